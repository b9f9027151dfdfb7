"""The catalogue of pairs (`*.yaml` beside this file) and how their models get onto this machine."""

from registry.pairs.catalogue import ModelSource, PackageFile, PairSpec, find_pair, list_pairs
from registry.pairs.fetching import fetch
from registry.pairs.records import model_records

__all__ = ["ModelSource", "PackageFile", "PairSpec", "fetch", "find_pair", "list_pairs", "model_records"]
