"""What ships with the default pair: models of the promised size, artifacts that fit them."""

from __future__ import annotations

import pytest
import torch

from draftwell.registry.pairs import find_pair
from draftwell.serving.artifacts.base import read_manifest
from draftwell.serving.artifacts.distilled_draft import DistilledDraft
from tests.support.models.default_pair import default_pair, strategy_of

PAIR = find_pair("default")
HOME = PAIR.folder / PAIR.name.replace("-", "_")
ARTIFACTS = sorted(path.parent for path in HOME.glob("artifacts/*/*/artifact.json"))


def test_the_qualifier_is_small_and_of_the_drafts_target():
    draft, qualifier = (DistilledDraft.load(HOME / role) for role in ("draft", "qualifier"))
    assert qualifier.provenance.fingerprint == draft.provenance.fingerprint
    assert sum(path.stat().st_size for path in (HOME / "qualifier").iterdir()) <= 40e6


@pytest.mark.slow
def test_every_starter_artifact_is_of_the_shipped_models():
    from draftwell.registry.pairs import fetch
    from draftwell.serving.artifacts.pair_files import fingerprint

    wanted = {dtype: fingerprint(fetch(PAIR), dtype) for dtype in ("bfloat16", "float32")}
    assert len(ARTIFACTS) == 9
    for path in ARTIFACTS:
        assert read_manifest(path)["provenance"]["fingerprint"] == wanted[path.parent.name], (
            path.name
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pyramid_assisted", "pyramid_fuzzy"])
def test_three_models_write_text(name):
    pair = default_pair()
    job = pair.engine().generate(
        pair.encode_prompt("Name three colours."),
        pair.sampling(max_tokens=12),
        strategy_of(pair, name),
    )
    assert 0 < len(job.output) <= 12
    assert job.session.stats.qualifier_calls > 0
    assert torch.tensor(job.output).max() < len(pair.tokenizer)
