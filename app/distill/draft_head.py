"""The new student of `distill`: its shape from the flags and the target, and what it starts from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.errors import UsageError, UserError

if TYPE_CHECKING:
    from app.distill.options import DistillArgs
    from app.lanes.lane import Engine
    from sampling.drafters.draft_heads.config import StudentConfig
    from sampling.drafters.draft_heads.modules import Student
    from training.text.self_text import Text


def check_target(engine: Engine, args: DistillArgs) -> None:
    """Refuse, before any work, a target that no student of this kind can be made for, or a shape that is none."""
    from sampling.drafters.draft_heads.checkpoint import target_rotary

    model = engine.loaded.target.model
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{engine.loaded.target.name} is an encoder-decoder: distill takes decoder-only targets")
    if args.student == "glide" and target_rotary(model) is None:
        raise UserError(
            f"{engine.loaded.target.name} has no rotary keys that a glide drafter could read: "
            "--student plain or feature goes without"
        )
    config = config_for(engine, args, args.short_list)
    layers = engine.target.network.layers
    for layer in args.init_layers:
        if layer >= layers:
            raise UsageError(f"--init-layers {layer}: the target has layers 0 to {layers - 1}")
    width = model.config.get_text_config().hidden_size
    if args.init_layers and config.hidden_size != width:
        raise UsageError(f"--init-layers needs the target's width {width}, the student's is {config.hidden_size}")
    if args.head != "trained" and config.hidden_size != width:
        raise UsageError(f"--head {args.head} needs the target's width {width}, the student's is {config.hidden_size}")


def config_for(engine: Engine, args: DistillArgs, listed: int) -> StudentConfig:
    """The student's shape. UsageError for numbers that do not go together."""
    from training.draft_heads.build import shape_for

    model = engine.loaded.target.model
    changes: dict[str, Any] = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_attention_heads": args.heads,
        "short_list": 0 if listed >= engine.loaded.target.vocab_size else listed,
        "shared_head": args.head != "trained",
        "project": args.head == "projected",
        "block_size": args.lag,
        "recency": args.recency == "on" and args.student == "glide",
    }
    plain = shape_for(model, args.student)
    if args.heads is not None:
        width = args.hidden or plain.hidden_size
        if width % args.heads or (width // args.heads) % 2:
            raise UsageError(f"--heads {args.heads} does not divide the width {width} into heads of even size")
        changes["num_key_value_heads"] = math.gcd(args.heads, plain.num_key_value_heads)
    return shape_for(model, args.student, **changes)


def student_for(engine: Engine, args: DistillArgs, learned: list[Text], seed: int) -> Student:
    """A new student; its layers and head may start as the target's."""
    from training.draft_heads.build import new_student
    from training.text.self_text import short_list
    from utils.kernels.packed_linear import unpacked_copy

    if args.start is not None:
        return _going_on(engine, args, args.start, learned)
    listed: list[int] = []
    if 0 < args.short_list < engine.loaded.target.vocab_size:
        listed = short_list(learned, args.short_list, sorted(engine.stop_ids))
    seen = max(len(text.ids) for text in learned)  # what it never saw it cannot use
    config = replace(config_for(engine, args, len(listed)), window=seen)
    target = unpacked_copy(engine.loaded.target.model)  # packed weights cannot be copied from
    student = new_student(config, target, listed, list(args.init_layers), seed)
    return student.to(engine.target.device)


def _going_on(engine: Engine, args: DistillArgs, folder: Path, learned: list[Text]) -> Student:
    """A trained student to train further. UsageError if it is of another shape than the flags say."""
    import torch

    from sampling.drafters.draft_heads.checkpoint import load_student
    from training.draft_heads.build import taken_up
    from utils.loading.fit import fingerprint

    old = load_student(folder, engine.loaded.target.model, fingerprint(engine.tokenizer))
    wanted = config_for(engine, args, old.config.short_list if args.short_list else 0)
    for name in ("kind", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "short_list"):
        theirs, ours = getattr(old.config, name), getattr(wanted, name)
        if theirs != ours:
            raise UsageError(f"--start {folder}: its {name} is {theirs}, the flags say {ours}")
    seen = max(old.config.window, *(len(text.ids) for text in learned))
    changed = replace(old.config, window=seen, block_size=wanted.block_size, recency=wanted.recency)
    return taken_up(old, changed, torch.device(engine.target.device))
