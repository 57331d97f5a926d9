"""EAGLE heads as others publish them → our configuration and our names of tensors; ours of EAGLE-3 → theirs.

EAGLE-1 and 2 (Li et al., arXiv 2401.15077, 2406.16858): `fc` [H, 2H], `layers.i`, the first without an input norm.
EAGLE-3 (arXiv 2503.01840) in three namings: `midlayer.*` (its authors, SpecForge), `layers.0.*` (speculators), and
either behind `model.`. Shapes are believed of the weights, not of `config.json`: a published one says 40 layers of one.
Written is what *speculators* 0.9.0 writes, but for the embedding, which is the target's.
Knows neither files nor modules; what does not fit is refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError

_OTHERS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # no parameters of the head
_ROPE = ("default", "linear", "yarn", "llama3")  # functions of the position: others change with length or with images
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Found = dict[str, Any]


def translated(stored: Found, tensors: dict[str, Tensor], large: Any, place: Path) -> tuple[Found, dict[str, Tensor]]:
    """The configuration in our keys, and the tensors by our names, `ids` among them if the vocabulary is reduced.

    `large` is the target's configuration. UserError for another kind of head, or one for a target of another size.
    """
    kind = stored.get("speculators_model_type", "eagle3")
    if kind not in ("eagle", "eagle3", "peagle"):
        raise UserError(f"the drafter {place} is a {kind} head, which is not read")
    inner = stored.get("transformer_layer_config") or stored
    own = named(tensors, place, "EAGLE")
    wide = f"{_FIRST}hidden_norm.weight" in own
    width = own["model.fc.weight"].shape[0]
    if "sliding_attention" in (inner.get("layer_types") or ()):
        raise UserError(f"the drafter {place} has sliding_attention layers, which are not read")
    reads = _reads(stored, large.num_hidden_layers, place) if wide else (-1,)
    _check_switches(stored, inner, own, wide, place)
    found = {
        "kind": "eagle",
        **shape(stored, own, tensors, large, place, reads, 0 if wide else width),
        "wide": wide,
        "fc_bias": "model.fc.bias" in own,
        "final_norm": "model.norm.weight" in own,
        **{name: bool(stored.get(name, inner.get(name, False))) for name in _SWITCHES},
        "norm_before_fc": "model.input_norm.weight" in own,
        "fc_norm": "model.fc_norm.0.weight" in own,
    }
    if kind == "peagle":
        found |= parallel(stored, own, found["vocab_size"], place)
    return reduced(found, own, tensors, place)


def named(tensors: dict[str, Tensor], place: Path, kind: str) -> dict[str, Tensor]:
    """The head's own tensors by our names. UserError where it lacks those that tell its shape."""
    own = {_name(name): value for name, value in tensors.items() if name not in _OTHERS}
    if (missing := next((name for name in _NEEDED if name not in own), None)) is not None:
        raise UserError(f"the drafter {place} is no {kind} head that can be read: it lacks {missing[6:]}")
    return own


def shape(
    stored: Found,
    own: dict[str, Tensor],
    tensors: dict[str, Tensor],
    large: Any,
    place: Path,
    reads: tuple[int, ...],
    beside: int = 0,
) -> Found:
    """The part of the configuration that all published heads have, as the weights tell it.

    `reads`: the target's states that enter `fc`, behind `beside` other numbers. UserError for a head that is not read,
    or for a target of another size.
    """
    inner = stored.get("transformer_layer_config") or stored
    fc, q, k, gate = (own[name] for name in _NEEDED)
    if "quantization_config" in stored or fc.dim() != 2 or not fc.is_floating_point():
        raise UserError(f"the drafter {place} is quantized by another program, which is not read")
    if inner.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UserError(f"the drafter {place} has the activation {inner['hidden_act']}, which is not read: silu is")
    size = own[f"{_FIRST}self_attn.q_norm.weight"].shape[0] if f"{_FIRST}self_attn.q_norm.weight" in own else None
    size = size or inner.get("head_dim") or q.shape[0] // int(inner["num_attention_heads"])
    states = fc.shape[1] - beside
    if states != len(reads) * large.hidden_size:
        theirs = stored.get("target_hidden_size") or states / len(reads)
        raise UserError(
            f"the drafter {place} is for a target of hidden size {theirs:g}{_made_for(stored)}, this one has "
            f"{large.hidden_size}"
        )
    vocabulary = next((len(one) for one in (tensors.get("t2d"), own.get(_EMBEDDING)) if one is not None), None)
    found = {
        "vocab_size": vocabulary or inner.get("vocab_size"),
        "hidden_size": fc.shape[0],
        "intermediate_size": gate.shape[0],
        "num_hidden_layers": 1 + max(int(name.split(".")[2]) for name in own if name.startswith("model.layers.")),
        "num_attention_heads": q.shape[0] // size,
        "num_key_value_heads": k.shape[0] // size,
        "head_dim": size,
        "large_hidden_size": large.hidden_size,
        # Nothing is learned by position: a head of a short context drafts as far as its target goes.
        "max_position_embeddings": max(_context(inner), _context(large)),
        "rms_norm_eps": inner.get("rms_norm_eps", 1e-6),
        **_rope(inner, place),
        "reads": reads,
        "attention_bias": f"{_FIRST}self_attn.q_proj.bias" in own,
        "qk_norm": f"{_FIRST}self_attn.q_norm.weight" in own,
        "shared_embedding": _EMBEDDING not in own,
        "shared_head": _HEAD not in own,
    }
    if found["vocab_size"] != large.vocab_size:
        raise UserError(
            f"the drafter {place} is for a vocabulary of {found['vocab_size']} ids{_made_for(stored)}, this one has "
            f"{large.vocab_size}"
        )
    return found


def _check_switches(stored: Found, inner: Found, own: dict[str, Tensor], wide: bool, place: Path) -> None:
    """UserError if a tensor is not there that the format always has, or that the configuration says is there."""
    always = {"model.norm.weight": wide, "model.fc.bias": bool(stored.get("bias")) and not wide}
    said = {"model.input_norm.weight": "norm_before_fc", "model.fc_norm.0.weight": "fc_norm"}
    always |= {_EMBEDDING: bool(stored.get("embed_requires_grad"))}
    always |= {name: bool(stored.get(switch, inner.get(switch))) for name, switch in said.items()}
    missing = [name.removeprefix("model.") for name, needed in always.items() if needed and name not in own]
    if missing:
        raise UserError(f"the drafter {place} is no EAGLE head that can be read: it lacks {', '.join(missing)}")


_FIRST = "model.layers.0."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NEEDED = (
    *("model.fc.weight", f"{_FIRST}self_attn.q_proj.weight", f"{_FIRST}self_attn.k_proj.weight"),
    f"{_FIRST}mlp.gate_proj.weight",
)


def _name(name: str) -> str:
    """A published name as ours: all but the head behind `model.`, the middle layer the first of all."""
    bare = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    return bare if bare.startswith("lm_head.") else f"model.{bare}"


def verifier(stored: Found) -> str:
    """The name of the target that a head was made for, as speculators writes it; "" if it says none."""
    made = stored.get("speculators_config")
    verified = made.get("verifier") if isinstance(made, dict) else None
    name = verified.get("name_or_path") if isinstance(verified, dict) else None
    return name if isinstance(name, str) else ""


def _made_for(stored: Found) -> str:
    return f" ({verifier(stored)})" if verifier(stored) else ""


def check_verifier(stored: Found, target: str | None, place: Path) -> None:
    """UserError where a head was made for a target of another name than `target`, a hub id; None compares nothing."""
    made = verifier(stored)
    if target and made.count("/") == 1 and made.lower().rpartition("/")[2] != target.lower().rpartition("/")[2]:
        raise UserError(f"the drafter {place} is for {made}, this target is {target} (a target's folder has no name)")


def _reads(stored: Found, layers: int, place: Path) -> tuple[int, ...]:
    """The target's states that EAGLE-3 reads, as `sampling.types.Hidden` numbers them, ascending.

    The authors take what enters layers 2, n//2 and n−3 (EAGLE's modeling_llama_kv.py), speculators and vLLM store
    numbers of the same meaning (`resolve_target_layer_ids`; n is what the last layer gives). SpecForge and ModelOpt
    store in `eagle_config` the layers that *give* them; SGLang adds one when it loads those ("we plus 1 here",
    `set_eagle3_layers_to_capture`). Whatever equals the authors' choice, or that less one, is meant as that.
    """
    usual = usual_reads(layers)
    inside = stored.get("eagle_config")
    nested = inside.get("eagle_aux_hidden_state_layer_ids") if isinstance(inside, dict) else None
    named = stored.get("eagle_aux_hidden_state_layer_ids") or nested or []
    if not isinstance(named, list) or not all(isinstance(one, int) for one in named):
        raise UserError(f"the drafter {place}: eagle_aux_hidden_state_layer_ids is {named!r}, no list of layers")
    if not named and len(usual) < 3:
        raise UserError(
            f"the drafter {place} reads three layers of its target and names none: one of {layers} layers "
            "has no three for it"
        )
    ids = sorted(named or usual)
    given = named == nested or ids == [one - 1 for one in usual]
    reads = [one + 1 for one in ids] if given and ids != usual else ids
    if len({*reads}) != len(reads) or not 0 <= reads[0] <= reads[-1] <= layers:
        raise UserError(f"the drafter {place} reads states {reads}: a target of {layers} layers has not those")
    return tuple(-1 if one == layers else one for one in reads)


def mask_in(stored: Found, size: int, place: Path) -> int:
    """The id of a block's mask. UserError where the configuration names none."""
    names = ("mask_token_id", "ptd_token_id", "pard_token")
    mask = next((stored[name] for name in names if stored.get(name) is not None), None)
    if not isinstance(mask, int) or not 0 <= mask < size:
        raise UserError(f"the drafter {place}: mask_token_id is {mask!r}, no id of {size}")
    return mask


def parallel(stored: Found, own: dict[str, Tensor], size: int, place: Path) -> Found:
    """What P-EAGLE adds to EAGLE-3: its mask, and how many drafts it was trained for."""
    if "model.mask_hidden" not in own:
        raise UserError(f"the drafter {place} is no P-EAGLE head that can be read: it lacks mask_hidden")
    return {"kind": "peagle", "mask": mask_in(stored, size, place), "drafts": _trained_for(stored) or USUAL_DRAFTS}


USUAL_DRAFTS = 8  # of P-EAGLE, where the configuration says nothing


def _trained_for(stored: Found) -> int | None:
    made = stored.get("speculators_config")
    methods = made.get("proposal_methods") if isinstance(made, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    return count if isinstance(count, int) else None


def usual_reads(layers: int) -> list[int]:
    """What the authors read of a target of so many layers: what enters these. Of fewer than 7 they are no three."""
    return sorted({2, layers // 2, layers - 3})


def has_place(config: Found, about: Found) -> bool:
    """Whether the published format can say this configuration: what the last layer gives it numbers by the layers."""
    return (
        (config["wide"] or config["kind"] == "dflash")
        and not config["project"]
        and (min(config["reads"]) >= 0 or "layers" in about.get("verifier", {}))
    )


def as_published(config: Found, own: dict[str, Tensor], about: Found) -> tuple[Found, dict[str, Tensor]]:
    """The reverse for EAGLE-3 and DFlash: our configuration and tensors, by our names (`ids` those of a reduced
    vocabulary), as *speculators* writes them. `about` says of its target the `verifier` {name_or_path, architectures,
    layers} and joins in.
    """
    tensors = {name.removeprefix("model."): value for name, value in own.items() if name != "lm_head.ids"}
    count = config["vocab_size"]
    if (ids := own.get("lm_head.ids")) is not None:
        tensors["d2t"] = ids.long() - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(count, dtype=torch.bool).index_fill_(0, ids.long(), True)
    verifier = {"name_or_path": None, "architectures": [], **about.get("verifier", {})}
    layers = verifier.pop("layers", None)
    block = config["kind"] == "dflash"
    drafts = config["drafts"] if block else 3
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    inner = {name: config[name] for name in (*_SAME, "attention_bias")}
    rope = {"rope_type": "default", **config["rope"], "rope_theta": config["rope_theta"]}
    llama = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "tie_word_embeddings": False}
    reads = [layers if one < 0 else one for one in config["reads"]]
    if block:
        llama = {**llama, "model_type": "qwen3", "layer_types": ["full_attention"] * config["num_hidden_layers"]}
        said = {
            "aux_hidden_state_layer_ids": reads,
            "block_size": config["drafts"] - config["from_anchor"] + 1,
            "mask_token_id": config["mask"],
            "sample_from_anchor": config["from_anchor"],
            "sliding_window_non_causal": False,
        }
    else:
        said = {"eagle_aux_hidden_state_layer_ids": reads, "embed_requires_grad": False}
        said |= {name: config[name] for name in _SWITCHES}
    return {
        "architectures": ["DFlashDraftModel" if block else "Eagle3DraftModel"],
        "speculators_model_type": "dflash" if block else "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dflash" if block else "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "draft_vocab_size": config["short_list"] or count,
        **said,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {**llama, **inner, "rope_parameters": rope},
        **{name: value for name, value in about.items() if name != "verifier"},
    }, tensors


_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
)


def _context(config: Any) -> int:
    value = (config if isinstance(config, dict) else vars(config)).get("max_position_embeddings")
    return value if isinstance(value, int) else 1


def _rope(inner: Found, place: Path) -> Found:
    """Base and stretching of the positions, as transformers 5 (`rope_parameters`) and those before it store them."""
    rope = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    kind = rope.pop("type", None) or rope.get("rope_type") or "default"
    theta = rope.pop("rope_theta", None) or inner.get("rope_theta") or 10000.0
    if kind not in _ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"the drafter {place} has {kind} rotary positions, which are not read")
    return {"rope_theta": float(theta), "rope": {} if kind == "default" else {**rope, "rope_type": kind}}


def reduced(
    found: Found, own: dict[str, Tensor], tensors: dict[str, Tensor], place: Path, like_head: tuple[str, ...] = ()
) -> tuple[Found, dict[str, Tensor]]:
    """The same with its reduced vocabulary: row i of the head is the target's id i + d2t[i]. Ascending, as ours are.

    `like_head`: other tensors with a row for each of these ids.
    """
    offsets, chosen = tensors.get("d2t"), tensors.get("t2d")
    rows = None if found["shared_head"] else len(own[_HEAD])
    if offsets is None:
        if rows not in (None, found["vocab_size"]):
            raise UserError(f"the drafter {place} has a head of {rows} ids and no d2t, which says which")
        return found, own
    ids, order = (torch.arange(len(offsets)) + offsets.flatten().long()).sort()
    wrong = rows not in (None, len(ids)) or bool((ids.diff() <= 0).any())
    wrong |= not 0 <= int(ids[0]) <= int(ids[-1]) < found["vocab_size"]
    if wrong or (chosen is not None and not torch.equal(chosen.flatten().bool().nonzero()[:, 0], ids)):
        raise UserError(f"the drafter {place} is damaged: d2t, t2d and lm_head speak of different ids")
    if len(ids) == found["vocab_size"]:
        return found, own
    own |= {name: own[name][order] for name in (_HEAD, *like_head) if name in own and len(own[name]) == len(order)}
    return {**found, "short_list": len(ids)}, {**own, "lm_head.ids": ids}
