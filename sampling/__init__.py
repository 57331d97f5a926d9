"""Decoding, on token ids and tensors. Text only by a given tokenizer (engines, stop strings, models in a server or of
another vocabulary). No printing. Importing the package is cheap: it imports neither its modules nor torch before a name
of `_MODULES` is first used."""

from importlib import import_module
from typing import Any

_MODULES = {
    "BeamPlan": "sampling.beam",
    "Engine": "sampling.engine",
    "FeatureDrafter": "sampling.drafters.draft_heads.eagle",
    "GlideLM": "sampling.drafters.draft_heads.glide",
    "InferenceConfig": "sampling.inference_engine",
    "InferenceEngine": "sampling.inference_engine",
    "MaxGramDrafter": "sampling.drafters.max_gram",
    "NGramStorage": "sampling.drafters.tables.ngram",
    "OneLevelNGramStorage": "sampling.drafters.tables.ngram",
    "RecordedLM": "sampling.recorded",
    "StopStrings": "sampling.stops",
    "StudentNetwork": "sampling.drafters.draft_heads.network",
    "autoregressive_generate": "sampling.api",
    "autoregressive_generate_encoder_decoder": "sampling.api",
    "beam_generate": "sampling.beam",
    "beam_search_generate": "sampling.api",
    "cascade_generate": "sampling.api",
    "generate": "sampling.loop",
    "ngram_assisted_speculative_generate": "sampling.api",
    "speculative_generate": "sampling.api",
    "speculative_generate_encoder_decoder": "sampling.api",
}


__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sampling' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
