"""The two texts in a bundle that are meant for people and shells."""

from __future__ import annotations

from serving.runtime.bundle import Manifest

README = """# {pair}, release {version} for {device}

Speculative decoding as Draftwell tuned it. `manifest.json` names every file with its sha256; the runtime checks them
all before it loads anything. Nothing in this folder is code that the runtime runs.

    ./serve.sh                       # answers OpenAI's API on 127.0.0.1:8000
    ./serve.sh --port 9000           # options go on to draftwell-serve

Gate: {gate}

| artifact | registered version |
| --- | --- |
{artifacts}

| model | source | weights (sha256) | folder |
| --- | --- | --- | --- |
{models}

Models that are not bundled are looked for in `$DRAFTWELL_MODELS` (by default `.draftwell/models`), under the folder's
name, and their weights are checked. `draftwell deploy --with-weights` puts them into the bundle.
"""


def readme(manifest: Manifest) -> str:
    """README.md of a bundle."""
    gate = "passed" if manifest.gated else f"none; deployed because: {manifest.ungated_reason}"
    rows = [f"| {role} | {m.source}{f' at {m.revision}' if m.revision else ''} | {m.weights_sha256[:12]} | {m.folder} |"
            for role, m in sorted(manifest.models.items())]
    return README.format(pair=manifest.pair, version=manifest.release_version, device=manifest.device, gate=gate,
                         artifacts="\n".join(f"| {kind} | {v} |" for kind, v in sorted(manifest.versions.items())),
                         models="\n".join(rows))


def serve_script() -> str:
    """serve.sh of a bundle."""
    return '#!/bin/sh\n# Serves this bundle; options go on to draftwell-serve.\nset -eu\n' \
           'exec draftwell-serve --bundle "$(cd "$(dirname "$0")" && pwd -P)" "$@"\n'
