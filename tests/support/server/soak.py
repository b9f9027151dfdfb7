"""The default pair behind a real server process, out of a bundle that a release made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.server.server_process import ENTRY, server_process

REPO = Path(__file__).resolve().parents[3]

if TYPE_CHECKING:
    from draftwell.flows.workspace import Workspace
    from draftwell.serving.runtime.strategies import StrategyChoice


@dataclass(frozen=True)
class Served:
    """A server that answers.

    Args:
        url: without a path.
        pid: of its process.
    """

    url: str
    pid: int


def default_bundle(
    folder: Path,
    dtype: str,
    strategy: str,
    parameters: Mapping[str, Any],
    *,
    profiled: bool = False,
) -> Path:
    """A bundle of the default pair with a chosen config, and with whatever artifacts the pair ships
    with for it.

    Release and registry are made for it; no gate judged it, so it is deployed ungated.

    Args:
        profiled: as a tuned release is: with a hardware profile and draft lengths by load, measured
            now on this machine.
    """
    from draftwell.flows.workspace import Workspace
    from draftwell.registry.bundles.build import build_bundle
    from draftwell.registry.pairs import model_records
    from draftwell.registry.releases import create_release
    from draftwell.registry.store import Store
    from draftwell.serving.artifacts.base import Provenance
    from draftwell.serving.artifacts.decoding_config import DecodingConfig
    from draftwell.serving.artifacts.pair_files import fingerprint
    from draftwell.serving.runtime.strategies import StrategyChoice, find_strategy

    space, store = Workspace("default", dtype), Store()
    files, name = space.files(), space.spec.name
    made = Provenance(pair=name, fingerprint=fingerprint(files, dtype))
    table = measure(space, folder, StrategyChoice(strategy, parameters)) if profiled else {}
    config = DecodingConfig(strategy, dict(parameters), {}, made, None, table)
    if find_strategy(strategy).lossless:  # its requests are sampled
        config = config.with_greedy_for_sampled()
    config.save(folder / "decoding_config")
    own = [folder / "decoding_config", folder / "hardware_profile"]
    folders = [*own, *(space.shipped / kind for kind in find_strategy(strategy).reads())]
    published = [store.publish(place, pair=name) for place in folders if place.is_dir()]
    pins = {artifact.kind: artifact.version for artifact in published}
    release = create_release(store, name, "cpu", pins, model_records(space.spec, files), {})
    return build_bundle(
        store,
        space.spec,
        files,
        alias=str(release.version),
        out=folder / "dist",
        ungated_reason="a trial of the server",
    )


def measure(space: Workspace, folder: Path, choice: StrategyChoice) -> dict[int, int]:
    """As the tuner measures a choice: the hardware profile, into the folder, and draft lengths by
    load."""
    from draftwell.components.calibrate.hardware_profile import measure_profile
    from draftwell.components.prompts.prompt import demo_prompts
    from draftwell.components.report.provenance import provenance
    from draftwell.components.tune.by_batch import measure_levels
    from draftwell.components.tune.levels import table_of

    pair = space.load(slots=8)
    profile = measure_profile(pair, provenance(pair))
    profile.save(folder / "hardware_profile")
    resources = space.resources(pair, [choice.name], profile=profile)
    sampling = pair.sampling(max_tokens=32)
    return table_of(measure_levels(pair, resources, choice, demo_prompts(12), sampling)[0])


@contextmanager
def served_bundle(bundle: Path, *options: str) -> Iterator[Served]:
    """A running `draftwell-serve` on a free port with all cores; it must end with exit code 0 when
    it is asked to."""
    command = [
        *ENTRY,
        "--bundle",
        str(bundle),
        "--port",
        "0",
        "--threads",
        str(len(os.sched_getaffinity(0))),
        *options,
    ]
    log = bundle.parent / "server.log"
    with log.open("w") as errors, server_process(command, stderr=errors) as (process, url):
        yield Served(url, process.pid)
        process.terminate()
        assert process.wait(60) == 0, log.read_text()[-3000:]
