"""The gate from the command line: a release from its first tuning to its champion, planted
regressions, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import draftwell.flows.steps.gate_parts.checks
import draftwell.serving.device
from draftwell.components.prompts.overlap import hashes_of
from draftwell.components.prompts.prompt import read_prompts
from draftwell.flows.steps.gate_parts.record import earlier_verdict
from draftwell.flows.workspace import Workspace
from draftwell.registry import gates
from draftwell.registry.releases import find_release, gate_record
from draftwell.registry.store import Store
from draftwell.serving.artifacts.acceptance_table import AcceptanceTable
from draftwell.serving.artifacts.base import Provenance, read_manifest
from draftwell.serving.artifacts.decoding_config import DecodingConfig, SampledChoice
from draftwell.serving.artifacts.pair_files import draftwell_home
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.bundle.verdict import Check, GateVerdict
from draftwell.serving.runtime.strategies import STRATEGIES
from tests.support.commands import run_command, split_name
from tests.support.errors import raises_code
from tests.support.loop.thresholds import ANY_SPEED, thresholds_in
from tests.support.patching import replace_everywhere


@pytest.fixture(scope="module")
def place(place: Path) -> Iterator[Path]:
    """The same with thresholds that let any speed pass."""
    with thresholds_in(place / "registry", ANY_SPEED):
        yield place


@pytest.fixture(scope="module")
def call(place: Path, pair_file: Path) -> Callable[..., Any]:
    """Run a command of `draftwell` on the tiny pair."""

    def called(command: str, *more: Any) -> Any:
        name, options = split_name(command)
        return run_command(f"{name} --pair {pair_file} {options}", *more)

    return called


@pytest.fixture(scope="module")
def few(prompts_file: Path) -> str:
    return f"--prompts {prompts_file} --set limit=2 --set max_tokens=8"


@pytest.fixture(scope="module")
def tuned(call: Callable[..., Any], prompts_file: Path, few: str) -> Path:
    """Stations one by one, as README tells them; the workspace."""
    for words in (
        f"step collect --prompts {prompts_file} --set limit=5 --set max_tokens=16",
        "step train",
        f"step calibrate --prompts {prompts_file} --set limit=2",
        f"step choose {few} --set trials=2",
    ):
        done = call(words)
        assert done.exit_code == 0, (done.output, done.exception)
    assert "the candidate" in done.stderr
    return draftwell_home() / "pairs" / "tiny" / "float32"


@pytest.fixture(scope="module", autouse=True)
def starts_are_not_timed() -> None:
    """Not here: the first release starts truly."""


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that a process that does nothing will do."""
    monkeypatch.setattr("draftwell.components.gate.footprint.CHILD", "pass")


def suites(file: Path) -> dict[str, list[str]]:
    """Suite → names of the cases that failed or were errors."""
    root = ElementTree.fromstring(file.read_text())
    found = [root] if root.tag == "testsuite" else list(root)
    return {
        str(suite.get("name")): [
            str(case.get("name"))
            for case in suite
            if case.find("failure") is not None or case.find("error") is not None
        ]
        for suite in found
    }


@pytest.fixture(scope="module")
def release_now(pair_file: Path) -> Callable[[], int]:
    """Publish the workspace as it is; the number of its release."""
    from draftwell.flows.context import StepContext
    from draftwell.flows.steps.publish import run_publish

    nothing_loaded: Any = None
    step = StepContext(Workspace(str(pair_file), "float32"), nothing_loaded)
    return lambda: run_publish(step, {}, device="cpu").version


@pytest.fixture(scope="module")
def champion(tuned: Path, call: Callable[..., Any], few: str, place: Path) -> Path:
    """The first release, gated, promoted and deployed; the workspace that it was made from. A dry
    run before starts no process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwell.components.gate.footprint.CHILD", "pass")
        done = call("gate", few, f"--dry-run --report {place}/dry.md")
    assert done.exit_code == 0, (done.output, done.exception)
    assert Store().get_aliases("release", "tiny.cpu") == {"candidate": 1}
    assert gate_record(find_release(Store(), "tiny", "cpu", 1)) is None, (
        "a dry run keeps no verdict"
    )
    for words in (
        f"gate {few} --report {place}/gate.md --report {place}/gate.xml",
        "release promote",
        "deploy",
    ):
        done = call(words)
        assert done.exit_code == 0, (done.output, done.exception)
    return tuned


def test_the_bundle_that_was_judged_is_deployed(champion: Path, place: Path) -> None:
    release = find_release(Store(), "tiny", "cpu", 1)
    record = gate_record(release)
    assert record is not None
    assert record.release_digest == release.published.digest
    assert open_bundle(place / "dist" / "tiny" / "1-cpu").manifest.digest == record.bundle_digest


def test_a_verdict_is_a_table_markdown_and_junit(champion: Path, place: Path) -> None:
    text = (place / "gate.md").read_text()
    assert text.startswith("### release 1\n\n**Gate: passed**")
    assert (place / "dry.md").read_text().splitlines()[0] == "### release 1"
    for check in ("speedup", "bundle size", "start-up", "acceptance_table predicts"):
        assert f"| {check} | " in text
    assert suites(place / "gate.xml") == {"release 1": []}
    record = gate_record(find_release(Store(), "tiny", "cpu", 1))
    assert record is not None
    assert {"bundle size", "start-up"} <= {check.name for check in record.checks}


def test_a_release_shows_its_figures_and_its_bench_in_mlflow(champion: Path) -> None:
    store = Store()
    made = store.resolve("release", "tiny.cpu", 1)
    metrics = store.metrics(made)
    assert {
        "gate.speedup",
        "gate.bundle_size",
        "gate.start-up",
        "tokens_per_second",
        "verifier.auc",
    } <= set(metrics)
    assert 1 <= metrics["gate.start-up"] < 120
    assert "**Gate: passed**" in store.description(made)
    run = store.client.get_run(made.run_id).data
    assert run.params["strategy"] == made.tags["strategy"]
    (folder,) = [
        file.path for file in store.client.list_artifacts(made.run_id, "gates") if file.is_dir
    ]
    names = {Path(file.path).name for file in store.client.list_artifacts(made.run_id, folder)}
    assert {"bench.json", "speedup.png"} <= names


@pytest.fixture
def space(pair_file: Path) -> Workspace:
    return Workspace(str(pair_file), "float32")


@pytest.fixture
def judged_as(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the start-up of a bundle come out as a check."""

    def judged(**fields: Any) -> None:
        check = Check("start-up", 200.0, 120.0, False, "200 s", **fields)
        replace_everywhere(
            monkeypatch,
            draftwell.flows.steps.gate_parts.checks,
            "footprint_check",
            lambda *arguments: GateVerdict((Check("bundle size", 1, 250, True), check)),
        )

    return judged


@pytest.mark.parametrize("fields", [{"transient": True}, {"enough": False}])
def test_a_champion_that_a_slow_minute_or_few_prompts_leave_open_keeps_its_record(
    champion: Path,
    call: Callable[..., Any],
    few: str,
    judged_as: Callable[..., None],
    space: Workspace,
    fields: dict[str, bool],
) -> None:
    """As `make gate` on a busy machine does: what serves can still be deployed."""
    judged_as(**fields)
    before = find_release(Store(), "tiny", "cpu", "champion")
    done = call("gate", few)
    assert done.exit_code == (1 if "transient" in fields else 3), (done.output, done.exception)
    assert "version 1, the champion, keeps its record" in done.stderr
    after = find_release(Store(), "tiny", "cpu", "champion")
    assert (after.version, gate_record(after)) == (before.version, gate_record(before))
    assert earlier_verdict(space, "cpu", 1, 1) == {"passed": True, "checks": []}
    assert call("deploy").exit_code == 0


def test_a_champion_that_fails_loses_its_record_and_serves_on(
    champion: Path,
    call: Callable[..., Any],
    few: str,
    judged_as: Callable[..., None],
    space: Workspace,
    place: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwell.components.gate.footprint.CHILD", "pass")
        before = find_release(Store(), "tiny", "cpu", 1).published.tags["gate_record"]
        judged_as()
        done = call("gate", few)
    assert done.exit_code == 1, (done.output, done.exception)
    assert "fails its gate now (start-up): it serves on" in done.stderr
    release, current = find_release(Store(), "tiny", "cpu", "champion"), place / "dist/tiny/current"
    assert release.version == 1
    assert current.resolve().name == "1-cpu"
    record = gate_record(release)
    assert record is not None
    assert record.result == "failed"
    assert earlier_verdict(space, "cpu", 1, 1) is None, "it is judged again"
    done = call("deploy")
    assert done.exit_code == 2
    assert "its gate failed (start-up)" in done.stderr
    Store().set_tag(release.published, "gate_record", before)  # for the tests that follow


@pytest.mark.usefixtures("quick_start")
def test_a_table_turned_round_is_refused_and_the_champion_stays(
    champion: Path,
    release_now: Callable[[], int],
    call: Callable[..., Any],
    few: str,
    place: Path,
) -> None:
    folder = champion / "artifacts" / "acceptance_table"
    table = AcceptanceTable.load(folder)
    rejected = [
        10 * (total - accepted) for total, accepted in zip(table.total, table.accepted, strict=True)
    ]
    AcceptanceTable([10 * total for total in table.total], rejected, table.provenance).save(folder)
    try:
        number = release_now()
        done = call("gate", few, f"--report {place}/gate.xml --report {place}/gate.md")
    finally:
        table.save(folder)
    assert number == 2
    assert done.exit_code == 1, (done.output, done.exception)
    assert suites(place / "gate.xml") == {"release 2": ["acceptance_table predicts"]}
    assert "**Gate: failed**" in (place / "gate.md").read_text()
    done = call("release promote --release 2")
    assert done.exit_code == 2
    assert "its gate failed (acceptance_table predicts)" in done.stderr
    assert Store().get_aliases("release", "tiny.cpu")["champion"] == 1


@pytest.mark.usefixtures("quick_start")
def test_a_lossy_config_called_lossless_is_refused(
    champion: Path,
    release_now: Callable[[], int],
    call: Callable[..., Any],
    few: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = champion / "cpu" / "artifacts" / "decoding_config"
    config = DecodingConfig.load(folder)
    DecodingConfig("lossy_sd", {}, {}, config.provenance).save(folder)
    monkeypatch.setattr(STRATEGIES["lossy_sd"], "lossless", True)
    try:
        number = release_now()
        done = call("gate", few, f"--report {place}/gate.xml")
    finally:
        config.save(folder)
    assert done.exit_code == 1, (done.output, done.exception)
    failed = suites(place / "gate.xml")[f"release {number}"]
    assert "identical outputs" in failed
    assert set(failed) <= {"identical outputs", "sampled likelihood"}, "it shows in samples, too"


@pytest.mark.usefixtures("quick_start")
def test_a_release_whose_checkout_counts_otherwise_is_not_promoted(
    champion: Path,
    release_now: Callable[[], int],
    call: Callable[..., Any],
    few: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate is red for its deterministic part: the registry must not say that the release
    passed."""
    failed = GateVerdict(
        (Check("vanilla_sd: target calls", 70, 35, False, "70 target calls, recorded 35 (± 2)"),)
    )
    # the shipped prompts do not fit into the tiny pair
    replace_everywhere(monkeypatch, gates, "load_baseline", lambda pair, model: object())
    replace_everywhere(
        monkeypatch,
        draftwell.flows.steps.gate_parts.checks,
        "judge_baseline",
        lambda *arguments: failed,
    )
    folder = champion / "artifacts" / "acceptance_table"
    table = AcceptanceTable.load(folder)
    AcceptanceTable(
        [2 * total for total in table.total],
        [2 * accepted for accepted in table.accepted],
        table.provenance,
    ).save(folder)
    try:
        number = release_now()
        done = call("gate", few, f"--report {place}/gate.xml")
    finally:
        table.save(folder)
    assert done.exit_code == 1, (done.output, done.exception)
    assert suites(place / "gate.xml") == {
        "deterministic counts, float32": ["vanilla_sd: target calls"],
        f"release {number}": [],
    }
    done = call(f"release promote --release {number}")
    assert done.exit_code == 2
    assert "its gate failed (vanilla_sd: target calls)" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_each_class_of_temperatures_is_judged_and_must_have_its_own_artifacts(
    champion: Path,
    release_now: Callable[[], int],
    call: Callable[..., Any],
    few: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = champion / "cpu" / "artifacts" / "decoding_config"
    config = DecodingConfig.load(folder)
    sampled = SampledChoice(0.7, "vanilla_sd", {"num_speculative_tokens": 2})
    try:
        DecodingConfig(
            config.strategy,
            config.parameters,
            config.evidence,
            config.provenance,
            replace(sampled, strategy="spide", parameters={}),
        ).save(folder)
        with raises_code("artifact_of_another_temperature", "acceptance_table", "spide"):
            release_now()
        with monkeypatch.context() as patch:  # as if pinned past that check
            patch.setattr(
                "draftwell.flows.steps.publish.check_temperatures", lambda *arguments: None
            )
            number = release_now()
        done = call("gate", few, f"--report {place}/gate.xml --report {place}/gate.md")
        assert done.exit_code == 1, (done.output, done.exception)
        assert suites(place / "gate.xml") == {f"release {number}": ["sampled temperature"]}, (
            "the greedy choice is not to blame"
        )
        assert (
            "the acceptance_table is for temperature 0 (greedy), not 0.7 (sampled)"
            in (place / "gate.md").read_text()
        )
        DecodingConfig(
            config.strategy, config.parameters, config.evidence, config.provenance, sampled
        ).save(folder)
        number = release_now()
        done = call("gate", few, f"--report {place}/gate.md --report {place}/gate.xml")
    finally:
        config.save(folder)
    assert done.exit_code == 0, (done.output, done.exception)
    text = (place / "gate.md").read_text()
    assert all(
        f"| {check} | " in text
        for check in ("speedup", "sampled speedup", "sampled regression", "temperature")
    )
    params = (
        Store().client.get_run(Store().resolve("release", "tiny.cpu", number).run_id).data.params
    )
    assert (params["sampled.strategy"], params["sampled.temperature"]) == ("vanilla_sd", "0.7")
    bench = json.loads((champion / "cpu" / "reports" / "bench_sampled.json").read_text())
    assert bench["settings"]["temperature"] == 0.7
    assert "champion" in bench["strategies"]


def test_a_mistyped_device_passes_no_gate(champion: Path, call: Callable[..., Any]) -> None:
    done = call("gate --device gpu")
    assert done.exit_code == 2
    assert "there is no --device gpu" in done.stderr


@pytest.mark.parametrize("words", ["", "--device cuda"])
def test_a_host_with_cuda_does_not_pass_over_a_candidate_for_the_cpu(
    champion: Path,
    call: Callable[..., Any],
    words: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the device was named or picked; without this the counts alone would be judged, and
    the gate be green."""
    replace_everywhere(monkeypatch, draftwell.serving.device, "cuda_available", lambda: True)
    done = call("gate", words, f"--report {place}/none.xml")
    assert done.exit_code == 2
    assert "release.tiny.cuda has no candidate" in done.stderr
    assert "(device cpu)" in done.stderr
    assert suites(place / "none.xml") == {"gate": ["verdict"]}


def test_prompts_of_collect_calibrate_tune_and_gate_are_disjoint(
    champion: Path, prompts_file: Path
) -> None:
    """One file was named to each command: five prompts for the traces, then two, two and two."""
    report = json.loads((champion / "cpu" / "reports" / "bench.json").read_text())
    rows = read_prompts(prompts_file)
    assert {row["prompt_id"] for row in report["strategies"]["autoregressive"]["per_prompt"]} == {
        rows[9].id,
        rows[10].id,
    }
    folders = {"decoding_config": champion / "cpu"}
    made = {
        kind: Provenance.model_validate(
            read_manifest(folders.get(kind, champion) / "artifacts" / kind)["provenance"]
        ).training_prompts
        for kind in ("verifier", "acceptance_table", "correction_memory", "decoding_config")
    }
    assert made == {
        "verifier": hashes_of(rows[:5]),
        "acceptance_table": hashes_of(rows[:5]),
        "correction_memory": hashes_of(rows[5:7]),
        "decoding_config": hashes_of([*rows[:5], *rows[7:9]]),
    }


@pytest.mark.usefixtures("quick_start")
def test_a_release_that_was_tuned_on_the_gates_prompts_is_refused_by_name(
    champion: Path,
    release_now: Callable[[], int],
    call: Callable[..., Any],
    prompts_file: Path,
    place: Path,
) -> None:
    """Under other ids, in another file: it is the text that counts."""
    own, folder = place / "own.jsonl", champion / "cpu" / "artifacts" / "decoding_config"
    own.write_text(
        "".join(
            json.dumps({"id": f"mine-{i}", "turns": prompt.turns}) + "\n"
            for i, prompt in enumerate(read_prompts(prompts_file)[7:9])
        )
    )
    config = DecodingConfig.load(folder)
    DecodingConfig(
        config.strategy,
        config.parameters,
        {**config.evidence, "reason": "another"},
        config.provenance,
    ).save(folder)
    try:
        number = release_now()
        done = call(
            f"gate --prompts {own} --set max_tokens=8 --report {place}/gate.xml --report "
            f"{place}/gate.md",
        )
    finally:
        config.save(folder)
    assert done.exit_code == 1, (done.output, done.exception)
    assert suites(place / "gate.xml") == {f"release {number}": ["untouched prompts"]}
    assert (
        "judged on its own training prompts: 2 of 2 were used to make decoding_config"
        in (place / "gate.md").read_text()
    )
    done = call(f"release promote --release {number}")
    assert done.exit_code == 2
    assert "its gate failed (untouched prompts)" in done.stderr


def test_what_keeps_the_gate_from_a_verdict_is_no_failed_gate(
    champion: Path,
    call: Callable[..., Any],
    few: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, an error in JUnit, and no verdict of an earlier gate left to be read."""
    import draftwell.flows.steps.gate

    files = f"--report {place}/gate.xml --report {place}/gate.md"
    done = call("gate", few, "--release 99", files)
    assert done.exit_code == 2
    assert suites(place / "gate.xml") == {"gate": ["verdict"]}
    assert "no version 99" in (place / "gate.md").read_text()

    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a fault of ours")

    replace_everywhere(monkeypatch, draftwell.flows.steps.gate, "gate_release", broken)
    done = call("gate", few, files)
    assert done.exit_code == 2, "Python's own exit code would say that the gate failed"
    assert 'errors="1"' in (place / "gate.xml").read_text()
    assert "a fault of ours" in (place / "gate.md").read_text()


def test_the_way_back(champion: Path, call: Callable[..., Any], place: Path) -> None:
    from draftwell.registry.promotion import promote
    from tests.support.loop.publishing import verdict

    done = call("release rollback --reason", "a trial")
    assert done.exit_code == 2
    assert "has no previous champion" in done.stderr
    store = Store()
    number = max(version.version for version in store.versions("release", "tiny.cpu"))
    promote(
        store,
        "tiny",
        "cpu",
        number,
        verdict(
            find_release(store, "tiny", "cpu", number),
            beside=store.get_aliases("release", "tiny.cpu")["champion"],
        ),
    )
    assert call("deploy").exit_code == 0
    assert (place / "dist" / "tiny" / "current").resolve().name == f"{number}-cpu"
    done = call("release rollback --reason", "answers in French are cut")
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"version {number} was rolled back: answers in French are cut" in done.stdout
    assert (place / "dist" / "tiny" / "current").resolve().name == "1-cpu"
    assert Store().get_aliases("release", "tiny.cpu")["champion"] == 1
    done = call(f"release promote --release {number}")
    assert done.exit_code == 2
    assert "answers in French are cut" in done.stderr
    why = ("--set", "reason=they were whole")
    assert call(f"release promote --release {number}", *why).exit_code == 0
    done = call(f"release rollback --reason no --set bundles={place}/elsewhere")
    assert "`draftwell deploy" in done.stdout


def test_a_fresh_clone_asks_no_registry(call: Callable[..., Any], own_stores: Path) -> None:
    """The deterministic part alone; asking would make a database, which takes seconds."""
    done = call("gate")
    assert done.exit_code == 2
    assert "has no recorded baseline" in done.stderr
    assert not (own_stores / "mlflow.db").exists()
