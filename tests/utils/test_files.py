"""The one writer of files (utils/files.py): what stands at a path decides how it is written, and nothing gets lost."""

import gzip
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.places import largest_file, modes_count
from tests.support.refusals import refused
from utils import files
from utils.errors import UsageError, UserError
from utils.files import (
    WriteError,
    append,
    check_outputs,
    drop_half_line,
    hash_of,
    read_text,
    replacing,
    writable,
    write_bytes,
    write_result,
)

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")


OLD = b"old content, longer than the new"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with content."""
    (tmp_path / "file").write_bytes(OLD)
    return tmp_path / "file"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- regular files --------------------------------------------------------------------------------


def test_a_full_disk_is_told_with_what_the_file_holds(file: Path) -> None:
    with largest_file(100), pytest.raises(WriteError) as caught:
        write_bytes(file, bytes(1000))
    assert str(caught.value) == f"cannot write {file}: File too large (nothing was saved, the old content stays)"
    assert isinstance(caught.value, UserError)
    assert isinstance(caught.value, OSError)
    assert file.read_bytes() == OLD
    assert names(file.parent) == ["file"]


def test_a_signal_at_any_moment_leaves_the_old_content_or_the_new(tmp_path: Path) -> None:
    """Really Ctrl-C, while a process writes again and again."""
    code = (
        "import signal, sys; from utils.files import write_bytes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.stdout.write('.'); sys.stdout.flush()\n"
        "while True: write_bytes(sys.argv[1], b'a' * 3000); write_bytes(sys.argv[1], b'b' * 3000)\n"
    )
    file = tmp_path / "file"
    for delay in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(file)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None
        assert child.stdout.read(1) == b"."
        threading.Event().wait(0.003 * delay)
        while child.poll() is None:  # once more where the first fell into a callback, which Python only reports
            child.send_signal(signal.SIGINT)
            threading.Event().wait(0.1)
        if file.exists():
            assert file.read_bytes() in (b"a" * 3000, b"b" * 3000)


WRITING = (
    "import sys, time; from utils.files import replacing\n"
    "with replacing(sys.argv[1]) as out: out.write(b'half'); out.flush(); print('begun', flush=True); time.sleep(60)"
)


def test_the_next_file_removes_what_a_killed_process_was_writing_and_not_what_a_living_one_writes(
    tmp_path: Path,
) -> None:
    killed, living = (
        subprocess.Popen([sys.executable, "-c", WRITING, tmp_path / name], cwd=ROOT, stdout=subprocess.PIPE)
        for name in ("killed", "living")
    )
    for process in (killed, living):
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
    assert len(list(tmp_path.iterdir())) == 2
    killed.kill()
    killed.wait()
    write_bytes(tmp_path / "next", b"whole")
    left, _ = sorted(tmp_path.iterdir())
    assert (left / "living").read_bytes() == b"half"
    living.kill()
    living.wait()
    write_bytes(tmp_path / "next", b"whole again")
    assert names(tmp_path) == ["next"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_bytes(tmp_path / "new", b"x")
        for mode in (0o600, 0o640, 0o666, 0o755):
            file = tmp_path / oct(mode)
            file.touch()
            file.chmod(mode)
            write_bytes(file, b"x")
            assert stat.S_IMODE(file.stat().st_mode) == mode
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    finally:
        os.umask(before)


def test_a_write_protected_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    file.chmod(0o444)
    with modes_count(), pytest.raises(UsageError, match="cannot be written: Permission denied"):
        writable(file)
    with modes_count(), pytest.raises(WriteError, match=r"Permission denied \(nothing was saved, the old content"):
        write_bytes(file, b"new")
    assert file.read_bytes() == b"old"


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    files.write_json(path, {"a": 1, "b": "\u00e9"})
    refused(files.write_json, path, {"a": float("nan")}, kind=ValueError, match="JSON")
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1, "b": "\u00e9"}
    files.write_text(path, "lone \ud800")
    assert path.read_text(encoding="utf-8") == "lone ?"
    assert names(tmp_path) == ["out.json"]


# -- links ----------------------------------------------------------------------------------------


def test_links_are_followed_by_however_many_steps(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "folder").symlink_to("a/deep")
    (tmp_path / "first").symlink_to("b/second")
    (tmp_path / "b" / "second").symlink_to("../folder/../deep/real")
    for data in (b"made", b"replaced"):  # where it leads to nothing the file is made there
        write_bytes(tmp_path / "first", data)
        assert (tmp_path / "a" / "deep" / "real").read_bytes() == data
    assert names(tmp_path / "a" / "deep") == ["real"]
    assert (names(tmp_path), names(tmp_path / "b")) == (["a", "b", "first", "folder"], ["second"])
    assert os.readlink(tmp_path / "first") == "b/second"


def test_a_circle_of_links_and_other_impossible_places_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "file").write_bytes(b"")
    for path, said in (
        (tmp_path / "one", "Too many levels of symbolic links"),
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "file", "No such file or directory"),
        (tmp_path / "file" / "in", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        refused(write_bytes, path, b"x", kind=WriteError, match=said)
        with pytest.raises(UsageError) if "long" not in said else io.BytesIO():
            writable(path)
    assert names(tmp_path) == ["file", "one", "two"]


# -- what is no file ------------------------------------------------------------------------------


def test_a_full_device_is_one_line_and_stays(tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to(FULL)
    refused(write_bytes, link, b"x", kind=WriteError, match=r"full: No space left on device \(it may hold a part\)$")
    assert FULL.is_char_device()
    assert names(tmp_path) == ["full"]


def test_a_pipe_gets_it_and_one_that_is_closed_is_told(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = os.urandom(1 << 18)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, data)
    reader.join()
    assert came == [data]

    def closes() -> None:
        with pipe.open("rb") as file:
            file.read(1)

    reader = threading.Thread(target=closes)
    reader.start()
    refused(write_bytes, pipe, data, kind=WriteError, match=r"Broken pipe \(it may hold a part\)")
    reader.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("to", ["pipe", "file"])
def test_standard_output_goes_on_where_it_is(name: str, to: str, tmp_path: Path) -> None:
    """Also where it is a file: that is not replaced under whoever goes on writing to it."""
    code = (
        "import sys; from utils.files import write_bytes\n"
        "print('before'); write_bytes(sys.argv[1], b'it\\n'); print('behind')"
    )
    file = tmp_path / "out"
    with file.open("wb") as out:
        ran = subprocess.run(
            [sys.executable, "-c", code, name], cwd=ROOT, stdout=subprocess.PIPE if to == "pipe" else out, check=True
        )
    assert (ran.stdout if to == "pipe" else file.read_bytes()) == b"before\nit\nbehind\n"
    assert names(tmp_path) == ["out"]


# -- appending ------------------------------------------------------------------------------------


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("ab", buffering=0) as out:
        append(out, b"first\n", file)
        with largest_file(10), pytest.raises(WriteError, match=r"log: File too large \(its content is kept\)"):
            append(out, b"second, which is longer\n", file)
        append(out, b"third\n", file)
    assert file.read_bytes() == b"first\nthird\n"


@given(lines=st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"")), max_size=6), half=st.binary())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_half_a_line_is_taken_off_and_no_whole_one(lines: list[bytes], half: bytes, tmp_path: Path) -> None:
    file = tmp_path / "log"
    whole = b"".join(line + b"\n" for line in lines)
    file.write_bytes(whole + half.replace(b"\n", b""))
    drop_half_line(file)
    assert file.read_bytes() == whole


# -- any order of anything --------------------------------------------------------------------------

PLACES = st.sampled_from(["plain", "link", "far", "new"])
FAULTS = st.sampled_from(["", "", "error", "full"])


@given(
    steps=st.lists(st.tuples(PLACES, st.binary(max_size=400), FAULTS, st.integers(0o400, 0o777)), max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_writes_is_that_of_a_dictionary(
    steps: list[tuple[str, bytes, str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model: a path's content is what was last written without a fault; a mode is what it was."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "there").mkdir()
    for name in ("plain", "real"):
        (folder / name).write_bytes(b"")
    (folder / "link").symlink_to("real")
    (folder / "far").symlink_to("there/made")
    real = {"plain": "plain", "link": "real", "far": "there/made", "new": "new"}
    held = {"plain": b"", "real": b""}
    known = sorted([*names(folder), "new"])
    for place, data, fault, mode in steps:
        name, modes = real[place], {}
        if name in held:
            (folder / name).chmod(mode | 0o600)
        modes = {one: stat.S_IMODE((folder / one).stat().st_mode) for one in held}
        try:
            _faulty(folder / place, data, fault)
            held[name] = data
        except (WriteError, ZeroDivisionError):
            assert fault
        assert {one: (folder / one).read_bytes() for one in held} == held
        assert all(stat.S_IMODE((folder / one).stat().st_mode) == kept for one, kept in modes.items())
        assert (folder / "link").is_symlink()
        assert (folder / "far").is_symlink()
        assert set(names(folder)) <= set(known)
        assert names(folder / "there") == (["made"] if "there/made" in held else [])


def _faulty(path: Path, data: bytes, fault: str) -> None:
    with largest_file(100 if fault == "full" else 1 << 30), replacing(path) as out:
        out.write(data)
        if fault == "error":
            raise ZeroDivisionError


# -- negative controls: what other writers do is caught by the tests above ---------------------------


def moved(path: str | Path, data: bytes) -> None:
    beside = Path(f"{path}.partial")
    beside.write_bytes(data)
    os.replace(beside, path)


def truncated(path: str | Path, data: bytes) -> None:
    Path(path).write_bytes(data)


CAUGHT: list[tuple[Callable[..., None], Callable[..., None]]] = [
    (moved, lambda folder: test_links_are_followed_by_however_many_steps(folder)),
    (moved, lambda folder: test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode(0o022, folder)),
    (moved, lambda folder: test_a_full_device_is_one_line_and_stays(folder)),
    (moved, lambda folder: test_a_write_protected_file_is_left_alone(folder)),
    (truncated, lambda folder: test_a_full_device_is_one_line_and_stays(folder)),
]


@pytest.mark.parametrize("index", range(len(CAUGHT)))
def test_a_simpler_writer_is_caught(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check = CAUGHT[index]
    monkeypatch.setattr(sys.modules[__name__], "write_bytes", mutant)
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        check(tmp_path)


# -- before and after hours of work -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "complete", "written"),
    [
        (None, False, True),
        (b"", False, True),
        (b'{"complete": false}', False, True),
        (b'{"complete": true}', False, False),
        (b'{"complete": true}', True, True),
        (b'{"rows": []}', False, False),
        (b"no JSON", False, False),
        (b"[1]", False, False),
    ],
)
def test_a_part_of_a_result_replaces_only_a_part(
    before: bytes | None, complete: bool, written: bool, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    if before is not None:
        file.write_bytes(before)
    assert write_result(file, {"complete": complete, "answers": 1}) is written
    assert (file.read_bytes() if written else before) == file.read_bytes()
    assert (b"answers" in file.read_bytes()) is written


def test_files_are_told_apart_by_where_they_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, link = tmp_path / "a", tmp_path / "link"
    file.touch()
    link.symlink_to("a")
    for same in ("a", "./a", link, tmp_path / "." / "a"):
        refused(
            check_outputs,
            {"--out": same},
            ["b", None, file],
            match=r"^--out \S+ is the file to be read: name another$",
            kind=UsageError,
        )
        refused(
            check_outputs,
            {"--out": file, "--log": None, "--report": same},
            match=r"^--report \S+ is the file of --out as well: name another$",
            kind=UsageError,
        )
    refused(
        check_outputs, {"--out": "new", "--log": "new"}, match="--log new is the file of --out as well", kind=UsageError
    )
    check_outputs({"--out": "new", "--report": "other"}, [file, file])
    check_outputs({"--out": "/dev/null", "--report": "/dev/null", "--log": "/dev/stdout"}, ["/dev/stdout"])


def test_a_change_anywhere_in_a_file_of_weights_is_seen_and_nothing_else_is(tmp_path: Path) -> None:
    file, twin, content = tmp_path / "w", tmp_path / "twin", bytearray(range(1, 256)) * 8192
    file.write_bytes(content)
    twin.write_bytes(content)
    first = hash_of([file], sampled=True)
    os.utime(file, (1, 1))
    assert hash_of([file], sampled=True) == first == hash_of([twin], sampled=True)
    for start in range(0, len(content), len(content) // 16):  # an eighth of it, as a layer is
        changed = content.copy()
        changed[start : start + len(content) // 8] = bytes(len(content[start : start + len(content) // 8]))
        file.write_bytes(changed)
        assert hash_of([file], sampled=True) != first
    file.write_bytes(content + b"x")
    assert hash_of([file], sampled=True) != first
    assert hash_of([], sampled=True) == ""
    refused(hash_of, [tmp_path / "none"], sampled=True, match="cannot read")


@pytest.mark.parametrize(
    "kept",
    [gzip.compress(OLD)[:-9], gzip.compress(OLD)[:12] + b"\xff" * 8, b"plain", gzip.compress(b"\xff")],
    ids=["cut", "changed", "plain", "no text"],
)
def test_a_damaged_packed_file_is_refused_in_a_line(tmp_path: Path, kept: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(kept)
    refused(read_text, tmp_path / "a.gz", match=r"cannot read .*a\.gz")
