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
    from sampling.beam import beam_generate
    from sampling.beam_api import beam_search_generate
    from sampling.beam_plan import BeamPlan
    from sampling.drafters.feature import FeatureDrafter
    from sampling.drafters.glide import GlideLM
    from sampling.drafters.max_gram import MaxGramDrafter
    from sampling.engine import Engine
    from sampling.loop import generate
    from sampling.recorded import RecordedLM
    from sampling.student_network import StudentNetwork

_HOMES = {
    "Engine": "sampling.engine",
    "BeamPlan": "sampling.beam_plan",
    "FeatureDrafter": "sampling.drafters.feature",
    "GlideLM": "sampling.drafters.glide",
    "MaxGramDrafter": "sampling.drafters.max_gram",
    "RecordedLM": "sampling.recorded",
    "StudentNetwork": "sampling.student_network",
    "autoregressive_generate": "sampling.api",
    "autoregressive_generate_encoder_decoder": "sampling.api_encdec",
    "beam_generate": "sampling.beam",
    "beam_search_generate": "sampling.beam_api",
    "cascade_generate": "sampling.api",
    "generate": "sampling.loop",
    "ngram_assisted_speculative_generate": "sampling.api",
    "speculative_generate": "sampling.api",
    "speculative_generate_encoder_decoder": "sampling.api_encdec",
}

__all__ = [
    "BeamPlan",
    "Engine",
    "FeatureDrafter",
    "GlideLM",
    "MaxGramDrafter",
    "RecordedLM",
    "StudentNetwork",
    "autoregressive_generate",
    "autoregressive_generate_encoder_decoder",
    "beam_generate",
    "beam_search_generate",
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
