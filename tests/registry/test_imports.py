"""The registry's modules are imported by every command: none of them may pull in a heavy
library."""

import subprocess
import sys

HEAVY = ("mlflow", "torch", "transformers", "huggingface_hub", "sqlalchemy", "pandas")


def test_importing_the_registry_loads_no_heavy_library() -> None:
    code = (
        "import sys, draftwell.registry.bundles.build, draftwell.registry.gates, "
        "draftwell.registry.lineage, "
        "draftwell.registry.pairs, draftwell.registry.releases\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
