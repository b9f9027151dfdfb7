"""A bundle's bill of materials: `sbom.cdx.json`, CycloneDX 1.6 in JSON.

It lists what the bundle's requirements install (packages with licence, purl, and sha256 where it is
known), the runtime's wheel, the models and the artifacts, and which package needs which. Nothing in
it depends on time or place: the serial number is made of the content.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from draftwell.registry.bundles.requirements import EXTRA, PROJECT, Lock, needs
from draftwell.registry.bundles.wheel import NAME, Wheel
from draftwell.serving.bundle.bundle import Manifest

SBOM = "sbom.cdx.json"
SPEC = "1.6"
NAMESPACE = uuid.UUID("3f0f6f4e-6d1c-5d53-9d43-0b8b6f9b9a11")
LONGEST_LICENCE = 80
"""Characters of a licence's name; what is longer is the text of one."""

Record = dict[str, Any]


def bill_of_materials(manifest: Manifest, lock: Lock, wheel: Wheel, licence: str = "") -> str:
    """The text of `sbom.cdx.json`.

    Args:
        manifest: of the bundle; its list of files may be empty still.
        licence: of the models, as the pair's YAML file has it.
    """
    packages = [
        _component("library", name, name, version)
        | {"purl": f"pkg:pypi/{name}@{quote(version, safe='')}", **_licence(name)}
        | _hash(lock.hashes.get(name))
        for name, version in sorted(lock.versions.items())
    ]
    runtime = _component("library", NAME, NAME, wheel.version) | _hash(
        hashlib.sha256(wheel.data).hexdigest()
    )
    runtime["licenses"] = [{"expression": "Apache-2.0"}]
    models = [
        # the digest of weights is over all files of a model, and so no hash of a file
        _component("machine-learning-model", f"model:{role}", f"{manifest.pair}-{role}")
        | ({"version": model.revision} if model.revision else {})
        | ({"licenses": [{"license": {"name": licence}}]} if licence else {})
        | {
            "properties": [
                {"name": "draftwell:source", "value": manifest.origins.get(role, model.source)},
                {"name": "draftwell:weights_sha256", "value": model.weights_sha256},
            ]
        }
        for role, model in sorted(manifest.models.items())
    ]
    artifacts = [
        _component("data", f"artifact:{kind}", kind, str(version))
        for kind, version in sorted(manifest.versions.items())
    ]
    own = [part["bom-ref"] for part in (runtime, *models, *artifacts)]
    names = lock.versions.keys()
    depends = {name: _needed(name) for name in names} | {NAME: _needed(PROJECT)}
    name, release = f"{manifest.pair}-{manifest.device}", str(manifest.release_version)
    subject = _component("application", "bundle", name, release)
    tool = {"type": "application", "name": PROJECT, "version": importlib.metadata.version(PROJECT)}
    body: Record = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": subject},
        "components": [*packages, runtime, *models, *artifacts],
        "dependencies": [
            {"ref": "bundle", "dependsOn": sorted(own)},
            *(
                {"ref": name, "dependsOn": sorted(needed & names - {name})}
                for name, needed in sorted(depends.items())
            ),
        ],
    }
    body["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, json.dumps(body, sort_keys=True))}"
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _component(kind: str, ref: str, name: str, version: str | None = None) -> Record:
    named = {"type": kind, "bom-ref": ref, "name": name}
    return named if version is None else {**named, "version": version}


def _hash(sha256: str | None) -> Record:
    return {"hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else {}


def _needed(name: str) -> set[str]:
    return {canonicalize_name(one.name) for one in needs(name, {EXTRA} if name == PROJECT else ())}


def _licence(name: str) -> Record:
    """A package's licence: the SPDX expression that its metadata has, else the name that it has, or
    that it is sorted under."""
    metadata = importlib.metadata.metadata(name)
    if "License-Expression" in metadata:
        return {"licenses": [{"expression": metadata["License-Expression"]}]}
    sorts = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    stated = str(metadata["License"] or "") if "License" in metadata else ""
    said = next(filter(None, [stated.strip().partition("\n")[0], *sorts]), "")
    if not 0 < len(said) <= LONGEST_LICENCE:
        return {}
    return {"licenses": [{"license": {"name": said}}]}
