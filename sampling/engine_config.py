"""transformers' GenerationConfig, or a dict of its names, as what the loop is given.

What this project cannot honour is refused by name, never left out in silence; what changes no text is taken. Knows no
models: of one it reads its generation config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from utils.checks import shown, whole
from utils.errors import UserError
from utils.logits_processors import LogitsProcessor, make_processor

NEW_TOKENS = 128  # where the config says nothing

_HONOURED = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_new_tokens", "max_length", "eos_token_id"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # values that ask for nothing; None always does
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "top_h"), (1, 1.0)),
    **dict.fromkeys(("encoder_repetition_penalty", "length_penalty", "guidance_scale"), (1, 1.0)),
    **dict.fromkeys(("min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0, 0.0)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "penalty_alpha", "prompt_lookup_num_tokens"), (0, 0.0)),
    **dict.fromkeys(("early_stopping", "renormalize_logits", "remove_invalid_values", "token_healing"), (False,)),
    **dict.fromkeys(("use_mtp", "low_memory", "output_attentions", "output_hidden_states"), (False,)),
    **dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), (False,)),
}
_WITHOUT_EFFECT = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
    # of transformers' own speculative decoding, which is not asked for here
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type"),
)


@dataclass(frozen=True)
class EngineConfig:
    """What a generation config comes to. `max_length` counts the prompt, `max_new_tokens` does not and wins."""

    processor: LogitsProcessor
    max_new_tokens: int | None
    max_length: int | None
    stop: Any  # an id, several, or None

    def new_tokens(self, prompt: int) -> int:
        """The most new ids behind prompts of up to `prompt` tokens. UserError if max_length leaves none."""
        if self.max_new_tokens is not None or self.max_length is None:
            return NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens
        if self.max_length <= prompt:
            raise UserError(
                f"max_length must be above the {prompt} tokens of the longest prompt, got {self.max_length}"
            )
        return self.max_length - prompt


def read_config(given: Any) -> EngineConfig:
    """From a GenerationConfig, a dict of its names, or a model that has one.

    Raises UserError for what cannot be honoured, an unknown name in a dict and a value outside its range.
    """
    if hasattr(given, "generation_config"):
        given = given.generation_config
    if isinstance(given, Mapping):
        values = dict(given)
    elif hasattr(given, "to_dict"):
        values = given.to_dict()
    else:
        raise UserError(f"generation_config must be a GenerationConfig or a dict, got {shown(given)}")
    values = {name: value for name, value in values.items() if value is not None and not name.startswith("_")}
    for name, value in values.items():
        known = name in _HONOURED or name in _WITHOUT_EFFECT
        if not known and not any(value == neutral for neutral in _NEUTRAL.get(name, ())):
            near = [] if name in _NEUTRAL else get_close_matches(name, _HONOURED, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise UserError(f"generation_config: {name}={shown(value)} cannot be honoured here: {hint}")
    sampled = values.get("do_sample", False)
    if not isinstance(sampled, bool):
        raise UserError(f"do_sample must be True or False, got {shown(sampled)}")
    lengths = {
        name: whole(name, values[name], 1, "a whole number, at least 1") if name in values else None
        for name in ("max_new_tokens", "max_length")
    }
    return EngineConfig(_processor(values, sampled), **lengths, stop=values.get("eos_token_id"))


def _processor(values: dict[str, Any], sampled: bool) -> LogitsProcessor:
    """As transformers: greedy unless `do_sample`, and then temperature 1 and top-k 50 where nothing else is said."""
    rules: dict[str, Any] = {
        "repetition_penalty": values.get("repetition_penalty", 1.0),
        "no_repeat_ngram": values.get("no_repeat_ngram_size", 0),
    }
    if not sampled:
        return make_processor(0.0, **rules)
    numbers: dict[str, Any] = {"temperature": 1.0, "top_k": 50}
    numbers |= {name: values[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in values}
    return make_processor(**numbers, **rules)
