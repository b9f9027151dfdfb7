"""What bench and collect do with `--engine URL`: each a few lines over
`draftwell.flows.steps.remote`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from draftwell.components.bench.engines.at_address import load_table
from draftwell.components.engines.remote.address import EngineAddress, parse_address
from draftwell.components.prompts.prompt import mixed
from draftwell.flows.cli.bench_run import outputs_of, teller
from draftwell.flows.cli.options import (
    pick_device,
    progress,
    say,
)
from draftwell.flows.context import now
from draftwell.flows.steps.remote.measure import TEXTS, bench_at_address, collect_at_address
from draftwell.flows.steps.remote.space import RemoteSpace, document, open_remote
from draftwell.flows.workspace import Workspace

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt


def address_of(context: typer.Context, option: str = "engine") -> EngineAddress | None:
    """The address that an option names, with the key, headers, certificates and model that the
    others name; None where it names none. A key is sent to the engine and to that of plain=
    alike."""
    given = context.params
    if (url := given.get(option)) is None:
        return None
    return parse_address(
        str(url),
        key_file=given.get("engine_key_file"),
        headers=given.get("engine_header") or (),
        ca=given.get("engine_ca"),
        model=given.get("engine_model"),
    )


@contextmanager
def open_at_address(title: str, context: typer.Context) -> Iterator[RemoteSpace]:
    """The command's pair and the engine at its address, with a progress bar; remarks are said at
    the end."""
    given = context.params
    address = address_of(context)
    assert address is not None
    workspace = Workspace(given["pair"], given["dtype"], say, pick_device(given["device"]))
    with (
        progress(title) as bar,
        open_remote(workspace, address, address_of(context, "plain"), bar=bar) as space,
    ):
        yield space
    for remark in space.remarks:
        say(remark)


def levels_of(context: typer.Context, default: int) -> tuple[int, ...]:
    """Requests at once that concurrency names."""
    named = context.params["concurrency"]
    return (default,) if named is None else tuple(named)


def bench_remote(context: typer.Context, prompts: Sequence[Prompt]) -> None:
    """`draftwell bench --engine URL`."""
    given = context.params
    outputs = outputs_of(given["out"], report_alone=True)
    chosen = (mixed(prompts) if given["mix"] else list(prompts))[: given["limit"]]
    asked = {name: given[name] for name in ("max_tokens", "temperature", "seed")}
    with open_at_address("bench", context) as space:
        sampling = space.pair.sampling(**asked)
        figures = bench_at_address(space, chosen, sampling, levels_of(context, 1))
        made = document(
            space,
            made=now(),
            prompts=[prompt.id for prompt in chosen],
            figures=[figure.model_dump(mode="json") for figure in figures],
            **asked,
        )
    title = (
        f"{made['pair']}, {len(chosen)} prompts of up to {given['max_tokens']} tokens, "
        f"{made['version']} at {made['address']}"
    )
    teller(outputs.report, as_json=given["as_json"])(made, load_table(figures, title))


def collect_remote(context: typer.Context, rows: Sequence[Prompt]) -> None:
    """`draftwell step collect --engine URL`."""
    given = context.params
    asked = {name: given[name] for name in ("max_tokens", "temperature", "top_p", "seed")}
    with open_at_address("collect", context) as space:
        file = Path(given["out"]) if given["out"] else space.folder / TEXTS
        made = collect_at_address(
            space,
            rows,
            space.pair.sampling(logprobs=given["logprobs"] or None, **asked),
            file,
            at_once=max(levels_of(context, 8)),
            fresh=given["fresh"],
        )
    acceptance, speed = made["acceptance"], made["tokens_per_second"]
    told = [f"{file}  {made['rows']} texts, {made['tokens']} tokens"]
    if speed is not None:
        told.append(f"{speed:.0f} tokens/s")
    if acceptance.rate is not None:
        told.append(f"{acceptance.rate:.2f} of drafts accepted")
    if acceptance.length is not None:
        told.append(f"{acceptance.length:.2f} tokens a round")
    typer.echo(", ".join(told))
