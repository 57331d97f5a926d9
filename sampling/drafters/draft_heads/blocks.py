"""Published DFlash, DSpark and DFlash2 heads → our configuration and our tensor names.

Three namings: z-lab's (`dflash_config` in a Qwen3 configuration), DeepSpec's (`target_layer_ids` and `markov_rank` at
the top of one), and *speculators*' (`speculators_model_type`, `aux_hidden_state_layer_ids`). The first two number the
layers whose output is read, the third numbers inputs of layers, one more. Tensors have the same names in all.
Knows neither files nor modules; a head that does not fit is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sampling.drafters.draft_heads.published import Config, mask_in, named, reduced, shape, states_read
from utils.errors import UserError

_REFUSED = ("causal_head", "draft_shift")  # JetSpec's
_BIAS = "model.markov_head.markov_w2.weight"


def translated_block(
    kind: str, stored: Config, tensors: dict[str, Tensor], large: Any, folder: Path
) -> tuple[Config, dict[str, Tensor]]:
    """Translate a head of this kind as :func:`sampling.drafters.draft_heads.published.translated` does."""
    inner, nested = stored.get("transformer_layer_config") or stored, stored.get("dflash_config")
    settings = {**stored, **(nested if isinstance(nested, dict) else {})}
    if wrong := [name for name in _REFUSED if settings.get(name)]:
        raise UserError(f"the drafter {folder} has {wrong[0]}, which is not read")
    own = named(tensors, folder, {"dspark": "DSpark", "dflash2": "DFlash2"}.get(kind, "DFlash"))
    theirs, states = "speculators_model_type" in stored, own["model.fc.weight"].shape[-1] // large.hidden_size
    config = {
        "kind": kind,
        **shape(stored, own, tensors, large, folder, _reads(settings, theirs, states, large.num_hidden_layers, folder)),
        "from_anchor": bool(settings.get("sample_from_anchor", kind == "dspark" or "target_layer_ids" in stored)),
        # z-lab's own pass is never causal.
        "causal": theirs and not settings.get("sliding_window_non_causal", kind == "dflash2"),
    }
    config["windows"] = _windows(inner, config["num_hidden_layers"], folder)
    block = settings.get("block_size")
    if not isinstance(block, int) or block < 2:
        raise UserError(f"the drafter {folder}: block_size is {block!r}, no number of rows from 2 on")
    config["mask"] = mask_in(settings, config["vocab_size"], folder)
    config["drafts"] = block - 1 + config["from_anchor"]
    if kind == "dspark":
        rank = int(settings.get("markov_rank", 256))
        config |= {
            "rank": rank,
            "markov": str(settings.get("markov_head_type", "vanilla")).lower() if rank else "",
            "confidence": bool(settings.get("enable_confidence_head", True)),
            "confidence_with_markov": bool(settings.get("confidence_head_with_markov", True)),
        }
        if config["markov"] not in ("", "vanilla", "gated", "rnn"):
            raise UserError(
                f"the drafter {folder}: markov_head_type is {config['markov']!r}: vanilla, gated and rnn are read"
            )
    if kind == "dflash2":
        if "d2t" in tensors:
            raise UserError(f"the drafter {folder} has a reduced vocabulary, which no DFlash2 head has")
        sizes = {
            "choices": "selector_top_k",
            "rank": "selector_rank",
            "taps": "conv_kernel_size",
            "group": "conv_group_size",
        }
        usual = {"choices": 16, "rank": 256, "taps": 2, "group": 16}
        config |= {name: int(settings.get(theirs, usual[name])) for name, theirs in sizes.items()}
        if config["hidden_size"] % config["group"]:
            raise UserError(
                f"the drafter {folder}: conv_group_size {config['group']} does not divide {config['hidden_size']}"
            )
    return reduced(config, own, tensors, folder, (_BIAS,))


def _reads(settings: Config, theirs: bool, count: int, layers: int, folder: Path) -> tuple[int, ...]:
    """Return the target's states that it reads, as `sampling.types.Hidden` numbers them, in the order of its `fc`."""
    name = "aux_hidden_state_layer_ids" if theirs else "target_layer_ids"
    ids = settings.get(name)
    if ids is None and not theirs:  # z-lab's choice
        ids = [round(1 + index * (layers - 4) / (count - 1)) for index in range(count)] if count > 1 else [layers // 2]
    return states_read(ids, not theirs, name, layers, folder)


def _windows(inner: Config, layers: int, folder: Path) -> tuple[int, ...]:
    """Return the window of each layer, 0 = to the beginning. As in Qwen3, a window must be switched on."""
    kinds = inner.get("layer_types") or ["full_attention"] * layers
    window = (
        inner.get("sliding_window") if inner.get("use_sliding_window", inner.get("model_type") != "qwen3") else None
    )
    if len(kinds) != layers or {*kinds} - {"full_attention", "sliding_attention"}:
        raise UserError(f"the drafter {folder} has {layers} layers, its layer_types are {kinds!r}")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
