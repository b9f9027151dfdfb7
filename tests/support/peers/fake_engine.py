"""An engine in this process, with a clock of its own: it repeats the prompt, as fast as it is
told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from draftwell.components.engines.port import (
    About,
    Acceptance,
    Answer,
    Capabilities,
    Decoded,
    EngineSettings,
)
from draftwell.serving.errors import DraftwellError
from draftwell.serving.runtime.requests import Sampling

SECONDS = 0.01
"""Of the own clock, for a token of plain decoding."""


class FakeEngine:
    """An `Engine`; `log` gets a line for each start, group and stop.

    Args:
        speeds: `method`, `method:k` or `method:k@requests` → times plain decoding; .9 where nothing
            is named. `scheduled@requests` overrules them where lengths follow the load,
            `method:0@requests` says what a length of 0 costs there.
        faults: labels of engines that are killed when they decode; `crash LABEL`: that fail then;
            `start LABEL`: when they start.
    """

    capabilities = Capabilities(restart=True)

    def __init__(
        self, label: str, speeds: Mapping[str, float], log: list[str], faults: Sequence[str] = ()
    ):
        self.label, self.speeds, self.log, self.faults = label, speeds, log, faults
        self.settings: EngineSettings | None = None

    def start(self, settings: EngineSettings) -> About:
        self.log.append(f"start {self.label}")
        if f"start {self.label}" in self.faults:
            raise DraftwellError(f"{self.label} has no kernel", code="engine_failed")
        self.settings = settings
        return About(version="fake 1.0")

    def decode(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Decoded:
        assert self.settings is not None
        assert len(prompts) <= self.settings.slots
        self.log.append(f"decode {self.label} {len(prompts)}")
        if self.label in self.faults:
            raise DraftwellError(f"{self.label} was killed", code="engine_killed")
        if f"crash {self.label}" in self.faults:
            raise DraftwellError(f"{self.label} has crashed", code="engine_failed")
        pace = SECONDS / self.speed(len(prompts))
        answers = []
        for ids in prompts:
            tokens = [ids[i % len(ids)] for i in range(sampling.max_tokens)]
            seconds = pace * len(tokens) * (1 + len(ids) % 3 / 50)
            answers.append(
                Answer(
                    tokens=tokens,
                    seconds=seconds,
                    first_token_seconds=pace,
                    acceptance=Acceptance(rounds=2, drafted=4, accepted=3, accepted_at=(2, 1)),
                    top_logprobs=[[(token, -0.1), (token + 1, -0.3)] for token in tokens],
                )
            )
        return Decoded(seconds=max(answer.seconds for answer in answers), answers=answers)

    def stop(self) -> None:
        if self.settings is not None:
            self.log.append(f"stop {self.label}")
        self.settings = None

    def speed(self, requests: int) -> float:
        """Times plain decoding."""
        assert self.settings is not None
        chosen = self.settings.speculation or {}
        name, k = chosen.get("method", "off"), chosen.get("num_speculative_tokens", 0)
        for first, last, length in chosen.get("num_speculative_tokens_per_batch_size", []):
            if first <= requests <= last:
                k = length
        if k == 0:
            return self.speeds.get(f"{name}:0@{requests}", 1.0)
        if (
            "num_speculative_tokens_per_batch_size" in chosen
            and f"scheduled@{requests}" in self.speeds
        ):
            return self.speeds[f"scheduled@{requests}"]
        named = (f"{name}:{k}@{requests}", f"{name}:{k}", name)
        return next((self.speeds[key] for key in named if key in self.speeds), 0.9)


def maker(
    speeds: Mapping[str, float], log: list[str], faults: Sequence[str] = ()
) -> Callable[[str], FakeEngine]:
    """Makes engines by label."""
    return lambda label: FakeEngine(label, speeds, log, faults)
