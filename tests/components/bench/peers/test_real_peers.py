"""The real peers decode what the target's own greedy choice is: `DRAFTWELL_TEST_PEERS` names the
folder that `make peers` filled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftwell.components.bench.peers.loading import open_peers
from draftwell.components.bench.runner import Contender
from draftwell.components.bench.target_agreement import difference
from draftwell.components.engines.environments import DRIVERS, INSTALLED
from tests.support.models.default_pair import default_pair, generated, two_threads

TOKENS, PROMPTS = 24, 2


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRIVERS))
def test_every_variant_gives_the_targets_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("DRAFTWELL_TEST_PEERS")
    if not folder or not (Path(folder) / name / INSTALLED).is_file():
        pytest.skip(
            f"{name} is not installed: `make peers PEERS_DIR=folder`, then "
            "DRAFTWELL_TEST_PEERS=folder"
        )
    monkeypatch.setenv("DRAFTWELL_PEERS", folder)
    pair = default_pair()
    with two_threads(), open_peers(pair, [name], gamma=2, context=512) as groups:
        for contender in groups[name].contenders:
            for prompt_id, ids, expected in generated()[:PROMPTS]:
                check(contender, prompt_id, ids, expected[:TOKENS])


def check(contender: Contender, prompt_id: str, ids: list[int], expected: list[int]) -> None:
    """The same tokens, or the first difference where the target's two best are nearly tied; and a
    clock that runs."""
    pair = default_pair()
    made = contender.generate(ids, pair.sampling(max_tokens=TOKENS))
    found = difference(pair, prompt_id, ids, made.tokens, expected, exact=False)
    assert found is None or found.near_tie, (contender.label, found)
    assert 0 < made.stats.first_token_seconds < made.seconds
