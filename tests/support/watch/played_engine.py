"""A played vLLM over HTTP: its metrics are those of a simulated minute, and it answers completions
as the simulator says that a fixed prompt fares."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from draftwell.components.engines.remote.counters import Counters
from draftwell.components.engines.remote.dialects.vllm import NAMES
from tests.support.engines.server import MODEL, EngineServer, Json, serving
from tests.support.engines.simulated import SimulatedEngine
from tests.support.watch.simulator import Run

LETTERS_PER_TOKEN = 4


class PlayedEngine(EngineServer):
    """What the server says; tests turn `minute`, and let it be `away`."""

    def __init__(self, run: Run, *, plain: bool = False):
        split = SimulatedEngine(split=lambda text: [*range(-(-len(text) // LETTERS_PER_TOKEN))])
        super().__init__(split, hangs_up=True)
        self.run, self.plain = run, plain
        self.minute = self.waiting = 0
        self.prompts: list[int] = []
        """Lengths of those that were decoded."""
        self.context = 100_000
        self.url = ""

    @property
    def sample(self) -> Counters:
        """Counters at the end of the minute."""
        return self.run.samples[self.minute]

    @property
    def now(self) -> float:
        """Unix seconds, simulated."""
        return self.sample.at

    def about(self, path: str) -> Json:
        self.engine.version = str(self.sample.version)
        return super().about(path)

    def metrics_text(self) -> str:
        sample, lines = self.sample, [f"process_start_time_seconds {self.sample.started}"]
        for field, names in NAMES.sums.items():
            value = self.waiting if field == "waiting" else getattr(sample, field)
            lines.append(f'{names[0]}{{model_name="{MODEL}"}} {value}')
        for place, count in enumerate(sample.accepted_at):
            labels = f'model_name="{MODEL}",position="{place}"'
            lines.append(f"{NAMES.accepted_at}{{{labels}}} {count}")
        return "\n".join(lines) + "\n"

    def is_too_long(self, body: Json) -> bool:
        return len(body["prompt"]) + int(body["max_tokens"]) > self.context

    def events(self, path: str, body: Json) -> Iterator[Json]:
        tokens, count = len(body["prompt"]), body["max_tokens"]
        self.prompts.append(tokens)
        said = self.run.probe(self.minute, "chat", tokens, plain=self.plain).acceptance
        assert said is not None
        histogram = [said.rounds, *said.accepted_at, 0]
        event: Json = {
            "choices": [{"token_ids": [7] * count, "finish_reason": "length"}],
            "usage": {"completion_tokens": count},
        }
        if not self.plain:
            event["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": [a - b for a, b in pairwise(histogram)],
                    "num_draft_tokens": said.drafted,
                }
            }
        yield event


@contextmanager
def served(engine: PlayedEngine) -> Iterator[PlayedEngine]:
    """The engine at an address, until the block is left."""
    with serving(engine) as engine.url:
        yield engine
