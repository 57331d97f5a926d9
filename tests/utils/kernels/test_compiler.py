"""A second process takes its part of the compiling on a new machine: what it leaves is taken, what it could not make is
made here."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from utils.kernels import compiler
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
