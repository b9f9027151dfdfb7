"""The plug-in of vLLM over a stub of vLLM's interface: drafts, stop rules, what it learns, and the
lines that it spools."""

from __future__ import annotations

import importlib
import json
import logging
import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from draftwell.registry.bundles.vllm.plugin.draftwell_vllm import (
    access,
    proposers,
    register,
    spool,
    stopping,
)
from draftwell.registry.bundles.vllm.plugin.draftwell_vllm.ngrams import MOST, guess
from draftwell.registry.bundles.vllm.plugin.draftwell_vllm.proposers import (
    Fixed,
    HFDynamic,
    Spide,
    Svip,
)
from draftwell.registry.bundles.vllm.plugin.draftwell_vllm.stopping import (
    HFDynamicRule,
    SpideRule,
    StopRule,
    SvipRule,
)
from draftwell.registry.bundles.wheel import plugin_wheel
from draftwell.serving.artifacts import acceptance_table

CONTEXT = 64


def config(k: int = 4, lengths: Sequence[Sequence[int]] | None = None, **settings: Any) -> Any:
    """As much of vLLM's config as proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=k,
            method="custom_class",
            num_speculative_tokens_per_batch_size=lengths,
        ),
        model_config=SimpleNamespace(max_model_len=CONTEXT, dtype=None, served_model_name=["mine"]),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        device_config=SimpleNamespace(device="cpu"),
        additional_config={"draftwell": settings} if settings else {},
    )


def propose(
    proposer: Any, *texts: Sequence[int], fresh: Sequence[int] | None = None
) -> list[list[int]]:
    """One step as vLLM makes it: rows of a wide array that may hold anything behind their texts."""
    rows = np.full((len(texts), CONTEXT), 7, dtype=np.int32)
    for row, text in enumerate(texts):
        rows[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    sampled = [[1] * (1 if fresh is None else fresh[row]) for row in range(len(texts))]
    return list(proposer.propose(sampled, lengths, rows, slot_mappings=None))


def test_longer_ngrams_and_repeated_ones_are_surer() -> None:
    once, deep = guess(np.array([5, 1, 9, 6, 1]), 3), guess(np.array([5, 1, 9, 5, 1]), 3)
    assert once is not None
    assert deep is not None
    assert (once.token, once.confidence, deep.token, deep.confidence) == (9, 0.5, 9, 0.75)
    twice = guess(np.array([1, 9, 2, 1, 9, 3, 1]), 1)
    assert twice is not None
    assert twice.confidence == pytest.approx(2 / 3)
    assert twice.entropy == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))
    split = guess(np.array([1, 8, 1, 9, 1]), 1)
    assert split is not None
    assert (split.token, split.confidence) == (9, 0.25), "of equal ones what came last"
    assert guess(np.array([1, 2, 3]), 3) is None
    assert guess(np.array([1]), 3) is None
    assert guess(np.array([1, 9, 6, 1]), 3, shortest=2) is None


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_it_is_a_distribution_over_what_followed(ids: list[int], longest: int) -> None:
    found = guess(np.array(ids, dtype=np.int64), longest)
    followed = {ids[i + 1] for i in range(len(ids) - 1) if ids[i] == ids[-1]}
    assert (found is None) == (not followed)
    if found is not None:
        assert found.token in followed
        assert 0 < found.confidence < 1
        assert 0 < found.entropy <= math.log(len(followed) + 1) + 1e-9


def test_only_the_latest_places_count() -> None:
    ids = np.array([1, 8] * MOST + [1, 9] * MOST + [1])
    found = guess(ids, 1)
    assert found is not None
    assert (found.token, found.confidence) == (9, pytest.approx(MOST / (MOST + 1)))


def test_rows_get_ragged_drafts_and_those_without_new_tokens_none() -> None:
    repeated, fresh, short = [1, 2, 3, 4, 5, 1, 2], [1, 2, 3], [5, 6, 5]
    drafts = propose(Fixed(config()), repeated, fresh, short, repeated, fresh=(1, 1, 2, 0))
    assert drafts == [[3, 4, 5, 1], [], [6, 5, 6, 5], []]


def test_drafts_are_as_long_as_the_number_of_requests_allows() -> None:
    text = [1, 2, 3, 4, 5, 1, 2]
    proposer = Fixed(config(4, [[1, 1, 4], [2, 3, 2], [4, 8, 0]]))
    for rows, longest in ((1, 4), (2, 2), (3, 2), (4, 0), (8, 0), (9, 0), (1, 4)):
        assert propose(proposer, *[text] * rows) == [[3, 4, 5, 1][:longest]] * rows
    assert len(propose(Fixed(config(4, [[1, 2, 3]])), *[text] * 5)[4]) == 3, (
        "as vLLM: the last length beyond the last number"
    )
    gap = Fixed(config(4, [[6, 8, 1], [1, 2, 9]]))
    assert [gap.longest(rows) for rows in (1, 2, 5, 6, 9)] == [4, 4, 4, 1, 1], (
        "ranges in any order, no longer than the longest draft"
    )


def test_what_was_kept_is_learnt_where_nothing_is_drafted_next() -> None:
    proposer, rule = Fixed(config(4, [[1, 1, 4], [2, 8, 0]])), Recorded()
    proposer.rule = rule
    text = [1, 2, 3, 4, 5, 1, 2]
    propose(proposer, text)
    propose(proposer, [*text, 3, 9], [8, 8])
    assert [kept for _, kept in rule.seen] == [True, False]


def test_a_draft_never_leaves_the_context() -> None:
    text = ([1, 2, 3] * CONTEXT)[: CONTEXT - 2]
    assert [
        len(draft) for draft in propose(Fixed(config()), text, text[:-5], (text + text)[:CONTEXT])
    ] == [2, 4, 0]


def test_what_is_behind_a_text_is_not_read() -> None:
    """vLLM's array holds rejected drafts there."""
    rows = np.array([[1, 2, 7, 9, 9]], dtype=np.int32)
    assert Fixed(config()).propose([[2]], np.array([2]), rows) == [[]]
    assert rows.tolist() == [[1, 2, 7, 9, 9]]


@pytest.mark.parametrize(
    ("rule", "continues", "stops"),
    [
        (HFDynamicRule(0.4), (0.4, 5.0), (0.39, 0.0)),
        (SvipRule(0.3), (0.1, 0.59), (0.9, 0.61)),
        (StopRule(), (0.0, 9.0), None),
    ],
)
def test_rules_stop_by_their_papers(
    rule: Any, continues: tuple[float, float], stops: tuple[float, float] | None
) -> None:
    rule.start()
    assert rule.continues(*continues)
    if stops is not None:
        assert not rule.continues(*stops)


def test_spides_rule_multiplies_the_tables_chances_and_starts_again() -> None:
    rule = SpideRule(tau=0.5)
    for _ in range(2):
        rule.start()
        assert [
            rule.continues(0.85, 0.0),
            rule.continues(0.85, 0.0),
            rule.continues(0.75, 0.0),
        ] == [True, True, True]
        assert not rule.continues(0.85, 0.0)  # .85 · .85 · .75 · .85 = .46


def test_the_table_counts_as_the_artifact_does(tmp_path: Path) -> None:
    assert (stopping.EDGES, stopping.MIDPOINTS) == (
        acceptance_table.EDGES,
        acceptance_table.MIDPOINTS,
    )
    assert (stopping.PRIOR_WEIGHT, stopping.MOST_JUDGED) == (
        acceptance_table.PRIOR_WEIGHT,
        acceptance_table.MOST_JUDGED,
    )
    made = acceptance_table.AcceptanceTable.empty().provenance
    theirs = acceptance_table.AcceptanceTable(
        [2**15 - 2] + [3] * 19, [10_000] + [1] * 19, made, prior_weight=2.5
    )
    theirs.write_files(tmp_path)
    ours = SpideRule.of_table(json.loads((tmp_path / "table.json").read_text()), tau=0.5)
    for confidence, kept in ((0.05, True), (0.95, False), (0.999, True), (0.3, True)):
        for _ in range(5):
            theirs.update(confidence, kept)
            ours.learn(confidence, kept)
        assert ours.alpha(confidence) == pytest.approx(theirs.alpha(confidence))
    assert (ours.total, ours.accepted) == (theirs.total, theirs.accepted)


class Recorded(StopRule):
    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def learn(self, confidence: float, kept: bool) -> None:
        self.seen.append((round(confidence, 2), kept))


@pytest.mark.parametrize(
    ("after", "seen"),
    [
        ([3, 4, 9], [True, True, False]),  # two kept, then the target's own
        ([3, 4, 5, 1, 8], [True] * 4),  # all kept, and one more
        ([9], [False]),
        ([3], [True]),
        ([], []),
    ],
)
def test_it_learns_what_the_target_kept(after: list[int], seen: list[bool]) -> None:
    proposer, rule = Fixed(config()), Recorded()
    proposer.rule = rule
    text = [1, 2, 3, 4, 5, 1, 2]
    assert propose(proposer, text) == [[3, 4, 5, 1]]
    propose(proposer, text + after)
    assert [kept for _, kept in rule.seen] == seen


def test_another_text_in_the_row_teaches_nothing() -> None:
    proposer, rule = Fixed(config()), Recorded()
    proposer.rule = rule
    propose(proposer, [1, 2, 3, 4, 5, 1, 2], [8, 8])
    propose(proposer, [8, 8, 8], [6, 2, 3, 4, 5, 6, 2, 9])  # rows moved, and one is new
    assert [kept for _, kept in rule.seen] == []
    propose(proposer, [8, 8, 8, 8, 8])
    assert [kept for _, kept in rule.seen] == [True, True], "of the first row's second draft"


def test_spide_drafts_less_where_drafts_fail_and_more_where_they_are_kept() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    begins = len(propose(Spide(config(8, tau=0.5)), text)[0])
    good, bad = Spide(config(8, tau=0.5)), Spide(config(8, tau=0.5))
    for _ in range(40):
        propose(good, text)
        propose(good, [*text, 3, 4, 5, 6, 9])
        propose(bad, text)
        propose(bad, [*text, 8])
    assert len(propose(bad, text)[0]) < begins < len(propose(good, text)[0])


def test_rules_end_drafts_of_ngrams_before_the_token_that_triggers() -> None:
    text = [1, 2, 8, 1, 2, 9, 1, 2]  # after (1, 2) two continuations of equal chance
    assert [len(propose(kind(config(1)), text)[0]) for kind in (Fixed, HFDynamic, Svip)] == [
        1,
        0,
        0,
    ]
    assert len(propose(HFDynamic(config(1, threshold=0.1)), text)[0]) == 1
    assert len(propose(Svip(config(1, threshold=1.0)), text)[0]) == 1


def test_a_row_that_fails_is_logged_once_and_the_others_are_drafted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(StopRule):
        def learn(self, confidence: float, kept: bool) -> None:
            raise RuntimeError("no")

    proposer = Fixed(config())
    text, other = [1, 2, 3, 4, 5, 1, 2], [5, 6, 5]
    proposer.rule = Failing()
    assert propose(proposer, text, other) == [[3, 4, 5, 1], [6, 5, 6, 5]]
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert propose(proposer, [*text, 3], [7, 6, 7]) == [[], [6, 7, 6, 7]], (
                "what was drafted for another text teaches nothing"
            )
            propose(proposer, text, other)
    assert [record.name for record in caplog.records].count("vllm.draftwell") == 1


@pytest.mark.parametrize(
    "changed",
    [{"total": [1] * 19}, {"accepted": [1] * 21}, {"total": [1.5] * 20}, {"prior_weight": 0}],
)
def test_a_table_of_another_shape_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"total": [1] * 20, "accepted": [1] * 20, **changed}))
    with pytest.raises(ValueError, match="is no acceptance table"):
        Spide(config(table=str(file)))


def test_settings_are_checked_in_a_line() -> None:
    for settings, said in (
        ({"treshold": 1}, "treshold is 1"),
        ({"tau": 2}, "tau is 2"),
        ({"threshold": "x"}, "threshold is 'x'"),
        ({"window": 100}, "window is 100"),
        ({"draft": 3}, "draft is 3"),
    ):
        with pytest.raises(ValueError, match=said):
            Spide(config(**settings))
    with pytest.raises(ValueError, match="is no acceptance table"):
        Spide(config(table="/nowhere/table.json"))
    plain = SimpleNamespace(**{**vars(config()), "additional_config": None})
    assert Spide(plain).settings.tau is None


def test_a_draft_model_is_asked_where_the_text_says_nothing(tmp_path: Path) -> None:
    """Its drafts are its own greedy text, whatever was read for the row before; the token at which
    the rule stops stays."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.support.server.served_pair import tiny_pair

    tiny_pair(1).modules["draft"].save_pretrained(tmp_path / "draft")
    module: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    made = config(3, draft=str(tmp_path / "draft"))
    made.model_config.dtype, made.device_config.device = torch.float32, torch.device("cpu")
    proposer = Fixed(made)
    proposer.load_model(object())
    assert not hasattr(proposer, "model"), "vLLM would take it for layers of its own"

    def greedy(text: list[int]) -> list[int]:
        out = module.generate(
            torch.tensor([text]),
            max_new_tokens=3,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return list(out[0, len(text) :].tolist())

    for texts in (([3, 4, 5], [6, 5]), ([3, 4, 5, 6, 7], [8, 9, 3, 4]), ([8, 9, 3, 4, 5], [3, 4])):
        assert propose(proposer, *texts) == [greedy(text) for text in texts]
    repeated = [3, 4, 5, 3, 4]
    assert propose(proposer, repeated) == [[5, 3, 4]], "n-grams first"
    strict = HFDynamic(
        SimpleNamespace(
            **{
                **vars(made),
                "additional_config": {
                    "draftwell": {"draft": str(tmp_path / "draft"), "threshold": 1.0}
                },
            }
        )
    )
    strict.load_model(object())
    assert propose(strict, [3, 4, 5]) == [greedy([3, 4, 5])[:1]]
    assert set(proposer._model._read) == {0}, "caches of rows that are no more are dropped"
    full = greedy([3, 4, 5])
    made.model_config.get_vocab_size = lambda: max(full)
    smaller = Fixed(made)
    smaller.load_model(object())
    (drafted,) = propose(smaller, [3, 4, 5])
    assert len(drafted) == 3
    assert max(drafted) < max(full), "what is no token of the target's is not drafted"
    wrong = Fixed(config(draft=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="is no draft model"):
        wrong.load_model(object())


def test_another_version_of_vllm_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import draftwell.registry.bundles.vllm.plugin.draftwell_vllm as package

    for version, warned in (
        ("0.32.0", False),
        ("0.32.1+cpu", False),
        (None, False),
        ("0.33.0", True),
        ("0.3", True),
    ):
        caplog.clear()
        monkeypatch.setattr(package, "installed_version", lambda version=version: version)
        with caplog.at_level(logging.WARNING):
            register()
        said = {record.name for record in caplog.records}
        assert ("vllm.draftwell" in said) is warned, version


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The stat logger over a stub of vLLM's base class, with a clock of its own."""
    stub: Any = ModuleType("vllm.v1.metrics.loggers")
    stub.StatLoggerBase = type("StatLoggerBase", (), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    name = "draftwell.registry.bundles.vllm.plugin.draftwell_vllm.stats"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("DRAFTWELL_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("DRAFTWELL_BUNDLE", "mine/3-cpu")
    clock = SimpleNamespace(now=1_800_000_000.0)
    monkeypatch.setattr(spool.time, "time", lambda: clock.now)
    stats = importlib.import_module(name)
    monkeypatch.setattr(stats.atexit, "register", lambda call: None)
    yield SimpleNamespace(
        make=lambda: stats.AcceptanceLogger(config(), 0), clock=clock, folder=tmp_path / "spool"
    )
    sys.modules.pop(name, None)


def step(drafted: int = 4, accepted_at: Sequence[int] = (1, 1, 0, 0)) -> tuple[Any, Any]:
    """Statistics of a step, as vLLM gives them."""
    drafts = SimpleNamespace(
        num_drafts=1,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(accepted_at),
        num_accepted_tokens_per_pos=list(accepted_at),
    )
    return (
        SimpleNamespace(spec_decoding_stats=drafts, num_running_reqs=2),
        SimpleNamespace(num_generation_tokens=1 + sum(accepted_at), finished_requests=[object()]),
    )


def test_counts_are_spooled_by_the_minute(logger: Any) -> None:
    made = logger.make()
    made.record(*step())
    made.record(*step(3, (1, 0, 0)))
    made.record(None, None)
    made.log()
    assert not logger.folder.exists()
    logger.clock.now += spool.SECONDS
    made.log()
    (file,) = logger.folder.iterdir()
    assert spool.NAME.fullmatch(file.name)
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert line["bundle"] == "mine/3-cpu"
    assert {
        name: line[name]
        for name in (
            "engine",
            "model",
            "method",
            "num_speculative_tokens",
            "running",
            "requests",
            "tokens",
            "rounds",
            "drafted",
            "accepted",
            "accepted_at",
            "seconds",
        )
    } == {
        "engine": "vllm",
        "model": "mine",
        "method": "custom_class",
        "num_speculative_tokens": 4,
        "running": 2,
        "requests": 2,
        "tokens": 5,
        "rounds": 2,
        "drafted": 7,
        "accepted": 3,
        "accepted_at": [2, 1, 0, 0],
        "seconds": spool.SECONDS,
    }
    made.record(*step())
    logger.clock.now += spool.SECONDS
    made.record(*step())
    assert len(file.read_text().splitlines()) == 2, "the step that ends a minute belongs to it"
    logger.clock.now += 10 * spool.SECONDS
    made.log()
    assert len(file.read_text().splitlines()) == 2, "nothing is written of a time without traffic"


def test_what_is_counted_after_other_weights_is_of_their_bundle(
    logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = logger.make()
    made.record(*step())
    monkeypatch.setenv("DRAFTWELL_BUNDLE", "mine/4-cpu")
    made.record(*step())
    made.record(*step())
    made.spool.write()
    (file,) = logger.folder.glob("*.ndjson")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["bundle"], line["rounds"]) for line in lines] == [
        ("mine/3-cpu", 1),
        ("mine/4-cpu", 2),
    ]


@pytest.mark.parametrize(
    ("said", "seconds"), [("5", 5.0), ("", 60.0), ("0", 60.0), ("soon", 60.0), ("nan", 60.0)]
)
def test_a_trial_may_want_its_lines_sooner(
    said: str, seconds: float, logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWELL_SPOOL_SECONDS", said)
    made = logger.make()
    made.record(*step())
    logger.clock.now += seconds - 0.5
    made.log()
    assert not logger.folder.exists()
    logger.clock.now += 0.5
    made.log()
    assert logger.folder.exists()


def test_a_folder_that_cannot_be_written_is_a_warning_and_not_vllms_end(
    logger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logger.folder.write_text("a file")
    made = logger.make()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            made.record(*step())
            logger.clock.now += spool.SECONDS
            made.log()
    assert [
        record.getMessage().startswith("acceptance is not recorded") for record in caplog.records
    ] == [True]


def test_without_a_folder_nothing_is_counted(logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTWELL_SPOOL")
    made = logger.make()
    made.record(*step())
    made.log()
    assert made.spool is None
    assert not logger.folder.exists()


def test_old_files_are_removed(logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "KEEP", 2)
    logger.folder.mkdir()
    for day in (20200101, 20200102, 20200103):
        (logger.folder / f"acceptance-{day}-host-1.ndjson").write_text("{}\n")
    (logger.folder / "shard-000000000000001-1.parquet").write_text("not ours")
    made = logger.make()
    made.record(*step())
    made.spool.write()
    names = sorted(path.name for path in logger.folder.iterdir())
    assert names[0] == "acceptance-20200103-host-1.ndjson"
    assert len(names) == 3
    assert names[-1].startswith("shard-")


def client(monkeypatch: pytest.MonkeyPatch, key: str) -> TestClient:
    """Of an application that answers every path, as it is behind vLLM's own check."""
    monkeypatch.setenv("VLLM_API_KEY", key)

    async def said(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    routes = [
        WebSocketRoute("/realtime", said),
        Route("/{path:path}", lambda _: PlainTextResponse("answer"), methods=["GET", "POST"]),
    ]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(access.KeyForAllPaths)]))


@pytest.mark.parametrize(
    "path", ["/invocations", "/tokenize", "/metrics", "/v1/completions", "/health/x", "//health"]
)
def test_the_key_is_asked_for_on_every_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """vLLM's own check covers a few prefixes."""
    keyed = client(monkeypatch, "mine")

    def status(sent: str) -> int:
        return keyed.post(path, headers={"Authorization": sent}).status_code

    wrong = ("", "mine", "Bearer", "Bearer min", "Bearer mine2", "Basic mine")
    assert {status(sent) for sent in wrong} == {keyed.post(path).status_code} == {401}
    assert [status(sent) for sent in ("Bearer mine", "bearer mine")] == [200, 200]
    assert client(monkeypatch, "").post(path).status_code == 200, "the server has no key"


def test_probes_and_a_browsers_question_need_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = client(monkeypatch, "mine")
    assert [keyed.get(path).status_code for path in ("/health", "/ping")] == [200, 200]
    assert keyed.options("/invocations").status_code == 405, "the application's own answer"


def test_a_websocket_needs_the_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = client(monkeypatch, "mine")
    with pytest.raises(WebSocketDisconnect) as refused, keyed.websocket_connect("/realtime"):
        pass
    assert refused.value.code == 1008
    with keyed.websocket_connect("/realtime", headers={"Authorization": "Bearer mine"}):
        pass


def test_the_wheel_is_complete_and_its_entry_points_are_found_without_an_installation(
    tmp_path: Path,
) -> None:
    wheel = plugin_wheel()
    file = tmp_path / wheel.name
    file.write_bytes(wheel.data)
    sources = {
        f"draftwell_vllm/{path.name}" for path in Path(proposers.__file__).parent.glob("*.py")
    }
    assert {
        name for name in zipfile.ZipFile(file).namelist() if ".dist-info/" not in name
    } == sources
    code = (
        "import importlib.metadata as m, json; points = "
        "[*m.entry_points(group='vllm.general_plugins'),"
        "*m.entry_points(group='vllm.stat_logger_plugins'),"
        "*m.entry_points(group='vllm.endpoint_plugins')]; from draftwell_vllm.proposers "
        "import Spide;"
        "points[0].load()(); print(json.dumps([[p.name, p.value] for p in points] + "
        "[m.version('draftwell-vllm'), Spide.__module__]))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(file)},
    )
    assert json.loads(done.stdout) == [
        ["draftwell", "draftwell_vllm:register"],
        ["draftwell_acceptance", "draftwell_vllm.stats:AcceptanceLogger"],
        ["draftwell_draft", "draftwell_vllm.draft_route:DraftRoute"],
        wheel.version,
        "draftwell_vllm.proposers",
    ]
