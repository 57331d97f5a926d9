"""The names of a GGUF file's tensors → those of transformers' modules."""

from __future__ import annotations

from utils.families import UnfitError

TABLE, HEAD = "model.embed_tokens", "lm_head"
_OUTSIDE = {"token_embd": TABLE, "output": HEAD, "output_norm": "model.norm"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
for _part in ("gate", "up", "down"):
    _INSIDE |= {f"ffn_{_part}": f"mlp.{_part}_proj", f"ffn_{_part}_exps": f"mlp.experts.{_part}_proj"}
    _INSIDE |= {f"ffn_{_part}_shexp": f"mlp.shared_expert.{_part}_proj"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_OTHERWISE = {
    **{"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": {"ffn_up": "mlp.gate_up_proj"}},
    **dict.fromkeys(("olmo2", "qwen35", "qwen35moe"), _AFTER),
}


def module_name(name: str, architecture: str = "llama") -> tuple[str, str]:
    """A tensor's name in the file → its module's in transformers, and "weight" or "bias". UnfitError for others."""
    parts = name.split(".")
    known = _OUTSIDE.get(parts[0]) if len(parts) == 2 else None
    if len(parts) == 4 and parts[0] == "blk":
        own = _OTHERWISE.get(architecture, {}).get(parts[2]) or _INSIDE.get(parts[2])
        known = own and f"model.layers.{parts[1]}.{own}"
    if known is None or parts[-1] not in ("weight", "bias"):
        raise UnfitError(f"no place for the tensor {name}")
    return known, parts[-1]
