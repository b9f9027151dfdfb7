"""The texts in a bundle that are meant for people, shells and Docker."""

from __future__ import annotations

import sys
from string import Template

from draftwell.registry.bundles.requirements import Lock, requirements_name
from draftwell.serving.bundle.bundle import Manifest

PYTHON = ".".join(map(str, sys.version_info[:2]))
"""The one that the bundle is built with, hence the one that its requirements are known to fit."""
README = Template("""\
# $pair, release $version for $device

Speculative decoding as Draftwell tuned it. `manifest.json` names every file with its sha256; the runtime checks them all before it
loads anything, and refuses the bundle if a file was changed, cut, added or is missing. Install it with Python $python, into an
environment outside of this folder:

    $install

    ./serve.sh                       # answers OpenAI's API on 127.0.0.1:8000
    ./serve.sh --port 9000           # options are passed to draftwell-serve

The server writes to `$$DRAFTWELL_HOME`: by default `.draftwell` where it is started, and `~/.draftwell` where that is this
folder, in which it writes nothing but digests next to the weights. It refuses a home, a `--state-dir` or a `--feedback-dir` in here.

The wheel is the decoding runtime and its server, nothing else: no Prefect, no MLflow. `$requirements` names the exact
version of every package that these need, as installed where the bundle was built.$index As a container:

    $docker

Gate: $gate

| artifact | registered version |
| --- | --- |
$artifacts

| model | source | weights (sha256) | folder |
| --- | --- | --- | --- |
$models

$weights
""")  # noqa: E501
INDEX_NOTE = (
    "\nThe extra index has that build of PyTorch; leave it out where your own index has it."
)
WITH_WEIGHTS = (
    "All weights are in the bundle: it serves without network and without a cache of models."
)
WITHOUT_WEIGHTS = """\
Models that are not bundled are looked for in `$DRAFTWELL_MODELS` (by default `models` in `$DRAFTWELL_HOME`), under the folder's
name, and their weights are checked. `draftwell deploy --with-weights` puts them into the bundle."""  # noqa: E501
SERVE = Template("""\
#!/bin/sh
# Serves this bundle; options are passed to draftwell-serve.
set -eu
here="$$(cd "$$(dirname "$$0")" && pwd)" # not -P: the server sees the link `current` move
if ! command -v draftwell-serve > /dev/null; then
  echo "serve.sh: the runtime is not installed. Once, in an environment of its own: cd '$$here' && $install" >&2
  exit 2
fi
# Started in this folder, the server would by itself keep its files here, and then refuse the bundle for them.
case "$$(pwd -P)/" in
  "$$(cd "$$here" && pwd -P)"/*) [ -z "$${HOME:-}" ] || export DRAFTWELL_HOME="$${DRAFTWELL_HOME:-$$HOME/.draftwell}" ;;
esac
exec draftwell-serve --bundle "$$here" "$$@"
""")  # noqa: E501
DOCKERFILE = Template("""\
# Serves this bundle:
#   $docker
FROM python:$python-slim
RUN useradd --create-home --uid 10001 draftwell
COPY $requirements $wheel /install/
RUN cd /install && $install --no-cache-dir
# Belongs to root: the server reads its bundle and cannot change it.
COPY . /bundle
ENV DRAFTWELL_HOME=/home/draftwell/state DRAFTWELL_MODELS=/models HF_HUB_OFFLINE=1$cuda
USER draftwell
WORKDIR /home/draftwell
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["draftwell-serve", "--bundle", "/bundle", "--host", "0.0.0.0"]
""")  # noqa: E501
CUDA_ENV = " \\\n    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"


def install_command(device: str, wheel: str, lock: Lock) -> str:
    """The one command that installs the runtime, run in the bundle's folder.

    Args:
        wheel: file name of the runtime's wheel in it.
        lock: its requirements; those with hashes list the wheel too.
    """
    index = f" --extra-index-url {lock.index}" if lock.index else ""
    if lock.hashes:
        return f"pip install --require-hashes -r {requirements_name(device)}{index}"
    return f"pip install -r {requirements_name(device)} ./{wheel}{index}"


def docker_commands(manifest: Manifest) -> str:
    """Build and run the bundle's container."""
    name = f"draftwell-{manifest.pair}".lower()
    gpus = " --gpus all" if manifest.device == "cuda" else ""
    local = any(record.source != "bundled" for record in manifest.models.values())
    models = ' -v "$DRAFTWELL_MODELS:/models:ro"' if local else ""
    return f"docker build -t {name} . && docker run --rm -p 8000:8000{gpus}{models} {name}"


def readme(manifest: Manifest, wheel: str, lock: Lock) -> str:
    """README.md of a bundle.

    Args:
        wheel, lock: as in `install_command`.
    """
    gate = "passed" if manifest.gated else f"none; deployed because: {manifest.ungated_reason}"
    rows = [
        f"| {role} | "
        f"{manifest.origins.get(role, m.source)}{f' at {m.revision}' if m.revision else ''} "
        f"| {m.weights_sha256[:12]} "
        f"| {m.folder} |"
        for role, m in sorted(manifest.models.items())
    ]
    bundled = all(record.source == "bundled" for record in manifest.models.values())
    return README.substitute(
        pair=manifest.pair,
        version=manifest.release_version,
        device=manifest.device,
        gate=gate,
        python=PYTHON,
        requirements=requirements_name(manifest.device),
        install=install_command(manifest.device, wheel, lock),
        docker=docker_commands(manifest),
        index=INDEX_NOTE if lock.index else "",
        artifacts="\n".join(f"| {kind} | {v} |" for kind, v in sorted(manifest.versions.items())),
        models="\n".join(rows),
        weights=WITH_WEIGHTS if bundled else WITHOUT_WEIGHTS,
    )


def serve_script(manifest: Manifest, wheel: str, lock: Lock) -> str:
    """serve.sh of a bundle; arguments as in `readme`."""
    return SERVE.substitute(install=install_command(manifest.device, wheel, lock))


def dockerfile(manifest: Manifest, wheel: str, lock: Lock) -> str:
    """Dockerfile of a bundle; arguments as in `readme`."""
    return DOCKERFILE.substitute(
        docker=docker_commands(manifest),
        python=PYTHON,
        requirements=requirements_name(manifest.device),
        wheel=wheel,
        install=install_command(manifest.device, wheel, lock),
        cuda=CUDA_ENV if manifest.device == "cuda" else "",
    )
