"""Whether a drafter can draft for a target: the same tokens under the same ids. Knows no decoding."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

from utils.loading.loaded import LoadedModel


class Vocabulary(Protocol):
    """The one question asked of a tokenizer."""

    def get_vocab(self) -> dict[str, int]: ...


def spoken_ids(target: LoadedModel, tokenizer: Vocabulary) -> int:
    """How many ids may be said, 0 … n-1: the target has logits for more where its vocabulary is padded."""
    return min(target.vocab_size, max(tokenizer.get_vocab().values(), default=target.vocab_size - 1) + 1)


def check_fit(
    target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[Vocabulary | None, Vocabulary | None]
) -> list[str]:
    """Why the drafter does not fit, in lines for the user; empty if it does.

    `tokenizers` are the target's and the drafter's. Ids are compared one by one, added and special tokens too; where
    vocabularies end may differ, and a token of the target's that the drafter has no id for is one that it never drafts.
    """
    ours, theirs = tokenizers
    if ours is None or theirs is None:
        if target.vocab_size == drafter.vocab_size:
            return []
        missing = target.name if ours is None else drafter.name
        return [
            f"{missing} has no tokenizer files and the vocabularies differ in size "
            f"({target.name} {target.vocab_size}, {drafter.name} {drafter.vocab_size})"
        ]
    shared = min(target.vocab_size, drafter.vocab_size)
    mine, yours = _by_id(ours), _by_id(theirs)
    for token_id in range(max([-1, *mine, *yours]) + 1):
        here, there = mine.get(token_id), yours.get(token_id)
        if token_id < shared and here != there:
            return [
                f"the vocabularies of {target.name} and {drafter.name} differ: "
                f"id {token_id} is {_shown(here)} and {_shown(there)}"
            ]
        if token_id >= shared and there is not None and here != there:
            return [
                f"token {_shown(there)} (id {token_id}) lies outside the vocabulary "
                f"both models have ({target.name} {target.vocab_size}, {drafter.name} {drafter.vocab_size})"
            ]
    return []


def fit_notes(
    target: LoadedModel, drafter: LoadedModel, tokenizers: tuple[Vocabulary | None, Vocabulary | None]
) -> list[str]:
    """What fits, but is worth a line: a shorter context, an assumption made."""
    notes = []
    if drafter.context < target.context:
        notes.append(
            f"{drafter.name} has a context of {drafter.context} tokens, {target.name} {target.context}: "
            f"the pair runs with {drafter.context}"
        )
    if None in tokenizers:
        bare = target.name if tokenizers[0] is None else drafter.name
        notes.append(f"{bare} has no tokenizer files: assumed to use the other model's, as the sizes agree")
    return notes


def fingerprint(tokenizer: Vocabulary) -> str:
    """Sixteen hexadecimal digits that differ between tokenizers whose ids mean different tokens."""
    listed = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(listed).encode("ascii")).hexdigest()[:16]


def _by_id(tokenizer: Vocabulary) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _shown(token: Any) -> str:
    return "no token" if token is None else repr(token)
