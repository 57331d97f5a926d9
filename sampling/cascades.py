"""Cascades as they are written down: a list of drafters, large to small, a K matrix and a lenience → one drafter
(Chen et al., arXiv 2312.11462, algorithm 1). Knows no names and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sampling.drafters.cascade import CascadeDrafter, Reviewer
from sampling.drafters.chain import ChainDrafter, Link
from sampling.drafters.feature import FeatureDrafter
from sampling.drafters.model import ModelDrafter
from sampling.types import LM, Drafter
from utils.errors import UserError
from utils.k_matrix import Matrix, check_fit, check_lenience

_ALL = 1 << 30  # a review is never cut but by the room that is left


def cascade_of(drafters: Sequence[Drafter], matrix: Any, lenience: float = 1.0) -> ChainDrafter:
    """The cascade of `drafters`, large to small, by the K matrix; λ = `lenience` holds between them only.

    All but the last review: model drafters (of which the model is taken) or models. A last one without a model is
    asked for K's last entry at a time, one with a model for what is missing. A cascade ignores gamma: a
    proposal has up to `most` tokens, and what it is asked for only cuts.

    Raises:
        UserError: no drafter, a matrix that does not fit, λ < 1, or a drafter that cannot review before the last.
    """
    if not drafters:
        raise UserError("a cascade needs at least one drafter")
    k, lenience = check_fit(matrix, len(drafters)), check_lenience(lenience)
    *reviewers, last = drafters
    call = None if isinstance(last, ModelDrafter) else k[-1][-1] or None
    links = [Link(last, 0, call, 0 if call is None else call - 1)]
    for place in range(len(reviewers) - 1, -1, -1):
        below = _chain(links, k, place + 1)
        drafter = CascadeDrafter(Reviewer(_model_of(reviewers[place])), below, lenience)
        links.insert(0, Link(drafter, 0, _ALL, below.most))
    return _chain(links, k, 0)


def chain_of(drafters: Sequence[Drafter], amounts: Sequence[int]) -> ChainDrafter:
    """Drafter i adds amounts[i] tokens behind those before it; nobody reviews but the target.

    UserError for no drafter, another number of amounts, or one below zero.
    """
    if not drafters or len(drafters) != len(amounts):
        raise UserError(f"a chain needs an amount for each of its drafters, got {len(amounts)} for {len(drafters)}")
    if min(amounts) < 0:
        raise UserError(f"the amounts of a chain must be 0 or more, got {min(amounts)}")
    return ChainDrafter([Link(drafter, amount) for drafter, amount in zip(drafters, amounts, strict=True)])


def _chain(links: Sequence[Link], k: Matrix, reviewer: int) -> ChainDrafter:
    """What `reviewer` (0 = the target) is given: the drafters after it, with the tokens of its row."""
    row = k[reviewer][reviewer:]
    return ChainDrafter([link._replace(tokens=tokens) for link, tokens in zip(links, row, strict=True)])


def _model_of(drafter: Any) -> LM:
    """What reviews: the model of a model drafter."""
    if isinstance(drafter, FeatureDrafter):
        raise UserError("feature cannot review drafts (it has no states but its target's): only the last can be one")
    model: Any = drafter.lm if isinstance(drafter, ModelDrafter) else drafter
    if not hasattr(model, "open"):
        name = drafter.names[0] if getattr(drafter, "names", ()) else type(drafter).__name__
        raise UserError(f"{name} is no model and cannot review drafts: only the last drafter of a cascade may be one")
    lm: LM = model
    return lm
