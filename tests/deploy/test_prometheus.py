"""deploy/prometheus/draftwell.rules.yaml: read by promtool, over a day of planted traffic on each
engine."""

import re
import subprocess
from pathlib import Path

import yaml

from tests.support.promtool import PROMTOOL, RULES, needs_promtool

DAY = 80
"""Minutes of ordinary traffic before anything changes; rules over a day take what there is."""
LATER = 75
"""Minutes after the change that are looked at."""


def counter(*parts: tuple[float, int], restart: bool = False) -> str:
    """A counter that grows by so much a minute for so many minutes, in promtool's notation."""
    words, value = [], 0.0
    for number, (rate, minutes) in enumerate(parts):
        value = 0.0 if restart and number else value
        words.append(f"{value:g}+{rate:g}x{minutes - 1}")
        value += rate * minutes
    return " ".join(words)


def gauge(*parts: tuple[float, int]) -> str:
    """A gauge that stands still for so many minutes."""
    return " ".join(f"{value:g}+0x{minutes - 1}" for value, minutes in parts)


STEADY = {
    "generation_tokens_total": 600.0,
    "spec_decode_num_drafts_total": 200.0,
    "spec_decode_num_draft_tokens_total": 800.0,
    "spec_decode_num_accepted_tokens_total": 400.0,
    'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': 160.0,
    'spec_decode_num_accepted_tokens_per_pos_total{position="3"}': 60.0,
    "prefix_cache_queries_total": 4000.0,
    "prefix_cache_hits_total": 2000.0,
    "request_prompt_tokens_sum": 4000.0,
    "request_prompt_tokens_count": 20.0,
    "request_time_per_output_token_seconds_sum": 0.4,
    "request_time_per_output_token_seconds_count": 20.0,
}
"""What each sum of a vLLM grows by in a minute."""
SPECULATIVE = [name for name in STEADY if name.startswith("spec_")]
ACCEPTED = "spec_decode_num_accepted_tokens_total"
FIRST = 'spec_decode_num_accepted_tokens_per_pos_total{position="0"}'
LAST = 'spec_decode_num_accepted_tokens_per_pos_total{position="3"}'
TIME = "request_time_per_output_token_seconds_sum"
Series = dict[str, str]
"""Name with labels but for the job → values, in promtool's notation."""


def vllm(
    changed: dict[str, float], instance: str = "a", *, restart: bool = False, plain: bool = False
) -> Series:
    """A vLLM, of which some sums change after the day; a plain one does not speculate and never
    changes."""
    series = {}
    for name, rate in STEADY.items():
        base, _, position = name.partition("{")
        labels = f'instance="{instance}",model_name="m",engine="0",{position.rstrip("}")}'
        now = changed.get(name, rate)
        before = now if plain else rate
        if not (plain and name in SPECULATIVE):
            values = counter((before, DAY), (now, LATER), restart=restart)
            series[f"vllm:{base}{{{labels.rstrip(',')}}}"] = values
    series[f'vllm:num_requests_running{{instance="{instance}",model_name="m"}}'] = gauge(
        (4.0, DAY + LATER)
    )
    return series


def other(prefix: str, sums: dict[str, tuple[float, float]], gauges: dict[str, float]) -> Series:
    """Another engine: sums that grow by so much a minute before and after the day, and gauges."""
    grown = {name: counter((a, DAY), (b, LATER)) for name, (a, b) in sums.items()}
    still = {name: gauge((value, DAY + LATER)) for name, value in gauges.items()}
    return {f'{prefix}:{name}{{instance="o"}}': row for name, row in {**grown, **still}.items()}


def sglang(rounds: float) -> Series:
    """SGLang, whose rounds a minute change after the day."""
    sums = {"spec_verify_calls_total": (200.0, rounds), "generation_tokens_total": (600.0, 600.0)}
    return other("sglang", sums, {"spec_num_steps": 3.0})


def llama(accepted: float, cached: float) -> Series:
    """llama.cpp's server, whose accepted and cached tokens a minute change after the day."""
    sums = {
        "tokens_predicted_total": (600.0, 600.0),
        "spec_decode_num_drafts_total": (200.0, 200.0),
        "spec_decode_num_draft_tokens_total": (800.0, 800.0),
        ACCEPTED: (400.0, accepted),
        "prompt_tokens_total": (500.0, 1000.0 - cached),
        "prompt_tokens_cached_total": (500.0, cached),
    }
    return other("llamacpp", sums, {})


def monitor_file(alarm: float, *looked: tuple[float, int]) -> Series:
    """What `draftwell monitor --metrics-file` says."""
    return {
        'draftwell_monitor_alarm{engine="e",cause="context"}': gauge((0, DAY), (alarm, LATER)),
        'draftwell_monitor_look_timestamp_seconds{engine="e"}': counter(*looked),
    }


LOOKING = (60.0, DAY + LATER)
SLOWER_CACHELESS = {"DraftAcceptanceFell": 42, "PrefixCacheHitsFell": 32}
CASES: dict[str, tuple[Series, dict[str, int]]] = {
    # job → its series, and the alerts that it raises, with the minutes within which it does
    "ordinary vllm": (vllm({}), {}),
    "ordinary sglang": (sglang(200), {}),
    "ordinary llama": (llama(400, 500), {}),
    "ordinary monitor": (monitor_file(0, LOOKING), {}),
    "noise": (vllm({ACCEPTED: 8, FIRST: 8, LAST: 0}), {"DraftDead": 21}),
    "stopped": (vllm(dict.fromkeys(SPECULATIVE, 0.0)), {"DraftsStopped": 22}),
    "traffic": (vllm({ACCEPTED: 260, FIRST: 100}), {"DraftAcceptanceFell": 42}),
    "long prompts": (
        vllm({ACCEPTED: 260, FIRST: 100, "request_prompt_tokens_sum": 40000}),
        {"DraftAcceptanceFellWithContext": 42},
    ),
    "long drafts": (vllm({LAST: 4}), {"LastDraftTokensWasted": 72}),
    "no cache": (vllm({"prefix_cache_hits_total": 0}), {"PrefixCacheHitsFell": 32}),
    "slower version": (vllm({TIME: 0.44}, restart=True), {"EngineSlowerSinceItsStart": 42}),
    "slower without a start": (vllm({TIME: 0.44}), {}),
    "same version": (vllm({}, restart=True), {}),
    "faster plain replica": (
        {**vllm({TIME: 0.9}), **vllm({TIME: 0.6}, "b", plain=True)},
        {"SpeculationSlowerThanPlainReplica": 27},
    ),
    "noise in sglang": (sglang(590), {"DraftDead": 21}),
    "llama": (llama(260, 0), SLOWER_CACHELESS),
    "alarm": (monitor_file(1, LOOKING), {"DraftwellMonitorAlarm": 2}),
    "silent": (
        monitor_file(0, (60.0, DAY - 60), (0.0, LATER + 60)),
        {"DraftwellMonitorSilent": 70},
    ),
    "silent without its file": (
        monitor_file(0, (60.0, DAY - 60)),
        {"DraftwellMonitorSilent": 70},
    ),
}


def firing(minute: int, raised: list[tuple[str, str]]) -> dict[str, object]:
    """A question: which alerts of which jobs fire at a minute."""
    rows = [f'{{alertname="{alert}", job="{job}"}}' for job, alert in raised]
    return {
        "expr": 'count by (alertname, job) (ALERTS{alertstate="firing"})',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": row, "value": 1} for row in rows],
    }


def test_a_monitor_whose_file_is_gone_is_still_asked_for() -> None:
    """Without promtool: the silence is counted from a look of the last day, not of this moment,
    when the series has ended."""
    rules = [one for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]]
    (silent,) = (one for one in rules if one.get("alert") == "DraftwellMonitorSilent")
    looks = re.findall(r"(\w*\(?)draftwell_monitor_look_timestamp_seconds(\S*)", silent["expr"])
    assert looks == [("max_over_time(", "[1d])")]


@needs_promtool
def test_each_silence_raises_its_alert_in_time_and_quiet_days_none(tmp_path: Path) -> None:
    """Every alert has a job that raises it, within its time, and no job raises another one."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    within = [(job, *item) for job, (_, raised) in CASES.items() for item in raised.items()]
    assert alerts == {alert for _, alert, _ in within}
    series = [
        {"series": name.replace("{", f'{{job="{job}",'), "values": values}
        for job, (rows, _) in CASES.items()
        for name, values in rows.items()
    ]
    questions = [
        firing(DAY + time, [(job, alert) for job, alert, minutes in within if minutes <= time])
        for time in (-1, LATER - 1)
    ]
    questions += [
        {
            "expr": f'count(ALERTS{{alertstate="firing",alertname="{alert}",job="{job}"}})',
            "eval_time": f"{DAY + minutes}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for job, alert, minutes in within
    ]
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": questions}]
    file = tmp_path / "test.yaml"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
