"""A bundle's bill of materials, held by CycloneDX's own schema, and its signature, by a stand-in
for cosign that works like it."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from draftwell.registry.bundles.hashes import UNHASHED, recorded_hashes
from draftwell.registry.bundles.requirements import locked
from draftwell.registry.bundles.sbom import SBOM
from draftwell.registry.bundles.signing import hashes_remark, sign, signature_remark
from draftwell.registry.store import Store
from draftwell.serving.bundle.bundle import open_bundle
from draftwell.serving.bundle.signature import SIGNATURE, check_signature, split_flags
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code
from tests.support.loop.pip_reports import reported
from tests.support.loop.publishing import Make

COSIGN = """#!/usr/bin/env python3
# A "signature" is the key's first line and the sha256 of what was signed.
import hashlib, pathlib, sys
words = sys.argv[1:]
key, bundle = (pathlib.Path(words[words.index(name) + 1]) for name in ("--key", "--bundle"))
if not key.exists():
    sys.exit("Error: reading key: open: no such file")
mark = key.read_text().split()[0] + hashlib.sha256(pathlib.Path(words[-1]).read_bytes()).hexdigest()
if words[0] == "sign-blob":
    assert "--yes" in words
    bundle.write_text(mark)
elif bundle.read_text() != mark:
    sys.exit("Error: failed to verify signature")
"""


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key, and a cosign on PATH."""
    tool = tmp_path / "bin" / "cosign"
    tool.parent.mkdir()
    tool.write_text(COSIGN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    (tmp_path / "key").write_text("mine\n")
    return tmp_path / "key"


@pytest.fixture
def hashed(reports: Path) -> None:
    """pip's report of every package that a bundle pins."""
    packages = locked("cpu").versions
    reported(reports, "1", {name: (version, "a" * 64) for name, version in packages.items()})


@pytest.fixture
def no_cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("draftwell.registry.bundles.signing.shutil.which", lambda name: None)


def test_the_bill_of_materials_is_valid_and_complete(
    build: Make, champion: Store, tmp_path: Path
) -> None:
    built = build()
    text = (built / SBOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = json.loads(text)
    manifest = open_bundle(built).manifest
    assert SBOM in manifest.files
    assert found["metadata"]["component"]["name"] == "tiny-cpu"
    parts = {part["bom-ref"]: part for part in found["components"]}
    assert len(parts) == len(found["components"])
    assert parts.keys() == {
        *locked("cpu").versions,
        "draftwell-runtime",
        "model:target",
        "model:draft",
        *(f"artifact:{kind}" for kind in manifest.versions),
    }
    assert parts["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert "BSD-3-Clause AND" in parts["torch"]["licenses"][0]["expression"]
    assert parts["numpy"]["version"] == importlib.metadata.version("numpy")
    assert {each["name"]: each["value"] for each in parts["model:draft"]["properties"]} == {
        "draftwell:source": "local",
        "draftwell:weights_sha256": manifest.models["draft"].weights_sha256,
    }
    assert {
        one for each in found["dependencies"] for one in (each["ref"], *each.get("dependsOn", ()))
    } == {
        "bundle",
        *parts,
    }
    assert str(tmp_path) not in text


def test_without_cosign_a_line_says_that_nothing_is_signed(
    build: Make, champion: Store, tmp_path: Path, no_cosign: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build()
    assert signature_remark(built) == "the bundle is not signed: cosign is not on PATH"
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", "some.key")
    with raises_code("not_signed", "DRAFTWELL_COSIGN_KEY", "cosign is not on PATH"):
        build(out=tmp_path / "dist2")
    assert not (tmp_path / "dist2" / "tiny" / "current").exists()


def test_a_bundle_is_signed_and_its_signature_checked(
    build: Make,
    champion: Store,
    tmp_path: Path,
    key: Path,
    hashed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsigned = build(out=tmp_path / "unsigned")
    assert "DRAFTWELL_COSIGN_KEY" in str(signature_remark(unsigned))
    with raises_code("unsigned_bundle", SIGNATURE):
        check_signature(unsigned, str(key))
    with raises_code("unsigned_bundle", "--signature-key"):
        from_bundle(ServerSettings(bundle=unsigned, signature_key=str(key)))
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    built = build()
    assert signature_remark(built) is None
    check_signature(open_bundle(built).path, str(key))
    assert build() == built, "the same bundle is not made twice"
    (tmp_path / "other").write_text("foreign\n")
    with raises_code("wrong_signature", "failed to verify signature"):
        check_signature(built, str(tmp_path / "other"))


def test_a_signature_of_an_old_key_and_a_damaged_one_are_replaced(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "1-cpu"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    for left in ("of an old key", ""):
        (bundle / SIGNATURE).write_text(left)
        sign(bundle)
        check_signature(bundle, str(key))


@pytest.mark.parametrize("flags", ["--annotations 'a", "a\\"])
def test_flags_with_an_open_quote_are_named(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    monkeypatch.setenv("DRAFTWELL_COSIGN_FLAGS", flags)
    with raises_code("bad_value", "DRAFTWELL_COSIGN_FLAGS"):
        sign(tmp_path)
    with raises_code("bad_value", "--signature-flags"):
        split_flags(flags, "--signature-flags")
    assert split_flags("--a 'b c'", "--signature-flags") == ["--a", "b c"]


def test_a_bundle_without_hashes_is_not_signed(
    build: Make, champion: Store, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signature would cover requirements that any file of these versions fits."""
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    with raises_code("unlocked_requirements", "requirements-cpu.txt", "`make hashes`"):
        build()
    home = tmp_path / "dist" / "tiny"
    assert (list(home.rglob(SIGNATURE)), (home / "current").exists()) == ([], False)
    (tmp_path / "requirements-engine.txt").write_text(f"{UNHASHED}vllm\nvllm==1\n")
    with raises_code("unlocked_requirements", "requirements-engine.txt", "`make peers`"):
        sign(tmp_path)


def test_what_cannot_be_signed_is_not_deployed(
    build: Make,
    champion: Store,
    tmp_path: Path,
    key: Path,
    hashed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(tmp_path / "nowhere"))
    with raises_code("not_signed", "no such file", "COSIGN_PASSWORD"):
        build()
    assert sorted(
        path.name
        for path in (tmp_path / "dist" / "tiny").iterdir()
        if not path.name.startswith(".")
    ) == ["1-cpu"]


def test_a_deployment_says_which_hashes_are_missing(build: Make, champion: Store) -> None:
    assert recorded_hashes({"torch": "0"}) == {}
    built = build()
    line = str(hashes_remark(built))
    assert line.startswith("requirements-cpu.txt has no hashes")
    assert "make hashes" in line
    assert "\n" not in line
