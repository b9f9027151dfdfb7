"""The README.md of a bundle that vLLM serves."""

from __future__ import annotations

import json
from string import Template

from draftwell.registry.bundles.vllm.settings import VllmServing

ENGINE_LOCK = "requirements-engine.txt"
"""File in a bundle with the exact versions of the environment that the gate measured vLLM in."""
README = Template("""\
# $pair, release $release, for vLLM $version on $device

$how

`manifest.json` names every file with its sha256, and the engine, version, device class, number format and models that the gate
judged. Before vLLM starts, `serve.sh` checks (`check.py`) the digests, vLLM's version, the device that it is built for and, where
nvidia-smi says it, the model of the GPU. It refuses what differs, in one line, with exit code 2. Other packages' versions are not checked,
nor is a CPU's model, nor options that are passed to vLLM.

Gate: $gate

## Start it

    PYTHON=/path/to/the/python/with/vllm ./serve.sh      # answers OpenAI's API on 127.0.0.1:$port
    ./serve.sh --host 0.0.0.0 --port 9000                # options are passed to vLLM

Asked to end (SIGTERM) vLLM answers what it has begun, refuses what comes after that, and ends; `--shutdown-timeout` says within how many seconds.
It does not follow `current`: restart it after that has moved. A unit of systemd:

    [Service]
    Environment=PYTHON=/path/to/the/python/with/vllm
    ExecStart=/path/to/current/serve.sh --port $port
    Restart=on-failure
    KillMode=mixed

`mixed` lets vLLM end its own processes, so that the requests which it has begun are answered. A new vLLM listens when its model
is loaded, which takes minutes at a first start. Until then a single one answers nothing.

Without `PYTHON` it is `python3`. `$lock` has the exact version of every package of the environment that was measured:

    pip install --no-deps -r $lock

$containers
Ray Serve takes `ray_serve.yaml`, with this folder at `/bundle` on every node. Ray starts vLLM itself: run `python3 /bundle/check.py` there
first.
$plugins""")  # noqa: E501
CONTAINERS = Template("""\
As a container, on one machine, or in a cluster:

    docker build -t $image . && docker run --rm -p $port:$port$gpus $image
    VLLM_API_KEY=… docker compose up --build
    helm install $name ./chart
$replicas""")
REPLICAS = """
Compose starts {replicas} replicas behind a proxy (Caddy, `Caddyfile`){own}. A restart that keeps one of them answering:

    for one in {names}; do VLLM_API_KEY=… docker compose up -d --build --wait --no-deps $one; done
"""  # noqa: E501
NO_CONTAINERS = """\
There is no Dockerfile, compose file or chart: deploy again with `--set image=NAME`, an image with this vLLM{what}.
"""  # noqa: E501
NEEDS = """
These settings need {needs} beside vLLM; vLLM's own image has it not, and `serve.sh` refuses an environment without it.
"""  # noqa: E501
PLUGINS = """
The wheels in this folder are plug-ins of vLLM. `serve.sh` lets vLLM import them from here; nothing is installed.
With `DRAFTWELL_SPOOL=folder` vLLM counts there how its drafts fare, for `draftwell monitor --engine vllm`.
A relative folder is one below the folder that `serve.sh` was called from.
"""  # noqa: E501


def readme(settings: VllmServing) -> str:
    """How a bundle is started, and what was judged."""
    config = (
        "Plain decoding: no way to speculate was surely faster."
        if settings.speculative is None
        else (
            "vLLM's speculative decoding, as Draftwell tuned it by running vLLM:\n\n    "
            + json.dumps(settings.speculative, sort_keys=True)
        )
    )
    gate = (
        "passed"
        if settings.gate.passed
        else f"none; deployed because: {settings.gate.ungated_reason}"
    )
    image = CONTAINERS.substitute(
        image=settings.image_name,
        port=settings.port,
        name=settings.name,
        replicas=replicas(settings) if settings.replicas > 1 else "",
        gpus=" --gpus all --ipc host" if settings.gate.device == "cuda" else "",
    )
    return README.substitute(
        pair=settings.pair,
        release=settings.release,
        version=settings.gate.version,
        device=settings.gate.device,
        how=config,
        gate=gate,
        port=settings.port,
        lock=ENGINE_LOCK,
        containers=(
            image if settings.base_image else NO_CONTAINERS.format(what=missing_in_image(settings))
        )
        + (NEEDS.format(needs=", ".join(settings.needs)) if settings.needs else ""),
        plugins=PLUGINS if settings.plugins else "",
    )


def replicas(settings: VllmServing) -> str:
    """How several replicas of a compose project are restarted."""
    own = (
        f", each with {settings.gpus} of the machine's GPUs"
        if settings.gate.device == "cuda"
        else f", each with {settings.cpus} of the machine's cores (`cpuset`)"
    )
    names = " ".join(f"vllm-{number}" for number in range(1, settings.replicas + 1))
    return REPLICAS.format(replicas=settings.replicas, own=own, names=names)


def missing_in_image(settings: VllmServing) -> str:
    """What an image needs besides vLLM, behind its name."""
    device = " for CPUs" if settings.gate.device == "cpu" else ""
    return device + (f" and {', '.join(settings.needs)}" if settings.needs else "")
