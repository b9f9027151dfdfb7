"""The bench of single forward passes: every way and shape in turn, and slots as they were."""

from __future__ import annotations

from draftwell.components.bench.forward import Shape, compare, shapes, table, timed, ways
from draftwell.serving.runtime.models.lean_llama import LeanLlama
from draftwell.serving.runtime.models.transformers_model import TransformersModel
from tests.support.models.llama_shapes import llama


def test_every_shape_is_timed_and_slots_are_given_back():
    model = LeanLlama(llama(), slots=8, max_context=64)
    for shape in shapes(20, 40):
        assert timed(model, shape) > 0
    assert [model.open() for _ in range(8)], "all slots are free again"


def test_ways_are_measured_in_turn_and_the_table_has_median_and_least():
    order = []
    times = iter([3.0, 10.0, 20.0, 1.0, 2.0, 30.0])

    def timer(model, shape):
        order.append(model)
        return next(times)

    found = compare({"a": "a", "b": "b"}, [Shape("s", 1, 1, 1, 1)], 3, timer)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"s": {"a": [3.0, 1.0, 2.0], "b": [10.0, 20.0, 30.0]}}
    assert "| s | 2.00 (1.00) | 20.00 (10.00) |" in table(found)


def test_the_ways_of_a_folder(tmp_path):
    llama().save_pretrained(tmp_path)
    found = ways(tmp_path, "float32", "off", slots=2, max_context=32)
    assert [(name, type(model)) for name, model in found.items()] == [
        ("transformers", TransformersModel),
        ("eager", LeanLlama),
    ]
