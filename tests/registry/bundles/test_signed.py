"""A bundle's bill of materials, held by CycloneDX's own schema, and its signature, by a stand-in
for cosign that works like it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from draftwell.registry.bundles.hashes import UNHASHED, recorded_hashes
from draftwell.registry.bundles.requirements import locked
from draftwell.registry.bundles.sbom import SBOM
from draftwell.registry.bundles.signing import hashes_remark, sign, signature_remark
from draftwell.registry.bundles.vllm.render import OWN_FILES, file_records
from draftwell.registry.store import Store
from draftwell.serving.artifacts.pair_files import SIDECAR, models_root
from draftwell.serving.bundle.bundle import BundleError, check_signed_files, open_bundle
from draftwell.serving.bundle.manifest import manifest_bytes
from draftwell.serving.bundle.signature import (
    SIGNATURE,
    check_signature,
    signature_check,
    split_flags,
)
from draftwell.serving.server.model.loading import from_bundle
from draftwell.serving.server.settings import ServerSettings
from tests.support.errors import raises_code
from tests.support.loop.pip_reports import reported
from tests.support.loop.publishing import Make
from tests.support.paths import REPO

COSIGN = """#!/usr/bin/env python3
# A "signature" is the key's first line and the sha256 of what was signed.
import hashlib, pathlib, sys
words = sys.argv[1:]
key, bundle = (pathlib.Path(words[words.index(name) + 1]) for name in ("--key", "--bundle"))
if not key.exists():
    sys.exit("Error: reading key: open: no such file")
data = sys.stdin.buffer.read() if words[-1] == "-" else pathlib.Path(words[-1]).read_bytes()
mark = key.read_text().split()[0] + hashlib.sha256(data).hexdigest()
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
        check_signature(unsigned, manifest_bytes(unsigned), str(key))
    with raises_code("unsigned_bundle", "--signature-key"):
        from_bundle(ServerSettings(bundle=unsigned, signature_key=str(key)))
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    built = build()
    assert signature_remark(built) is None
    check_signature(built, manifest_bytes(built), str(key))
    assert build() == built, "the same bundle is not made twice"
    (tmp_path / "other").write_text("foreign\n")
    with raises_code("wrong_signature", "failed to verify signature"):
        check_signature(built, manifest_bytes(built), str(tmp_path / "other"))


@pytest.fixture
def signed(
    build: Make, champion: Store, key: Path, hashed: None, monkeypatch: pytest.MonkeyPatch
) -> ServerSettings:
    """What serves a bundle that was signed with the key."""
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    return ServerSettings(bundle=build(), signature_key=str(key))


def test_nothing_is_parsed_before_the_signature_is_verified(
    signed: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "draftwell.serving.bundle.bundle.read_bundle_manifest",
        lambda *_: pytest.fail("parsed"),
    )
    (signed.bundle / "manifest.json").write_text("{")
    with raises_code("wrong_signature", str(signed.bundle)):
        from_bundle(signed)
    (signed.bundle / "manifest.json").unlink()
    with raises_code("no_bundle", str(signed.bundle)):
        from_bundle(signed)


def test_what_is_opened_is_what_was_verified(
    signed: ServerSettings, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the manifest is exchanged while cosign looks at the one before."""
    manifest = signed.bundle / "manifest.json"
    was = manifest.read_text()
    tool = key.parent / "bin" / "cosign"
    tool.write_text(f"{COSIGN}\npathlib.Path({str(manifest)!r}).write_text('{{}}')\n")
    opened = open_bundle(signed.bundle, verify=partial(check_signature, key=str(key)))
    assert manifest.read_text() == "{}"
    assert opened.manifest.to_json() == was


def test_under_a_key_weights_are_read_in_full(
    signed: ServerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one, digests that somebody has written beside them are believed."""
    record = open_bundle(signed.bundle).manifest.models["target"]
    weights = models_root() / record.folder / "model.safetensors"
    before = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    state = {"size": before.st_size, "mtime_ns": before.st_mtime_ns}
    forged = {weights.name: {**state, "sha256": record.weights_sha256}}
    (weights.parent / SIDECAR).write_text(json.dumps(forged))
    assert open_bundle(signed.bundle).files(models_root()).target == weights.parent
    with caplog.at_level("INFO"), raises_code("other_weights", str(weights.parent)):
        from_bundle(signed)
    assert f"read the weights of {weights.parent} in full" in caplog.text
    assert json.loads((weights.parent / SIDECAR).read_text()) == forged


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
def test_under_a_key_what_lies_next_to_weights_is_what_was_signed(
    signed: ServerSettings, name: str
) -> None:
    opened = open_bundle(signed.bundle)
    assert set(opened.manifest.settings_sha256) == {"target", "draft"}
    opened.files(models_root(), in_full=True)
    draft = models_root() / opened.manifest.models["draft"].folder
    (draft / name).write_text("{ }")
    opened.files(models_root())
    with raises_code("other_settings", str(draft), "draft"):
        from_bundle(signed)


VERIFY = re.findall(
    r"<!-- test: verify -->\n```bash\n(.*?)```",
    (REPO / "docs" / "deploying.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


def for_vllm(folder: Path) -> Path:
    """A signed bundle for vLLM."""
    folder.mkdir()
    (folder / "serve.sh").write_text("#!/bin/sh\n")
    files = file_records(folder)
    (folder / "manifest.json").write_text(json.dumps({"kind": "vllm", "files": files}))
    sign(folder)
    return folder


def add(bundle: Path) -> Path:
    (bundle / "sitecustomize.py").touch()
    return bundle / "sitecustomize.py"


def change(bundle: Path) -> Path:
    (bundle / "serve.sh").write_text("#!/bin/sh\r")
    return bundle / "serve.sh"


def remove(bundle: Path) -> Path:
    (bundle / "serve.sh").unlink()
    return bundle / "serve.sh"


def exchange_by_a_link(bundle: Path) -> Path:
    (bundle / "serve.sh").rename(bundle.parent / "serve.sh")
    (bundle / "serve.sh").symlink_to(bundle.parent / "serve.sh")
    return bundle / "serve.sh"


SPOILED = (add, change, remove, exchange_by_a_link)


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bundle_is_verified_by_hand_as_the_page_says(
    signed: ServerSettings, key: Path, tmp_path: Path, spoil: Callable[[Path], Path]
) -> None:
    [script] = VERIFY
    other = tmp_path / "other"
    other.write_text("foreign\n")
    for bundle in (signed.bundle, for_vllm(tmp_path / "vllm")):

        def verified(with_key: Path, bundle: Path = bundle) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-c", script],
                cwd=bundle,
                env={**os.environ, "KEY": str(with_key)},
                capture_output=True,
                text=True,
                check=False,
            )

        done = verified(key)
        assert (done.returncode, done.stderr) == (0, "")
        assert "failed to verify" in verified(other).stderr
        name = spoil(bundle).name
        done = verified(key)
        assert done.returncode != 0
        assert f"not as it was signed: ['{name}']" in done.stderr


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_bundle_for_vllm_is_what_was_signed(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(key))
    bundle = for_vllm(tmp_path / "1-cpu")
    (bundle / ".env").touch()
    (tmp_path / "current").symlink_to("1-cpu")
    verify = signature_check(str(key), "")
    assert check_signed_files(tmp_path / "current", verify, OWN_FILES) == bundle
    with raises_code("unlisted_file", ".env"):
        check_signed_files(bundle, verify)
    place = spoil(bundle)
    with pytest.raises(BundleError, match=re.escape(str(place))):
        check_signed_files(bundle, verify, OWN_FILES)
    (tmp_path / "other").write_text("foreign\n")
    with raises_code("wrong_signature", str(bundle)):
        check_signed_files(bundle, signature_check(str(tmp_path / "other"), ""), OWN_FILES)


def test_with_real_cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cosign") is None:
        pytest.skip("no cosign on PATH")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    for name in ("mine", "other"):
        words = ["cosign", "generate-key-pair", "--output-key-prefix", name]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setenv("DRAFTWELL_COSIGN_KEY", str(tmp_path / "mine.key"))
    monkeypatch.setenv(
        "DRAFTWELL_COSIGN_FLAGS", os.environ.get("DRAFTWELL_COSIGN_FLAGS", "--tlog-upload=false")
    )
    bundle = tmp_path / "1-cpu"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    sign(bundle)
    offline = ["--insecure-ignore-tlog=true"]
    check_signature(bundle, b"{}", str(tmp_path / "mine.pub"), offline)
    for manifest, name in ((b"{} ", "mine"), (b"{}", "other")):
        with raises_code("wrong_signature"):
            check_signature(bundle, manifest, str(tmp_path / f"{name}.pub"), offline)


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
        check_signature(bundle, manifest_bytes(bundle), str(key))


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
