"""The pipeline step that makes a draft for a target that has none: from a hub id or a folder to a
pair that every command takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.collect.plan import exclusive_folder
from draftwell.components.distil.distil import (
    SHARD,
    Source,
    distil_draft,
    ids_that_fit,
    longest_prompt,
    own_outputs_on,
    positions_of,
    target_alone,
)
from draftwell.components.distil.family import (
    check_layers,
    default_layers,
    refuse_unless_text_only,
)
from draftwell.components.distil.instructions import UNTOUCHED, kept_instructions, split
from draftwell.components.distil.training import Recipe
from draftwell.components.distil.writers import Writer
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import demo_prompts, ids_of
from draftwell.flows.workspace import Workspace
from draftwell.registry.pairs import (
    NAME,
    ModelSource,
    PairSpec,
    fetch,
    find_pair,
    list_pairs,
    write_pair,
)
from draftwell.serving.artifacts.base import MANIFEST, read_manifest
from draftwell.serving.artifacts.pair_files import PairFiles, draftwell_home, weights_digest
from draftwell.serving.errors import DraftwellError
from draftwell.serving.files import write_json
from draftwell.serving.number_format import dtype_of, weights_of
from draftwell.serving.runtime.engine.thread_governor import governor_for
from draftwell.serving.runtime.model_files import read_config

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt
    from draftwell.serving.runtime.pair import LoadedPair

Say = Callable[[str], None]
AT_ONCE = {"cpu": 32, "cuda": 64}
"""Requests in one batch of the engine, by device."""


@dataclass(frozen=True)
class DistilRequest:
    """What a user asked for.

    Args:
        target: a hub id, a folder, or a pair, of which the target is taken.
        layers: numbers of the layers to keep; None takes the first two and the last two.
        prompts: what the target is asked; None lets it invent `invented` instructions.
        name: of the new pair; None derives it from the target's.
        work: folder of unfinished work; None takes `$DRAFTWELL_HOME/distill/<name>`.
        out: folder of the draft; None takes `$DRAFTWELL_HOME/pairs/<name>/draft`.
        threads: of torch; None: one for each usable core, and fewer while the target writes and
            other processes use them.
    """

    target: str
    layers: tuple[int, ...] | None = None
    prompts: Sequence[Prompt] | None = None
    invented: int = 2000
    head_tokens: int = 8192
    loss: str = "kl"
    minutes: float = 60.0
    tokens: int | None = None
    max_tokens: int = 128
    name: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    work: Path | None = None
    out: Path | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Distilled:
    """The result: the pair's file, the draft's folder, and the report of
    `draftwell.components.distil.distil`."""

    pair: PairSpec
    file: Path
    folder: Path
    report: dict[str, Any]


def run_distil(wanted: DistilRequest, *, say: Say = print) -> Distilled:
    """Make a draft, put it into its folder, and describe the pair of both in
    `$DRAFTWELL_HOME/pairs/<name>.yaml`.

    Everything that a user can get wrong is refused before models are loaded; an earlier draft is
    replaced only by a finished one.
    """

    source, known = find_target(wanted.target)
    name = wanted.name or name_of(wanted.target)
    file = draftwell_home() / "pairs" / f"{name}.yaml"
    out = (wanted.out or draftwell_home() / "pairs" / name / "draft").expanduser()
    check_name(name, source, file)
    check_out(out, work_of(wanted, name))
    chosen = None if wanted.prompts is None else split(wanted.prompts)
    spec = PairSpec(
        name=name,
        description=f"{wanted.target} with a draft distilled from it",
        licence=known.licence if known else "that of the target",
        target=source,
        chat=known.chat if known else True,
        dtype=dtype_of(wanted.dtype),
        weights=weights_of(wanted.dtype),
        draft=ModelSource(artifact=written(out, file.parent)),
    )
    files = fetch(spec.model_copy(update={"draft": None}), progress=say)
    config = read_config(files.target)
    refuse_unless_text_only(config)
    recipe = recipe_of(wanted, config)
    positions_of(config, wanted.max_tokens)  # refuses a target without room
    with exclusive_pair(name, work_of(wanted, name)):
        pair = load_target(files, spec, wanted, say)
        asked = source_of(pair, files, wanted, chosen, say)
        artifact, report = distil_draft(asked, recipe, work_of(wanted, name), say=say)
        artifact.save(out)
        write_pair(spec, file)
    return Distilled(spec, file, out, report)


@contextmanager
def exclusive_pair(name: str, work: Path) -> Iterator[None]:
    """Hold a pair's name and a work folder against other distillations: of two with the same name
    only the last would remain."""

    with ExitStack() as held:
        for folder in {
            work.expanduser().absolute(),
            (draftwell_home() / "pairs" / name).absolute(),
        }:
            held.enter_context(
                exclusive_folder(folder, "distillation", "choose another name and work=")
            )
        yield


def check_out(out: Path, work: Path) -> None:
    """Refuse a folder with other content: a finished draft replaces the folder."""

    here, there = out.expanduser().absolute(), work.expanduser().absolute()
    if here == there or here in there.parents or there in here.parents:
        raise DraftwellError(
            (
                f"the draft's folder {out} and the work folder {work} overlap: choose another "
                "out or work"
            ),
            code="folders_overlap",
        )
    if here == Path.cwd() or here in Path.cwd().parents:
        raise DraftwellError(
            f"{out} holds the folder you are in: choose another out", code="folder_in_use"
        )
    if not here.is_dir() or not any(here.iterdir()):
        return
    if not (here / MANIFEST).is_file() or read_manifest(here).get("kind") != "distilled_draft":
        raise DraftwellError(
            (
                f"{out} holds something other than a draft, which would be lost: choose an "
                "empty or a new folder as out"
            ),
            code="folder_not_empty",
        )


def keep_report(made: Distilled) -> Path:
    """Write the report into the pair's workspace."""

    return write_json(Workspace(str(made.file)).reports / "distilled_draft.json", made.report)


def model_source(named: str, option: str = "--target") -> ModelSource | None:
    """Where a model comes from that is a folder or on the hub; None: it is neither.

    Raises:
        DraftwellError: a folder without a model (`no_model`).
    """
    folder = Path(named).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DraftwellError(
                f"{option} {named} holds no model (no config.json): name a model folder of "
                "transformers",
                code="no_model",
            )
        return ModelSource(path=str(folder.absolute()))
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", named) and not named.endswith((".yaml", ".yml")):
        return ModelSource(hub=named, revision="main")
    return None


def find_target(target: str) -> tuple[ModelSource, PairSpec | None]:
    """Where a target comes from, and the pair that it is taken from, if any."""
    if (source := model_source(target)) is not None:
        return source, None
    try:
        spec = find_pair(target)
    except DraftwellError as error:
        raise DraftwellError(
            f"--target {target}: no such folder, no hub id (ORG/NAME) and no pair: {error}",
            code="unknown_target",
        ) from error
    if spec.target.path is None:
        return spec.target, spec
    return ModelSource(
        path=str((spec.folder / Path(spec.target.path).expanduser()).absolute())
    ), spec


def name_of(target: str) -> str:
    """A name for the pair of a target and its draft.

    >>> name_of("Qwen/Qwen3-1.7B"), name_of("models/My Model/")
    ('qwen3-1.7b-distilled', 'my-model-distilled')
    """
    last = Path(target).expanduser().absolute().name.removesuffix(".yaml").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._") + "-distilled"


def check_name(name: str, source: ModelSource, file: Path) -> None:
    """Refuse a name that is taken, except by an earlier distillation of the same target, which is
    replaced."""
    if not re.fullmatch(NAME, name):
        raise DraftwellError(
            (
                f"{name!r} cannot name a pair: choose a name of lower case letters, digits, "
                "dots, dashes, underscores"
            ),
            code="bad_pair_name",
        )
    owners = [spec for spec in list_pairs() if name in (spec.name, *spec.aliases)]
    if not owners and not file.exists():
        return
    ours = [
        spec
        for spec in owners
        if (spec.name, spec.folder, spec.target) == (name, file.parent, source)
        and spec.draft is not None
        and spec.draft.artifact is not None
    ]
    if not ours or not file.is_file():
        raise DraftwellError(
            (
                f"there is a pair named {name} already, with another target or draft: choose "
                "another name"
            ),
            code="pair_exists",
        )


def written(out: Path, base: Path) -> str:
    """How the pair's file names the draft's folder: relative where the folder is below it, so that
    both can be moved together."""
    path = out.expanduser().absolute()
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def recipe_of(wanted: DistilRequest, config: Any) -> Recipe:
    """The recipe for a target of this configuration."""

    count = config.num_hidden_layers
    layers = default_layers(count) if wanted.layers is None else check_layers(wanted.layers, count)
    return Recipe(
        layers=layers,
        head_tokens=wanted.head_tokens,
        loss=wanted.loss,  # type: ignore[arg-type]  # the CLI's enum
        minutes=wanted.minutes,
        tokens=wanted.tokens,
    )


def load_target(files: PairFiles, spec: PairSpec, wanted: DistilRequest, say: Say) -> LoadedPair:
    """The target alone, with as many slots as its device fills."""
    say(f"loading {wanted.target} in {wanted.dtype}")
    return target_alone(
        spec.name,
        files.target,
        wanted.max_tokens,
        dtype=spec.number_format,
        device=wanted.device,
        slots=AT_ONCE[wanted.device],
        chat=spec.chat,
    )


def source_of(
    pair: LoadedPair,
    files: PairFiles,
    wanted: DistilRequest,
    chosen: tuple[list[Prompt], list[Prompt]] | None,
    say: Say,
) -> Source:
    """What is distilled: prompts to learn on, and prompts that agreement is measured on, as ids.

    Args:
        chosen: both, of a user's prompts; None has the target invent what it is asked, and measures
            on the shipped demo prompts.
    """

    donor = weights_digest(files.target)
    writer = Writer(pair, AT_ONCE[wanted.device], governor_for(wanted.threads, wanted.device))
    room = longest_prompt(pair, wanted.max_tokens)
    learnt, untouched = chosen or (
        kept_instructions(writer, pair, wanted.invented, donor, work_of(wanted, pair.name), say),
        demo_prompts(UNTOUCHED),
    )
    kept = [(p.task or "", ids) for p in untouched if 0 < len(ids := ids_of(pair, p)) <= room]
    return Source(
        pair,
        donor,
        writer,
        ids_that_fit(pair, learnt, room, say),
        kept,
        wanted.max_tokens,
        SHARD,
        data=own_outputs_on(wanted.prompts),
        hashes=hashes_of(learnt),
    )


def work_of(wanted: DistilRequest, name: str) -> Path:
    """Folder of shards, instructions and checkpoints."""
    return wanted.work or draftwell_home() / "distill" / name
