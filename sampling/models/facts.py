"""What the compiled pass must know of a transformers model beside its weights: a table of facts by family.

A row of :data:`FAMILIES` says how a family's layers are put together; numbers come from the configuration. A model that
says something no fact expresses has no row, or is refused by :func:`facts_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from utils.kernels.bindings import TABLES
from utils.rotary import is_fixed

PRE = {"before": "input_layernorm", "between": "post_attention_layernorm"}
_POST = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {"before": "input_layernorm", "between": "pre_feedforward_layernorm", **_POST}
_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family has norms, by the field that they are in the pass; whether a norm's gain is 1 + w; whether the
    norms of queries and keys are those of all heads together; whether embeddings are multiplied by √hidden."""

    norms: Mapping[str, str] = field(default_factory=lambda: PRE)
    gain_above_one: bool = False
    wide_norm: bool = False
    scaled_embeddings: bool = False


LLAMA = Family()
FAMILIES = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Phi3"), LLAMA),
    "Olmo2": Family(_POST, wide_norm=True),
    "Gemma2": Family(_BOTH, gain_above_one=True, scaled_embeddings=True),
    "Gemma3": Family(_BOTH, gain_above_one=True, scaled_embeddings=True),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """`scalars` are fields of the pass; of each layer its window (0: none) and which of `rotary` turns it (-1: none).
    A table of `rotary` is frequencies [D/2] and the factor of cos and sin."""

    family: Family
    scalars: Mapping[str, float]
    windows: tuple[int, ...]
    tables: tuple[int, ...]
    rotary: tuple[tuple[Tensor, float], ...]


def facts_of(model: Any, size: int) -> Facts | None:
    """The facts of a causal model whose heads have `size` numbers; None where the compiled pass does not compute it."""
    config = model.config.get_text_config(decoder=True)
    family = FAMILIES.get(_family(model, config))
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    rope = getattr(config, "rope_parameters", None) or {}
    rules = [rule for rule in (rope.values() if "rope_type" not in rope and rope else [rope]) if isinstance(rule, dict)]
    if family is None or activation not in _ACTIVATIONS or not all(is_fixed(rule) for rule in rules):
        return None
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if set(kinds or ()) - {"full_attention", "sliding_attention"}:
        return None
    kinds = kinds or ["sliding_attention" if sliding else "full_attention"] * count
    rotary = _rotary(model.model.rotary_emb, kinds)
    turned = {2 * len(frequencies) for frequencies, _ in rotary.values()}
    if len(turned) != 1 or len(rotary) > TABLES or turned.pop() % 32:
        return None
    names, turning = list(rotary), getattr(config, "no_rope_layers", None) or [1] * count
    scale = getattr(config, "query_pre_attn_scalar", None) or size
    scalars = {
        "activation": _ACTIVATIONS[activation],
        "epsilon": config.rms_norm_eps,
        "scale": getattr(config, "attention_multiplier", None) or scale**-0.5,
        "embed_scale": config.hidden_size**0.5 if family.scaled_embeddings else _number(config, "embedding_multiplier"),
        "residual_scale": _number(config, "residual_multiplier"),
        "logit_scale": 1 / _number(config, "logits_scaling"),
        "logit_cap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "attention_cap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "turned": 2 * len(rotary[names[0]][0]),
    }
    return Facts(
        family,
        scalars,
        tuple(sliding or 0 if kind == "sliding_attention" else 0 for kind in kinds),
        tuple(
            names.index(kind if kind in rotary else "") if turns else -1
            for kind, turns in zip(kinds, turning, strict=True)
        ),
        tuple(rotary.values()),
    )


def _family(model: Any, config: Any) -> str:
    """By its class, or by its configuration where it is one of ours."""
    name = type(model).__name__
    if name == "PackedModel":
        return {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}.get(config.model_type, "")
    return name.removesuffix("ForCausalLM") if type(model).__module__.startswith("transformers.") else ""


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


def _rotary(module: Any, kinds: list[str]) -> dict[str, tuple[Tensor, float]]:
    """Frequencies and factors, by the kind of layer where these differ, else under an empty name."""
    if hasattr(module, "inv_freq"):
        return {"": (module.inv_freq, module.attention_scaling)}
    return {
        kind: (getattr(module, f"{kind}_inv_freq"), getattr(module, f"{kind}_attention_scaling"))
        for kind in dict.fromkeys(kinds)
    }
