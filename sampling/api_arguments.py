"""What the one-call functions make of their arguments: each is checked, and refused in one line that says what to do.

Knows no decoding. Of a tokenizer only its stop ids and its size are asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import torch

from sampling.causal import CausalLM
from sampling.drafters import MaxGramDrafter, ModelDrafter
from sampling.encdec import check_same_kind, lm_of
from sampling.recorded import RecordedLM
from sampling.sampler import Coupling, DraftSampling, KeyedSampler
from sampling.types import LM, Drafter
from utils.checks import shown
from utils.errors import UserError
from utils.logits_processors import GreedyProcessor, LogitsProcessor

Ids = Sequence[int] | torch.Tensor
Stop = int | Iterable[int] | None
Seed = int | torch.Generator

PADDING = 1024
"""Two vocabularies of one tokenizer differ by less than this: rows that stand for no token."""
_REFUSED = {
    ("skip_sample_adjustment", True): "without the adjustment after a refusal the text no longer has the target's law",
    ("first_target", False): "the target always does the opening round (no drafts before the prompt is read)",
}
_TAKEN = ("use_cache", "debug", "first_target", "skip_sample_adjustment")
_MEANT = {  # names that other libraries use
    **dict.fromkeys(("inputs", "prompt", "prompt_ids"), "input_ids"),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_gen_len"),
    **dict.fromkeys(("eos_token_id", "stop", "stop_ids"), "end_tokens_id"),
    **dict.fromkeys(("temperature", "top_p", "top_k", "do_sample", "processor"), "logits_processor"),
    **dict.fromkeys(("generator", "random_seed"), "seed"),
    **dict.fromkeys(("num_assistant_tokens", "n_spec_tokens"), "gamma"),
    **dict.fromkeys(("assistant_model", "draft_model"), "drafter"),
}


def take_more(function: Callable[..., Any], more: dict[str, Any]) -> bool:
    """The arguments that change nothing or are refused; whether `debug` is on.

    Raises TypeError for an unknown keyword, with the nearest known one; UserError for a value that cannot be honoured.
    """
    names = [name for name in inspect.signature(function).parameters if name != "more"]
    for name, value in more.items():
        if name not in _TAKEN:
            meant = _MEANT.get(name, "")
            near = [meant] if meant in names else get_close_matches(name, [*names, *_TAKEN], n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'{hint}")
        if not isinstance(value, bool):
            raise UserError(f"{name} must be True or False, got {shown(value)}")
        if (name, value) in _REFUSED:
            raise UserError(f"{name}={value} is refused: {_REFUSED[name, value]}")
    return bool(more.get("debug", False))


def prompt_ids(given: Any, name: str = "input_ids") -> list[int]:
    """One prompt as ids: a sequence of ints, or a tensor [n] or [1, n]."""
    if isinstance(given, str):
        raise UserError(f"{name} must be token ids, got text: encode it first (tokenizer(text).input_ids)")
    rows = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(rows, Sequence):
        raise UserError(f"{name} must be a list of ids or a tensor of them, got {type(given).__name__}")
    if len(rows) == 1 and isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
        rows = rows[0]
    if not len(rows):
        raise UserError(f"{'the prompt' if name == 'input_ids' else name} is empty: give at least one token")
    if isinstance(rows[0], Sequence) and not isinstance(rows[0], str):
        raise UserError(f"{name} must be one prompt, got {len(rows)} rows (Engine.generate takes several)")
    wrong = next((token for token in rows if not isinstance(token, Integral) or isinstance(token, bool)), None)
    if wrong is not None:
        raise UserError(f"{name} must be whole numbers, got {shown(wrong)}")
    return [int(token) for token in rows]


def sampler_of(
    processor: LogitsProcessor | None,
    seed: Seed,
    coupling: Coupling = "rejection",
    draft_sampling: DraftSampling = "law",
) -> KeyedSampler:
    """The sampler of a call. From a generator one number is drawn; the global one is never touched."""
    if isinstance(processor, type):
        raise UserError(f"logits_processor must be an object, got the class {processor.__name__}: call it")
    if processor is not None and not (callable(processor) and hasattr(processor, "needs_prefixes")):
        raise UserError(
            f"logits_processor must be one of utils.logits_processors, got {type(processor).__name__}"
            " (GreedyProcessor(), NucleusProcessor(temperature, top_p) …)"
        )
    if isinstance(seed, torch.Generator):
        seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise UserError(f"seed must be a whole number or a torch.Generator, got {shown(seed)}")
    return KeyedSampler(processor or GreedyProcessor(), int(seed), coupling=coupling, draft_sampling=draft_sampling)


def stop_ids_of(end: Stop, eos: Stop, model: Any, tokenizer: Any = None) -> frozenset[int]:
    """What the caller named; else what the model's generation config and the tokenizer name."""
    given: list[Any] = [stop for stop in (end, eos) if stop is not None]
    if not given:
        given = [
            getattr(getattr(model, "generation_config", None), "eos_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
            getattr(model, "end_id", None),  # a recording's
        ]
    ids: set[int] = set()
    for stop in given:
        several = [] if stop is None else [stop] if isinstance(stop, Integral | str) else list(stop)
        wrong = next((one for one in several if not isinstance(one, Integral) or isinstance(one, bool)), None)
        if wrong is not None:
            raise UserError(f"end_tokens_id must be an id or several, got {shown(wrong)}")
        ids.update(map(int, several))
    return frozenset(ids)


def target_of(model: Any) -> LM:
    """The target as an LM: a transformers model, a Network, or an LM such as RecordedLM as it is."""
    return _lm(model, "target")


def drafter_of(model: Any, name: str = "drafter") -> Drafter:
    """A drafter: an object with `propose` as it is, or a model to draft from."""
    return model if hasattr(model, "propose") else ModelDrafter(_lm(model, name))


def _lm(model: Any, name: str) -> LM:
    if isinstance(model, str):
        raise UserError(f"{name} must be a model, got {shown(model)}: load it (AutoModelForCausalLM.from_pretrained)")
    if isinstance(model, type) or not any(hasattr(model, part) for part in ("open", "new_cache", "config")):
        raise UserError(f"{name} must be a transformers model, got {shown(model)}")
    return model if hasattr(model, "open") else lm_of(model, name)


def share(target: LM, drafters: Sequence[Drafter], tokenizer: Any = None) -> LM:
    """Cut the vocabularies of a target and its drafting models to the range they share; the target to decode with.

    Raises UserError for models on different devices or of different kinds, and where the sizes differ by more than
    padding.
    """
    parts = [part for one in drafters for part in getattr(one, "members", (one,))]
    models = [target, *(part.lm for part in parts if hasattr(part, "lm"))]
    check_same_kind(models)
    smallest = min(model.vocab_size for model in models)
    if isinstance(target, RecordedLM):
        models[0] = target = target.cut(smallest)  # the caller's own stays as it is
    for model in models[1:]:
        places = [getattr(one, "device", None) for one in (model, target)]
        if None not in places and places[0] != places[1]:
            raise UserError(f"{model.name} is on {places[0]}, the target on {places[1]}: move one of them")
        if isinstance(target, CausalLM) and isinstance(model, CausalLM):
            _check_sizes(model, target, tokenizer)
    for model in (*models, *(part for part in parts if isinstance(part, MaxGramDrafter))):
        model.vocab_size = smallest
    return target


def _check_sizes(model: LM, target: LM, tokenizer: Any) -> None:
    small, large = sorted((model.vocab_size, target.vocab_size))
    sizes = f"{model.name} has {model.vocab_size:,} ids, the target {target.vocab_size:,}"
    if tokenizer is not None and hasattr(tokenizer, "__len__"):
        if small != large and len(tokenizer) > small:
            raise UserError(f"different vocabularies: {sizes}, and the tokenizer {len(tokenizer):,}")
    elif large - small >= PADDING:
        raise UserError(f"different vocabularies: {sizes} (one tokenizer for both? then give it)")
