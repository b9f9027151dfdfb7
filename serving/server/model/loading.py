"""Loading a bundle: its models, artifacts and tuned strategy, checked for this machine, as a
`ServedModel`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from draftwell.serving.artifacts.base import Artifact
from draftwell.serving.artifacts.compiled_libraries import COMPILED, wanted_mode
from draftwell.serving.artifacts.datastore import Datastore
from draftwell.serving.artifacts.decoding_config import DecodingConfig
from draftwell.serving.artifacts.eagle3_head import Eagle3Head
from draftwell.serving.artifacts.hardware_profile import HardwareProfile
from draftwell.serving.artifacts.kinds import other_temperature
from draftwell.serving.artifacts.pair_files import (
    PairFiles,
    draftwell_home,
    models_root,
    settings_digest,
)
from draftwell.serving.bundle.bundle import Bundle, Manifest, open_bundle, refuse_inside
from draftwell.serving.bundle.card import read_card_files
from draftwell.serving.bundle.signature import signature_check
from draftwell.serving.device import cuda_problem, device_class, set_threads
from draftwell.serving.errors import DraftwellError
from draftwell.serving.memory import free_memory, needed
from draftwell.serving.runtime.engine.thread_governor import ThreadGovernor, governor_for
from draftwell.serving.runtime.machine_class import machine_class, without_layers
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from draftwell.serving.runtime.strategies import (
    Strategy,
    StrategyChoice,
    StrategyResources,
    build_strategy,
    find_strategy,
    served_choice,
)
from draftwell.serving.server.model.served_model import ServedModel
from draftwell.serving.server.model.snapshots import SnapshotOrigin
from draftwell.serving.server.model.strategy_pool import StrategyPool
from draftwell.serving.server.settings import ServerSettings
from draftwell.serving.temperature import SERVED_TEMPERATURE

log = logging.getLogger(__name__)

MEASURED_WITH = ("torch", "transformers")
"""Libraries that texts and times depend on."""
NO_ROOM = "no_room_to_switch"
CAPTURE_SECONDS = 120.0
"""Longest time that a server captures graphs before it is ready."""


def from_bundle(settings: ServerSettings, serving_now: ServedModel | None = None) -> ServedModel:
    """Load `settings.bundle`. Online state starts from the bundle's artifacts and is kept in
    memory.

    Args:
        settings: those of models, slots, threads and online state are used here.
        serving_now: what answers requests meanwhile, loaded with the same settings. Its pair is
            shared if the bundle is for the same models; the caller then checks that the new
            strategy works, because those models are busy.
    Raises:
        DraftwellError: the bundle is damaged or for another pair, its models are missing, it was
            tuned for a device that is not here or that `serving_now` does not use, or
            DRAFTWELL_HOME is inside it.
    """
    bundle = _checked_bundle(settings)
    manifest = bundle.manifest
    check_same_device(manifest.device, serving_now)
    check_device(manifest.device)
    log_other_libraries(bundle)
    # foreign weights are refused before anything loads
    files = bundle.files(models_root(), in_full=settings.signature_key is not None)
    artifacts = bundle.artifacts()
    config = tuned_config(bundle, artifacts)
    artifacts = own_artifacts(settings, artifacts, config)
    set_threads(settings.threads)
    governor = governor_of(settings, manifest.device, serving_now)
    choices = tuned_choices(config)
    if serving_now is not None and can_share(
        serving_now.pair, manifest, files, choices, artifacts.get(Eagle3Head.kind)
    ):
        pair = serving_now.pair
    else:
        load_settings = _load_settings(settings, bundle)
        if serving_now is not None:
            check_memory(files, load_settings, manifest.release_version)
        onnx = any(find_strategy(choice.name).prefers_onnx for choice in choices)
        pair = load_pair(files, load_settings, onnx_draft=onnx, libraries=bundle.path / COMPILED)
        if governor:  # whom the cores belong to was seen while models were loaded
            governor.check()
        _warm_up_choices(pair, choices, artifacts)
        capture_graphs(pair)
    check_machine(config, artifacts, pair)
    served = _served_model(settings, bundle, pair, governor, artifacts, config, serving_now)
    log_defaults(served.sampling_defaults, feedback=settings.feedback_dir is not None)
    return served


def _checked_bundle(settings: ServerSettings) -> Bundle:
    """The bundle that is named, opened, with its signature checked."""
    path = settings.bundle
    # a draft's ONNX graph is cached there
    refuse_inside(path, {"DRAFTWELL_HOME": draftwell_home()})
    key = settings.signature_key
    verify = None if key is None else signature_check(key, settings.signature_flags)
    return open_bundle(path, verify=verify)


def _load_settings(settings: ServerSettings, bundle: Bundle) -> LoadSettings:
    """How the bundle's models are loaded."""
    return LoadSettings.model_validate(
        {
            "dtype": bundle.manifest.dtype,
            "device": bundle.manifest.device,
            "slots": settings.slots,
            "max_context": settings.max_context,
            "compile": wanted_mode(),
        }
    )


def _warm_up_choices(
    pair: LoadedPair, choices: Sequence[StrategyChoice], artifacts: Mapping[str, Artifact]
) -> None:
    """Run every tuned choice once."""
    for choice in choices:
        needed = {
            kind: artifacts[kind]
            for kind in find_strategy(choice.name).reads()
            if kind in artifacts
        }
        resources = StrategyResources(needed, pair.special_tokens, deterministic=True)
        warm_up(pair, build_strategy(choice.name, dict(choice.parameters), resources))


def _served_model(
    settings: ServerSettings,
    bundle: Bundle,
    pair: LoadedPair,
    governor: ThreadGovernor | None,
    artifacts: Mapping[str, Artifact],
    config: DecodingConfig,
    serving_now: ServedModel | None,
) -> ServedModel:
    """What answers requests with a loaded pair."""
    fits = profile_fits(artifacts, pair)
    usable = {
        kind: artifact
        for kind, artifact in artifacts.items()
        if kind != HardwareProfile.kind or fits
    }
    mode = "off" if settings.deterministic else settings.state or "shared"
    pool = StrategyPool(pair, usable, config, mode=mode, offered=settings.offered)
    return ServedModel(
        bundle.manifest.pair,
        pair,
        pool.get(),
        settings.slots,
        settings.threads,
        governor,
        version=str(bundle.manifest.release_version),
        strategies=pool,
        origin=SnapshotOrigin.of(bundle.manifest),
        artifacts=artifacts,
        model_defaults=settings.generation_config == "model",
        prompt_sharing=settings.prompt_sharing,
        card=read_card_files(bundle.path, bundle.manifest),
    )


def governor_of(
    settings: ServerSettings, device: str, serving_now: ServedModel | None
) -> ThreadGovernor | None:
    """What adapts the threads of this process: the same for every bundle, because only the first
    knows how many there were at first."""
    if settings.deterministic:
        return None
    return serving_now.governor if serving_now else governor_for(settings.threads, device)


def tuned_config(bundle: Bundle, artifacts: Mapping[str, Artifact]) -> DecodingConfig:
    """A bundle's tuned strategy; DraftwellError where there is none, or where it needs measurements
    of this machine."""
    config = artifacts.get(DecodingConfig.kind)
    if not isinstance(config, DecodingConfig):
        raise DraftwellError(
            f"the bundle {bundle.path} holds no decoding config: tune the pair and deploy again",
            code="no_decoding_config",
        )
    if bundle.manifest.sampled_as_greedy:
        config = config.with_greedy_for_sampled()
    refuse_other_machine(config, artifacts, device_class(bundle.manifest.device), loaded=False)
    log_temperatures(config, artifacts, bundle.manifest.device)
    return config


def own_artifacts(
    settings: ServerSettings, artifacts: Mapping[str, Artifact], config: DecodingConfig
) -> dict[str, Artifact]:
    """The artifacts that requests may draft from: in mode `tenant` no datastore, whose texts may be
    other clients', unless asked for.

    Raises:
        DraftwellError: a tuned strategy needs it (`datastore_of_all_tenants`).
    """
    if (
        Datastore.kind not in artifacts
        or settings.state != "tenant"
        or settings.deterministic
        or settings.shared_datastore
    ):
        return dict(artifacts)
    for choice in tuned_choices(config):
        if Datastore.kind in find_strategy(choice.name).artifacts or choice.parameters.get(
            "use_datastore"
        ):
            raise DraftwellError(
                f"the bundle's strategy {choice.name} drafts from a datastore, which with "
                "--state tenant no request does, "
                "as it may hold other clients' texts: add --shared-datastore, or tune "
                "another strategy and deploy again",
                code="datastore_of_all_tenants",
            )
    log.info(
        "the bundle's datastore is not used, as it may hold other clients' texts "
        "(--shared-datastore uses it)"
    )
    return {kind: artifact for kind, artifact in artifacts.items() if kind != Datastore.kind}


def tuned_choices(config: DecodingConfig) -> list[StrategyChoice]:
    """What the config has requests decoded with: one choice, or one for greedy requests and another
    for sampled ones."""
    return list(
        dict.fromkeys(
            served_choice(config, temperature) for temperature in (0.0, SERVED_TEMPERATURE)
        )
    )


def log_temperatures(
    config: DecodingConfig, artifacts: Mapping[str, Artifact], device: str
) -> None:
    """Log what was not tuned or made for the temperatures that it serves."""
    sampled = served_choice(config, SERVED_TEMPERATURE)
    if config.sampled is None:
        log.warning(
            "nothing was tuned or measured for sampled requests: they are decoded plainly "
            "(draftwell step choose --device %s "
            "--set temperature=%g)",
            device,
            SERVED_TEMPERATURE,
        )
    for choice, temperature in (
        (served_choice(config, 0), 0.0),
        (sampled, config.sampled.temperature if config.sampled else None),
    ):
        used = [artifacts[kind] for kind in find_strategy(choice.name).reads() if kind in artifacts]
        if temperature is not None and (why := other_temperature(used, temperature)):
            log.warning("%s was not made for the requests it serves: %s", choice, why)


def log_defaults(defaults: Mapping[str, float], *, feedback: bool) -> None:
    """Log where sampling defaults of the model's generation config cost speed or feedback."""
    penalty = defaults.get("repetition_penalty", 1.0) != 1.0
    if penalty or (feedback and defaults.get("min_p")):
        log.warning(
            "requests that name no others get the model's own sampling settings (%s), with which "
            "they may be slower and feedback cannot record them; --generation-config none turns "
            "them off",
            ", ".join(f"{name} {value:g}" for name, value in defaults.items()),
        )


def can_share(
    pair: LoadedPair,
    manifest: Manifest,
    files: PairFiles,
    choices: Sequence[StrategyChoice],
    head: Artifact | None = None,
) -> bool:
    """Whether a loaded pair is the one that a bundle was made for, chat template and stop tokens
    included, with every model that the bundle's strategies use, and with a target that keeps the
    hidden states of the layers that the bundle's head reads."""
    reads_head = any(Eagle3Head.kind in find_strategy(choice.name).reads() for choice in choices)
    lacks_onnx = (
        any(find_strategy(choice.name).prefers_onnx for choice in choices)
        and "draft_onnx" not in pair.models
    )
    same = (pair.fingerprint, pair.device) == (
        manifest.fingerprint,
        manifest.device,
    ) and pair.settings == settings_digest(files)
    kept = getattr(pair.models["target"], "features", ())
    other_layers = False
    if isinstance(head, Eagle3Head) and kept != head.layers:
        # to begin to keep some, slots that the scheduler's thread writes to would be forgotten
        other_layers = kept != () or reads_head
    return same and not lacks_onnx and not other_layers


def check_memory(files: PairFiles, settings: LoadSettings, version: int | str | None) -> None:
    """Refuse to load models beside those that serve where there is too little memory: the system
    would end the process.

    Raises:
        DraftwellError: `NO_ROOM`.
    """
    free = free_memory(settings.device)
    weights, slots = needed(
        files, settings.dtype, settings.device, settings.slots, settings.max_context
    )
    if free is not None and weights + slots > free:
        raise DraftwellError(
            f"bundle {version} needs about {(weights + slots) / 1e9:.1f} GB beside what serves "
            f"(weights {weights / 1e9:.1f}, slots {slots / 1e9:.1f}), and {free / 1e9:.1f} GB are "
            "free: restart the server to change to it, or serve with fewer --slots",
            code=NO_ROOM,
        )


def warm_up(pair: LoadedPair, strategy: Strategy) -> None:
    """Decode a few tokens, so that a missing artifact or broken weights are found before the first
    request."""
    prompt = pair.encode_prompt("Hello")
    pair.engine().generate(prompt, pair.sampling(max_tokens=8), strategy)


def check_same_device(device: str, serving_now: ServedModel | None) -> None:
    """Refuse a bundle for another device: one link `current` may point to bundles for both, and a
    server keeps its device."""
    if serving_now is not None and serving_now.pair.device != device:
        raise DraftwellError(
            f"the bundle was made for {device}, and this server computes on "
            f"{serving_now.pair.device}: deploy into one "
            "folder per device (draftwell deploy --out), or restart the server to change devices",
            code="wrong_device",
        )


def check_device(device: str) -> None:
    """Refuse a bundle for a device that is not here, or on which this torch or the driver cannot
    compute."""
    if device.startswith("cuda") and (problem := cuda_problem()):
        raise DraftwellError(
            f"the bundle was made for {device}, and {problem}, or deploy with DEVICE=cpu",
            code="no_cuda_device",
        )


def log_other_libraries(bundle: Bundle) -> None:
    """Log, in a line, which libraries that texts and times depend on have another version here than
    the bundle's requirements pin."""
    file = bundle.path / f"requirements-{bundle.manifest.device}.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    pinned = dict(line.split()[0].split("==", 1) for line in lines if "==" in line)
    here = {name: version(name) for name in MEASURED_WITH if name in pinned}
    other = [f"{n} {here[n]}, not {pinned[n]}" for n in here if here[n] != pinned[n]]
    if other:
        log.warning(
            "other libraries than the bundle was measured with: %s: pip install -r %s, or tune and "
            "gate with these",
            "; ".join(other),
            file.name,
        )


def capture_graphs(pair: LoadedPair, seconds: float = CAPTURE_SECONDS) -> None:
    """On an accelerator, capture the graphs of all passes, so that no user's first request waits
    for it.

    What is not captured within `seconds`, or does not fit into the device's memory, is left to its
    first use, and a line in the log says so. The models must be idle.

    Args:
        seconds: 0 or more, shared among the models.
    """
    if not pair.device.startswith("cuda"):
        return
    from torch import OutOfMemoryError

    models = {role: model for role, model in pair.models.items() if hasattr(model, "warm_up")}
    started = time.monotonic()
    for number, (role, model) in enumerate(models.items(), 1):
        left = max(0.0, seconds * number / len(models) - (time.monotonic() - started))
        try:
            why = None if model.warm_up(left) else f"in {seconds:.0f} s"
        except OutOfMemoryError:
            why = (
                "because the device's memory is full: fewer --slots or a smaller --max-context "
                "need less"
            )
        if why is not None:
            log.warning(
                (
                    "the graphs of the %s were not all captured %s; the rest is captured when "
                    "it is first needed"
                ),
                role,
                why,
            )
    if models:
        log.info(
            "captured the graphs of %s in %.1f s",
            ", ".join(models),
            time.monotonic() - started,
        )


def check_machine(
    config: DecodingConfig, artifacts: Mapping[str, Artifact], pair: LoadedPair
) -> None:
    """Refuse a profile of another machine, or of other compiled layers, if the strategy uses it;
    log a warning if only the tuning was done elsewhere."""
    here, tuned = machine_class(pair), config.provenance.device_class
    refuse_other_machine(config, artifacts, here, loaded=True)
    if tuned not in (None, here):
        log.warning(
            "the decoding config was tuned on %s, this machine with the models loaded here is %s: "
            "another choice may be faster",
            tuned,
            here,
        )


def refuse_other_machine(
    config: DecodingConfig, artifacts: Mapping[str, Artifact], here: str, *, loaded: bool
) -> None:
    """Refuse a profile that was not measured on the machine class `here`, if the strategy uses it.

    Args:
        loaded: whether models are; before that, compiled layers are not looked at, so that another
            machine is refused in no time.
    """
    measured = measured_on(artifacts)
    if measured is None or not uses_profile(config):
        return
    if here != (measured if loaded else without_layers(measured)):
        raise DraftwellError(
            f"the bundle's hardware profile was measured on {measured}, and this machine is "
            f"{here}: run `draftwell step calibrate` and `draftwell step choose` here, and "
            f"deploy again; where "
            "only +torch differs, install g++ or unset DRAFTWELL_COMPILE",
            code="profile_of_another_machine",
        )


def uses_profile(config: DecodingConfig) -> bool:
    """Whether a tuned strategy reads the hardware profile."""
    return any(
        HardwareProfile.kind in find_strategy(choice.name).reads()
        for choice in tuned_choices(config)
    )


def measured_on(artifacts: Mapping[str, Artifact]) -> str | None:
    """Machine class of the hardware profile; None without one, or where it does not say."""
    profile = artifacts.get(HardwareProfile.kind)
    return profile.provenance.device_class if profile else None


def profile_fits(artifacts: Mapping[str, Artifact], pair: LoadedPair) -> bool:
    """Whether the hardware profile was measured on this machine and with these layers."""
    return HardwareProfile.kind in artifacts and measured_on(artifacts) in (
        None,
        machine_class(pair),
    )
