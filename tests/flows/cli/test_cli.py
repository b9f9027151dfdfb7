"""The command line: what it lists, and that a user's mistake is one line, exit code 2, and leaves
nothing behind."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwell.registry.pairs import fetch, find_pair
from draftwell.registry.store import Store
from draftwell.serving.artifacts.compiled_libraries import own_folder
from draftwell.serving.runtime.models.native.library import key
from tests.support.loop.publishing import release, table
from tests.support.loop.refusals import refused
from tests.support.loop.tiny_files import snapshot

COMMANDS = (
    "tune",
    "generate",
    "bench",
    "gate",
    "deploy",
    "serve",
    "monitor",
    "export",
    "schedule",
    "doctor",
    "step collect",
    "step train",
    "step calibrate",
    "step choose",
    "step distil",
    "release create",
    "release show",
    "release promote",
    "release rollback",
    "release prune",
    "release sync",
    "release webhook",
    "release forget",
    "release ui",
    "list strategies",
    "list pairs",
    "reproduce papers",
    "reproduce gpu",
    "reproduce import",
)
GROUPS = ("step", "release", "list", "reproduce")
PAGES = ("", *COMMANDS, *GROUPS)
HEAVY = ("torch", "transformers", "mlflow", "prefect")
HELP = f"""
import json, sys
from typer.testing import CliRunner
from draftwell.flows.cli.main import app
pages = {[page.split() for page in PAGES]}
shown = [CliRunner().invoke(app, [*words, "--help"]).output for words in pages]
print(json.dumps([shown, [name for name in {HEAVY} if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def help_pages() -> tuple[list[str], list[str]]:
    """Output of every --help in a process of its own, and the heavy modules that were imported for
    it."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    pages, heavy = json.loads(done.stdout)
    return pages, heavy


def test_help_lists_every_command_and_stays_light(help_pages: tuple[list[str], list[str]]) -> None:
    pages, heavy = help_pages
    assert heavy == []
    lists = dict(zip(PAGES, pages, strict=True))
    for command in COMMANDS:
        group, _, name = command.rpartition(" ")
        assert f" {name} " in lists[group], command
    assert [group for group in GROUPS if f" {group} " not in pages[0]] == []


def test_no_command_is_missing_from_these_tests() -> None:
    from draftwell.flows.cli import main

    assert set(main.COMMANDS) == set(main.all_commands()) == set(COMMANDS)
    assert set(main.GROUPS) == set(GROUPS)


def test_the_command_line_can_be_kept_in_mind() -> None:
    """Few names, few options; whoever adds one takes another out, or makes it a setting."""
    from draftwell.flows.cli import main

    assert len([name for name in main.COMMANDS if " " not in name]) + len(main.GROUPS) <= 14
    options = [
        f"{name} {option.opts[0]}"
        for name, command in main.all_commands().items()
        for option in command.params
        if option.param_type_name == "option" and option.name != "help"
    ]
    assert len(options) <= 130, "\n".join(options)


def test_a_key_means_one_thing_in_all_commands() -> None:
    """One type and one description, wherever a command takes it."""
    from draftwell.flows.cli import main

    types: dict[str, set[str]] = {}
    for command in main.all_commands().values():
        for name, field in command.settings.model_fields.items():
            kind = re.sub(r"<class '(.*)'>", r"\1", str(field.annotation))
            types.setdefault(name, set()).add(kind.replace(" | None", ""))
    assert {key: found for key, found in types.items() if len(found) > 1} == {}
    assert len(types) <= 120


def test_help_explains_every_setting(run: Any) -> None:
    """Also where an option that the command cannot do without is not there."""
    from draftwell.flows.cli import main

    silent = []
    for name, command in main.all_commands().items():
        if not command.all_keys():
            continue
        done = run(f"{name} --set help")
        assert done.exit_code == 0, (name, done.output)
        for one in command.all_keys():
            found = re.search(rf"^{re.escape(one)}: (.+)\n( {{4}}\S.+)?", done.stdout, re.MULTILINE)
            if found is None or not (found[2] or one == "STRATEGY.PARAMETER"):
                silent.append(f"{name}: {one}")
    assert not silent


def test_help_of_a_command_fits_a_screen(help_pages: tuple[list[str], list[str]]) -> None:
    pages, _ = help_pages
    long = {
        name: len(page.splitlines())
        for name, page in zip(PAGES, pages, strict=True)
        if len(page.splitlines()) > 40
    }
    assert long == {}


def test_an_earlier_option_says_the_new_one(run: Any) -> None:
    from draftwell.flows.cli.renamed import RENAMED

    assert {"bench", "gate", "step choose"} <= set(RENAMED)
    for command, options in RENAMED.items():
        for old, new in options.items():
            done = run(f"{command} {old} value")
            assert (done.exit_code, done.stderr) == (2, f"Error: {old} is now {new}\n")
    assert {"--traces", "--no-publish"} <= set(RENAMED["tune"])
    said = "Error: --bench-prompts is now --set bench_prompts=VALUE\n"
    assert run("tune --bench-prompts 4").stderr == said
    done = run("step choose --bench-prompts 3")
    assert "No such option" in done.stderr, "it never had that"
    assert run("step choose --trials 3").stderr == "Error: --trials is now --set trials=VALUE\n"
    assert run("step choose --fresh").stderr == "Error: --fresh is now --set fresh=true\n"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("engine_header=A: 1, b", ["A: 1, b"]),
        ("engine_header=A:1 engine_header=B:2 engine_header=C:3", ["A:1", "B:2", "C:3"]),
        ("engine_header=[A:1, B:2]", ["A:1", "B:2"]),
        ("engine_model=7", "7"),
        ("engine_model=~", None),
        ("stop_command=kill: it # all", "kill: it # all"),
        ("unmeasured=#3", "#3"),
        ("levels=1,8", (1, 8)),
        ("levels=[1, 8]", (1, 8)),
        ("plain_evidence=a plain_evidence=b", [Path("a"), Path("b")]),
        ("dtype=float32", "float32"),
        ("sampled=yes", True),
    ],
)
def test_a_settings_text_is_read_by_its_type(words: str, value: object) -> None:
    """And alike by `tune`, which has no types of its own for them."""
    from draftwell.flows.cli.main import all_commands
    from draftwell.flows.cli.tune import value_of

    key = words.partition("=")[0]
    given = [word for part in re.split(r" (?=\w+=)", words) for word in ("--set", part)]
    commands = all_commands()
    assert commands["gate"].make_context("gate", [*given]).params[key] == value
    if key in commands["tune"].all_keys() and value is not None:
        [(_, text)] = commands["tune"].make_context("tune", given).params["more"].items()
        read = value_of(key, text)
        assert (tuple(read) if isinstance(value, tuple) else read) == value


def test_settings_come_from_a_file_then_from_set(tmp_path: Path) -> None:
    from draftwell.flows.cli.main import all_commands

    file = tmp_path / "settings.yaml"
    file.write_text("runs: 3\nmix: true\nspide: {tau: 0.9}\npeers: [vllm]\n")
    words = ["--settings", str(file), "--set", "runs=5", "--set", "vanilla_sd.gamma=4"]
    words += ["--set", "peers=vllm,transformers", "--set", "peers=llama.cpp"]
    given = all_commands()["bench"].make_context("bench", words).params
    assert (given["runs"], given["mix"], given["peers"]) == (
        *(5, True),
        ("vllm", "transformers", "llama.cpp"),
    )
    assert given["parameters"] == {"spide.tau": "0.9", "vanilla_sd.gamma": "4"}
    assert given["max_tokens"] == 64, "the default"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--set runs=x", "--set runs: "),
        ("--set runs=2 --set runs=3", "--set runs is there twice"),
        ("--settings date.yaml", "vanilla_sd has no parameter"),
        ("--set runs=0", "greater than or equal to 1"),
        ("--set rnus=3", "did you mean runs?"),
        ("--set pair=default", "it is an option, --pair"),
        ("--set runs", "KEY=VALUE"),
        ("--settings nowhere.yaml", "nowhere.yaml"),
        ("--settings list.yaml", "list.yaml holds no settings"),
        ("--settings wrong.yaml", "wrong.yaml: runs: "),
    ],
)
def test_a_wrong_setting_is_one_line(
    run: Any, place: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "list.yaml").write_text("- runs\n")
    (place / "wrong.yaml").write_text("runs: many\n")
    (place / "date.yaml").write_text("vanilla_sd.day: 2024-01-01\n")
    refused_at_once(run("bench", words), said)


def test_quiet_says_nothing_of_progress(run: Any, place: Path, pair_file: Path) -> None:
    command = f"release sync --pair {pair_file} --set device=cpu"
    assert "has no champion" in run(command).stderr
    done = run(f"-q {command}")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "has no champion" in run(command).stderr, "the next one may speak"


def test_an_earlier_name_says_the_new_one(run: Any) -> None:
    from draftwell.flows.cli.main import COMMANDS as commands, OLD_NAMES

    assert {"promote", "collect", "import-results"} <= set(OLD_NAMES)
    for old, new in OLD_NAMES.items():
        done = run(f"{old} --pair default")
        said = f"Error: `draftwell {old}` is now `draftwell {new}`\n"
        assert (done.exit_code, done.stderr) == (2, said)
        assert new in commands


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; "
        "from draftwell.flows.cli.main import app; "
        "CliRunner().invoke(app, ['--help']); "
        "print([name for name in sys.modules if name.startswith('draftwell.flows.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['draftwell.flows.cli.main']"


def test_the_version_is_that_of_the_installed_package(run: Any) -> None:
    from importlib.metadata import version

    assert run("--version").stdout.strip() == f"draftwell {version('draftwell')}"


def test_every_command_shows_an_example(help_pages: tuple[list[str], list[str]]) -> None:
    pages, _ = help_pages
    assert [
        name
        for name, page in zip(PAGES, pages, strict=True)
        if f"Example: draftwell {name}" not in page
    ] == []


def test_mlflows_ui_which_has_no_password_answers_this_machine_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run_process = list[str](), subprocess.run

    def started(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if "mlflow" not in command:
            return run_process(command, **options)
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", started)
    assert run("release ui --host 0.0.0.0").exit_code == 2
    assert asked == []
    assert run("release ui --port 5001").exit_code == 0
    assert asked[asked.index("--host") + 1] == "127.0.0.1"


def test_strategies_as_json(run: Any) -> None:
    done = run("list strategies --json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"autoregressive", "vanilla_sd", "prompt_lookup", "sprinter", "csd", "spide"} <= set(
        rows
    )
    for row in rows.values():
        assert {"name", "lossless", "parameters", "artifacts", "paper"} <= set(row)
        assert all({"default", "minimum", "maximum"} <= set(p) for p in row["parameters"].values())
    assert rows["spide"]["lossless"] is True
    assert rows["csd"]["lossless"] is False
    assert "verifier" in rows["sprinter"]["artifacts"]
    assert rows["vanilla_sd"]["parameters"]["num_speculative_tokens"]["default"] == 5


def test_tables_keep_their_brackets(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich reads [...] as markup unless it is escaped."""
    monkeypatch.setenv("COLUMNS", "200")
    assert "num_speculative_tokens = 5  [1 … 32]" in run("list strategies").stdout


def test_pairs(run: Any) -> None:
    names = [row["name"] for row in json.loads(run("list pairs --json").stdout)]
    assert names[0] == "smollm2-135m"
    assert "smollm2-135m" in run("list pairs").stdout


@pytest.fixture
def place(own_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with stores of its own."""
    monkeypatch.setenv("DRAFTWELL_MODELS", str(own_stores / "models"))
    folder = own_stores / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return own_stores


@pytest.fixture
def registered(place: Path, empty_database: Path) -> Path:
    """The same with a registry that holds nothing yet."""
    shutil.copyfile(empty_database, place / "mlflow.db")
    return place


def refused_at_once(done: Any, *words: str) -> None:
    """A refusal before anything was begun."""
    refused(done, *words)
    # a bar that had nothing to show leaves an empty line
    assert len(done.stderr.split("\n")) == 2 + done.stderr.startswith("\n")


GENERATE = "generate --prompt hi"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            f"{GENERATE} --pair smolm2-135m",
            ("unknown pair smolm2-135m", "did you mean smollm2-135m"),
        ),
        (f"{GENERATE} --pair nowhere.yaml", ("nowhere.yaml",)),
        (f"{GENERATE} --strategy vanila_sd", ("vanila_sd", "vanilla_sd")),
        (f"{GENERATE} --set tau", ("'tau'", "KEY=VALUE")),
        (f"{GENERATE} --set tau=1", ("tau", "STRATEGY.tau")),
        (f"{GENERATE} --set vanilla_sd.num_speculative_tokens=0", ("num_speculative_tokens", "1")),
        (
            f"{GENERATE} --set vanilla_sd.num_speculative_tokens=many",
            ("num_speculative_tokens", "many"),
        ),
        (
            f"{GENERATE} --strategy adaedl",
            ("adaedl", "threshold and max_draft", "--set adaedl.threshold="),
        ),
        (
            "bench --strategies vanilla_sd,adaedl --set adaedl.threshold=0.4",
            ("max_draft", "--set adaedl.max_draft="),
        ),
        (f"{GENERATE} --set artifacts=nowhere", ("nowhere", "artifacts=")),
        ("generate --prompt '  '", ("--prompt is empty",)),
        ("bench --strategies vanilla_sd,spied", ("spied", "spide")),
        ("bench --set tau=1", ("STRATEGY.tau",)),
        ("bench --set spide.tau=1", ("strategy.key=value",)),
        ("bench --set vanilla_sd.tau=1", ("tau", "vanilla_sd")),
        ("bench --set peers=sglang", ("sglang", "transformers, vllm, llama.cpp")),
        ("bench --set peers=vllm", ("vllm", "make peers")),
        ("bench --set artifacts=nowhere", ("nowhere", "artifacts=")),
        ("bench --out nowhere/report.json", ("nowhere", "does not exist")),
        ("bench --out report.txt", ("report.txt", "FILE.json")),
        ("bench --prompts nowhere.jsonl", ("nowhere.jsonl",)),
        ("step collect --prompts nowhere.jsonl", ("nowhere.jsonl",)),
        ("tune --prompts nowhere.jsonl", ("nowhere.jsonl",)),
        ("tune --pair smolm2", ("unknown pair smolm2",)),
        ("gate --pair smolm2-135m", ("did you mean",)),
        ("gate --report nowhere/gate.xml", ("nowhere", "does not exist")),
        ("release promote --pair smolm2-135m", ("did you mean",)),
        ("release rollback --pair smolm2-135m --reason slow", ("did you mean",)),
        ("deploy --pair smolm2-135m", ("did you mean",)),
        ("serve --pair smolm2-135m", ("did you mean",)),
        ("serve", ("smollm2-135m", "draftwell deploy")),
        ("serve --engine http://127.0.0.1:9", ("starts an engine",)),
        ("release prune --set engine=llama.cpp", ("draftwell and vllm alone",)),
        ("gate --set record_counts=true --dry-run", ("--dry-run means nothing",)),
        ("gate --set record_counts=true --evidence a", ("--evidence means nothing",)),
        ("gate --set counts_only=true --release 3", ("--release means nothing",)),
        ("gate --set counts_only=true --set max_tokens=32", ("--set max_tokens means nothing",)),
        ("serve --bundle nowhere", ("nowhere", "draftwell deploy")),
    ],
)
def test_mistakes(run: Any, place: Path, arguments: str, words: tuple[str, ...]) -> None:
    before = snapshot(place)
    refused_at_once(run(arguments), *words)
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": ""}\n{"prompt": \n', ("2 rows left out", "line 1", "line 2")),
        ('\n\n{"story": "b"}\n', ("line 3", "story", "conversations", "--set column=")),
        ("\n", ("holds no prompts",)),
    ],
)
@pytest.mark.parametrize(
    "command", ["bench", "step collect", "step calibrate", "step choose", "tune"]
)
def test_broken_prompt_files(
    run: Any, place: Path, command: str, text: str, words: tuple[str, ...]
) -> None:
    (place / "bad.jsonl").write_text(text)
    before = snapshot(place)
    refused_at_once(run(command, f"--prompts {place}/bad.jsonl"), "bad.jsonl", *words)
    assert snapshot(place) == before


@pytest.mark.parametrize("arguments", ["generate --nope", "bench --limit none", "nope", "generate"])
def test_usage_errors(run: Any, place: Path, arguments: str) -> None:
    done = run(arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert snapshot(place) == {}


@pytest.mark.slow
def test_the_installed_command_ends_with_two() -> None:
    """The entry point, in a process of its own: nothing of the refusal is lost between Typer and
    the shell."""
    words = [*shlex.split(GENERATE), "--pair", "nope"]
    command = [sys.executable, "-m", "draftwell.flows.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("Error: unknown pair nope")


def test_artifact_of_another_pair(run: Any, place: Path, pair_file: Path) -> None:
    table("f" * 64).save(place / "foreign" / "acceptance_table")
    before = snapshot(place)
    refused(
        run(GENERATE, f"--pair {pair_file} --strategy spide --set artifacts={place}/foreign"),
        "acceptance_table",
        "f" * 12,
    )
    assert snapshot(place) == before


def test_settings_that_have_no_default_can_be_given(
    run: Any, place: Path, pair_file: Path, prompts_file: Path
) -> None:
    assert "threshold = (required)" in run("list strategies").stdout
    done = run(
        GENERATE,
        f"--pair {pair_file} --strategy adaedl --set adaedl.threshold=0.4 "
        "--set adaedl.max_draft=4 --max-tokens 8",
    )
    assert done.exit_code == 0, done.output
    done = run(
        f"bench --pair {pair_file} --strategies adaedl --set adaedl.threshold=0.4 --set "
        f"adaedl.max_draft=4 --prompts {prompts_file} --limit 1 --set max_tokens=8 --out "
        f"{place}/report.json",
    )
    assert done.exit_code == 0, done.output
    entry = json.loads((place / "report.json").read_text())["strategies"]["adaedl"]
    assert (entry["lossless"], entry["identical_outputs"]) == (True, 1)


def test_missing_artifact(run: Any, place: Path, pair_file: Path) -> None:
    refused(
        run(GENERATE, f"--pair {pair_file} --strategy sprinter"), "verifier", "draftwell step train"
    )
    refused(
        run(GENERATE, f"--pair {pair_file} --strategy specdec_pp"),
        "acceptance_head",
        "draftwell step train --kind acceptance_head",
    )
    refused(run(f"step train --pair {pair_file}"), "no traces", "draftwell step collect")


def test_prompt_longer_than_the_context(run: Any, place: Path, pair_file: Path) -> None:
    before = snapshot(place)
    refused(run(f"generate --pair {pair_file} --prompt", "x" * 300), "256")
    (place / "long.jsonl").write_text(
        json.dumps({"prompt": "x" * 300, "id": "the long one"}) + "\n"
    )
    refused(
        run(
            f"bench --pair {pair_file} --prompts {place}/long.jsonl --out {place}/out.json",
        ),
        "192",
    )
    assert snapshot(place).keys() - before.keys() == {"long.jsonl"}


def test_nothing_to_release(run: Any, registered: Path, pair_file: Path) -> None:
    for command in ("deploy", "release promote"):
        refused_at_once(run(command, f"--pair {pair_file}"), "release.tiny.cpu", "draftwell tune")
    refused_at_once(run(f"gate --pair {pair_file} --release 7"), "version 7")
    done = run(f"gate --pair {pair_file}")
    refused(done, "baseline", "--set record_counts=true")
    assert "pair tiny has no release" in done.stderr
    assert not (registered / "work" / "dist").exists()


def test_ungated_releases_stay_where_they_are(run: Any, registered: Path, pair_file: Path) -> None:
    spec = find_pair(str(pair_file))
    release(Store(), spec, fetch(spec), registered / "made")
    refused_at_once(run(f"release promote --pair {pair_file}"), "draftwell gate")
    refused_at_once(run(f"deploy --pair {pair_file} --release candidate"), "--set ungated=")
    assert not (registered / "work" / "dist").exists()
    assert Store().get_aliases("release", "tiny.cpu") == {"candidate": 1}


def test_tampered_bundle(run: Any, registered: Path, pair_file: Path) -> None:
    spec = find_pair(str(pair_file))
    release(Store(), spec, fetch(spec), registered / "made")
    done = run(f"deploy --pair {pair_file} --release 1 --set", "ungated=a test")
    assert done.exit_code == 0, done.output
    current = Path("dist/tiny/current")
    file = next(current.rglob("artifact.json"))
    file.write_text(file.read_text().replace("5", "6", 1))
    refused_at_once(run(f"serve --pair {pair_file}"), "artifact.json", "deploy again")
    shutil.rmtree(current.resolve())
    refused_at_once(run(f"serve --pair {pair_file}"), "draftwell deploy")


def test_doctor(run: Any) -> None:
    done = run("doctor")
    assert done.exit_code == 0, done.output
    assert "torch" in done.stdout


def test_doctor_says_whether_layers_can_be_compiled(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = " ".join(run("doctor").output.split())
    assert "not exact" in said
    assert "not yet" in said
    (own_folder("compiled", key()) / f"{'0' * 64}.so").touch()
    said = " ".join(run("doctor").output.split())
    assert "there" in said
    assert "not exact" not in said
    monkeypatch.setenv("DRAFTWELL_COMPILE", "off")
    assert "not exact" in " ".join(run("doctor").output.split())


def test_doctor_names_what_is_known_to_break(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.1.3" if name == "sqlalchemy" else real(name)
    )
    done = run("doctor")
    assert done.exit_code == 2
    assert "Error: 1 check(s) failed" in done.stderr
