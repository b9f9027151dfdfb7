"""ROUGE: values worked out by hand, and properties of a longest common subsequence."""

import pytest
from hypothesis import given, strategies as st

from draftwell.components.bench.answers.rouge import (
    longest_common_subsequence,
    mean_rouge_l,
    rouge_l,
    rouge_n,
)

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=7)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        # Lin (2004), section 3.1: precision and recall 3/4
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("the gunman police killed", "police killed the gunman", 0.5),
        ("It's 3.5!", "it s 3 5", 1.0),
        ("no", "yes", 0.0),
        ("", "", 0.0),
        ("Straße", "stra e", 1.0),
    ],
)
def test_known_values(answer, reference, f1):
    assert rouge_l(answer, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "reference", "n", "f1"),
    [
        ("police killed the gunman", "police kill the gunman", 1, 0.75),
        ("police killed the gunman", "police kill the gunman", 2, 1 / 3),  # one pair of three
        # the order of single words does not count
        ("the gunman kill police", "police kill the gunman", 1, 1.0),
        ("the the the", "the cat", 1, 0.4),  # a word counts as often as both have it
        ("", "yes", 1, 0.0),
        ("yes", "yes", 2, 0.0),
    ],
)
def test_known_values_of_runs_of_words(answer, reference, n, f1):
    assert rouge_n(answer, reference, n) == pytest.approx(f1)


def slow_subsequence(a, b):
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + slow_subsequence(a[1:], b[1:])
    return max(slow_subsequence(a[1:], b), slow_subsequence(a, b[1:]))


@given(WORDS, WORDS)
def test_subsequence_equals_its_definition(a, b):
    assert longest_common_subsequence(a, b) == slow_subsequence(a, b)
    assert longest_common_subsequence(a, b) == longest_common_subsequence(b, a)


def test_prompts_without_reference_are_left_out():
    assert mean_rouge_l(["a b", "x", "q"], ["a b", None, "r"]) == 0.5
    assert mean_rouge_l(["a"], [None]) is None
    assert mean_rouge_l(["a"], [""]) is None
