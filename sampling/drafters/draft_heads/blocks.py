"""DFlash, DSpark and DFlash2 heads as others publish them → our configuration and our names of tensors.

Three namings: z-lab's (`dflash_config` in a Qwen3 configuration), DeepSpec's (`target_layer_ids` and `markov_rank` at
the top of one), and *speculators*' (`speculators_model_type`, `aux_hidden_state_layer_ids`). The first two number the
layers whose output is read, the third numbers what enters a layer, one more. Tensors have the same names in all.
Knows neither files nor modules; what does not fit is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sampling.drafters.draft_heads.published import Found, mask_in, named, reduced, shape
from utils.errors import UserError

_REFUSED = ("causal_head", "draft_shift")  # JetSpec's
_BIAS = "model.markov_head.markov_w2.weight"


def translated_block(
    kind: str, stored: Found, tensors: dict[str, Tensor], large: Any, place: Path
) -> tuple[Found, dict[str, Tensor]]:
    """As :func:`sampling.drafters.draft_heads.published.translated`, of a head of this kind."""
    inner, nested = stored.get("transformer_layer_config") or stored, stored.get("dflash_config")
    told = {**stored, **(nested if isinstance(nested, dict) else {})}
    if wrong := [name for name in _REFUSED if told.get(name)]:
        raise UserError(f"the drafter {place} has {wrong[0]}, which is not read")
    own = named(tensors, place, {"dspark": "DSpark", "dflash2": "DFlash2"}.get(kind, "DFlash"))
    theirs, states = "speculators_model_type" in stored, own["model.fc.weight"].shape[-1] // large.hidden_size
    found = {
        "kind": kind,
        **shape(stored, own, tensors, large, place, _reads(told, theirs, states, large.num_hidden_layers, place)),
        "from_anchor": bool(told.get("sample_from_anchor", kind == "dspark" or "target_layer_ids" in stored)),
        # z-lab's own pass is never causal.
        "causal": theirs and not told.get("sliding_window_non_causal", kind == "dflash2"),
    }
    found["windows"] = _windows(inner, found["num_hidden_layers"], place)
    block = told.get("block_size")
    if not isinstance(block, int) or block < 2:
        raise UserError(f"the drafter {place}: block_size is {block!r}, no number of rows from 2 on")
    found["mask"] = mask_in(told, found["vocab_size"], place)
    found["drafts"] = block - 1 + found["from_anchor"]
    if kind == "dspark":
        rank = int(told.get("markov_rank", 256))
        found |= {
            "rank": rank,
            "markov": str(told.get("markov_head_type", "vanilla")).lower() if rank else "",
            "confidence": bool(told.get("enable_confidence_head", True)),
            "confidence_with_markov": bool(told.get("confidence_head_with_markov", True)),
        }
        if found["markov"] not in ("", "vanilla", "gated", "rnn"):
            raise UserError(
                f"the drafter {place}: markov_head_type is {found['markov']!r}: vanilla, gated and rnn are read"
            )
    if kind == "dflash2":
        if "d2t" in tensors:
            raise UserError(f"the drafter {place} has a reduced vocabulary, which no DFlash2 head has")
        sizes = {
            "choices": "selector_top_k",
            "rank": "selector_rank",
            "taps": "conv_kernel_size",
            "group": "conv_group_size",
        }
        usual = {"choices": 16, "rank": 256, "taps": 2, "group": 16}
        found |= {name: int(told.get(theirs, usual[name])) for name, theirs in sizes.items()}
        if found["hidden_size"] % found["group"]:
            raise UserError(
                f"the drafter {place}: conv_group_size {found['group']} does not divide {found['hidden_size']}"
            )
    return reduced(found, own, tensors, place, (_BIAS,))


def _reads(told: Found, theirs: bool, count: int, layers: int, place: Path) -> tuple[int, ...]:
    """The target's states that it reads, as `sampling.types.Hidden` numbers them, in the order of its `fc`."""
    name = "aux_hidden_state_layer_ids" if theirs else "target_layer_ids"
    ids = told.get(name)
    if ids is None and not theirs:
        ids = _usual(layers, count)
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
        raise UserError(f"the drafter {place}: {name} is {ids!r}, no list of layers")
    reads = [one + (not theirs) for one in ids]
    if len({*reads}) != len(reads) or not 0 <= min(reads) <= max(reads) <= layers:
        raise UserError(f"the drafter {place} reads states {reads}: a target of {layers} layers has not those")
    return tuple(-1 if one == layers else one for one in reads)


def _usual(layers: int, count: int) -> list[int]:
    """The layers whose output z-lab reads where a configuration names none, so many of a target's."""
    if count < 2:
        return [layers // 2]
    return [round(1 + index * (layers - 4) / (count - 1)) for index in range(count)]


def _windows(inner: Found, layers: int, place: Path) -> tuple[int, ...]:
    """By layer how far back it looks; 0 = to the beginning. A window that is not switched on is none, as in Qwen3."""
    kinds = inner.get("layer_types") or ["full_attention"] * layers
    window = (
        inner.get("sliding_window") if inner.get("use_sliding_window", inner.get("model_type") != "qwen3") else None
    )
    if len(kinds) != layers or {*kinds} - {"full_attention", "sliding_attention"}:
        raise UserError(f"the drafter {place} has {layers} layers, its layer_types are {kinds!r}")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
