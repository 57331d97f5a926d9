"""The facts about a model that the compiled pass needs beside its weights, from a table of families.

A row of :data:`FAMILIES` says how a family's layers are built; numbers come from the configuration. :func:`facts_of`
refuses a configuration that no facts express. Rotary rules are functions of a configuration's `rope_parameters`, as
transformers has them. Reads no weights and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from utils.errors import UnfitError, holding
from utils.kernels.bindings import ACTIVATIONS, GROUP, MOST_CHOSEN, TABLES
from utils.objects import HfConfig, HfModel, Json

PRE = {"before": "input_layernorm", "between": "post_attention_layernorm"}
_POST = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_BOTH = {"before": "input_layernorm", "between": "pre_feedforward_layernorm", **_POST}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
BLOCK = 128  # positions of a table that are computed together


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of a family are built.

    `norms`: the names of its norms in a layer, by the fields of `Layer` in kernels.h. `gain_above_one`: a norm's gain
    is 1 + w. `qk_norm`: the norm of queries and keys: "" none, "head" each head separately, "all" all heads together.
    `scaled_embeddings`: they are multiplied by √hidden. `joined`: one linear layer computes queries, keys and values,
    another gate and up.
    """

    norms: Mapping[str, str] = field(default_factory=lambda: PRE)
    qk_norm: str = ""
    gain_above_one: bool = False
    scaled_embeddings: bool = False
    joined: bool = False


LLAMA = Family()
FAMILIES = {  # by the configuration's model_type
    **dict.fromkeys(("llama", "mistral", "mixtral", "smollm3", "granite", "qwen2", "qwen2_moe"), LLAMA),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Family(qk_norm="head")),
    "phi3": Family(joined=True),
    "olmo2": Family(_POST, "all"),
    "olmoe": Family(qk_norm="all"),
    "gemma2": Family(_BOTH, gain_above_one=True, scaled_embeddings=True),
    "gemma3_text": Family(_BOTH, "head", gain_above_one=True, scaled_embeddings=True),
}


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """The facts about a model: `scalars`, fields of `Pass` in kernels.h; for each layer its window (0: none), the kind
    of layers whose rotary table it uses ("" for the only table, None: none), and whether it is a mixture of experts."""

    family: Family
    scalars: Mapping[str, float]
    windows: tuple[int, ...]
    kinds: tuple[str | None, ...]
    mixtures: tuple[bool, ...]

    @property
    def rotary_dim(self) -> int:
        """The numbers of a head that are rotated."""
        return int(self.scalars["rotary_dim"])


def head_size(config: HfConfig) -> int:
    """Numbers of one head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rules_of(config: HfConfig) -> Json:
    """Return the rotary rules by the kind of layer; a single rule under an empty name."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {"": rope} if "rope_type" in rope or not rope else {kind: rule for kind, rule in rope.items() if rule}


def facts_of(config: HfConfig) -> FamilyFacts:
    """Return the facts about a causal model of `config`. UnfitError if the compiled pass cannot compute it."""
    if (family := FAMILIES.get(config.model_type)) is None:
        raise UnfitError(f"no compiled pass computes {config.model_type}")
    size, rules = head_size(config), rules_of(config)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    kinds = getattr(config, "layer_types", None)
    rotary_dims = {int(size * rule.get("partial_rotary_factor", 1.0)) for rule in rules.values()}
    if not all(is_fixed(rule) for rule in rules.values()):
        raise UnfitError("the compiled pass turns positions by one table for texts of every length")
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    chosen = config.num_experts_per_tok if experts else 0
    reasons = holding(
        {
            f"the activation {activation}": activation not in _ACTIVATIONS,
            f"layers of {', '.join(sorted(set(kinds or ())))}": set(kinds or ())
            - {"full_attention", "sliding_attention"},
            "heads, states or inner sizes that are no multiples of 32": any(
                width % GROUP
                for width in (size, *rotary_dims, config.hidden_size, config.intermediate_size, inner, shared)
            ),
            "rotary tables of several sizes": len(rotary_dims) != 1 or len(rules) > TABLES,
            f"{chosen} experts a token": chosen > MOST_CHOSEN,
            **{name: getattr(config, name, None) for name in ("clip_qkv", "use_bidirectional_attention")},
        }
    )
    if reasons:
        raise UnfitError(f"no compiled pass computes {config.model_type} as configured: {reasons[0]}")
    count = config.num_hidden_layers
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = kinds or ["sliding_attention" if sliding else "full_attention"] * count
    rescaled = getattr(config, "norm_topk_prob", None)
    dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", None) or 1
    scalars = {
        "activation": ACTIVATIONS.index(_ACTIVATIONS[activation]),
        "epsilon": config.rms_norm_eps,
        "scale": getattr(config, "attention_multiplier", None)
        or (getattr(config, "query_pre_attn_scalar", None) or size) ** -0.5,
        "embed_scale": config.hidden_size**0.5 if family.scaled_embeddings else _number(config, "embedding_multiplier"),
        "residual_scale": _number(config, "residual_multiplier"),
        "logit_scale": 1 / _number(config, "logits_scaling"),
        "logit_cap": getattr(config, "final_logit_softcapping", None) or 0.0,
        "attention_cap": getattr(config, "attn_logit_softcapping", None) or 0.0,
        "rotary_dim": rotary_dims.pop(),
        "experts": experts,
        "chosen": chosen,
        "expert_inner": inner,
        "common": shared,
        "rescaled": rescaled is None or rescaled,
    }
    return FamilyFacts(
        family,
        scalars,
        tuple(sliding or 0 if kind == "sliding_attention" else 0 for kind in kinds),
        tuple(
            (kind if kind in rules else "") if turns else None
            for kind, turns in zip(kinds, getattr(config, "no_rope_layers", None) or [1] * count, strict=True)
        ),
        tuple(bool(experts) and layer not in dense and not (layer + 1) % step for layer in range(count)),
    )


def _number(config: HfConfig, name: str) -> float:
    value = getattr(config, name, None)
    return 1.0 if value is None else float(value)


# -- rotary positions: how fast each pair of a head's dimensions rotates -----------------------------------------


def is_fixed(rope: Mapping[str, object] | None) -> bool:
    """Return whether the frequencies are the same for texts of every length."""
    rope = rope or {}
    alike = "short_factor" in rope and rope["short_factor"] == rope["long_factor"]
    return alike or rope.get("rope_type") not in ("dynamic", "longrope")  # these look at the length of the text


def frequencies(rope: Json, size: int) -> tuple[Tensor, float] | None:
    """Return radians a position [D/2] for heads of `size`, and the factor of cos and sin; None for a rule that looks at
    the length of the text, or an unknown one.

    Bit for bit those of transformers (modeling_rope_utils.py).
    """
    kind, period = rope.get("rope_type", "default"), rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if kind == "default":
        return 1.0 / period, 1.0
    if kind == "linear":
        return 1.0 / period / rope["factor"], 1.0
    if kind == "longrope" and is_fixed(rope) and rope.get("attention_factor") is not None:
        return 1.0 / (torch.tensor(rope["short_factor"]) * period), rope["attention_factor"]
    return None


def rotation_of(module: HfModel, kind: str = "") -> tuple[Tensor, float]:
    """Return frequencies [rotary_dim / 2] and factor of a transformers rotary module, for one kind of layers."""
    prefix = f"{kind}_" if kind else ""
    return getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")


def table(frequency: Tensor, scaling: float, first: int, last: int) -> Tensor:
    """cos and sin [n, D], halves side by side, of the positions from `first` to `last` or a few more.

    Positions are computed in whole blocks because torch rounds differently at the end of a tensor, and the bits must
    depend on the position alone.
    """
    positions = (torch.arange(start, start + BLOCK)[:, None].float() for start in range(first, last, BLOCK))
    angles = (position * frequency for position in positions)
    return torch.cat([torch.cat([angle.cos() * scaling, angle.sin() * scaling], dim=1) for angle in angles])
