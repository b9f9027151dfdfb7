"""New weights of a draft in a vLLM that runs, without a restart: of a release that passed its gate,
verified there, and undone where it does not fare as it was judged.

The server was started by its bundle's `serve.sh` with a key (`DRAFTWELL_SWAP_KEY`), which opens the
path of our plug-in (`draftwell_vllm.draft_route`). `current` moves last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwell.components.engines.port import Answer, EngineSettings
from draftwell.components.engines.remote.address import EngineAddress
from draftwell.components.engines.remote.remote import RemoteEngine
from draftwell.components.engines.vllm import NAME
from draftwell.components.engines.vllm_methods import NEEDS
from draftwell.components.gate.draft_swap import acceptance_check, outputs_check
from draftwell.components.prompts.overlap import different, hash_of
from draftwell.components.tune.engines.settings import DEFAULTS
from draftwell.flows.steps.engine.deploy import bundle_settings, deploy_on_engine, tuned_counts
from draftwell.flows.steps.engine.release import EngineRelease
from draftwell.flows.steps.engine.served import served_deployment
from draftwell.flows.steps.engine.space import EngineSpace
from draftwell.flows.steps.monitor import load_limits
from draftwell.registry.bundles.vllm.build import activate_vllm_bundle, bundles_of
from draftwell.registry.bundles.vllm.render import MANIFEST
from draftwell.registry.bundles.vllm.settings import BUNDLED
from draftwell.serving.bundle.verdict import Check
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

if TYPE_CHECKING:
    from draftwell.components.prompts.prompt import Prompt

KEY, HEADER, PATH = "DRAFTWELL_SWAP_KEY", "X-Draftwell-Key", "/draftwell/draft"
"""As the plug-in has them."""
PROBE = Sampling(max_tokens=DEFAULTS.max_tokens)
"""Greedy, as long as the tuning's."""
UNDO_SECONDS = 900.0
"""How long a server may be busy with the new draft until the old one is given up."""
SAME = ("model", "revision", "dtype", "speculative", "plugins")
"""Settings of a bundle that a running server cannot change."""
SAME_OF_GATE = ("version", "device", "device_class")


@dataclass(frozen=True)
class Swap:
    """What came of a swap.

    Args:
        bundle: that is served now.
        checks: that it passed.
    """

    bundle: Path
    checks: tuple[Check, ...]


def swap_on_engine(
    space: EngineSpace,
    released: EngineRelease,
    out: Path,
    address: EngineAddress,
    prompts: Sequence[Prompt],
) -> Swap:
    """Load a release's draft into the server at an address, and move `current`.

    Args:
        prompts: among them are those that the release was tuned on.
    Raises:
        DraftwellError: what `deploy_on_engine` raises; the release differs in more than the weights
            of its draft, or the server serves another bundle than `current`
            (`swap_needs_restart`); it takes no drafts (`swap_not_offered`); prompts of the tuning
            are missing (`probe_prompts`); the draft did not fare as judged, and the one before was
            loaded again (`swap_undone`). `current` stays then.
    """
    pair = space.workspace.spec.name
    current = (bundles_of(out, pair) / "current").resolve()
    kept = served_deployment(out, pair)
    ids, _ = space.encoded(tuned_prompts(released, prompts), DEFAULTS.max_tokens)
    engine = RemoteEngine(f"{NAME} at {address.url}", keyed(address))
    engine.start(EngineSettings())
    try:
        refuse_other_server(engine, name_of(current))  # before gigabytes are copied
        bundle = deploy_on_engine(
            space,
            released,
            out,
            options=kept.options,
            with_weights=kept.with_weights,
            activate=False,
        )
        place = refuse_more_than_weights(current, bundle, released.choice.method)
        checks = swapped(engine, (current, bundle), place, ids, space.workspace.dtype)
    finally:
        engine.stop()
    activate_vllm_bundle(bundle)
    return Swap(bundle, checks)


def swapped(
    engine: RemoteEngine,
    bundles: tuple[Path, Path],
    place: str,
    ids: Sequence[Sequence[int]],
    dtype: str,
) -> tuple[Check, ...]:
    """Load the draft of the second bundle instead of the first's; the checks, all passed.

    Args:
        place: of the draft in both bundles.
        ids: of the prompts that the second one's draft was tuned on.
    Raises:
        DraftwellError: one failed, and the first one's is loaded again (`swap_undone`), or could
            not be (`swap_not_undone`).
    """
    old, new = bundles
    tuned = bundle_settings(new)["tuned"]["by_prompt"]
    before = probes(engine, ids)
    checks: tuple[Check, ...] = ()
    try:
        load(engine, new, place)
        after = probes(engine, ids)
        checks = (
            acceptance_check(
                [answer.acceptance.first for answer in after],
                [(kept, drafts) for kept, drafts in tuned],
                load_limits().acceptance,
            ),
            outputs_check(ids, before, after, engine, dtype, PROBE),
        )
        failed = [check.detail for check in checks if not check.passed]
    except DraftwellError as error:
        failed = [str(error)]
    except BaseException:
        undo(engine, old, place)
        raise
    if failed:
        undo(engine, old, place)
        raise DraftwellError(
            f"the draft of {new.name} was loaded and {old.name}'s is loaded again: "
            f"{'; '.join(failed)}: restart vLLM with {new}, or tune and gate again",
            code="swap_undone",
        )
    return checks


def probes(engine: RemoteEngine, ids: Sequence[Sequence[int]]) -> list[Answer]:
    """Greedy answers, one request at a time as the tuning counted drafts."""
    return [engine.decode([one], PROBE).answers[0] for one in ids]


def load(engine: RemoteEngine, bundle: Path, place: str) -> None:
    """Ask the server to load a bundle's draft; the folder of bundles has the pair's name."""
    engine.client.ask(PATH, {"folder": f"{bundle.name}/{place}", "bundle": name_of(bundle)})


def undo(engine: RemoteEngine, old: Path, place: str) -> None:
    """Load the old draft again. A server that still loads the new one says that it is busy, and is
    asked again when that is done.

    Raises:
        DraftwellError: it could not be loaded (`swap_not_undone`).
    """
    engine.client.wait_seconds = UNDO_SECONDS
    try:
        load(engine, old, place)
    except DraftwellError as error:
        raise DraftwellError(
            f"{engine.address.url} may serve a draft that did not pass, and that of {old.name} "
            f"could not be loaded again ({error}): restart vLLM with {old}",
            code="swap_not_undone",
        ) from error


def name_of(bundle: Path) -> str:
    """A bundle as its server knows it, such as default/3-cpu."""
    return f"{bundle.parent.name}/{bundle.name}"


def keyed(address: EngineAddress) -> EngineAddress:
    """The address with the key of swaps.

    Raises:
        DraftwellError: the environment has none (`swap_not_offered`).
    """
    key = os.environ.get(KEY, "").strip()
    if not key:
        raise DraftwellError(
            f"{KEY} is not set: set it here and for serve.sh to the same secret, with which a "
            "server takes new drafts",
            code="swap_not_offered",
        )
    return replace(address, headers=(*address.headers, (HEADER, key)))


def refuse_other_server(engine: RemoteEngine, served: str) -> None:
    """Refuse a server that takes no drafts, or that serves another bundle than `current`.

    Raises:
        DraftwellError: `swap_not_offered`, `swap_needs_restart`.
    """
    said = engine.client.find(PATH)
    if said is None:
        raise DraftwellError(
            f"{engine.address.url} takes no new drafts: start it by its bundle's serve.sh with "
            f"{KEY} set to the secret that it has here (vLLM 0.32), or restart it with the bundle",
            code="swap_not_offered",
        )
    if said.get("bundle") != served:
        raise DraftwellError(
            f"{engine.address.url} serves {said.get('bundle')}, and `current` is {served}: "
            "restart it, or point `current` to what it serves",
            code="swap_needs_restart",
        )


def refuse_more_than_weights(old: Path, new: Path, method: str) -> str:
    """The draft's place in both bundles, where they differ in its weights alone.

    Raises:
        DraftwellError: they differ in more, or in nothing (`swap_needs_restart`).
    """
    one, other = (json.loads((bundle / MANIFEST).read_text()) for bundle in (old, new))
    role = NEEDS.get(method)
    place = f"{BUNDLED}{role}"
    changed = differing(one["settings"], other["settings"], SAME)
    changed += differing(one["settings"]["gate"], other["settings"]["gate"], SAME_OF_GATE)
    files, more = one["files"], other["files"]
    changed += sorted(
        name
        for name in files.keys() | more.keys()
        if name.startswith(BUNDLED)
        and not (name.startswith(f"{place}/") and name.endswith(".safetensors"))
        and files.get(name) != more.get(name)
    )
    if role is None or changed:
        what = changed[0] if changed else f"{method}, which has no draft,"
        raise DraftwellError(
            f"{new.name} differs from {old.name}, which is served, in {what}: only weights of a "
            f"draft are swapped: `draftwell deploy --engine {NAME}` and restart vLLM",
            code="swap_needs_restart",
        )
    if all(files[name] == more.get(name) for name in files if name.startswith(f"{place}/")):
        raise DraftwellError(
            f"the draft of {new.name} is what {old.name} serves already: there is nothing to swap",
            code="nothing_to_swap",
        )
    return place


def differing(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Names whose values differ."""
    return [name for name in names if one.get(name) != other.get(name)]


def tuned_prompts(released: EngineRelease, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that a release was tuned on, of which it is known how drafts fared.

    Raises:
        DraftwellError: some are not among `prompts` (`probe_prompts`).
    """
    wanted = frozenset(released.config.provenance.training_prompts or ())
    counted = len(tuned_counts(released)["by_prompt"])
    found = [prompt for prompt in different(prompts) if hash_of(prompt) in wanted]
    if len(found) != counted or counted < 2:
        raise DraftwellError(
            f"{len(found)} of the {counted} prompts are here that {released.release.name} was "
            "tuned on, by which the server is checked: name their file with --set swap_prompts=…",
            code="probe_prompts",
        )
    return found
