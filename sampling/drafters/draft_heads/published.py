"""Translates published EAGLE and block heads into our configuration and tensor names, and our EAGLE-3, DFlash and
DSpark heads into the published format.

EAGLE-1 and 2 (Li et al., arXiv 2401.15077, 2406.16858): `fc` [H, 2H], `layers.i`, the first without an input norm.
EAGLE-3 (arXiv 2503.01840) in three namings: `midlayer.*` (its authors, SpecForge), `layers.0.*` (speculators), and
either with the prefix `model.`. Shapes come from the weights, not from `config.json`, which in one published head gives
40 layers instead of 1. The format written is that of *speculators* 0.9.0, without the embedding (the target's).
DFlash, DSpark and DFlash2 in three namings: z-lab's (`dflash_config` in a Qwen3 configuration), DeepSpec's
(`target_layer_ids` and `markov_rank` at the top of one), and *speculators*' (`speculators_model_type`,
`aux_hidden_state_layer_ids`). The first two number the layers whose output is read, the third numbers inputs of layers,
one more. Tensors have the same names in all.
Knows neither files nor modules; a head that does not fit is refused by name.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.objects import HfConfig, HfModel, Json, nested

_OTHERS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # no parameters of the head
_ROPE = ("default", "linear", "yarn", "llama3")  # functions of the position; others depend on length or on images
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def require(fits: bool, folder: str | Path, why: str) -> None:
    """Raise UserError, the drafter's folder and `why`, unless a head fits."""
    if not fits:
        raise UserError(f"the drafter {folder}{why}")


def translated(
    stored: Json, tensors: dict[str, Tensor], large: HfModel, folder: Path
) -> tuple[Json, dict[str, Tensor]]:
    """Return the configuration in our keys and the tensors by our names, with `lm_head.ids` for a reduced vocabulary.

    `large` is the target's configuration. UserError for another kind of head, or one for a target of another size.
    """
    kind = stored.get("speculators_model_type", "eagle3")
    require(kind in ("eagle", "eagle3", "peagle"), folder, f" is a {kind} head, which is not read")
    inner = stored.get("transformer_layer_config") or stored
    own = named(tensors, folder, "EAGLE")
    wide = f"{_FIRST}hidden_norm.weight" in own
    slides = "sliding_attention" in (inner.get("layer_types") or ())
    require(not slides, folder, " has sliding_attention layers, which are not read")
    reads = _reads(stored, large.num_hidden_layers, folder) if wide else (-1,)
    _check_switches(stored, inner, own, wide, folder)
    config = {
        "kind": "eagle",
        **shape(stored, own, tensors, large, folder, reads, 0 if wide else len(own["model.fc.weight"])),
        "wide": wide,
        "fc_bias": "model.fc.bias" in own,
        "final_norm": "model.norm.weight" in own,
        **{name: bool(stored.get(name, inner.get(name, False))) for name in _SWITCHES},
        "norm_before_fc": "model.input_norm.weight" in own,
        "fc_norm": "model.fc_norm.0.weight" in own,
    }
    if kind == "peagle":
        config |= parallel(stored, own, config["vocab_size"], folder)
    return reduced(config, own, tensors, folder)


def named(tensors: dict[str, Tensor], folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the head's own tensors by our names. UserError if one of those that define its shape is missing."""
    own = {our_name(name): value for name, value in tensors.items() if name not in _OTHERS}
    if (missing := next((name for name in _NEEDED if name not in own), None)) is not None:
        raise UserError(f"the drafter {folder} is no {kind} head that can be read: it lacks {missing[6:]}")
    return own


def shape(
    stored: Json,
    own: dict[str, Tensor],
    tensors: dict[str, Tensor],
    large: HfModel,
    folder: Path,
    reads: tuple[int, ...],
    beside: int = 0,
) -> Json:
    """Return the part of the configuration that all published heads have, with the sizes of the weights.

    `reads`: the target's states that enter `fc` [H, K·G], after `beside` other columns. UserError for a head that is
    not read, or for a target of another size.
    """
    inner = stored.get("transformer_layer_config") or stored
    fc, q, k, gate = (own[name] for name in _NEEDED)
    require(fc.dim() == 2, folder, " is quantized by another program, which is not read")
    activation = inner.get("hidden_act", "silu")
    require(activation in ("silu", "swish"), folder, f" has the activation {activation}, which is not read: silu is")
    norm = own.get(f"{_FIRST}self_attn.q_norm.weight")
    size = inner.get("head_dim") or q.shape[0] // int(inner["num_attention_heads"]) if norm is None else len(norm)
    states, made_for = fc.shape[1] - beside, f" ({verifier(stored)})" if verifier(stored) else ""
    if states != len(reads) * large.hidden_size:
        width = stored.get("target_hidden_size") or states / len(reads)
        theirs = f"a target of hidden size {width:g}{made_for}"
        raise UserError(f"the drafter {folder} is for {theirs}, this one has {large.hidden_size}")
    vocabulary = next((len(by_id) for by_id in (tensors.get("t2d"), own.get(_EMBEDDING)) if by_id is not None), None)
    config = {
        "vocab_size": vocabulary or inner.get("vocab_size"),
        "hidden_size": fc.shape[0],
        "intermediate_size": gate.shape[0],
        "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in own if name.startswith("model.layers.")),
        "num_attention_heads": q.shape[0] // size,
        "num_key_value_heads": k.shape[0] // size,
        "head_dim": size,
        "large_hidden_size": large.hidden_size,
        # Nothing is learned by position: a head of a short context drafts to the end of its target's.
        "max_position_embeddings": max(_context(inner), _context(large)),
        "rms_norm_eps": inner.get("rms_norm_eps", 1e-6),
        **_rope(inner, folder),
        "reads": reads,
        **{key: f"{_FIRST}{part}.bias" in own for key, part in _BIASES.items()},
        "qk_norm": norm is not None,
        "shared_embedding": _EMBEDDING not in own,
        "shared_head": _HEAD not in own,
    }
    theirs = f" is for a vocabulary of {config['vocab_size']} ids{made_for}"
    require(config["vocab_size"] == large.vocab_size, folder, f"{theirs}, this one has {large.vocab_size}")
    return config


def _check_switches(stored: Json, inner: Json, own: dict[str, Tensor], wide: bool, folder: Path) -> None:
    """Raise UserError if a tensor is missing that the format always has, or that the configuration announces."""
    needed = {
        "model.norm.weight": wide,
        "model.fc.bias": stored.get("bias") and not wide,
        _EMBEDDING: stored.get("embed_requires_grad"),
        "model.input_norm.weight": stored.get("norm_before_fc", inner.get("norm_before_fc")),
        "model.fc_norm.0.weight": stored.get("fc_norm", inner.get("fc_norm")),
    }
    missing = [name.removeprefix("model.") for name, needs in needed.items() if needs and name not in own]
    require(not missing, folder, f" is no EAGLE head that can be read: it lacks {', '.join(missing)}")


_FIRST = "model.layers.0."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BIASES = {"attention_bias": "self_attn.q_proj", "output_bias": "self_attn.o_proj", "mlp_bias": "mlp.gate_proj"}
_NEEDED = (
    *("model.fc.weight", f"{_FIRST}self_attn.q_proj.weight", f"{_FIRST}self_attn.k_proj.weight"),
    f"{_FIRST}mlp.gate_proj.weight",
)


def our_name(name: str) -> str:
    """Return our name for a published one: `model.` before all but the head, the middle layer as the first."""
    bare = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    return bare if bare.startswith("lm_head.") else f"model.{bare}"


def verifier(stored: Json) -> str:
    """Return the name of the target that a head was made for, as speculators writes it; "" if it has none."""
    name = nested(stored, "speculators_config", "verifier", "name_or_path")
    return name if isinstance(name, str) else ""


def check_verifier(stored: Json, target: str | None, folder: Path) -> None:
    """Raise UserError if a head was made for a target of another name than `target`, a hub id; None: no check."""
    made_for = verifier(stored)
    other = (
        target and made_for.count("/") == 1 and made_for.lower().rpartition("/")[2] != target.lower().rpartition("/")[2]
    )
    require(not other, folder, f" is for {made_for}, this target is {target} (a target's folder has no name)")


def _reads(stored: Json, layers: int, folder: Path) -> tuple[int, ...]:
    """Return the target's states that EAGLE-3 reads, as `sampling.types.Hidden` numbers them, in the order of its `fc`.

    The authors read the inputs of layers 2, n//2 and n−3 (EAGLE's modeling_llama_kv.py); speculators and vLLM store
    numbers of the same meaning (`resolve_target_layer_ids`; n is the output of the last layer). SpecForge and ModelOpt
    store in `eagle_config` the layers whose *output* is read; SGLang adds one when it loads those ("we plus 1 here",
    `set_eagle3_layers_to_capture`). Numbers equal to the authors' choice, or to it less one, mean that choice.
    """
    usual = usual_reads(layers)
    inner = nested(stored, "eagle_config", "eagle_aux_hidden_state_layer_ids")
    named = stored.get("eagle_aux_hidden_state_layer_ids") or inner or []
    three = " reads three layers of its target and names none"
    require(bool(named) or len(usual) == 3, folder, f"{three}: one of {layers} layers has no three for it")
    ids, before = list(named or usual), [layer - 1 for layer in usual]
    outputs = sorted(ids) != usual and (named == inner or sorted(ids) == before) and not stored.get("gguf")
    return states_read(ids, outputs, "eagle_aux_hidden_state_layer_ids", layers, folder)


def states_read(ids: Any, outputs: bool, name: str, layers: int, folder: Path) -> tuple[int, ...]:
    """Return layer numbers of a configuration as `sampling.types.Hidden` numbers states, in their order.

    `outputs`: they number layers whose output is read, not whose input. UserError, with the setting's `name`, for
    anything but different layers of a target of `layers` layers.
    """
    if not isinstance(ids, list) or not ids or not all(isinstance(layer, int) for layer in ids):
        raise UserError(f"the drafter {folder}: {name} is {ids!r}, no list of layers")
    reads = [layer + outputs for layer in ids]
    if len({*reads}) != len(reads) or not 0 <= min(reads) <= max(reads) <= layers:
        raise UserError(f"the drafter {folder} reads states {reads}: a target of {layers} layers does not have them")
    return tuple(-1 if state == layers else state for state in reads)


def mask_in(stored: Json, size: int, folder: Path) -> int:
    """Return the id of a block's mask token, below `size`. UserError if the configuration has none."""
    names = ("mask_token_id", "ptd_token_id", "pard_token")
    mask: Any = next((stored[name] for name in names if stored.get(name) is not None), None)
    require(isinstance(mask, int) and 0 <= mask < size, folder, f": mask_token_id is {mask!r}, no id of {size}")
    return int(mask)


def parallel(stored: Json, own: dict[str, Tensor], size: int, folder: Path) -> Json:
    """Return the settings that P-EAGLE adds to EAGLE-3: its mask, and the number of drafts it was trained for, 8 where
    the configuration has none.

    UserError if the head has no state [1, 1, K·G] for masks, or its mask is no id.
    """
    require("model.mask_hidden" in own, folder, " is no P-EAGLE head that can be read: it lacks mask_hidden")
    methods = nested(stored, "speculators_config", "proposal_methods")
    drafts = nested(methods[0] if isinstance(methods, list) and methods else None, "speculative_tokens")
    return {"kind": "peagle", "mask": mask_in(stored, size, folder), "drafts": drafts or 8}


def usual_reads(layers: int) -> list[int]:
    """Return the layers of a target whose inputs EAGLE-3's authors read; in one of 4 to 6 layers some are the same."""
    return sorted({2, layers // 2, layers - 3})


def has_place(config: Json, about: Json) -> bool:
    """Return whether the published format can hold this configuration; for the last layer's output it needs the number
    of layers."""
    return (config["wide"] or config["kind"] in ("dflash", "dspark")) and (
        min(config["reads"]) >= 0 or "layers" in about.get("verifier", {})
    )


def as_published(config: Json, own: dict[str, Tensor], about: Json) -> tuple[Json, dict[str, Tensor]]:
    """Return the configuration and the tensors of an EAGLE-3, DFlash or DSpark head as *speculators* writes them.

    `own` are tensors by our names, with `lm_head.ids` of a reduced vocabulary; `about` is added to the configuration,
    its `verifier` {name_or_path, architectures, layers} describes the target.
    """
    tensors = {name.removeprefix("model."): value for name, value in own.items() if name != "lm_head.ids"}
    count = config["vocab_size"]
    if (ids := own.get("lm_head.ids")) is not None:
        tensors["d2t"] = ids.long() - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(count, dtype=torch.bool).index_fill_(0, ids.long(), True)
    verifier = {"name_or_path": None, "architectures": [], **about.get("verifier", {})}
    layers = verifier.pop("layers", None)
    block = config["kind"] in ("dflash", "dspark")
    kind = config["kind"] if block else "eagle3"
    inner = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": config["mlp_bias"], "tie_word_embeddings": False}
    reads = [layers if state < 0 else state for state in config["reads"]]
    if block:
        inner = {**inner, "model_type": "qwen3", "layer_types": ["full_attention"] * config["num_hidden_layers"]}
        of_kind = {
            "aux_hidden_state_layer_ids": reads,
            "block_size": config["drafts"] - config["from_anchor"] + 1,
            "mask_token_id": config["mask"],
            "sample_from_anchor": config["from_anchor"],
            "sliding_window_non_causal": False,
        }
        if kind == "dspark":
            of_kind |= {
                "markov_rank": config["rank"],
                "markov_head_type": config["markov"] or "vanilla",
                "enable_confidence_head": config["confidence"],
                "confidence_head_with_markov": config["confidence_with_markov"],
            }
    else:
        of_kind = {
            "eagle_aux_hidden_state_layer_ids": reads,
            "embed_requires_grad": False,
            **{name: config[name] for name in _SWITCHES},
        }
    return {
        "architectures": [{"dflash": "DFlash", "dspark": "DSpark", "eagle3": "Eagle3"}[kind] + "DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config["drafts"] if block else 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": verifier,
        },
        "draft_vocab_size": config["short_list"] or count,
        **of_kind,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {
            **inner,
            **{name: config[name] for name in (*_SAME, "attention_bias")},
            "rope_parameters": {"rope_type": "default", **config["rope"], "rope_theta": config["rope_theta"]},
        },
        **{name: value for name, value in about.items() if name != "verifier"},
    }, tensors


_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
)


def _context(config: HfConfig) -> int:
    value = (config if isinstance(config, dict) else vars(config)).get("max_position_embeddings")
    return value if isinstance(value, int) else 1


def _rope(inner: Json, folder: Path) -> Json:
    """Return base and scaling of the rotary positions, stored as in transformers 5 (`rope_parameters`) or before."""
    rope = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    kind = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.pop("rope_theta", None) or inner.get("rope_theta") or 10000.0
    fixed = rope.get("short_factor") == rope.get("long_factor")  # independent of the length
    read = kind in (*_ROPE, *["longrope"] * fixed) and rope.get("partial_rotary_factor", 1.0) == 1.0
    require(read, folder, f" has {kind} rotary positions, which are not read")
    return {"rope_theta": float(theta), "rope": {} if kind == "default" else {**rope, "rope_type": kind}}


def reduced(
    config: Json, own: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path, like_head: tuple[str, ...] = ()
) -> tuple[Json, dict[str, Tensor]]:
    """Return configuration and tensors with the reduced vocabulary: row i of the head is the target's id i + d2t[i];
    rows are sorted by id.

    `like_head`: other tensors with a row for each of these ids. UserError if d2t, t2d and the head do not fit.
    """
    offsets, chosen = tensors.get("d2t"), tensors.get("t2d")
    rows = None if config["shared_head"] else len(own[_HEAD])
    if offsets is None:
        require(rows in (None, config["vocab_size"]), folder, f" has a head of {rows} ids and no d2t, which says which")
        return config, own
    ids, order = (torch.arange(len(offsets)) + offsets.flatten().long()).sort()
    fits = (
        0 <= int(ids[0]) <= int(ids[-1]) < config["vocab_size"]
        and bool((ids.diff() > 0).all())
        and rows in (None, len(ids))
        and (chosen is None or torch.equal(chosen.flatten().bool().nonzero()[:, 0], ids))
    )
    require(fits, folder, " is damaged: d2t, t2d and lm_head have different ids")
    if len(ids) == config["vocab_size"]:
        return config, own
    own |= {name: own[name][order] for name in (_HEAD, *like_head) if name in own and len(own[name]) == len(order)}
    return {**config, "short_list": len(ids)}, {**own, "lm_head.ids": ids}


# -- heads that draft a block ----------------------------------------------------------------------------

_NAMES = {"dspark": "DSpark", "dflash2": "DFlash2", "jetspec": "JetSpec", "domino": "Domino", "dflare": "DFlare"}
_BIASES_OF_IDS = ("model.markov_head.markov_w2.weight", "model.embed_proj.2.weight")  # a row for each id


def translated_block(
    kind: str, stored: Json, tensors: dict[str, Tensor], large: HfModel, folder: Path
) -> tuple[Json, dict[str, Tensor]]:
    """Translate a head of this kind as :func:`translated` does, with its UserErrors."""
    inner, block = stored.get("transformer_layer_config") or stored, stored.get("dflash_config")
    settings = {**stored, **(block if isinstance(block, dict) else {})}
    require(not settings.get("draft_shift"), folder, " has draft_shift, which is not read")  # JetSpec's
    if kind == "dflare":  # it has `layer_fusion_weights` instead of `fc`, which `shape` reads
        width = tensors["layers.0.self_attn.k_proj_target.weight"].shape[1]
        shares = tensors["layer_fusion_weights"].shape[1]
        tensors = {**tensors, "fc.weight": torch.empty(width, shares * width, device="meta")}
    own = named(tensors, folder, _NAMES.get(kind, "DFlash"))
    speculators, states = "speculators_model_type" in stored, own["model.fc.weight"].shape[-1] // large.hidden_size
    anchor = "shift_label" if kind == "domino" else "sample_from_anchor"
    config = {
        "kind": kind,
        **shape(
            *(stored, own, tensors, large, folder),
            _block_reads(settings, speculators, states, large.num_hidden_layers, folder),
        ),
        "from_anchor": bool(settings.get(anchor, kind == "dspark" or "target_layer_ids" in stored)),
        # z-lab's own pass is never causal.
        "causal": speculators and not settings.get("sliding_window_non_causal", kind == "dflash2"),
        "causal_head": bool(settings.get("causal_head") or settings.get("causal")),
    }
    if kind == "dflare":
        del own["model.fc.weight"]
    config["windows"] = _windows(inner, config["num_hidden_layers"], folder)
    rows: Any = settings.get("block_size")
    require(isinstance(rows, int) and rows >= 2, folder, f": block_size is {rows!r}, no number of rows from 2 on")
    config |= {
        "mask": mask_in(settings, config["vocab_size"], folder),
        "drafts": rows - 1 + config["from_anchor"],
        **_own_parts(kind, settings, config, tensors, folder),
    }
    return reduced(config, own, tensors, folder, _BIASES_OF_IDS)


def _own_parts(kind: str, settings: Json, config: Json, tensors: dict[str, Tensor], folder: Path) -> Json:
    """Return the settings that only this kind has: its correction of logits, its confidence, its convolutions."""
    if kind == "dspark":
        rank = int(settings.get("markov_rank", 256))
        markov = str(settings.get("markov_head_type", "vanilla")).lower() if rank else ""
        require(
            markov in ("", "vanilla", "gated", "rnn"),
            folder,
            f": markov_head_type is {markov!r}: vanilla, gated and rnn are read",
        )
        return {
            "rank": rank,
            "markov": markov,
            "confidence": bool(settings.get("enable_confidence_head", True)),
            "confidence_with_markov": bool(settings.get("confidence_head_with_markov", True)),
        }
    if kind == "domino":
        return {
            "memory": int(settings.get("gru_hidden_dim", 0)),
            "bottleneck": int(settings.get("emb_dim", 0)),
            "uncorrected": int(settings.get("pure_draft_prefix_len", 0)),
        }
    if kind != "dflash2":
        return {}
    require("d2t" not in tensors, folder, " has a reduced vocabulary, which no DFlash2 head has")
    sizes = {
        "choices": int(settings.get("selector_top_k", 16)),
        "rank": int(settings.get("selector_rank", 256)),
        "taps": int(settings.get("conv_kernel_size", 2)),
        "group": int(settings.get("conv_group_size", 16)),
    }
    group, width = sizes["group"], config["hidden_size"]
    require(width % group == 0, folder, f": conv_group_size {group} does not divide {width}")
    return sizes


def _block_reads(settings: Json, speculators: bool, count: int, layers: int, folder: Path) -> tuple[int, ...]:
    """Return the target's states that a block head reads, as `sampling.types.Hidden` numbers them, in the order of its
    `fc`. `speculators`: the head is in that format."""
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = settings.get(name)
    if ids is None and not speculators:  # z-lab's choice
        ids = [round(1 + index * (layers - 4) / (count - 1)) for index in range(count)] if count > 1 else [layers // 2]
    return states_read(ids, not speculators, name, layers, folder)


def _windows(inner: Json, layers: int, folder: Path) -> tuple[int, ...]:
    """Return the window of each layer, 0 = to the beginning. In a Qwen3 configuration `use_sliding_window` switches it
    on."""
    kinds = inner.get("layer_types") or ["full_attention"] * layers
    window = (
        inner.get("sliding_window") if inner.get("use_sliding_window", inner.get("model_type") != "qwen3") else None
    )
    require(
        len(kinds) == layers and {*kinds} <= {"full_attention", "sliding_attention"},
        folder,
        f" has {layers} layers, its layer_types are {kinds!r}",
    )
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
