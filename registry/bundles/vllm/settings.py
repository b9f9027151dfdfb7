"""What a bundle for vLLM is rendered from: one strict model, which every file is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from registry.pairs.catalogue import NAME
from registry.strict import Strict

BUNDLED = "models/"
"""How the names of model folders begin that are in the bundle."""
VERSION = r"^\d+(\.\d+)+([a-z0-9.]*)$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
FILE = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
WHEEL = FILE.replace("*$", r"*\.whl$")
ONE_LINE = r"^[^\x00-\x1f\x7f]+$"


class EngineGate(Strict):
    """What the gate judged: a choice is allowed on that engine, version and device, and on no other."""

    engine: Literal["vllm"] = "vllm"
    version: str = Field(pattern=VERSION, description="version of the engine that was measured, without its build")
    device: Literal["cpu", "cuda"]
    device_class: str | None = Field(None, description="machine class that it was measured on")
    passed: bool
    ungated_reason: str | None = Field(None, description="why it is deployed without a passed gate")


class VllmServing(Strict):
    """How vLLM serves a release.

    Paths of models begin with `models/` where they are in the bundle; others are what vLLM takes: a folder, or a repository of the hub.
    """

    pair: str = Field(pattern=NAME, description="name of the pair")
    release: int = Field(ge=1, description="number of the release")
    model: str = Field(pattern=ONE_LINE, description="the target")
    revision: str | None = Field(None, description="commit, tag or branch of the target on the hub")
    served_name: str | None = Field(None, pattern=ONE_LINE, description="model's name in the API; left out, the pair's")
    speculative: dict[str, Any] | None = Field(None, description="vLLM's speculative_config; left out, plain decoding")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = Field(None, ge=2, description="most tokens of prompt and answer; left out, the model's limit")
    max_num_seqs: int = Field(64, ge=1, description="requests decoded at once by a replica")
    memory: float = Field(0.9, gt=0, le=1, description="share of the GPU's memory that vLLM takes; not used on CPUs")
    gpus: int = Field(1, ge=1, description="GPUs of a replica, over which vLLM splits the models; not used on CPUs")
    cpus: int = Field(4, ge=1, description="cores that a replica asks for")
    replicas: int = Field(2, ge=1, description="copies behind one address: with two, one may restart")
    port: int = Field(8000, ge=1, le=65535)
    image: str | None = Field(None, pattern=IMAGE, description="image with vLLM that the bundle's is made from; left out, vLLM's own for "
                                                               "CUDA of that version. For CPUs it has to be named")
    plugins: tuple[Annotated[str, StringConstraints(pattern=WHEEL)], ...] = Field(
        (), description="file names of wheels in the bundle that are installed beside vLLM")
    requirements: str | None = Field(None, pattern=FILE, description="file in the bundle with what the plug-ins need, locked with hashes")
    environment: dict[Annotated[str, StringConstraints(pattern=VARIABLE)], str] = Field(
        default_factory=dict, description="further variables of the engine's process; no secrets")
    gate: EngineGate

    @model_validator(mode="after")
    def _is_complete(self) -> VllmServing:
        if not self.gate.passed and not self.gate.ungated_reason:
            raise ValueError("the gate did not pass on vLLM: gate it there, or give a reason (ungated_reason)")
        if self.gate.device == "cpu" and self.image is None:
            raise ValueError("image: name an image with vLLM for CPUs, vLLM's own is for CUDA")
        if self.gate.device == "cpu" and self.gpus != 1:
            raise ValueError("gpus: there are none on CPUs")
        if self.speculative is not None and not {"method", "model"} & self.speculative.keys():
            raise ValueError("speculative: it names neither a method nor a model")
        return self

    @property
    def name(self) -> str:
        """Name of what is deployed, as Kubernetes and Docker allow it."""
        return f"draftwell-{self.pair}".replace(".", "-").replace("_", "-")[:53].rstrip("-")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_name or self.pair

    @property
    def base_image(self) -> str:
        """The image that the bundle's image is made from."""
        return self.image or f"vllm/vllm-openai:v{self.gate.version}"

    @property
    def image_name(self) -> str:
        """Name and tag of the bundle's own image."""
        return f"{self.name}:{self.release}-{self.gate.device}"

    def place(self, model: str, root: str) -> str:
        """A model's path, seen from where the bundle is at `root` (empty: the working directory)."""
        return f"{root}{model}" if model.startswith(BUNDLED) else model

    def engine_arguments(self, root: str = "") -> dict[str, Any]:
        """vLLM's arguments besides the model, by their names in Python; None, what is left to vLLM, is left out."""
        speculative = self.speculative and {
            key: self.place(value, root) if isinstance(value, str) else value for key, value in self.speculative.items()}
        on_gpus = {"gpu_memory_utilization": self.memory, "tensor_parallel_size": self.gpus} if self.gate.device == "cuda" else {}
        found = {"revision": self.revision, "dtype": self.dtype, "max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs,
                 **on_gpus, "speculative_config": speculative}
        return {name: value for name, value in found.items() if value is not None}
