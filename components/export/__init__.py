"""A tuned decoding config as settings of other inference engines.

`export` builds the document, `speculation` reduces a strategy to what other engines support, one
module per engine (`vllm`, `sglang`, `llama_cpp`, `transformers_config`) writes its settings, and
`engines/` holds a JSON schema of what each engine documents. `checkpoint` saves a distilled draft
as a folder that other engines read.
"""

from draftwell.components.export.export import ENGINES, export_config, problems, schema
from draftwell.components.export.speculation import Speculation, Weights, speculation_of

__all__ = [
    "ENGINES",
    "Speculation",
    "Weights",
    "export_config",
    "problems",
    "schema",
    "speculation_of",
]
