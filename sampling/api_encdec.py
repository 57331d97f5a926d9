"""The one-call functions for encoder-decoder models (T5 and the like): those of `sampling.api`, which take such models
too, under the names that say so, and for nothing else. Knows no text.
"""

from __future__ import annotations

from typing import Any

from sampling.api import autoregressive_generate, speculative_generate
from sampling.api_arguments import Ids
from sampling.encdec_network import is_encoder_decoder
from utils.errors import UserError


def autoregressive_generate_encoder_decoder(input_ids: Ids, target: Any, **arguments: Any) -> list[int]:
    """Plain decoding with an encoder-decoder model: one pass of the encoder, one of the decoder a token.

    `input_ids` are the encoder's, with the end token that its tokenizer adds; `arguments` are those of
    :func:`sampling.api.autoregressive_generate`.

    Returns:
        The new ids, without the decoder's start token, the stop id included.

    Raises:
        UserError: `target` is no encoder-decoder model, or an argument cannot be used.
    """
    _check("target", target)
    return autoregressive_generate(input_ids, target, **arguments)


def speculative_generate_encoder_decoder(
    input_ids: Ids, drafter: Any, target: Any, tokenizer: Any = None, **arguments: Any
) -> tuple[list[int], float]:
    """Speculative decoding of an encoder-decoder model with a smaller one, each with its own encoder, run once.

    `arguments` are those of :func:`sampling.api.speculative_generate`.

    Returns:
        The new ids, without the decoder's start token, and accepted / drafted (0.0 if nothing was drafted).

    Raises:
        UserError: one of the two is no encoder-decoder model, or an argument cannot be used.
    """
    _check("target", target)
    _check("drafter", drafter)
    return speculative_generate(input_ids, drafter, target, tokenizer, **arguments)


def _check(role: str, model: Any) -> None:
    if not is_encoder_decoder(model):
        raise UserError(f"{role} must be an encoder-decoder model, got {type(model).__name__}")
