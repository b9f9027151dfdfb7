"""The catalogue of pairs (`*.yaml` next to this file) and how their models get onto this
machine."""

from draftwell.registry.pairs.catalogue import (
    NAME,
    ModelSource,
    PackageFile,
    PairSpec,
    find_pair,
    list_pairs,
    write_pair,
)
from draftwell.registry.pairs.fetching import fetch
from draftwell.registry.pairs.records import model_records

__all__ = [
    "NAME",
    "ModelSource",
    "PackageFile",
    "PairSpec",
    "fetch",
    "find_pair",
    "list_pairs",
    "model_records",
    "write_pair",
]
