"""Beam search in one call: a model and a prompt in, new ids out. It only drains :func:`sampling.beam.beam_generate`."""

from __future__ import annotations

from typing import Any

from sampling.api import Ids, Stop, _stop_ids
from sampling.beam import beam_generate
from sampling.beam_plan import BeamPlan, EarlyStopping
from sampling.beam_tree import BeamTree
from sampling.causal import CausalLM
from sampling.events import BeamStep
from sampling.types import LM, Limits
from utils.logits_processors import LogitsProcessor


def beam_search_generate(
    input_ids: Ids,
    model: Any,
    *,
    num_beams: int = 4,
    top_k: int = 0,
    min_length: int = 0,
    alpha: float = 1.2,
    max_gen_len: int = 100,
    end_tokens_id: Stop = None,
    eos_tokens_id: Stop = None,
    pad_token_id: int | None = None,
    tokenizer: Any = None,
    logits_processor: LogitsProcessor | None = None,
    early_stopping: EarlyStopping = False,
    penalty_offset: float = 5.0,
) -> Ids:
    """The best answer that a beam search finds: score = Σ log p / ((m + len) / (m + 1))^α.

    Args:
        input_ids: the prompt, at least one id.
        model: a transformers causal model, a :class:`sampling.types.Network`, or any :class:`sampling.types.LM`.
        num_beams, top_k, min_length, alpha, early_stopping: see :class:`sampling.beam_plan.BeamPlan`.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end an answer (`eos_tokens_id` is the same). None: the model's own (and the
            tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        logits_processor: log p is that of its law; None or a greedy one: the model's own.
        penalty_offset: m. With 0, α is transformers' `length_penalty`.

    Returns:
        The new ids, the stop id included.
    """
    lm: LM = model if hasattr(model, "open") else CausalLM(model)
    plan = BeamPlan(num_beams, top_k, min_length, alpha, penalty_offset, early_stopping)
    limits = Limits(max_gen_len, _stop_ids(end_tokens_id, eos_tokens_id, model, tokenizer), lm.context)
    tree = BeamTree()
    for event in beam_generate(lm, [list(input_ids)], limits, plan, processor=logits_processor):
        if isinstance(event, BeamStep):
            tree.add(event)
    tree.close()
    return list(tree.best.tokens)
