"""The new draft head of `distill`: its shape from the flags and the target, and what it starts from."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.lanes.lane import PairEngine
from sampling.drafters.draft_heads.checkpoint import load_student, target_rotary
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from training.draft_heads.build import new_draft_head, shape_for, taken_up
from training.text.self_text import TextIds, short_list
from utils.errors import UsageError, UserError
from utils.loading.fit import fingerprint

_SHAPE = ("kind", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "short_list")


def check_target(engine: PairEngine, args: Namespace) -> None:
    """Refuse, before any work, a target that no draft head of this kind can be made for, or a shape that is none."""
    model, name = engine.loaded.target.model, engine.loaded.target.name
    if args.student == "glide" and target_rotary(model) is None:
        raise UserError(
            f"{name} has no rotary keys that a glide drafter could read: --student plain or feature goes without"
        )
    own = config_for(engine, args, args.short_list).hidden_size
    if args.linear_start == "on" and own != model.config.get_text_config().hidden_size:
        raise UsageError(f"--linear-start on: a head of width {own} cannot begin as a map of the target's states")
    if args.kind in ("eagle", "dflash") and own != model.config.get_text_config().hidden_size:
        raise UsageError(f"--hidden {own}: --student {args.student} has the target's width, whose embedding it shares")


def config_for(engine: PairEngine, args: Namespace, listed: int) -> DraftHeadConfig:
    """The shape, with `listed` ids in its reduced vocabulary. UsageError for numbers that do not go together."""
    model = engine.loaded.target.model
    plain = shape_for(model, args.kind)
    keys = None
    if args.heads is not None:
        width = args.hidden or plain.hidden_size
        if width % args.heads or (width // args.heads) % 2:
            raise UsageError(f"--heads {args.heads} does not divide the width {width} into heads of even size")
        keys = math.gcd(args.heads, plain.num_key_value_heads)
    return shape_for(
        model,
        args.kind,
        num_hidden_layers=args.layers,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_attention_heads=args.heads,
        num_key_value_heads=keys,
        short_list=0 if listed >= engine.loaded.target.vocab_size else listed,
        shared_head=args.head != "trained",
        project=args.head == "projected",
        block_size=args.lag,
        recency=args.recency == "on",
        drafts=args.block - 1 if args.kind == "dflash" else None,
    )


def verifier_of(engine: PairEngine) -> dict[str, Any]:
    """The target as *speculators* names it: its hub id or its folder; of one from a single file no name."""
    spec, model = engine.loaded.spec.target, engine.loaded.target.model
    folder = None if spec.path is None else str(Path(spec.path).expanduser().absolute())
    names = getattr(model.config, "architectures", None) or [type(model).__name__]
    layers = engine.target.network.layers
    return {"name_or_path": spec.id or folder, "architectures": list(names), "layers": layers}


def draft_head_for(engine: PairEngine, args: Namespace, learned: Sequence[TextIds], seed: int) -> DraftHead:
    """A new draft head, whose head may start as the target's; with --start a trained one to train further, plain ones
    and GLIDE heads deeper too.

    UsageError if that is of another shape than the flags say.
    """
    model, device = engine.loaded.target.model, engine.loaded.target.device
    seen = max(len(text.ids) for text in learned)  # what it never saw it cannot use
    if args.start is None:
        listed: list[int] = []
        if 0 < args.short_list < engine.loaded.target.vocab_size:
            listed = short_list(learned, args.short_list, sorted(engine.stop_ids))
        # The published format knows no window.
        config = replace(config_for(engine, args, len(listed)), window=0 if args.kind in ("eagle", "dflash") else seen)
        return new_draft_head(config, model, listed, seed).to(device)
    old = load_student(args.start, model, fingerprint(engine.tokenizer))
    wanted = config_for(engine, args, old.config.short_list if args.short_list else 0)
    for name in _SHAPE:
        theirs, ours = getattr(old.config, name), getattr(wanted, name)
        if theirs != ours and not (name == "num_hidden_layers" and theirs < ours and args.kind in ("plain", "glide")):
            raise UsageError(f"--start {args.start}: its {name} is {theirs}, the flags say {ours}")
    if args.kind == "eagle" and not old.config.wide:
        raise UsageError(f"--start {args.start}: it is an EAGLE-1 or 2 head, --student eagle3 trains EAGLE-3")
    window = max(old.config.window, seen) if old.config.window else 0  # 0: it has learned to look back to the beginning
    changed = replace(
        old.config,
        window=window,
        block_size=wanted.block_size,
        recency=wanted.recency,
        num_hidden_layers=wanted.num_hidden_layers,
    )
    return taken_up(old, changed, device, seed)
