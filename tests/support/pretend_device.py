"""A device that exists only in tests, to find on any machine most of what a first run on CUDA would find.

Tensors on `ipu:N` hold CPU tensors and compute with them, so results are the CPU's, bit for bit. An operation on
tensors of two devices is refused by its name, as is reading such memory from the host; what would make the host wait
for a GPU is counted. Knows no models; only the torch functions that reach `__torch_function__`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAME = "ipu"  # a kind of device of which torch has the name alone

READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
SIZES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}  # of unknown length
MOVES = {"to", "cpu", "copy_", "tensor", "as_tensor", "new_tensor", "type_as"}  # take tensors of two devices
HOST = {"numpy", "data_ptr", "__array__", "untyped_storage"}


class Pretended(Tensor):
    """A tensor on a pretended device; `held` has its numbers."""

    held: Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, where: torch.device) -> "Pretended":
        wrapper = torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))
        wrapper.held, wrapper.where = held, where
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func.__name__} of a pretended tensor outside `pretending`")


def on_device(device: Any) -> torch.device | None:
    """`device` with its number if it is a pretended one, else None."""
    if device is None or isinstance(device, int) or torch.device(device).type != NAME:
        return None
    return torch.device(NAME, torch.device(device).index or 0)


class _Mode(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [*_leaves((*args, *kwargs.values()))]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        mine = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
        named = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and _is_device(leaf)]
        if func is torch.device or (not mine and not any(map(on_device, named))):
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            if name in ("device", "is_cpu"):
                return args[0].where if name == "device" else False
        if name in HOST:
            raise TypeError(f"can't convert {mine[0].where} device type tensor to numpy: {name}")
        self._refuse(name, tensors)
        where = on_device(named[0]) if named else mine[0].where
        if name in ("copy_", "cpu") or (name in ("to", "type_as") and isinstance((*args, None)[1], Tensor)):
            like = None if name == "cpu" else args[name != "copy_"]
            where = like.where if isinstance(like, Pretended) else None
        plain = _changed(args, _plain)
        self._count(name, plain, kwargs, where, isinstance((*args, None)[name == "copy_"], Pretended))
        out = func(*plain, **_changed(kwargs, _plain))
        known = {id(tensor.held): tensor for tensor in mine}
        if name == "__iter__":
            return iter([Pretended(part, mine[0].where) for part in out])
        if name == "copy_":
            return args[0]

        def wrapped(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or where is None:
                return leaf
            old = known.get(id(leaf))
            return Pretended(leaf, where) if old is None or old.where != where else old

        return _changed(out, wrapped)

    def _refuse(self, name: str, tensors: list[Tensor]) -> None:
        """RuntimeError for tensors of two devices; a number without dimensions may come from the host."""
        places = {str(tensor.where) if isinstance(tensor, Pretended) else "cpu" for tensor in tensors}
        places -= {"cpu"} if all(isinstance(t, Pretended) or not t.dim() for t in tensors) else set()
        if len(places) > 1 and name not in MOVES:
            raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(places))}")

    def _count(self, name: str, args: Any, kwargs: Any, where: torch.device | None, from_device: bool) -> None:
        """Note a call for which the host of a GPU waits; `args` are plain."""
        if name in MOVES:
            if from_device == (where is None) and (from_device or not kwargs.get("non_blocking")):
                self.note(f"{name} {'to' if where else 'from'} the device")
        elif (
            name in READS | SIZES
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and "output_size" not in kwargs and not isinstance(args[1], int))
        ):
            self.note(name)
            return
        index = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:2]
        filled = name == "__setitem__" and not (isinstance(args[2], Tensor) and args[2].dim())
        masks = any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index) and not filled
        if (
            name in READS | SIZES
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and "output_size" not in kwargs and not isinstance(args[1], int))
            or (name in ("__getitem__", "__setitem__") and (masks or any(isinstance(part, list) for part in index)))
        ):
            self.note(name)

    def note(self, what: str) -> None:
        """Count it, by the line that called."""
        frame = sys._getframe(2)
        while frame.f_back and ("torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        self.waits[f"{what}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1


def _leaves(parts: Iterable[Any]) -> Iterator[Any]:
    """The tensors, devices and words among these and in sequences of theirs."""
    for part in parts:
        if isinstance(part, tuple | list):
            yield from _leaves(part)
        elif isinstance(part, Tensor | torch.device | str):
            yield part


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` made to each tensor, device and word in it."""
    if isinstance(value, dict):
        return {name: _changed(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_changed(part, change) for part in value]
        return parts if isinstance(value, list) else type(value)(parts) if type(value) is not tuple else tuple(parts)
    return change(value) if isinstance(value, Tensor | torch.device | str) else value


def _is_device(leaf: str | torch.device) -> bool:
    return isinstance(leaf, torch.device) or leaf == "cpu" or leaf.startswith(NAME)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Pretended):
        return leaf.held
    return torch.device("cpu") if not isinstance(leaf, Tensor) and _is_device(leaf) else leaf


@contextmanager
def pretending() -> Iterator[Counter[str]]:
    """Pretended devices exist in this context; it gives the waits so far, by what waited."""
    waits: Counter[str] = Counter()

    def synchronize(device: Any = None) -> None:
        if on_device(device):
            mode.note("synchronize")

    mode = _Mode(waits)
    with mock.patch("torch.accelerator.synchronize", synchronize), mode:
        yield waits


def moved(module: Any, device: str = f"{NAME}:0") -> Any:
    """The module, with parameters and buffers on a pretended device."""
    where = torch.device(device)
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is not None and not isinstance(value, Pretended):
                    held[name] = Pretended(value.detach(), where)
    return module
