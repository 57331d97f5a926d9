"""Distributes the layers of a model that is too large for one device, and records passes as CUDA graphs.

`--device auto` loads a model onto one device if it fits there. Else the layers fill the GPUs, then the CPU's memory,
then the disk, in the order in which they are computed (accelerate's device map). Embedding and head stay on the first
device, where decoding happens and draft heads run. Layers on the CPU or the disk are copied for every pass.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from utils.errors import UserError
from utils.objects import HfConfig, HfModel

USED = 0.9  # share of the free memory; passes need the rest
COPIED = ("cpu", "disk")  # layers there are copied to a faster device
Out = TypeVar("Out")
WARM = 2  # calls of a function before it is recorded, in which libraries do their one-time setup
Device = int | str  # a GPU by its number
_BYTES = {"int8": 1.0, "nf4": 0.5, "fp4": 0.5}  # bytes of a quantized weight


def room_of(device: torch.device) -> dict[Device, int]:
    """Return the bytes that weights may take on each device, the fastest first."""
    import psutil

    memory = int(USED * psutil.virtual_memory().available)
    gpus = range(torch.cuda.device_count() if device.type == "cuda" else 0)
    return {
        **{index: int(USED * torch.cuda.mem_get_info(index)[0]) for index in gpus},
        **({"mps": memory} if device.type == "mps" else {}),
        **{"cpu": memory, "disk": 1 << 50},  # no bound
    }


def device_map(
    name: str,
    family: HfModel,
    config: HfConfig,
    dtype: torch.dtype,
    kind: str,
    room: Mapping[Device, int],
    trusted: bool = False,
) -> dict[str, Device] | None:
    """Return the device of each part of the model; None if the first device holds all of it.

    `kind`: its quantization; `trusted`: its own code may run. UserError if embedding and head do not fit on the first
    device, or a quantized model on the GPUs.
    """
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import compute_module_sizes

    with init_empty_weights():
        model = family.from_config(config, dtype=dtype, trust_remote_code=trusted)
    model.tie_weights()
    scale = _BYTES.get(kind, dtype.itemsize) / dtype.itemsize
    sizes = compute_module_sizes(model, dtype=dtype)
    first, free = next(iter(room)), dict(room)
    if scale * sizes[""] <= free[first]:
        return None
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    kept = {part: sizes[part] for part, module in model.named_modules() if module in ends}
    head = (
        0
        if ends[0].weight is ends[-1].weight
        else sum(sizes[part] for part, module in model.named_modules() if module is ends[-1])
    )
    if scale < 1:  # bitsandbytes computes where its weights lie
        free = {device: size for device, size in free.items() if device not in COPIED}
    free[first] -= head  # accelerate places the embedding first, but not the head
    devices: dict[str, Device] = infer_auto_device_map(
        model,
        max_memory={device: int(size / scale) for device, size in free.items()},
        no_split_module_classes=list(model._no_split_modules or ()),
        dtype=dtype,
    )
    devices |= {part: first for part in devices if any(f"{end}.".startswith(f"{part}.") for end in kept) or not part}
    if sum(kept.values()) > room[first] or (scale < 1 and "disk" in devices.values()):
        total, have = scale * sizes[""] / 1e9, sum(size for device, size in room.items() if device not in COPIED) / 1e9
        raise UserError(
            f"{name} needs {total:.1f} GB, {have:.1f} GB are free: try --quantization nf4 or a smaller model"
        )
    return devices


def main_device(model: HfModel) -> torch.device | None:
    """Return the first device of a model that is spread over several; None for a model on one device."""
    devices = list((getattr(model, "hf_device_map", None) or {}).values())
    if len({str(device) for device in devices}) < 2:
        return None
    first = next((device for device in devices if str(device) not in COPIED), "cpu")
    return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def spread_note(name: str, model: HfModel) -> str:
    """Return the gigabytes on each device, and the cost of copying; "" for a model on one device."""
    if (main := main_device(model)) is None:
        return ""
    held: Counter[str] = Counter()
    for part, device in model.hf_device_map.items():
        size = sum(weight.numel() * weight.element_size() for weight in model.get_submodule(part).parameters())
        held[f"cuda:{device}" if isinstance(device, int) else str(device)] += size
    listed = ", ".join(f"{size / 1e9:.2g} GB on {device}" for device, size in held.items())
    copied = sum(size for device, size in held.items() if device in COPIED and device != str(main))
    cost = f"; every pass copies {copied / 1e9:.2g} GB to {main}, however many tokens it checks: slow, and drafts pay"
    return f"{name} is spread: {listed}{cost if copied else ''}"


class Graphs:
    """Records functions as CUDA graphs. They share one memory pool: read a replay's result before the next replay."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Out]) -> Callable[[], Out]:
        """Return a function that replays `function`, which must read and write the same memory at every call."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool):
            out = function()

        def replay() -> Out:
            graph.replay()
            return out

        return replay
