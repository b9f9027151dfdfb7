"""Registry: the catalogue of pairs, published artifacts with their lineage, releases, gates and
bundles.

Only this package knows MLflow. It imports `draftwell.serving.runtime` and nothing else of the
project.
"""
