"""A tuned decoding config in the words of other engines: one small file per engine, and what each can say in `engines/`."""

from components.export.export import ENGINES, export_config, problems, schema
from components.export.speculation import Speculation, Weights, speculation_of

__all__ = ["ENGINES", "Speculation", "Weights", "export_config", "problems", "schema", "speculation_of"]
