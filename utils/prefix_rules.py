"""Rules that change the score of an id by the tokens before it: repetition penalty and no-repeat n-grams.

Both as transformers defines them: the tokens before are the whole prefix, the prompt included. Under speculation
that prefix is the committed tokens and the drafts before the position (ALGORITHMS of this project, section 1), which
is why the caller gives one for each law. Knows no models, no sampling and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def penalise(scores: Tensor, prefixes: Sequence[Sequence[int]], penalty: float) -> None:
    """Divide the positive scores of ids in the prefix by `penalty` and multiply the negative ones, in place.

    scores [M, V] with M prefixes; penalty above 0, above 1 discourages (Keskar et al., arXiv 1909.05858, section 4.1).
    """
    at = _places(scores, (set(prefix) for prefix in prefixes))
    flat = scores.view(-1)
    said = flat[at]
    flat[at] = torch.where(said < 0, said * penalty, said / penalty)


def ban_repeats(scores: Tensor, prefixes: Sequence[Sequence[int]], n: int) -> None:
    """Give -inf to every id that would end an n-gram the prefix already holds, in place; scores [M, V].

    Where that would leave no id at all nothing is banned: there is always a law to draw from.
    """
    banned = scores.clone()
    banned.view(-1)[_places(scores, (followers(prefix, n) for prefix in prefixes))] = -torch.inf
    left = (banned > -torch.inf).any(dim=-1, keepdim=True)
    scores.copy_(torch.where(left, banned, scores))


def followers(prefix: Sequence[int], n: int) -> set[int]:
    """The ids that stand behind an earlier occurrence of the prefix's last n - 1 tokens."""
    if len(prefix) < n:
        return set()
    tail = list(prefix[len(prefix) - n + 1 :])
    if not tail:
        return set(prefix)
    found: set[int] = set()
    last, end = tail[-1], n - 2
    while True:
        try:
            end = prefix.index(last, end, len(prefix) - 1)
        except ValueError:
            return found
        if list(prefix[end - n + 2 : end + 1]) == tail:
            found.add(prefix[end + 1])
        end += 1


def _places(scores: Tensor, ids: Iterable[Iterable[int]]) -> Tensor:
    """Indices into scores.view(-1) of these ids of each row; what is no id of the vocabulary (-1) is left out."""
    size = scores.shape[-1]
    flat = [row * size + token for row, tokens in enumerate(ids) for token in tokens if 0 <= token < size]
    return torch.tensor(flat, dtype=torch.long, device=scores.device)
