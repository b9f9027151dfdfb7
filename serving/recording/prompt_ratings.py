"""Rating a prompt: log-probs of text that is given, by one teacher-forced pass (what evaluation
harnesses ask a server for)."""

from __future__ import annotations

from draftwell.serving.runtime.commands import Step
from draftwell.serving.runtime.session.session import Session
from draftwell.serving.runtime.strategies.base import StrategyResources
from draftwell.serving.runtime.strategies.lossless.autoregressive import Autoregressive

PART = 32
"""Prompt tokens of one forward pass: a row is as wide as the vocabulary, so that those of a whole
long prompt would take a gigabyte. Where the engine reads the tokens in pieces, the rows of the
first ones wait for the last one's."""


class RatedPrompt(Autoregressive):
    """Plain decoding that rates the prompt's tokens on the way (`Session.prompt_ratings`)."""

    def __init__(self) -> None:
        super().__init__(self.Config(), StrategyResources())

    def run(self, session: Session) -> Step[None]:
        prompt = session.text.ids[:]
        for start in range(0, len(prompt), PART):
            part = prompt[start : start + PART]
            rows = yield from session.target.read(prompt[: start + len(part)], keep=len(part))
            session.rate_prompt(rows, start)
        yield from session.append_sampled(rows[-1:])
        while not session.text.finished:
            yield from session.decode_plainly()
