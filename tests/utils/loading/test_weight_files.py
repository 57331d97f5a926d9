"""Folders as hubs have them, files that were cut off, and conversions that memory or disk has no room for."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.support.gguf_files import random_model, write_gguf
from tests.support.refusals import refused
from tests.support.tiny import tiny_pair
from utils.catalogue.specs import spec_from_argument
from utils.loading.gguf import converted
from utils.loading.loaded import LoadOptions
from utils.loading.packed_gguf import packed_entry
from utils.loading.sources import model_folder

OPTIONS = LoadOptions(device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_pair(tmp_path).target


def refusal(place: Path) -> str:
    """The one line that says why the model there cannot be had."""
    return refused(model_folder, spec_from_argument(str(place)), OPTIONS)


def test_a_folder_without_the_weights_that_are_read_says_what_it_has(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert refusal(folder).endswith("neither model.safetensors nor its index is there, it has consolidated.safetensors")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n",
            "is a Git LFS pointer, not the weights",
        ),
        (b"", "is incomplete or damaged: "),
        (b"PK rubbish", "is incomplete or damaged: "),
        ((200).to_bytes(8, "little") + b'{"a":', "is incomplete or damaged: "),
        ((5).to_bytes(8, "little") + b"[[[[[[[", "is incomplete or damaged: "),
    ],
)
def test_a_file_that_holds_no_weights_is_named(folder: Path, content: bytes, told: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert f"{folder / 'model.safetensors'} {told}" in refusal(folder)


def test_a_file_that_was_cut_off_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    save_file({"a": torch.zeros(300_000), "b": torch.zeros(200_000)}, weights)
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert refusal(folder).startswith(f"{weights} is incomplete or damaged: ")
    torch.save({"a": torch.zeros(300_000)}, folder / "pytorch_model.bin")
    weights.unlink()
    model_folder(spec_from_argument(str(folder)), OPTIONS)
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[:-1000])
    assert "pytorch_model.bin is incomplete" in refusal(folder)


# -- GGUF files ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: Any) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "qwen2", random_model("qwen2"), kind="Q8_0")


def test_a_gguf_file_is_known_by_its_first_bytes(file: Path, tmp_path: Path) -> None:
    blob = shutil.copy(file, tmp_path / "sha256-0123")
    assert (spec_from_argument(str(blob)).gguf, spec_from_argument(str(blob)).name) == (str(blob), "sha256-0123")
    assert refusal(tmp_path / "none.gguf") == f"no GGUF file {tmp_path / 'none.gguf'}"
    (tmp_path / "m.gguf").write_text("{}")
    assert refusal(tmp_path / "m.gguf") == f"{tmp_path / 'm.gguf'} is no GGUF file: it does not begin with GGUF"


def test_a_folder_with_one_gguf_file_is_that_file(file: Path, tmp_path: Path) -> None:
    only = shutil.copy(file, tmp_path / "m-Q8_0.gguf")
    assert spec_from_argument(str(tmp_path)).gguf == str(only)
    shutil.copy(file, tmp_path / "m-Q4_0.gguf")
    assert refusal(tmp_path) == f"{tmp_path} holds several GGUF files: name one of m-Q4_0.gguf, m-Q8_0.gguf"


def test_a_conversion_without_room_is_refused_with_figures(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    for begin in (
        lambda: converted(lambda: file, "a" * 64),
        lambda: packed_entry(lambda: file, "a"),
    ):
        refused(begin, match=r"needs 0.0 GB of disk, 0.0 GB are free in .*: free some, or set SPEC_CACHE_D")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    refused(
        converted,
        lambda: file,
        "a" * 64,
        match=r"^expanding m.gguf to float32 needs 0.0 GB of memory, 0.0 GB are free: leave ou",
    )
    refused(
        packed_entry,
        lambda: file,
        "a",
        match=r"^m.gguf needs 0.0 GB of memory, 0.0 GB are free: take a file of it with fewer",
    )
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
