"""Decoding: token ids and tensors only. No text, no printing. Importing the package is cheap:
torch is imported when one of the names below is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sampling.api import (
        autoregressive_generate,
        autoregressive_generate_encoder_decoder,
        beam_search_generate,
        cascade_generate,
        ngram_assisted_speculative_generate,
        speculative_generate,
        speculative_generate_encoder_decoder,
        speculative_stream,
    )
    from sampling.beam.plan import BeamPlan
    from sampling.beam.search import beam_generate
    from sampling.drafters.draft_heads.eagle import FeatureDrafter
    from sampling.drafters.draft_heads.glide import GlideLM
    from sampling.drafters.draft_heads.network import StudentNetwork
    from sampling.drafters.max_gram import MaxGramDrafter
    from sampling.drafters.tables.ngram import NGramStorage, OneLevelNGramStorage
    from sampling.engine import Engine
    from sampling.inference_engine import InferenceConfig, InferenceEngine
    from sampling.loop import generate
    from sampling.recorded.target import RecordedLM

_HOMES = {
    "Engine": "sampling.engine",
    "BeamPlan": "sampling.beam.plan",
    "FeatureDrafter": "sampling.drafters.draft_heads.eagle",
    "GlideLM": "sampling.drafters.draft_heads.glide",
    "InferenceConfig": "sampling.inference_engine",
    "InferenceEngine": "sampling.inference_engine",
    "MaxGramDrafter": "sampling.drafters.max_gram",
    "NGramStorage": "sampling.drafters.tables.ngram",
    "OneLevelNGramStorage": "sampling.drafters.tables.ngram",
    "RecordedLM": "sampling.recorded.target",
    "StudentNetwork": "sampling.drafters.draft_heads.network",
    "autoregressive_generate": "sampling.api",
    "autoregressive_generate_encoder_decoder": "sampling.api",
    "beam_generate": "sampling.beam.search",
    "beam_search_generate": "sampling.api",
    "cascade_generate": "sampling.api",
    "generate": "sampling.loop",
    "ngram_assisted_speculative_generate": "sampling.api",
    "speculative_generate": "sampling.api",
    "speculative_generate_encoder_decoder": "sampling.api",
    "speculative_stream": "sampling.api",
}

__all__ = [
    "BeamPlan",
    "Engine",
    "FeatureDrafter",
    "GlideLM",
    "InferenceConfig",
    "InferenceEngine",
    "MaxGramDrafter",
    "NGramStorage",
    "OneLevelNGramStorage",
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
    "speculative_stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sampling' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
