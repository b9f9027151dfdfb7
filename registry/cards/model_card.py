"""What MLflow shows of an artifact: its MLmodel file, figures to compare, and words for a person.

Every kind has the flavour `draftwell`. What predicts something (`registry/onnx_models.py`) has
MLflow's `onnx` too, a graph: no file of a version is unpickled or run. Other kinds have neither
signature nor example, because there is nothing to call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from draftwell.registry.folders import copy_artifact
from draftwell.serving.artifacts.kinds import KINDS, Card

LONGEST = 5000
"""Characters of a description in MLflow's databases."""
MOST_ROWS = 16
"""Rows of a table in a description; what is too much to read lies with the run."""
TEMPLATE = jinja2.Template(
    (Path(__file__).parent / "description.md.j2").read_text(encoding="utf-8"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


CARDS = {
    **{name: kind.card for name, kind in KINDS.items()},
    "release": Card(
        "Release: the exact versions that are served together on one device.",
        (
            "`draftwell tune`, or the flow `release`, pins the artifacts of a workspace; "
            "`draftwell gate` judges them."
        ),
        (
            "Figures of its gate: `gate.speedup` (lower bound over plain decoding), "
            "`gate.regression` (against the champion), and more."
        ),
        "Aliases: `candidate` when made, `challenger` once its gate passed, `champion` "
        "when promoted (`draftwell release promote`; "
        "`draftwell release rollback --reason …` leads back). `make deploy` takes the champion, "
        "whoever named it, if its gate record stands.",
    ),
}
"""kind → its card."""


def describe_model(kind: str) -> str:
    """Description of a registered model: what all its versions are."""
    card = CARDS.get(kind)
    if card is None:
        return kind
    return (
        f"{card.what}\n\n**How it is made.** {card.made}\n\n**How good it is.** "
        f"{card.good}\n\n**How to use it.** {card.use}"
    )


def describe(
    manifest: Mapping[str, Any], metrics: Mapping[str, float], settings: Mapping[str, Any]
) -> str:
    """Description of a version, in Markdown: what it is, how it was made, how good it is, how to
    use it."""
    made, kind = manifest["provenance"], manifest["kind"]
    return TEMPLATE.render(
        card=CARDS.get(kind, Card(kind, "", "", "")),
        made=made,
        device="For" if kind == "release" else "Measured on",
        tables={
            "setting": {name: str(value) for name, value in settings.items()},
            "figure": {name: f"{value:.4g}" for name, value in metrics.items()},
        },
        most_rows=MOST_ROWS,
    )


def fitting(words: str) -> str:
    """A description as MLflow's databases hold it; SQLite would take more, PostgreSQL refuses
    it."""
    return words if len(words) <= LONGEST else words[: LONGEST - 2] + " …"


def figures_of(
    folder: Path, manifest: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and settings that MLflow compares, read from an artifact's own files; those of its
    provenance come first."""
    made, kind = manifest["provenance"], manifest["kind"]
    metrics = {
        **made["metrics"],
        "size_mb": sum((folder / name).stat().st_size for name in manifest["files"]) / 1e6,
    }
    settings = dict(made["parameters"])
    if kind == "decoding_config":
        config = json.loads((folder / "config.json").read_text())
        settings |= choice_settings(config["strategy"], config["parameters"])
        metrics |= _confirmed(config)
        if sampled := config.get("sampled"):
            settings |= {
                f"sampled.{key}": value
                for key, value in choice_settings(
                    sampled["strategy"], sampled["parameters"]
                ).items()
            }
            settings["sampled.temperature"] = sampled["temperature"]
            metrics |= {f"sampled_{key}": value for key, value in _confirmed(sampled).items()}
    if kind == "hardware_profile":
        times = json.loads((folder / "profile.json").read_text())
        draft, target = times.get("t_draft"), times["t_verify"]["1"]
        metrics |= {"t_verify_ms": target * 1e3}
        metrics |= (
            {} if draft is None else {"t_draft_ms": draft * 1e3, "speed_ratio": target / draft}
        )
    return metrics, settings


def choice_settings(strategy: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A choice as settings that MLflow compares."""
    return {
        "strategy": strategy,
        **{f"parameters.{key}": value for key, value in parameters.items()},
    }


def _confirmed(config: Mapping[str, Any]) -> dict[str, float]:
    """What the tuner's last measurement says of its choice; nothing where it has none."""
    confirmation = config["evidence"].get("confirmation")
    figures = confirmation.get("figures") or () if isinstance(confirmation, dict) else ()
    for figure in figures:
        if (figure.get("strategy"), figure.get("parameters")) == (
            config["strategy"],
            config["parameters"],
        ):
            return {
                key: float(figure[key])
                for key in ("speedup", "speedup_low", "seconds_per_token", "target_calls_per_token")
                if isinstance(figure.get(key), int | float)
            }
    return {}


def write_model(
    folder: Path,
    into: Path,
    manifest: dict[str, Any],
    *,
    location: str,
    run_id: str,
    model_id: str,
) -> None:
    """Write what MLflow keeps of an artifact into a new folder: a copy of its files, `MLmodel`, and
    for what predicts something its graph."""
    from mlflow.models import Model

    # imports torch, like the kinds' own modules
    from draftwell.registry.onnx_models import GRAPHS, save_onnx

    made, kind = manifest["provenance"], manifest["kind"]
    named = ("pair", "fingerprint", "trace_digest", "device_class", "git_commit", "parents")
    schema = {"kind": kind, "schema_version": manifest["schema_version"]}
    model = Model(
        location,
        run_id=run_id,
        model_id=model_id,
        model_uuid=model_id,
        metadata={**{key: made[key] for key in named}, **schema},
    )
    model.add_flavor("draftwell", **schema, data=".")
    if kind in GRAPHS:
        save_onnx(KINDS[kind].load_class().load(folder), into, model)
    else:
        into.mkdir(parents=True)
        model.save(str(into / "MLmodel"))
    copy_artifact(folder, into)
