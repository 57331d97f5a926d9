"""Published draft heads as GGUF files, in the layout that llama.cpp's converter writes.

Sources, in the release that llama-cpp-python 0.3.36 ships: conversion/llama.py (`LlamaModel` of an EAGLE-3 head:
`target_layers`, `permute`, `d2t` as absolute ids), conversion/qwen.py (`DFlashModel`, `DSparkModel`: `target_layers`
one more than z-lab's, `sample_from_anchor`, `has_confidence_head`), gguf-py/gguf/constants.py (keys and names).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.gguf_files import add_fields, llama3_factors
from tests.support.quantized import add_tensor, closed

_INSIDE = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{"hidden_norm": "attn_norm_2", "self_attn.sinks": "attn_sinks"},
    **{"attention_conv.base_kernel": "attn_conv_base", "attention_conv.kernel_projection": "attn_conv_proj"},
    **{"mlp_conv.base_kernel": "ffn_conv_base", "mlp_conv.kernel_projection": "ffn_conv_proj"},
}
_OUTSIDE = {
    **{"norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd", "fc": "fc"},
    **{"input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm"},
    **{"markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2"},
    **{"confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden"},
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}


def name_of(published: str) -> str:
    """The file's name of a published tensor."""
    own, _, part = published.rpartition(".")
    if part not in ("weight", "bias"):
        own, part = published, ""
    if own.startswith("layers."):
        _, number, own = own.split(".", 2)
        name = f"blk.{number}.{_INSIDE[own]}"
    else:
        name = _OUTSIDE[own]
    return f"{name}.{part}" if part else name


def write_head(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    enters: Sequence[int],
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write a published head that reads what enters layers `enters`; its matrices of type `kind` where they can be."""
    inner = config.get("transformer_layer_config") or config
    told = {**config, **(config.get("dflash_config") or {})}
    eagle = "layers.0.hidden_norm.weight" in tensors
    architecture = architecture or ("eagle3" if eagle else "dflash")
    writer = gguf.GGUFWriter(str(path), architecture)
    rope = inner.get("rope_parameters") or {"rope_theta": inner["rope_theta"], **(inner.get("rope_scaling") or {})}
    said: dict[str, Any] = {
        "context_length": inner["max_position_embeddings"],
        "embedding_length": tensors["norm.weight"].shape[0],
        "block_count": 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers.")),
        "feed_forward_length": tensors["layers.0.mlp.gate_proj.weight"].shape[0],
        "attention.head_count": inner["num_attention_heads"],
        "attention.head_count_kv": inner["num_key_value_heads"],
        "attention.key_length": inner["head_dim"],
        "attention.value_length": inner["head_dim"],
        "attention.layer_norm_rms_epsilon": inner["rms_norm_eps"],
        "rope.freq_base": float(rope["rope_theta"]),
        "target_layers": [*enters],
    }
    if eagle:
        said |= {"vocab_size": inner["vocab_size"], "rope.dimension_count": inner["head_dim"]}
        said |= {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_before_fc")}
        said["target_hidden_size"] = tensors["fc.weight"].shape[1] // len(enters)
    else:
        said["block_size"] = told["block_size"]
        if told.get("causal_head"):  # the converter's `dflash_config.causal`, which JetSpec's authors call so
            said["attention.causal"] = True
        if any(kind == "sliding_attention" for kind in inner.get("layer_types") or ()):
            said["attention.sliding_window"] = inner["sliding_window"]
            said["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in inner["layer_types"]]
        names = {"selector_rank": 256, "selector_top_k": 16, "conv_group_size": 16, "conv_kernel_size": 2}
        if "candidate_selector.hidden_projection.weight" in tensors:
            said |= {name: told.get(name, usual) for name, usual in names.items()}
        if "markov_head.markov_w1.weight" in tensors:
            said["sample_from_anchor"] = told.get("sample_from_anchor", True)
            said["has_confidence_head"] = "confidence_head.proj.weight" in tensors
    _say(writer, architecture, {**said, **(metadata or {})}, inner["vocab_size"])
    if "mask_token_id" in told:
        writer.add_uint32("tokenizer.ggml.mask_token_id", told["mask_token_id"])
    if rope.get("rope_type") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        writer.add_tensor(
            "rope_freqs.weight", llama3_factors(inner["head_dim"], rope["rope_theta"], *(rope[name] for name in names))
        )
    for name, value in tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            ids = value.long() + torch.arange(len(value))
            writer.add_tensor("d2t", ids.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        values = value.float()
        if eagle and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):  # permute
            heads = inner["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        data = np.ascontiguousarray(values.numpy())
        _add(writer, name_of(name), data, "F32" if "conf_proj" in name_of(name) else kind)
    return closed(writer, path)


def write_layer(path: Path, config: Any, tensors: Mapping[str, Tensor], kind: str = "F32") -> Path:
    """Write the multi-token prediction layer of a Qwen3.5 or Qwen3-Next model, by the names that Qwen publishes, and
    what it shares with the model, as the converter does with --mtp (conversion/qwen.py, `_QwenMtpMixin`)."""
    families = {"qwen3_5_text": "qwen35", "qwen3_next": "qwen3next", "qwen3_5_moe_text": "qwen35moe"}
    architecture, layers = families[config.model_type], config.num_hidden_layers
    writer = gguf.GGUFWriter(str(path), architecture)
    widths = {"feed_forward_length": "intermediate_size", "expert_count": "num_experts"}
    widths |= {"expert_feed_forward_length": "moe_intermediate_size", "expert_used_count": "num_experts_per_tok"}
    widths["expert_shared_feed_forward_length"] = "shared_expert_intermediate_size"
    said = {
        **{"block_count": layers + 1, "nextn_predict_layers": 1, "embedding_length": config.hidden_size},
        "context_length": config.max_position_embeddings,
        **{key: getattr(config, name) for key, name in widths.items() if hasattr(config, name)},
        **{"attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads},
        **{"attention.key_length": config.head_dim, "attention.value_length": config.head_dim},
        **{"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.dimension_count": config.head_dim // 4},
        **{"rope.dimension_sections": [1, 1, 0, 0], "rope.freq_base": float(config.rope_parameters["rope_theta"])},
        **{"ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim},
        **{"ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads},
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }
    _say(writer, architecture, said, config.vocab_size)
    _add(writer, "token_embd.weight", np.zeros((config.vocab_size, config.hidden_size), np.float32), kind)
    _add(writer, "output_norm.weight", np.ones(config.hidden_size, np.float32), kind)
    outside = {"fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm"}
    outside["norm"] = "nextn.shared_head_norm"
    inside = {**_INSIDE, "post_attention_layernorm": "post_attention_norm", "mlp.gate": "ffn_gate_inp"}
    inside |= {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    inside["mlp.shared_expert_gate"] = "ffn_gate_inp_shexp"
    experts: dict[str, list[Tensor]] = {}
    for name, value in tensors.items():
        own = name.removeprefix("mtp.").removesuffix(".weight")
        values = value.float() + 1 if "norm" in own else value.float()  # renamed first: each name ends with norm
        if ".experts." in own:
            experts.setdefault(own.rpartition(".")[2].removesuffix("_proj"), []).append(values)
            continue
        file_name = outside.get(own) or inside[own.removeprefix("layers.0.")]
        values = values[0] if own.endswith("shared_expert_gate") else values
        _add(writer, f"blk.{layers}.{file_name}.weight", values.contiguous().numpy(), kind)
    for part, each in experts.items():
        _add(writer, f"blk.{layers}.ffn_{part}_exps.weight", torch.stack(each).numpy(), "F32")
    return closed(writer, path)


def write_assistant(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str = "F32") -> Path:
    """Write a Gemma 4 assistant (conversion/gemma.py: `Gemma4AssistantModel`, whose norms are not shifted, and
    `Gemma4Model.generate_extra_tensors`)."""
    writer, text = gguf.GGUFWriter(str(path), "gemma4-assistant"), config["text_config"]
    windowed = [layer == "sliding_attention" for layer in text["layer_types"]]
    large = next(tensors[f"model.layers.{at}.self_attn.q_norm.weight"].shape[0] for at in range(2) if not windowed[at])
    said = {
        "context_length": text["max_position_embeddings"], "embedding_length": text["hidden_size"], "block_count": 2,
        "feed_forward_length": text["intermediate_size"], "attention.head_count": text["num_attention_heads"],
        "attention.head_count_kv": text["num_key_value_heads"],
        "attention.shared_kv_layers": text["num_kv_shared_layers"],
        "attention.layer_norm_rms_epsilon": text["rms_norm_eps"], "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": windowed, "attention.key_length": large, "attention.value_length": large,
        "attention.key_length_swa": text["head_dim"], "attention.value_length_swa": text["head_dim"],
        "rope.freq_base": float(text["rope_parameters"]["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(text["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": large, "rope.dimension_count_swa": text["head_dim"], "nextn_predict_layers": 2,
        "embedding_length_out": config["backbone_hidden_size"], "embedding_length_per_layer_input": 0,
    }  # fmt: skip
    _say(writer, "gemma4-assistant", said, text["vocab_size"])
    turned = int(large * text["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (large // 2 - turned), np.float32))
    after = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
    inside = {**_INSIDE, **after, "pre_feedforward_layernorm": "ffn_norm", "layer_scalar": "layer_output_scale"}
    for name, value in tensors.items():
        own = name.removeprefix("model.").removesuffix(".weight")
        if own.startswith("layers."):
            _, number, own = own.split(".", 2)
            own = f"blk.{number}.{inside[own]}"
        else:
            own = {"norm": "output_norm", "embed_tokens": "token_embd"}.get(own, f"nextn.{own}")
        _add(writer, f"{own}.weight", value.float().numpy(), kind)
    return closed(writer, path)


def _say(writer: Any, architecture: str, said: Mapping[str, Any], tokens: int) -> None:
    add_fields(writer, architecture, said)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(tokens)])
    writer.add_token_merges(["t 0"])


def _add(writer: Any, name: str, data: np.ndarray, kind: str) -> None:
    add_tensor(writer, name, data, "F32" if data.ndim != 2 or data.shape[1] % 32 else kind)
