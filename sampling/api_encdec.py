"""The one-call functions for encoder-decoder models (T5 and the like): those of `sampling.api`, which take such models
too, under the names that say so, and for nothing else. Knows no text.
"""

from __future__ import annotations

from typing import Any

from sampling.api import autoregressive_generate, speculative_generate
from sampling.api_arguments import Ids, Seed, Stop
from sampling.encdec_network import is_encoder_decoder
from sampling.sampler import Coupling, DraftSampling
from utils.errors import UserError
from utils.logits_processors import LogitsProcessor


def autoregressive_generate_encoder_decoder(
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
    """Plain decoding with an encoder-decoder model: one pass of the encoder, one of the decoder a token.

    Args as in :func:`sampling.api.autoregressive_generate`; `input_ids` are the encoder's, with the end token that
    its tokenizer adds.

    Returns:
        The new ids, without the decoder's start token, the stop id included.

    Raises:
        UserError: `target` is no encoder-decoder model.
    """
    _check("target", target)
    return autoregressive_generate(
        input_ids,
        target,
        logits_processor=logits_processor,
        max_gen_len=max_gen_len,
        end_tokens_id=end_tokens_id,
        eos_tokens_id=eos_tokens_id,
        pad_token_id=pad_token_id,
        tokenizer=tokenizer,
        seed=seed,
    )


def speculative_generate_encoder_decoder(
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
    """Speculative decoding of an encoder-decoder model with a smaller one, each with its own encoder, run once.

    Args as in :func:`sampling.api.speculative_generate`.

    Returns:
        The new ids, without the decoder's start token, and accepted / drafted (0.0 if nothing was drafted).

    Raises:
        UserError: one of the two is no encoder-decoder model.
    """
    _check("target", target)
    _check("drafter", drafter)
    return speculative_generate(
        input_ids,
        drafter,
        target,
        tokenizer,
        logits_processor=logits_processor,
        gamma=gamma,
        max_gen_len=max_gen_len,
        end_tokens_id=end_tokens_id,
        eos_tokens_id=eos_tokens_id,
        pad_token_id=pad_token_id,
        seed=seed,
        coupling=coupling,
        draft_sampling=draft_sampling,
    )


def _check(role: str, model: Any) -> None:
    if not is_encoder_decoder(model):
        raise UserError(f"{role} must be an encoder-decoder model, got {type(model).__name__}")
