"""What was compiled is kept and found again, unless anything in it has changed; a second process takes its part of the
compiling on a new machine: what it leaves is taken, what it could not make is made here."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from utils.kernels import compiler, walk
from utils.kernels.compiler import Entry, compile_beside, keep_in
from utils.kernels.instruction_sets import instruction_set, why_not
from utils.kernels.walk import over_entry

pytestmark = pytest.mark.skipif(instruction_set() is None, reason=f"nothing is compiled here: {why_not()}")


@pytest.fixture(autouse=True)
def _new_machine(tmp_path: Path) -> Iterator[None]:
    """A folder in which nothing is kept yet."""
    before = compiler._folder
    keep_in(tmp_path)
    yield
    compiler._folder = before


def uncompiled() -> Entry:
    """The smallest function of the kernels, as a process begins with it: probabilities over uniform noise."""
    return Entry(over_entry._function, over_entry._arguments)


def over_noise(entry: Entry, probs: list[float]) -> list[float]:
    given, result = np.array(probs, np.float32), np.empty(len(probs), np.float32)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(entry.address)
    call(5, len(probs), given.ctypes.data, result.ctypes.data)
    return [float(one) for one in result]


def test_another_process_compiles_what_this_one_then_takes_from_disk(tmp_path: Path) -> None:
    entry = uncompiled()
    assert not entry.is_kept
    compile_beside(entry)
    assert entry._elsewhere is not None
    assert entry._elsewhere.wait(120) == 0
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb*")}
    assert files
    assert entry.is_kept
    one, half = over_noise(entry, [1.0, 1.0]), over_noise(entry, [0.5, 0.25])
    assert half == [one[0] / 2, one[1] / 4]
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb*")} == files  # nothing was compiled again


@pytest.mark.parametrize("command", [["-c", "raise SystemExit(1)"], ["-c", "import os; os.abort()"]])
def test_what_the_other_process_failed_to_compile_is_compiled_here(command: list[str]) -> None:
    entry = uncompiled()
    entry.compiled_by(subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL))
    one, half = over_noise(entry, [1.0]), over_noise(entry, [0.5])
    assert half == [one[0] / 2]
    assert entry.is_kept


def test_without_room_for_a_process_everything_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is to be had")

    monkeypatch.setattr(subprocess, "Popen", refused)
    entry = uncompiled()
    compile_beside(entry)
    assert len(over_noise(entry, [1.0])) == 1


@pytest.mark.parametrize("where", ["sampling.models.compiled_pass", "sampling.drafters.draft_heads.compiled_step"])
def test_another_record_layout_is_other_code(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts lie in a module of their own; code compiled for another one would read at wild addresses."""
    from sampling.drafters.draft_heads.compiled_step import step_entry
    from sampling.models import compiled_pass

    entry = compiled_pass.whole_pass if where == compiled_pass.__name__ else step_entry
    before = compiler._version(entry._function)
    compiler._version.cache_clear()
    assert compiler._version(entry._function) == before
    monkeypatch.setattr(compiled_pass, "LAYER", np.dtype([("first", np.int64), *compiled_pass.LAYER.descr]))
    compiler._version.cache_clear()
    assert compiler._version(entry._function) != before
    compiler._version.cache_clear()


@pytest.mark.parametrize("trouble", ["a file in its place", "a full disk"])
def test_a_folder_that_cannot_be_used_costs_no_more_than_compiling(trouble: str, tmp_path: Path) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "a full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, allowed[1]))
    else:
        keep_in(tmp_path / "file")
        (tmp_path / "file").touch()
        compile_beside(uncompiled())
    try:
        assert len(over_noise(uncompiled(), [1.0])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert not list(Path(walk.__file__).parent.rglob("*.nbi"))  # where no hash would protect it


SMAPS = """7f0000000000-7f0000400000 r-xp 05000000 fe:00 1 /opt/libllvmlite.so
Private_Clean: 0 kB
Private_Dirty: {dirty} kB
Swap: {swapped} kB
VmFlags: rd mr mw me
"""


def test_pages_that_were_written_to_are_not_given_back_in_memory_or_swapped_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dirty, swapped, found in ((0, 0, [(0x7F0000000000, 0x400000)]), (4, 0, []), (0, 4096, [])):
        text = SMAPS.format(dirty=dirty, swapped=swapped)
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert compiler._clean_pages("libllvmlite") == found


def test_a_system_that_does_not_say_what_its_pages_are_gives_back_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file or directory", "/proc/self/smaps")

    monkeypatch.setattr(Path, "read_text", missing)
    compiler.put_away()
