"""The files of a folder that hold its weights, and whether they are whole. Reads only their headers."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import is_zipfile

from utils.errors import UserError

_NAMES = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers takes them
_POINTER = b"version https://git-lfs"
_SPELLED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NUMBERS = tuple(_SPELLED.values())


def weight_files(folder: Path) -> list[Path]:
    """The weight files that are read: one file of the first format there is, or the parts in its index.

    UserError for a folder without weights, and for a missing part.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _parts(folder, index)
    others = sorted(path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
    if not others:
        raise UserError(f"{folder} holds no model: no *.safetensors or *.bin file")
    has = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    raise UserError(f"{folder} holds no model: neither {_NAMES[0]} nor its index is there, it has {has}")


def _parts(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{index} is damaged: no weight_map") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{folder} is incomplete: {missing[0] if missing else 'every part'} is missing{more}")
    return [folder / name for name in names]


def check_weights(folder: Path, *, quantized: bool) -> None:
    """UserError if the weights in `folder` are not whole, are in two of its parts, or, unless `quantized`, are integers
    or bytes, which need scales."""
    parts: dict[str, Path] = {}
    for file in weight_files(folder):
        for tensor, dtype in check_whole(file).items():
            if tensor in parts:
                raise UserError(f"{folder}: {tensor} is in two parts, {parts[tensor].name} and {file.name}")
            parts[tensor] = file
            if not quantized and dtype not in _NUMBERS and (tensor.endswith(".weight") or dtype.startswith("F")):
                raise UserError(
                    f"{file}: {tensor} is {dtype}, and config.json has no quantization_config to read it by"
                )


def check_whole(file: Path) -> dict[str, str]:
    """Return the dtypes of a weight file's tensors by their names. UserError if it is damaged, or a Git LFS pointer."""
    from safetensors import safe_open

    with file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise UserError(f"{file} is a Git LFS pointer, not the weights: fetch them with git lfs pull")
    try:
        if file.suffix == ".bin":
            return _pickled(file)
        with safe_open(file, "numpy") as tensors:
            return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  # no mapping
    except Exception as error:  # the libraries raise many errors
        raise UserError(f"{file} is incomplete or damaged: {' '.join(str(error).split())[:100]}") from error


def _pickled(file: Path) -> dict[str, str]:
    """Return the dtypes of the tensors in a .bin file, spelled as in a safetensors file."""
    import torch

    tensors = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    dtypes = {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items() if hasattr(tensor, "dtype")
    }
    return {name: _SPELLED.get(dtype, dtype.upper()) for name, dtype in dtypes.items()}
