"""The one-call functions: each builds its parts and drains the loop. Plain transformers models in,
new ids out. Knows no text; a tokenizer, where one is taken, is asked for its stop ids only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sampling.cascades import cascade_of
from sampling.drafters import MaxGramDrafter, ModelDrafter, NgramDrafter, NoDrafter
from sampling.encdec import check_same_kind, lm_of
from sampling.events import Step
from sampling.loop import generate
from sampling.recorded import RecordedLM
from sampling.sampler import Coupling, DraftSampling, KeyedSampler
from sampling.types import LM, Drafter, FixedPace, Limits, Sampler
from utils.errors import UserError
from utils.logits_processors import GreedyProcessor, LogitsProcessor

Ids = list[int]
Stop = int | Iterable[int] | None
Seed = int | torch.Generator


def autoregressive_generate(
    input_ids: Ids,
    target: Any,
    *,
    logits_processor: LogitsProcessor | None = None,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    seed: Seed = 0,
) -> Ids:
    """Plain decoding: one target pass a token.

    Args:
        input_ids: the prompt, at least one id.
        target: a transformers model, causal or encoder-decoder (or a :class:`sampling.types.Network`).
        logits_processor: greedy if None.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end the answer (`eos_tokens_id` is the same). None:
            the model's own (and the tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        seed: an int, or a generator from which one is drawn. The global generator is never touched.

    Returns:
        The new ids, the stop id included.
    """
    lm = lm_of(target)
    stop = _stop_ids(end_tokens_id, eos_tokens_id, target, tokenizer)
    return _drain(lm, input_ids, NoDrafter(), _sampler(logits_processor, seed), max_gen_len, stop, 0)[0]


def speculative_generate(
    input_ids: Ids,
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    gamma: int = 4,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
) -> tuple[Ids, float]:
    """Speculative decoding with a draft model: the target's own law, fewer target passes.

    Args as in :func:`autoregressive_generate`; `gamma` drafts a round. The two models must share
    one tokenizer; padded vocabularies are cut to the shared range.

    Returns:
        The new ids, and accepted / drafted (0.0 if nothing was drafted).
    """
    lm, small = lm_of(target), lm_of(drafter, "drafter")
    check_same_kind([lm, small])
    lm.vocab_size = small.vocab_size = min(lm.vocab_size, small.vocab_size)
    way = ModelDrafter(small)
    stop = _stop_ids(end_tokens_id, eos_tokens_id, target, tokenizer)
    sampler = _sampler(logits_processor, seed, coupling, draft_sampling)
    return _drain(lm, input_ids, way, sampler, max_gen_len, stop, gamma)


def ngram_assisted_speculative_generate(
    input_ids: Ids,
    ngram: NgramDrafter | None,
    target: Any,
    tokenizer: Any = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    gamma: int = 4,
    n: int = 3,
    filler_top_k: int = 3,
    stop_if_unknown: bool = True,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
) -> tuple[Ids, float]:
    """Speculative decoding with n-gram drafts: no second model.

    Args as in :func:`speculative_generate`; `ngram` is a drafter to go on with (its own settings
    hold), or None for a fresh one of `n`, `filler_top_k` and `stop_if_unknown`.
    """
    lm = lm_of(target)
    way = ngram or NgramDrafter(lm.vocab_size, n=n, top_k_filler=filler_top_k, stop_if_unknown=stop_if_unknown)
    stop = _stop_ids(end_tokens_id, eos_tokens_id, target, tokenizer)
    return _drain(lm, input_ids, way, _sampler(logits_processor, seed), max_gen_len, stop, gamma)


def cascade_generate(
    input_ids: Ids,
    drafters: Sequence[Any],
    target: Any,
    k_matrix: Sequence[Sequence[int]],
    lenience: float = 1.0,
    max_gen_len: int = 200,
    *,
    tokenizer: Any = None,
    logits_processor: LogitsProcessor | None = None,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    seed: Seed = 0,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
) -> tuple[Ids, float]:
    """Cascade Speculative Drafting (Chen et al., arXiv 2312.11462, algorithm 1).

    Args as in :func:`speculative_generate`, and:
        drafters: large to small; transformers models, or drafters such as ``MaxGramDrafter()``. All but the last
            review the drafts of those behind them, so they must be models.
        target: a transformers model, or a :class:`sampling.recorded.RecordedLM` for greedy decoding.
        k_matrix: row r is the reviewer (0 = the target), column c says how many more tokens drafter c + 1 adds.
        lenience: λ ≥ 1 of the reviews between drafters; the target's own are exact whatever it is.

    Returns:
        The new ids, and accepted / drafted of the target's reviews.
    """
    lm: LM = target if isinstance(target, RecordedLM) else lm_of(target)
    ways = [
        way if hasattr(way, "propose") else ModelDrafter(lm_of(way, f"drafter {number}"))
        for number, way in enumerate(drafters, 1)
    ]
    models = [way.lm for way in ways if isinstance(way, ModelDrafter)]
    check_same_kind([lm, *models])
    size = min(one.vocab_size for one in (lm, *models))
    if isinstance(lm, RecordedLM):
        lm = RecordedLM(lm.answers, lm.end_id, size, lm.name, lm.context)
    for model in (lm, *models):
        model.vocab_size = size
    for way in ways:
        if isinstance(way, MaxGramDrafter):
            way.vocab_size = size
    drafter = cascade_of(ways, k_matrix, lenience)
    stop = _stop_ids(end_tokens_id, eos_tokens_id, target, tokenizer)
    sampler = _sampler(logits_processor, seed, coupling, draft_sampling)
    return _drain(lm, input_ids, drafter, sampler, max_gen_len, stop, drafter.most)


def _sampler(
    processor: LogitsProcessor | None,
    seed: Seed,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
) -> KeyedSampler:
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    return KeyedSampler(processor or GreedyProcessor(), seed, coupling=coupling, draft_sampling=draft_sampling)


def _drain(
    lm: LM, input_ids: Ids, drafter: Drafter, sampler: Sampler, max_gen_len: int, stop: frozenset[int], gamma: int
) -> tuple[Ids, float]:
    """The new ids, and accepted / drafted."""
    if gamma < 0:
        raise UserError(f"gamma must be at least 0, got {gamma}")
    limits = Limits(max_gen_len, stop, lm.context)
    ids: Ids = []
    drafted = accepted = 0
    for event in generate(lm, [list(input_ids)], drafter, sampler, limits, pace=FixedPace(gamma)):
        if isinstance(event, Step):
            ids.extend(event.emitted)
            drafted += len(event.drafted)
            accepted += len(event.path)
    return ids, accepted / drafted if drafted else 0.0


def _stop_ids(end: Stop, eos: Stop, model: Any, tokenizer: Any) -> frozenset[int]:
    """What the caller named; else what the model's generation config and the tokenizer name."""
    given: list[Any] = [stop for stop in (end, eos) if stop is not None]
    if not given:
        given = [
            getattr(getattr(model, "generation_config", None), "eos_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
            getattr(model, "end_id", None),  # a recording's
        ]
    ids: set[int] = set()
    for stop in given:
        if stop is not None:
            ids.update([stop] if isinstance(stop, int) else stop)
    return frozenset(ids)
