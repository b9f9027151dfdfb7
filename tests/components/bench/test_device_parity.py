"""A device's outputs against the CPU's: equal ones pass, another model's do not, lossy ones are not
asked."""

from draftwell.components.bench.bench import run_bench
from draftwell.components.bench.device_parity import check_against
from draftwell.components.bench.runner import measure
from draftwell.components.bench.settings import BenchSettings
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.runtime.strategies import StrategyChoice, StrategyResources
from tests.support.models.resources import table_resources
from tests.support.models.table_model import TableModel
from tests.support.models.tiny import pair_of, table_pair

PROMPTS = [Prompt(f"p{i}", None, [text]) for i, text in enumerate(["abcab", "hello"])]


def test_equal_models_pass():
    report = run_bench(
        table_pair(),
        [StrategyChoice("vanilla_sd"), StrategyChoice("csd")],
        PROMPTS,
        table_resources(vocab=24),
        BenchSettings(max_tokens=12),
        check=table_pair(),
    ).to_json()
    checked = report["cpu_check"]
    assert checked["passed"]
    assert "csd" not in checked["strategies"]
    assert {"autoregressive", "vanilla_sd"} <= set(checked["strategies"])
    assert checked["strategies"]["vanilla_sd"] == {
        "identical": 2,
        "near_ties": 0,
        "wrong": [],
    }


def test_another_model_does_not():
    measured = measure(
        table_pair(),
        StrategyResources(),
        [StrategyChoice("autoregressive")],
        PROMPTS,
        BenchSettings(max_tokens=12),
    )
    found = check_against(
        pair_of(TableModel.random(24, 9, order=1), None), measured, PROMPTS, max_tokens=12
    )
    assert not found.passed
    assert found.strategies["autoregressive"].wrong == ("p0", "p1")
