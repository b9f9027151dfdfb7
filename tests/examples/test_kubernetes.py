"""examples/kubernetes and examples/grafana: held against the server's own options, paths and
image."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from draftwell.serving.server.http.keys import read_file
from draftwell.serving.server.http.security import is_open
from draftwell.serving.server.lifecycle import FLUSH_SECONDS, WRITE_SECONDS
from draftwell.serving.server.main import app
from draftwell.serving.server.settings import ServerSettings
from tests.support.paths import REPO
from tests.support.server.served_pair import served_pair, serving

FOLDER = REPO / "examples" / "kubernetes"
DEPLOYMENT: dict[str, Any] = yaml.safe_load((FOLDER / "deployment.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((FOLDER / "service.yaml").read_text())
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
SERVER: dict[str, Any] = POD["containers"][0]
IMAGE = (REPO / "registry" / "bundles" / "templates" / "Dockerfile.j2").read_text()
PROBES = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}


@pytest.fixture(scope="module")
def settings() -> ServerSettings:
    """What the server makes of its arguments."""
    command = get_command(app)
    context = command.make_context("draftwell-serve", ["--bundle=/bundle", *SERVER["args"]])
    lists = dict.fromkeys(("cors_origin", "allowed_host"), ())
    return ServerSettings.from_options(**context.params | lists)


def test_its_probes_are_answered_without_a_key() -> None:
    import httpx

    asked = {name: SERVER[name]["httpGet"] for name in PROBES}
    assert {name: one["path"] for name, one in asked.items()} == PROBES
    assert {one["port"] for one in asked.values()} == {"http"}
    with serving(served_pair()) as (url, _):
        for path in PROBES.values():
            assert httpx.get(url + path).status_code == 200
            assert is_open(path)


def test_it_ends_before_it_is_killed(settings: ServerSettings) -> None:
    before = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    longest = before + settings.drain_seconds + FLUSH_SECONDS + WRITE_SECONDS
    assert longest + 5 <= POD["terminationGracePeriodSeconds"]
    assert settings.drain_seconds == 40


def test_it_listens_where_the_service_sends(settings: ServerSettings) -> None:
    assert SERVER["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert SERVICE["spec"]["ports"][0]["targetPort"] == "http"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels


def test_its_keys_are_a_secret(settings: ServerSettings, tmp_path: Path) -> None:
    mounts = {one["mountPath"]: one for one in SERVER["volumeMounts"]}
    assert settings.api_key_file is not None
    mount = mounts[str(settings.api_key_file.parent)]
    assert mount["readOnly"] is True
    [volume] = [one for one in POD["volumes"] if one["name"] == mount["name"]]
    name, readme = volume["secret"]["secretName"], (FOLDER / "README.md").read_text()
    assert f"secret generic {name} --from-file={settings.api_key_file.name}" in readme
    made = re.search(r"printf '(.+?)'", readme)
    assert made is not None
    file = tmp_path / "keys"
    file.write_text(made[1].replace("\\n", "\n") % ("a" * 32, "b" * 32))
    assert [sorted(one.scopes) for one in read_file(file)] == [["answers"], ["metrics"]]


def test_it_is_an_ordinary_user_on_files_that_cannot_change() -> None:
    user = re.search(r"useradd .*--uid (\d+)", IMAGE)
    assert user is not None
    pod, container = POD["securityContext"], SERVER["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"]) == (True, int(user[1]))
    assert pod["fsGroup"] == pod["runAsGroup"]
    assert container["readOnlyRootFilesystem"] is True
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False


def test_all_that_it_writes_is_on_a_volume() -> None:
    home = re.search(r"DRAFTWELL_HOME=(\S+)", IMAGE)
    assert home is not None
    given = {one["name"]: one["value"] for one in SERVER["env"]}
    writable = [one["mountPath"] for one in SERVER["volumeMounts"] if not one.get("readOnly")]
    assert given["DRAFTWELL_HOME"] == home[1]
    for path in (*given.values(), "/tmp"):
        assert any(path == one or path.startswith(f"{one}/") for one in writable), path
    assert {one["name"] for one in SERVER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}


def test_it_says_what_it_needs() -> None:
    for kind in ("requests", "limits"):
        assert set(SERVER["resources"][kind]) == {"cpu", "memory"}


@pytest.mark.parametrize("name", ["server.json", "engines.json"])
def test_the_dashboards_are_the_projects(name: str) -> None:
    file = REPO / "examples" / "grafana" / name
    assert file.resolve().is_relative_to(REPO)
    assert json.loads(file.read_text(encoding="utf-8"))["panels"]


@pytest.mark.parametrize("name", ["prometheus.yaml", "draftwell.rules.yaml"])
def test_what_they_need_is_beside_them(name: str) -> None:
    assert yaml.safe_load((REPO / "examples" / "grafana" / name).read_text(encoding="utf-8"))
