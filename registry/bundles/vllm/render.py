"""The files of a bundle that vLLM serves, rendered from `VllmServing` (`files/`).

`serve.sh` and `Dockerfile` for one machine, `compose.yaml` with a GPU reserved, `chart/` for Helm,
`ray_serve.yaml` for Ray Serve. All start the same arguments. `serve.sh`, which the image runs too,
first checks the manifest (`check.py`: digests, and that engine, version and device are those that
the gate judged). Plug-ins are imported from their wheels, whose digests are checked, and need not
be installed. What is put into YAML is put there as JSON, so that it is YAML whatever a name holds.
The same settings give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftwell.registry.bundles.text import render
from draftwell.registry.bundles.vllm.settings import BUNDLED, VllmServing
from draftwell.serving.bundle.signature import SIGNATURE
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import json_digest, sha256_file

MANIFEST = "manifest.json"
SCHEMA = 1
HERE = Path(__file__).parent / "files"
OWN_FILES = (".env", "compose.override.yaml", "values.override.yaml")
"""What whoever installs the bundle may put there; the check at start leaves it out, and the bundle
that follows takes it along."""
WORDS = (
    "Rendered by `draftwell deploy`; a change here is refused at start: use "
    f"{', '.join(OWN_FILES)}."
)
EXECUTABLE = ("serve.sh",)
FOR_CONTAINERS = (".dockerignore", "Caddyfile", "Dockerfile", "chart", "compose.yaml")
"""Files and folders of a bundle that there are where there is an image to start from."""


def write_bundle(settings: VllmServing, folder: Path) -> Path:
    """Write the rendered files, and the manifest over all that is in the folder, beside the models
    and wheels that are there already.

    Args:
        folder: the bundle, without a manifest yet.
    Returns:
        the manifest.
    Raises:
        DraftwellError: a plug-in or a model that the settings place in the bundle is not there
            (`missing_file`).
    """
    named = [
        *settings.plugins,
        *([settings.requirements] if settings.requirements else []),
        *(model for model, _ in settings.models().values() if model.startswith(BUNDLED)),
    ]
    for name in named:
        if not (folder / name).exists():
            raise DraftwellError(
                f"{folder / name}, which the settings name, is not in the bundle: put it there",
                code="missing_file",
            )
    for name, text in rendered(settings).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755 if name in EXECUTABLE else 0o644)
    body: dict[str, Any] = {
        "schema_version": SCHEMA,
        "kind": "vllm",
        "settings": settings.model_dump(mode="json"),
        "files": file_records(folder),
    }
    manifest = folder / MANIFEST
    manifest.write_text(
        json.dumps({**body, "digest": json_digest(body)}, indent=2, sort_keys=True) + "\n",
        encoding="utf-8",
    )
    return manifest


def file_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Path in the bundle → sha256 and size of every file that the manifest lists."""
    return {
        name: {"sha256": sha256_file(path), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (name := path.relative_to(folder).as_posix()) not in (MANIFEST, SIGNATURE, *OWN_FILES)
    }


def rendered(settings: VllmServing) -> dict[str, str]:
    """Path in the bundle → text of every file that is not a model or a wheel; those of containers
    only where there is an image to make them from."""
    on_gpu = settings.gate.device == "cuda"
    values = {
        "settings": settings,
        "gate": settings.gate,
        "words": WORDS,
        "signature": SIGNATURE,
        "replicas": replica_names(settings),
        "gpu_options": " --gpus all --ipc host" if on_gpu else "",
    }
    texts = {".dockerignore": "\n".join(OWN_FILES) + "\n"}
    for source in sorted(HERE.rglob("*")):
        name = source.relative_to(HERE).as_posix()
        if source.suffix == ".j2":
            texts[name.removesuffix(".j2")] = render(source, **values)
        elif source.is_file() and "__pycache__" not in source.parts:
            texts[name] = source.read_text(encoding="utf-8")
    left_out = {
        *(FOR_CONTAINERS if settings.base_image is None else ()),
        *(("cpu.py",) if on_gpu else ()),
        *(("Caddyfile",) if settings.replicas == 1 else ()),
    }
    return {name: text for name, text in texts.items() if name.partition("/")[0] not in left_out}


def replica_names(settings: VllmServing) -> list[str]:
    """What compose calls the replicas: vllm, or vllm-1, vllm-2 and so on."""
    if settings.replicas == 1:
        return ["vllm"]
    return [f"vllm-{number}" for number in range(1, settings.replicas + 1)]
