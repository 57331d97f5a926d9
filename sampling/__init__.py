"""Decoding: token ids and tensors only. No text, no printing. Importing the package is cheap:
torch is imported when one of the names below is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sampling.api import (
        autoregressive_generate,
        cascade_generate,
        ngram_assisted_speculative_generate,
        speculative_generate,
    )
    from sampling.api_encdec import autoregressive_generate_encoder_decoder, speculative_generate_encoder_decoder
    from sampling.drafters.feature import FeatureDrafter
    from sampling.drafters.glide import GlideLM
    from sampling.drafters.max_gram import MaxGramDrafter
    from sampling.engine import Engine
    from sampling.loop import generate
    from sampling.recorded import RecordedLM
    from sampling.student_network import StudentNetwork

_HOMES = {
    "Engine": "sampling.engine",
    "FeatureDrafter": "sampling.drafters.feature",
    "GlideLM": "sampling.drafters.glide",
    "MaxGramDrafter": "sampling.drafters.max_gram",
    "RecordedLM": "sampling.recorded",
    "StudentNetwork": "sampling.student_network",
    "autoregressive_generate": "sampling.api",
    "autoregressive_generate_encoder_decoder": "sampling.api_encdec",
    "cascade_generate": "sampling.api",
    "generate": "sampling.loop",
    "ngram_assisted_speculative_generate": "sampling.api",
    "speculative_generate": "sampling.api",
    "speculative_generate_encoder_decoder": "sampling.api_encdec",
}

__all__ = [
    "Engine",
    "FeatureDrafter",
    "GlideLM",
    "MaxGramDrafter",
    "RecordedLM",
    "StudentNetwork",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "cascade_generate",
    "generate",
    "ngram_assisted_speculative_generate",
    "speculative_generate",
    "speculative_generate_encoder_decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sampling' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
