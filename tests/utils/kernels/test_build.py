"""The library is compiled once, its structures are those of the header, and without it torch computes."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from utils.kernels import bindings, build, header
from utils.kernels.bindings import SHORTEST, Pace
from utils.kernels.build import BuildError, InstructionSet, instruction_set, kept_library, library, why_not

pytestmark = pytest.mark.skipif(instruction_set() is None, reason=f"there are no kernels here: {why_not()}")

SOURCES = Path(build.__file__).parent


def row() -> InstructionSet:
    found = instruction_set()
    assert found is not None
    return found


def checks() -> list[str]:
    """C assertions of the constants, types and structures that Python has read from the header."""
    lines = [f"_Static_assert({name} == {value}, {name});" for name, value in header.CONSTANTS.items()]
    lines += [f"_Static_assert({name} == {number}, {name});" for number, name in enumerate(bindings.TYPES)]
    lines += [f"_Static_assert({name.upper()} == {at}, {name});" for at, name in enumerate(bindings.ACTIVATIONS)]
    for name, kind in header.STRUCTURES.items():
        lines.append(f"_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, {name});")
        for field, _ in kind._fields_:
            at = getattr(kind, field).offset
            lines.append(f"_Static_assert(offsetof({name}, {field}) == {at}, {name}.{field});")
    lines.append(f"_Static_assert(sizeof(Row) == {bindings.ROW.itemsize}, Row);")
    return [f'{line.rsplit(", ", 1)[0]}, "{line.rsplit(", ", 1)[1][:-2]}");' for line in lines]


def test_python_says_of_structures_what_the_header_says(tmp_path: Path) -> None:
    text = '#include <stddef.h>\n#include "kernels.h"\n' + "\n".join(checks())
    (tmp_path / "check.c").write_text(text)
    files = ["-I", str(SOURCES), "-c", "-o", str(tmp_path / "check.o"), str(tmp_path / "check.c")]
    command = [sys.executable, "-m", "ziglang", "cc", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr
    assert done.returncode == 0
    (tmp_path / "check.c").write_text(text.replace(f"sizeof(Codes) == {bindings.CODES}", "sizeof(Codes) == 1"))
    assert subprocess.run(command, capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("Descent", "logits", "walks"),
        ("Offer", "token", "prob"),
        ("Offers", "longest", "model"),
        ("Offers", "row", "temperature"),
        ("Pass", "rows", "states_row"),
        ("Step", "kinds", "any_own"),
    ],
)
def test_packed_numbers_stand_where_the_fields_are(name: str, first: str, last: str) -> None:
    record = header.STRUCTURES[name]()
    names = [field for field, _ in record._fields_]
    packed = names[names.index(first) : names.index(last) + 1]
    offset = getattr(type(record), first).offset
    header.packer(name, first, last).pack_into(record, offset, *range(1, len(packed) + 1))
    assert [getattr(record, field) for field in packed] == [*range(1, len(packed) + 1)]


def loaded(folder: Path | None, reports: list[str]) -> float:
    """1 / noise by a library from this folder."""
    kernels = library(folder, row(), lambda: reports.append("compiling"))
    given, result = np.ones(1, np.float32), np.empty(1, np.float32)
    address = ctypes.c_void_p
    kernels.over_noise(ctypes.c_uint64(5), ctypes.c_int64(1), address(given.ctypes.data), address(result.ctypes.data))
    return float(result[0])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the products, whose compilation takes seconds."""
    monkeypatch.setattr(build, "UNITS", {"walk": build.UNITS["walk"]})


@pytest.mark.usefixtures("quick")
def test_a_second_start_takes_what_the_first_compiled(tmp_path: Path) -> None:
    reports: list[str] = []
    first = loaded(tmp_path, reports)
    assert kept_library(tmp_path, row()).is_file()
    assert first > 1
    assert loaded(tmp_path, reports) == first
    assert reports == ["compiling"]
    assert {file.suffix for file in tmp_path.iterdir()} <= {".so", ".dll", ".lock"}


KILLED = (
    "import sys; from pathlib import Path; from utils.kernels.build import instruction_set, library;"
    "library(Path(sys.argv[1]), instruction_set())"
)


@pytest.mark.usefixtures("quick")
def test_a_start_after_one_that_was_killed_as_it_compiled_leaves_the_library_alone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], start_new_session=True, cwd=SOURCES.parents[1])
    until = time.monotonic() + 60
    while not any(file.is_dir() for file in tmp_path.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert loaded(tmp_path, []) > 1
    assert {file.suffix for file in tmp_path.iterdir()} <= {".so", ".dll", ".lock"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("trouble", ["a file in its place", "no folder", "what cannot be executed"])
def test_a_folder_that_cannot_be_used_costs_no_more_than_compiling(trouble: str, tmp_path: Path) -> None:
    reports: list[str] = []
    folder: Path | None = tmp_path / "kept"
    if trouble == "a file in its place":
        (tmp_path / "kept").touch()
    elif trouble == "no folder":
        folder = None
    else:
        (tmp_path / "kept").mkdir()
        kept_library(tmp_path / "kept", row()).write_text("no library")
    assert loaded(folder, reports) > 1
    assert reports == ["compiling"]


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_library(tmp_path, row())
    for file in SOURCES.glob("*.[ch]"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert kept_library(tmp_path, row()) == before
    (tmp_path / "vectors.h").write_text("")
    assert kept_library(tmp_path, row()) != before
    with pytest.raises(BuildError, match=r"^the kernels do not compile: .*error: "):
        library(tmp_path / "kept", row())


# -- without kernels ---------------------------------------------------------------------------------

ASK = """
import torch
from utils.kernels.bindings import load
from utils.kernels.build import instruction_set, why_not
print(load(), instruction_set(), why_not(), sep="|")
"""
PLAIN = """
import sys, transformers
from sampling.models.network import network_of
from utils.kernels.bindings import at_hand
size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_hidden_layers=1, **size))
print(type(network_of(model)).__name__, at_hand())
"""


def said(program: str, **environment: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SPEC_KERNELS"} | environment
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    ).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names for it")
def test_a_compiler_that_fails_is_as_good_as_none_and_its_words_are_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    (tmp_path / "ziglang" / "__main__.py").write_text("raise SystemExit('error: out of luck\\nand more')")
    assert said(ASK, PYTHONPATH=str(tmp_path)) == "False|None|the kernels do not compile: error: out of luck"


def test_kernels_can_be_switched_off() -> None:
    assert said(ASK, SPEC_KERNELS="torch") == "False|None|SPEC_KERNELS=torch"


def test_a_model_without_packed_weights_loads_no_kernels() -> None:
    assert said(PLAIN) == "LlamaNetwork False"


# -- threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawing", [False, True])
def test_a_quiet_machine_keeps_the_team_also_where_a_terminal_draws_beside_the_passes(drawing: bool) -> None:
    pace = Pace()
    for run in range(200):  # twelve frames a second, each of which holds a pass up for 10 ms
        pace.ran(*(0.01, 0.0125) if drawing and run % 33 == 0 else (0.0002, 0.0025), now=run / 400)
        assert pace.threads(2, run / 400) == 2


@pytest.mark.parametrize(("slept", "seconds"), [(0.01, 0.012), (0.05, 0.06)])
def test_a_busy_machine_brings_one_thread_for_a_while_and_longer_each_time(slept: float, seconds: float) -> None:
    pace, now = Pace(), 0.0
    pace.ran(slept, seconds, now)
    assert pace.threads(2, now) == 2, "one slow run may be an accident"
    for pause in (SHORTEST, 2 * SHORTEST):
        for _ in range(5):
            pace.ran(slept, seconds, now)
            if pace.threads(2, now) == 1:
                break
        assert pace.threads(2, now + 0.99 * pause) == 1
        now += pause
        assert pace.threads(2, now) == 2


@pytest.mark.usefixtures("quick")
def test_a_start_beside_one_that_compiles_says_that_it_waits(tmp_path: Path) -> None:
    said: list[str] = []
    lock = FileLock(f"{kept_library(tmp_path, row())}.lock")
    lock.acquire()
    library(tmp_path, row(), lambda: said.append("compiling"), lambda: (said.append("waits"), lock.release()))
    assert said == ["waits", "compiling"]
