"""What every report is made of.

intervals: confidence intervals over prompts, and the only bootstrap. tables: text tables. drawing:
plots, and the digest of the artifact that a picture shows. machine, provenance: the machine,
threads, libraries and code that metrics depend on.
"""

from draftwell.components.report.intervals import paired_bootstrap_ratio

__all__ = ["paired_bootstrap_ratio"]
