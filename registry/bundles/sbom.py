"""A bundle's bill of materials: `sbom.cdx.json`, CycloneDX 1.6 in JSON.

It lists what the bundle's requirements install (packages with licence, purl, and sha256 where it is
known), the runtime's wheel, the models and the artifacts, and which package needs which. Nothing in
it depends on time or place: the serial number is made of the content.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import uuid
from collections.abc import Iterable

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from draftwell.registry.bundles.requirements import EXTRA, PROJECT, Lock, needs
from draftwell.registry.bundles.wheel import NAME, Wheel
from draftwell.serving.bundle.bundle import Manifest

SBOM = "sbom.cdx.json"
NAMESPACE = uuid.UUID("3f0f6f4e-6d1c-5d53-9d43-0b8b6f9b9a11")
LONGEST_LICENCE = 80
"""Characters of a licence's name; what is longer is the text of one."""


def bill_of_materials(manifest: Manifest, lock: Lock, wheel: Wheel, licence: str = "") -> str:
    """The text of `sbom.cdx.json`.

    Args:
        manifest: of the bundle; its list of files may be empty still.
        licence: of the models, as the pair's YAML file has it.
    """
    packages, models = _packages(lock, wheel), _models(manifest, licence)
    artifacts = [
        Component(
            type=ComponentType.DATA, bom_ref=f"artifact:{kind}", name=kind, version=str(version)
        )
        for kind, version in manifest.versions.items()
    ]
    subject = Component(
        type=ComponentType.APPLICATION,
        bom_ref="bundle",
        name=f"{manifest.pair}-{manifest.device}",
        version=str(manifest.release_version),
    )
    bom = Bom(components=[*packages.values(), *models, *artifacts])
    bom.metadata.component = subject
    bom.metadata.timestamp = None  # type: ignore[assignment]
    tool = Component(
        type=ComponentType.APPLICATION,
        name=PROJECT,
        bom_ref=PROJECT,
        version=importlib.metadata.version(PROJECT),
    )
    bom.metadata.tools.components.add(tool)
    bom.register_dependency(subject, [packages[NAME], *models, *artifacts])
    for name, package in packages.items():
        needed = _needed(PROJECT if name == NAME else name) & packages.keys() - {name}
        bom.register_dependency(package, [packages[one] for one in needed])
    bom.serial_number = uuid.uuid5(NAMESPACE, "")
    bom.serial_number = uuid.uuid5(NAMESPACE, JsonV1Dot6(bom).output_as_string())
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _packages(lock: Lock, wheel: Wheel) -> dict[str, Component]:
    """What the requirements install, and the runtime's wheel, by name."""
    packages = {
        name: Component(
            type=ComponentType.LIBRARY,
            bom_ref=name,
            name=name,
            version=version,
            purl=PackageURL("pypi", name=name, version=version),
            licenses=_licences(_stated_licence(name)),
            hashes=_hashes(lock.hashes.get(name)),
        )
        for name, version in lock.versions.items()
    }
    packages[NAME] = Component(
        type=ComponentType.LIBRARY,
        bom_ref=NAME,
        name=NAME,
        version=wheel.version,
        licenses=_licences("Apache-2.0"),
        hashes=_hashes(hashlib.sha256(wheel.data).hexdigest()),
    )
    return packages


def _models(manifest: Manifest, licence: str) -> list[Component]:
    return [
        # the digest of weights is over all files of a model, and so no hash of a file
        Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            bom_ref=f"model:{role}",
            name=f"{manifest.pair}-{role}",
            version=model.revision,
            licenses=[DisjunctiveLicense(name=licence)] if licence else [],
            properties=[
                Property(name="draftwell:source", value=manifest.origins.get(role, model.source)),
                Property(name="draftwell:weights_sha256", value=model.weights_sha256),
            ],
        )
        for role, model in manifest.models.items()
    ]


def _hashes(sha256: str | None) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _needed(name: str) -> set[str]:
    extras = {EXTRA} if name == PROJECT else set()
    return {canonicalize_name(requirement.name) for requirement in needs(name, extras)}


def _licences(stated: str) -> Iterable[License]:
    return [LicenseFactory().make_from_string(stated)] if stated else []


def _stated_licence(name: str) -> str:
    """A package's licence: the SPDX expression that its metadata has, else the name that it has, or
    that it is sorted under, unless that is a text."""
    metadata = importlib.metadata.metadata(name)

    def values(field: str) -> list[str]:
        return metadata.get_all(field) or []

    if expressions := values("License-Expression"):
        return expressions[0]
    found = [
        *(text.strip().partition("\n")[0] for text in values("License")),
        *(one.rpartition(" :: ")[2] for one in values("Classifier") if one.startswith("License ")),
    ]
    stated = next(filter(None, found), "")
    return stated if len(stated) <= LONGEST_LICENCE else ""
