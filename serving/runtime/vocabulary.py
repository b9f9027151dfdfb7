"""Which of its target's token ids a smaller model may propose.

Ids are the target's everywhere. Both models share an id where both have a row for it and both
tokenizers give it the same name, or none (padding). Ids that are not shared are never proposed, and
the smaller model reads its own end token in their place. Who judges is the target, so that no
output depends on what is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwell.serving.errors import VocabularyMismatch

Names = Mapping[int, str]
"""Token id → name, as a tokenizer has them."""
EXAMPLES = 3


def names_of(tokenizer: Any) -> Names:
    """The names of a tokenizer's ids."""
    return {token: name for name, token in tokenizer.get_vocab().items()}


def check_alike(draft: str, theirs: Names, target: str, own: Names) -> None:
    """Refuse a smaller model whose vocabulary is another one altogether.

    Args:
        draft, target: names of the models.
        theirs, own: names of their ids.
    Raises:
        VocabularyMismatch: of the ids that both have, half or fewer mean the same token.
    """
    both = own.keys() & theirs.keys()
    same = sum(own[token] == theirs[token] for token in both)
    if 2 * same <= len(both):
        raise VocabularyMismatch(
            f"{draft} cannot draft for {target}: of {len(both)} token ids that both have {same} "
            "mean the same, so only strategies without a draft model run; choose a draft of the "
            "same family, or make one with `draftwell step distil`"
        )


def not_shared(own: Names, rows: int, theirs: Names, their_rows: int) -> list[int]:
    """Ids of the target that a smaller model does not share, ascending.

    Args:
        rows, their_rows: ids that the models know; there may be more than names.

    >>> not_shared({0: "a", 1: "<x>", 2: "<y>"}, 5, {0: "a", 1: "<z>"}, 4)
    [1, 2, 4]
    """
    return [
        token for token in range(rows) if token >= their_rows or own.get(token) != theirs.get(token)
    ]


def shared_ids(differing: Sequence[int], rows: int) -> Tensor | None:
    """`[shared]` ids that a smaller model's head may cover beside a target of `rows` ids; None:
    all."""
    if not differing:
        return None
    shared = torch.ones(rows, dtype=torch.bool)
    shared[list(differing)] = False
    return shared.nonzero()[:, 0]


def what_differs(draft: str, differing: Sequence[int], own: Names, theirs: Names, rows: int) -> str:
    """One line about the ids that a smaller model does not share with a target of `rows` ids.

    >>> what_differs("draft d", [7, 8], {7: "<|end|>"}, {}, 9)
    "draft d never drafts 2 of the target's 9 token ids: it lacks 2 ('<|end|>', padding)"
    """
    lacks = [named(own, token) for token in differing if token not in theirs]
    other = [
        f"{named(theirs, token)} for {named(own, token)}" for token in differing if token in theirs
    ]
    parts = [
        f"{verb} {len(ids)} ({', '.join(list(dict.fromkeys(ids))[:EXAMPLES])})"
        for verb, ids in (("it lacks", lacks), ("it has other tokens for", other))
        if ids
    ]
    count = len(differing)
    return f"{draft} never drafts {count} of the target's {rows} token ids: {', '.join(parts)}"


def named(names: Names, token: int) -> str:
    """A token as a line names it."""
    return repr(names[token]) if token in names else "padding"


def end_token(module: Any) -> int:
    """The end token of a model, which it reads in place of what it lacks."""
    end = module.generation_config.eos_token_id
    found = end[0] if isinstance(end, list) and end else end
    rows = module.config.get_text_config().vocab_size
    return found if isinstance(found, int) and 0 <= found < rows else 0
