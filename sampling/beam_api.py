"""Beam search in one call: a model and a prompt in, new ids out. It only drains :func:`sampling.beam.beam_generate`."""

from __future__ import annotations

from typing import Any

from sampling.api_arguments import Ids, Stop, prompt_ids, stop_ids_of, take_more, target_of
from sampling.beam import beam_generate
from sampling.beam_plan import BeamPlan, EarlyStopping
from sampling.beam_tree import BeamTree
from sampling.events import BeamStep
from sampling.types import Limits
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
    **more: Any,
) -> list[int]:
    """The best answer that a beam search finds: score = Σ log p / ((m + len) / (m + 1))^α.

    Args:
        input_ids: the prompt, at least one id.
        model: a transformers model, causal or encoder-decoder, a :class:`sampling.types.Network`, or any
            :class:`sampling.types.LM`.
        num_beams, top_k, min_length, alpha, early_stopping: see :class:`sampling.beam_plan.BeamPlan`.
        max_gen_len: the most new ids.
        end_tokens_id: an id or several that end an answer (`eos_tokens_id` is the same). None: the model's own (and the
            tokenizer's, if given).
        pad_token_id: accepted for compatibility; nothing is padded.
        logits_processor: log p is that of its law; None or a greedy one: the model's own.
        penalty_offset: m. With 0, α is transformers' `length_penalty`.

    Returns:
        The new ids, the stop id included.

    Raises:
        UserError: an argument that cannot be used, in one line. TypeError: an unknown keyword.
    """
    take_more(beam_search_generate, more)
    lm = target_of(model)
    plan = BeamPlan(num_beams, top_k, min_length, alpha, penalty_offset, early_stopping)
    limits = Limits(max_gen_len, stop_ids_of(end_tokens_id, eos_tokens_id, model, tokenizer), lm.context)
    tree = BeamTree()
    for event in beam_generate(lm, [prompt_ids(input_ids)], limits, plan, processor=logits_processor):
        if isinstance(event, BeamStep):
            tree.add(event)
    tree.close()
    return list(tree.best.tokens)
