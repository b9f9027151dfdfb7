"""What a bundle for vLLM is rendered from: one strict model, which every file is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from draftwell.registry.pairs.catalogue import NAME
from draftwell.registry.strict import Strict, validate
from draftwell.serving.number_format import dtype_of

BUNDLED = "models/"
"""How the names of model folders begin that are in the bundle."""
VERSION = r"^\d+(\.\d+)+([a-z0-9.]*)$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
FILE = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
WHEEL = FILE.replace("*$", r"*\.whl$")
PACKAGE = r"^[a-z0-9][a-z0-9-]*$"
COMMIT = r"^[0-9a-f]{40}$"
SCHEDULE = "num_speculative_tokens_per_batch_size"
SUFFIX = "suffix"
"""vLLM's method whose longest draft is the same at all loads."""
CUSTOM = "custom_class"
"""vLLM's method whose `model` is the path of a class."""
ONE_LINE = r"^[^\x00-\x1f\x7f]+$"


class EngineGate(Strict):
    """What the gate judged: a choice is allowed on that engine, version and device, and on no
    other."""

    engine: Literal["vllm"] = "vllm"
    version: str = Field(
        pattern=VERSION, description="version of the engine that was measured, without its build"
    )
    device: Literal["cpu", "cuda"]
    device_class: str | None = Field(None, description="machine class that it was measured on")
    dtype: str | None = Field(None, description="number format that was measured")
    threads: int | None = Field(
        None, ge=1, description="compute threads that were measured with; left out, not known"
    )
    fingerprint: str | None = Field(None, description="of the models that were measured")
    settings: dict[str, Any] | None = Field(
        None, description="the speculative config that was judged; left out, plain decoding"
    )
    release: str | None = Field(
        None, description="the registered release that was judged; left out, none"
    )
    gpus: int = Field(1, ge=1, description="GPUs that it was measured on")
    at_once: int = Field(1, ge=1, description="most requests at once that it was measured with")
    passed: bool
    ungated_reason: str | None = Field(None, description="why it is deployed without a passed gate")


class Tuned(Strict):
    """How drafts fared when they were tuned; `draftwell monitor` compares with it what is
    served."""

    temperature: float = Field(ge=0, description="of the requests that it was tuned for")
    drafts: int = Field(ge=0, description="that the target verified")
    first_kept: int = Field(ge=0, description="of them, those whose first token was kept")
    by_prompt: tuple[tuple[int, int], ...] = Field(
        (), description="of each prompt first_kept and drafts; left out, not known"
    )


class VllmServing(Strict):
    """How vLLM serves a release.

    Paths of models begin with `models/` where they are in the bundle; others are what vLLM takes: a
    folder, or a repository of the hub.
    """

    pair: str = Field(pattern=NAME, description="name of the pair")
    release: int = Field(ge=1, description="number of the release")
    model: str = Field(pattern=ONE_LINE, description="the target")
    revision: str | None = Field(
        None,
        pattern=COMMIT,
        description="the target's commit on the hub; left out where it is in the bundle",
    )
    fingerprint: str | None = Field(
        None, description="of the release's models; needed where the gate passed"
    )
    served_name: str | None = Field(
        None, pattern=ONE_LINE, description="model's name in the API; left out, the pair's"
    )
    speculative: dict[str, Any] | None = Field(
        None, description="vLLM's speculative_config; left out, plain decoding"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(
        None, ge=2, description="most tokens of prompt and answer; left out, the model's limit"
    )
    max_num_seqs: int = Field(64, ge=1, description="requests decoded at once by a replica")
    memory: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory that vLLM takes; not used on CPUs"
    )
    cache: int = Field(
        4,
        ge=1,
        le=4096,
        description="GiB for keys and values of a replica on CPUs, where vLLM would take nine "
        "tenths "
        "of "
        "the machine's memory; not used on GPUs",
    )
    gpus: int = Field(
        1,
        ge=1,
        description="GPUs of a replica, over which vLLM splits the models; not used on CPUs",
    )
    cpus: int = Field(4, ge=1, description="cores that a replica asks for")
    replicas: int = Field(
        2, ge=1, description="copies behind one address: with two, one may restart"
    )
    port: int = Field(8000, ge=1, le=65535, description="that the address listens on")
    image: str | None = Field(
        None,
        pattern=IMAGE,
        description="image with vLLM that the bundle's is made from; left out, vLLM's own for "
        "CUDA of that version; on CPUs, and where the settings need more than vLLM, no "
        "container is described then",
    )
    plugins: tuple[Annotated[str, StringConstraints(pattern=WHEEL)], ...] = Field(
        (), description="file names of wheels in the bundle that are installed beside vLLM"
    )
    requirements: str | None = Field(
        None,
        pattern=FILE,
        description="file in the bundle with what the plug-ins need, locked with hashes",
    )
    needs: tuple[Annotated[str, StringConstraints(pattern=PACKAGE)], ...] = Field(
        (), description="distributions besides vLLM that its settings need and its image lacks"
    )
    environment: dict[Annotated[str, StringConstraints(pattern=VARIABLE)], str] = Field(
        default_factory=dict, description="further variables of the engine's process; no secrets"
    )
    tuned: Tuned | None = Field(
        None, description="how drafts fared when they were tuned; left out, not known"
    )
    gate: EngineGate

    @model_validator(mode="after")
    def _is_complete(self) -> VllmServing:
        if not self.gate.passed and not self.gate.ungated_reason:
            raise ValueError(
                "the gate did not pass on vLLM: gate it there, or give a reason (ungated_reason)"
            )
        for role, (model, revision) in self.models().items():
            if not model.startswith(BUNDLED) and not (
                isinstance(revision, str) and re.fullmatch(COMMIT, revision)
            ):
                raise ValueError(
                    f"{role}: put {model} into the bundle ({BUNDLED}…), or name its commit "
                    "on the hub (revision)"
                )
        if self.gate.device == "cpu" and self.gpus != 1:
            raise ValueError("gpus: there are none on CPUs")
        if self._in_plugin(self.speculative) and not self.plugins:
            raise ValueError(
                "speculative: its class is in a plug-in, and the bundle has none: name its "
                "wheel (plugins)"
            )
        if self.speculative is not None and not {"method", "model"} & self.speculative.keys():
            raise ValueError("speculative: it names neither a method nor a model")
        if self.gate.passed and (what := self._unlike()):
            raise ValueError(
                f"{what} is not what the gate judged: serve what it judged, or gate again"
            )
        return self

    def _unlike(self) -> str | None:
        """What is served otherwise than it was judged; a draft has another path where it is served,
        and its digest in the fingerprint."""
        gate = self.gate
        if gate.device_class is None or not gate.device_class.startswith(f"{gate.device}-"):
            return f"device {gate.device} (the record has class {gate.device_class})"
        if self.fingerprint is None or self.fingerprint != gate.fingerprint:
            return f"fingerprint {self.fingerprint}"
        if gate.dtype is None or self.dtype != dtype_of(gate.dtype):
            return f"dtype {self.dtype}"
        if self.gpus != gate.gpus:
            return f"gpus {self.gpus} (vLLM is measured on one, else use --set ungated=…)"
        if self.max_num_seqs > gate.at_once and (self.speculative or {}).get("method") == SUFFIX:
            return f"max_num_seqs {self.max_num_seqs} (measured with up to {gate.at_once})"
        judged, served = self._behaviour(gate.settings), self._behaviour(self.speculative)
        return "speculative" if judged != served else None

    def _behaviour(self, speculative: Mapping[str, Any] | None) -> dict[str, Any]:
        """A speculative config without the place of its model, but not without a plug-in's
        class."""
        places = ("revision",) if self._in_plugin(speculative) else ("revision", "model")
        found = {key: value for key, value in (speculative or {}).items() if key not in places}
        return {**found, "has_model": "model" in (speculative or {})}

    @staticmethod
    def _in_plugin(speculative: Mapping[str, Any] | None) -> bool:
        """Whether a speculative config names a class instead of a model."""
        return speculative is not None and speculative.get("method") == CUSTOM

    def models(self) -> dict[str, tuple[str, Any]]:
        """The models by the fields that name them, with their revisions."""
        speculative = {} if self._in_plugin(self.speculative) else self.speculative or {}
        draft = (
            {"speculative": (speculative["model"], speculative.get("revision"))}
            if isinstance(speculative.get("model"), str)
            else {}
        )
        return {"model": (self.model, self.revision), **draft}

    @property
    def name(self) -> str:
        """Name of what is deployed, as Kubernetes and Docker allow it."""
        return f"draftwell-{self.pair}".replace(".", "-").replace("_", "-")[:53].rstrip("-")

    @property
    def bundle(self) -> str:
        """Pair and folder of the bundle, by which `draftwell monitor` knows what was counted while
        it was served."""
        return f"{self.pair}/{self.release}-{self.gate.device}"

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_name or self.pair

    @property
    def base_image(self) -> str | None:
        """The image that the bundle's image is made from; None where none is known: vLLM's own is
        for CUDA, and has nothing that vLLM does not need itself."""
        own = (
            f"vllm/vllm-openai:v{self.gate.version}"
            if self.gate.device == "cuda" and not self.needs
            else None
        )
        return self.image or own

    @property
    def image_name(self) -> str:
        """Name and tag of the bundle's own image."""
        return f"{self.name}:{self.release}-{self.gate.device}"

    def place(self, model: str, root: str) -> str:
        """A model's path, seen from where the bundle is at `root` (empty: the working
        directory)."""
        return f"{root}{model}" if model.startswith(BUNDLED) else model

    def engine_arguments(self, root: str = "") -> dict[str, Any]:
        """vLLM's arguments besides the model, by their names in Python; None, what is left to vLLM,
        is left out."""
        speculative = self.speculative and {
            key: self.place(value, root) if isinstance(value, str) else value
            for key, value in self.speculative.items()
        }
        if speculative and speculative.get("method") != SUFFIX:
            same = [[1, self.gate.at_once, speculative.get("num_speculative_tokens")]]
            lengths: list[Any] = speculative.get(SCHEDULE) or same
            top = max(int(part[1]) for part in lengths)
            if top < self.max_num_seqs:
                # vLLM would go on with the last length at loads that nobody measured. With 0 it
                # drafts nothing there, though a draft model or a head still costs a pass in each
                # round (vllm/v1/spec_decode/llm_base_proposer.py).
                speculative[SCHEDULE] = [*lengths, [top + 1, self.max_num_seqs, 0]]
        by_device = (
            {"gpu_memory_utilization": self.memory, "tensor_parallel_size": self.gpus}
            if self.gate.device == "cuda"
            else {"kv_cache_memory_bytes": self.cache << 30}
        )
        found = {
            "revision": self.revision,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            **by_device,
            "speculative_config": speculative,
        }
        return {name: value for name, value in found.items() if value is not None}


def gated_serving(
    record: Mapping[str, Any],
    *,
    device: str,
    fingerprint: str,
    draft: str | None = None,
    ungated_reason: str | None = None,
    **serving: Any,
) -> VllmServing:
    """The settings that serve what an engine's gate judged, and nothing else.

    Args:
        record: fields of `EngineGate` that were judged; of the version the build may be in it.
        device: cpu or cuda.
        fingerprint: of the release's models.
        draft: place of the draft or head in the bundle, where the judged config has one.
        ungated_reason: why a record that did not pass is served.
        serving: other fields of `VllmServing`.
    Raises:
        DraftwellError: the record did not pass, or the settings are not what it judged
            (`bad_value`).
    """
    judged = record["settings"]
    speculative = {**judged, "model": draft} if draft and judged and "model" in judged else judged
    gate = {
        **record,
        "version": str(record["version"]).partition("+")[0],  # the build is the device's
        "device": device,
        "ungated_reason": ungated_reason,
    }
    return validate(
        VllmServing,
        {
            "dtype": dtype_of(str(record["dtype"])),
            "speculative": speculative,
            "fingerprint": fingerprint,
            **serving,
            "gate": gate,
        },
        "settings of the vLLM bundle",
    )
