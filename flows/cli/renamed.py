"""Earlier options that are no setting of the same name: what each is now.

Options that became a setting need no row: `--max-tokens` is `--set max_tokens=…`.
"""

from __future__ import annotations

from collections.abc import Mapping

BUNDLES = {"--out": "--set bundles=FOLDER"}
NOT_PUBLISHED = {"--no-publish": "--set publish=false", "--publish": "--set publish=true"}
OF_CHOOSE = (
    *("--traces", "--limit", "--split", "--column", "--temperature", "--study", "--pad-target"),
    *("--runner", "--workers", "--schedule", "--max-cost-ratio"),
)
"""Options of the earlier `draftwell tune`, which is `draftwell step choose` now."""

RENAMED: Mapping[str, Mapping[str, str]] = {
    "tune": {
        **{
            option: f"--set {option[2:].replace('-', '_')}=VALUE of `draftwell step choose`"
            for option in OF_CHOOSE
        },
        "--max-tokens": "--set max_tokens=N",
        **dict.fromkeys(
            ("--collect-tokens", "--tune-tokens", "--bench-tokens"), "--set max_tokens=N"
        ),
        "--publish": "always so, but in `draftwell step choose`",
        "--no-publish": "--set publish=false of `draftwell step choose`",
        "--allow-lossy": "--set lossless_only=false",
        "--port": "a free one, always",
        "--serve-seconds": "90, always",
    },
    "bench": {
        "--json": "--out FILE.json",
        "--peer": "--set peers=NAME,NAME",
        "--markdown": "--out FILE.md",
        "--plots": "--out FOLDER",
    },
    "gate": {
        "--json": "--report FILE.json",
        "--markdown": "--report FILE.md",
        "--junit": "--report FILE.xml",
        "--baseline": "--set counts_only=true",
        "--record": "--set record_counts=true",
    },
    "deploy": {"--alias": "--release"},
    "export": {"--alias": "--release"},
    "monitor": {"--report": "--out FOLDER"},
    "schedule": {
        "--file": "--settings FILE",
        "--gpu-slots": "`prefect gcl update gpu-slot --limit N`",
    },
    "step collect": {"--kinds": "--set prefix_kinds=NAMES"},
    "step train": NOT_PUBLISHED,
    "step calibrate": NOT_PUBLISHED,
    "step distil": NOT_PUBLISHED,
    "step choose": {
        **NOT_PUBLISHED,
        "--allow-lossy": "--set lossless_only=false",
    },
    "release rollback": {**BUNDLES, "--to": "--release NUMBER"},
    "release prune": BUNDLES,
    "release sync": BUNDLES,
    "release webhook": {**BUNDLES, "--register": "--set register_at=URL"},
    "release forget": {"--tenant": "the word after `draftwell release forget`"},
    "reproduce import": {"--dtype": "the number format of the file"},
    "reproduce papers": {"--no-publish": "--set publish=false"},
}
"""Command → its earlier option → what to write now."""
