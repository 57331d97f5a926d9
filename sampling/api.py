"""The one-call functions: each checks its arguments, builds its parts and drains the loop. Plain transformers
models in, new ids out. Knows no text; a tokenizer, where one is taken, is asked for its stop ids and its size only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sampling.api_arguments import (
    Ids,
    Seed,
    Stop,
    drafter_of,
    prompt_ids,
    sampler_of,
    share,
    stop_ids_of,
    take_more,
    target_of,
)
from sampling.cascades import cascade_of
from sampling.drafters import NgramDrafter, NoDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.sampler import Coupling, DraftSampling
from sampling.types import LM, Drafter, FixedPace, Limits, Sampler
from utils.checks import whole
from utils.errors import UserError
from utils.logits_processors import LogitsProcessor

_log = logging.getLogger("sampling")


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
    **more: Any,
) -> list[int]:
    """Plain decoding: one target pass a token.

    Args:
        input_ids: the prompt, at least one id: a list, or a tensor [n] or [1, n].
        target: a transformers model, causal or encoder-decoder (or a :class:`sampling.types.Network`, or an LM).
        logits_processor: greedy if None.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end the answer (`eos_tokens_id` is the same). None:
            the model's own (and the tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        seed: an int, or a generator from which one is drawn. The global generator is never touched.
        more: `debug=True` logs every round (logger "sampling", level INFO). `use_cache` is taken either way: the
            cache is always used and changes no output.

    Returns:
        The new ids, the stop id included.

    Raises:
        UserError: an argument that cannot be used, in one line. TypeError: an unknown keyword.
    """
    debug = take_more(autoregressive_generate, more)
    lm, sampler = target_of(target), sampler_of(logits_processor, seed)
    stop = stop_ids_of(end_tokens_id, eos_tokens_id, target, tokenizer)
    return _drain(lm, input_ids, NoDrafter(), sampler, max_gen_len, stop, 0, debug)[0]


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
    **more: Any,
) -> tuple[list[int], float]:
    """Speculative decoding with a draft model: the target's own law, fewer target passes.

    Args as in :func:`autoregressive_generate`; `gamma` drafts a round. `drafter` is a model, or an object that drafts,
    such as ``MaxGramDrafter()``. Two models must share one tokenizer; padded vocabularies are cut to the shared range.
    `more` also takes ``first_target=True`` (always so) and ``skip_sample_adjustment=False``, and refuses the opposites.

    Returns:
        The new ids, and accepted / drafted (0.0 if nothing was drafted).
    """
    debug = take_more(speculative_generate, more)
    lm, way = target_of(target), drafter_of(drafter)
    lm = share(lm, [way], tokenizer)
    stop = stop_ids_of(end_tokens_id, eos_tokens_id, target, tokenizer)
    sampler = sampler_of(logits_processor, seed, coupling, draft_sampling)
    return _drain(lm, input_ids, way, sampler, max_gen_len, stop, gamma, debug)


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
    **more: Any,
) -> tuple[list[int], float]:
    """Speculative decoding with n-gram drafts: no second model.

    Args as in :func:`speculative_generate`; `ngram` is a drafter to go on with (its own settings
    hold), or None for a fresh one of `n`, `filler_top_k` and `stop_if_unknown`.
    """
    debug = take_more(ngram_assisted_speculative_generate, more)
    lm = target_of(target)
    if not (ngram is None or hasattr(ngram, "propose")):
        raise UserError(f"ngram must be an NgramDrafter or None (a fresh one), got {type(ngram).__name__}")
    way = ngram or NgramDrafter(lm.vocab_size, n=n, top_k_filler=filler_top_k, stop_if_unknown=stop_if_unknown)
    stop = stop_ids_of(end_tokens_id, eos_tokens_id, target, tokenizer)
    return _drain(lm, input_ids, way, sampler_of(logits_processor, seed), max_gen_len, stop, gamma, debug)


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
    **more: Any,
) -> tuple[list[int], float]:
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
    debug = take_more(cascade_generate, more)
    lm = target_of(target)
    ways = [drafter_of(way, f"drafter {number}") for number, way in enumerate(drafters, 1)]
    lm = share(lm, ways, tokenizer)
    way = cascade_of(ways, k_matrix, lenience)
    stop = stop_ids_of(end_tokens_id, eos_tokens_id, target, tokenizer)
    sampler = sampler_of(logits_processor, seed, coupling, draft_sampling)
    return _drain(lm, input_ids, way, sampler, max_gen_len, stop, way.most, debug)


def _drain(
    lm: LM,
    input_ids: Ids,
    drafter: Drafter,
    sampler: Sampler,
    max_gen_len: int,
    stop: frozenset[int],
    gamma: int,
    debug: bool,
) -> tuple[list[int], float]:
    """The new ids, and accepted / drafted."""
    pace = FixedPace(whole("gamma", gamma, 0, "a whole number, at least 0"))
    limits = Limits(whole("max_gen_len", max_gen_len, 1, "a whole number, at least 1"), stop, lm.context)
    ids: list[int] = []
    rounds = drafted = accepted = 0
    for event in generate(lm, [prompt_ids(input_ids)], drafter, sampler, limits, pace=pace):
        if isinstance(event, Step):
            ids.extend(event.emitted)
            drafted += len(event.drafted)
            accepted += len(event.path)
            if debug:
                kept = [event.drafted[node] for node in event.path]
                _log.info("round %d: drafted %s, accepted %s, then %s", rounds, list(event.drafted), kept, event.token)
            rounds += 1
    return ids, accepted / drafted if drafted else 0.0
