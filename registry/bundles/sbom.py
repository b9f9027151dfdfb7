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
from importlib.metadata import PackageNotFoundError
from typing import Any
from urllib.parse import quote

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftwell.registry.bundles.requirements import PROJECT, Lock, runtime_requirements
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
    components = [
        *_packages(lock),
        _runtime(wheel),
        *_models(manifest, licence),
        *_artifacts(manifest),
    ]
    subject = {
        "type": "application",
        "bom-ref": "bundle",
        "name": f"{manifest.pair}-{manifest.device}",
        "version": str(manifest.release_version),
        "description": "A bundle of speculative decoding, as Draftwell tuned it",
    }
    tool = {"type": "application", "name": PROJECT, "version": importlib.metadata.version(PROJECT)}
    body: Record = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPEC}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": subject},
        "components": components,
        "dependencies": _dependencies(lock, components),
    }
    body["serialNumber"] = f"urn:uuid:{uuid.uuid5(NAMESPACE, json.dumps(body, sort_keys=True))}"
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def purl(name: str, version: str) -> str:
    """Package URL of a distribution on PyPI.

    >>> purl("torch", "2.13.0+cpu")
    'pkg:pypi/torch@2.13.0%2Bcpu'
    """
    return f"pkg:pypi/{name}@{quote(version, safe='')}"


def _packages(lock: Lock) -> list[Record]:
    return [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": version,
            "purl": purl(name, version),
            **_licences(name),
            **(
                {"hashes": [{"alg": "SHA-256", "content": lock.hashes[name]}]}
                if name in lock.hashes
                else {}
            ),
        }
        for name, version in sorted(lock.versions.items())
    ]


def _licences(name: str) -> Record:
    """A package's licence: the SPDX expression that its metadata has, else the name that it has, or
    that it is sorted under."""
    try:
        metadata = importlib.metadata.metadata(name)
    except PackageNotFoundError:
        return {}
    stated = [metadata[field] for field in ("License-Expression", "License") if field in metadata]
    sorts = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    said = next(filter(None, [*stated, *sorts]), "")
    try:
        return (
            {"licenses": [{"expression": str(canonicalize_license_expression(said))}]}
            if said
            else {}
        )
    except InvalidLicenseExpression:
        short = said.strip().partition("\n")[0]
        return (
            {"licenses": [{"license": {"name": short}}]}
            if 0 < len(short) <= LONGEST_LICENCE
            else {}
        )


def _runtime(wheel: Wheel) -> Record:
    return {
        "type": "library",
        "bom-ref": NAME,
        "name": NAME,
        "version": wheel.version,
        "licenses": [{"expression": "Apache-2.0"}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(wheel.data).hexdigest()}],
    }


def _models(manifest: Manifest, licence: str) -> list[Record]:
    """The models; the digest of weights is over all files of a model, and so no hash of a file."""
    return [
        {
            "type": "machine-learning-model",
            "bom-ref": f"model:{role}",
            "name": f"{manifest.pair}-{role}",
            **({"version": model.revision} if model.revision else {}),
            **({"licenses": [{"license": {"name": licence}}]} if licence else {}),
            "properties": [
                {"name": "draftwell:source", "value": manifest.origins.get(role, model.source)},
                {"name": "draftwell:weights_sha256", "value": model.weights_sha256},
            ],
        }
        for role, model in sorted(manifest.models.items())
    ]


def _artifacts(manifest: Manifest) -> list[Record]:
    return [
        {"type": "data", "bom-ref": f"artifact:{kind}", "name": kind, "version": str(version)}
        for kind, version in sorted(manifest.versions.items())
    ]


def _dependencies(lock: Lock, components: list[Record]) -> list[Record]:
    """Who needs whom: the bundle all that is not a package, the runtime what it asks for, each
    package its own."""
    own = [part["bom-ref"] for part in components if part["bom-ref"] not in lock.versions]
    asked = {canonicalize_name(Requirement(line).name) for line in runtime_requirements()}
    found = [
        {"ref": "bundle", "dependsOn": sorted(own)},
        {"ref": NAME, "dependsOn": sorted(asked & lock.versions.keys())},
    ]
    for name in sorted(lock.versions):
        try:
            needed = {
                canonicalize_name(Requirement(line).name)
                for line in importlib.metadata.requires(name) or []
                if (marker := Requirement(line).marker) is None or marker.evaluate({"extra": ""})
            }
        except PackageNotFoundError:
            needed = set()
        found.append({"ref": name, "dependsOn": sorted(needed & lock.versions.keys() - {name})})
    return found
