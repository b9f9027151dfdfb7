"""Prompts: one conversation a row, from a file, served traffic or a data set.

`prompt` reads and checks rows, `sources` finds them, `answer_fields` checks what an answer is
graded by; `data/` holds the demo prompts.
"""

from draftwell.components.prompts.prompt import Prompt, demo_prompts, ids_of, read_prompts
from draftwell.components.prompts.sources import load_prompts

__all__ = ["Prompt", "demo_prompts", "ids_of", "load_prompts", "read_prompts"]
