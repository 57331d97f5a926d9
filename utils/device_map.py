"""A model that no single device holds: which of its layers lie on which device.

`--device auto` takes one device while that has the room. Where it has not, the layers go on to the other GPUs, then to
the CPU's memory, then to the disk, in the order in which they are computed (accelerate's device map). What is read at
every token, the embedding and the head, stays on the first device, where decoding happens and draft heads run. Layers
that lie on the CPU or the disk are copied for every pass. Knows no decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from utils.errors import UserError

USED = 0.9  # of what is free: the rest is for what passes need
COPIED = ("cpu", "disk")  # where nothing is computed beside a faster device
_DISK = 1 << 50
Place = int | str  # of a GPU its number
_BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5}  # of a quantized weight


def room_of(place: torch.device) -> dict[Place, int]:
    """Bytes that may be filled on each device, the first one first."""
    import psutil

    room: dict[Place, int] = {}
    if place.type == "cuda":
        for index in range(torch.cuda.device_count()):
            room[index] = int(USED * torch.cuda.mem_get_info(index)[0])
    elif place.type == "mps":
        room["mps"] = int(USED * psutil.virtual_memory().available)
    room["cpu"] = int(USED * psutil.virtual_memory().available)
    room["disk"] = _DISK
    return room


def device_map(
    name: str, family: Any, config: Any, dtype: torch.dtype, kind: str, room: Mapping[Place, int], trusted: bool = False
) -> dict[str, Place] | None:
    """The device of each part of the model; None where the first device holds all of it.

    `kind`: its quantization; `trusted`: code that comes with it may run. UserError where what must lie on the first
    device, or a quantized model on the GPUs, does not fit.
    """
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import compute_module_sizes

    with init_empty_weights():
        model = family.from_config(config, dtype=dtype, trust_remote_code=trusted)
    model.tie_weights()
    scale = _BYTES.get(kind, dtype.itemsize) / dtype.itemsize
    sizes = compute_module_sizes(model, dtype=dtype)
    first, have = next(iter(room)), dict(room)
    if scale * sizes[""] <= have[first]:
        return None
    ends = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    kept = {part: sizes[part] for part, module in model.named_modules() if module in ends}
    tied = ends[0].weight is ends[-1].weight
    head = 0 if tied else sum(sizes[part] for part, module in model.named_modules() if module is ends[-1])
    if scale < 1:  # bitsandbytes computes where its weights lie
        have = {place: size for place, size in have.items() if place not in COPIED}
    have[first] -= head  # the embedding comes first by itself
    asked = {place: int(size / scale) for place, size in have.items()}
    found: dict[str, Place] = infer_auto_device_map(
        model, max_memory=asked, no_split_module_classes=list(model._no_split_modules or ()), dtype=dtype
    )
    found |= {part: first for part in found if any(inside(end, part) for end in kept)}
    if sum(kept.values()) > room[first] or (scale < 1 and "disk" in found.values()):
        total, free = scale * sizes[""] / 1e9, sum(size for place, size in room.items() if place not in COPIED) / 1e9
        raise UserError(
            f"{name} needs {total:.1f} GB, {free:.1f} GB are free: try --quantization nf4 or a smaller model"
        )
    return found


def inside(part: str, whole: str) -> bool:
    """Whether a module's name is that of `whole` or of something in it."""
    return part == whole or part.startswith(f"{whole}.") or not whole


def main_device(model: Any) -> torch.device | None:
    """Where a spread model is computed first; None for one that lies on one device."""
    places = list((getattr(model, "hf_device_map", None) or {}).values())
    if len({str(place) for place in places}) < 2:
        return None
    first = next((place for place in places if str(place) not in COPIED), "cpu")
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def spread_note(name: str, model: Any) -> str:
    """What lies where, and what that costs; "" for a model on one device."""
    main = main_device(model)
    if main is None:
        return ""
    held: dict[str, int] = {}
    for part, place in model.hf_device_map.items():
        size = sum(one.numel() * one.element_size() for one in model.get_submodule(part).parameters())
        where = f"cuda:{place}" if isinstance(place, int) else str(place)
        held[where] = held.get(where, 0) + size
    listed = ", ".join(f"{size / 1e9:.2g} GB on {where}" for where, size in held.items())
    copied = sum(size for where, size in held.items() if where in COPIED and where != str(main))
    cost = (
        f"; every pass copies {copied / 1e9:.2g} GB to {main}, however many tokens it checks: slow, and drafts pay"
        if copied
        else ""
    )
    return f"{name} is spread: {listed}{cost}"
