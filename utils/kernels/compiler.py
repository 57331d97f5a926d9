"""Python functions into machine code, once a machine: what numba compiled is kept on disk and mapped at later starts.

A compiled function here takes the address of one record and is run by a team of threads (utils/kernels/team.py). What
is kept is found by the text of its sources, the record layouts that these read and the versions of the compilers, so
that nothing stale is ever run. numba compiles one function at a time, so a second process takes its part of what a new
machine needs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import mmap
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from utils.kernels.instruction_sets import instruction_set

_HERE = Path(__file__).parent
_one_at_a_time = threading.Lock()
_folder: Path | None = None


def keep_in(folder: Path) -> None:
    """Compiled code is kept in this folder of the user's own. Without one, or where it cannot be written to, everything
    is compiled at every start."""
    global _folder
    _folder = folder


def at_hand() -> bool:
    """Whether the compiler is loaded: what only saves a little time is not worth loading it."""
    return "utils.kernels.vectors" in sys.modules


@functools.cache
def _version(function: Callable[..., None]) -> str:
    """What compiled code depends on: the texts of the kernels and of all modules whose functions may be part of it, the
    record layouts and numbers that these have from elsewhere, the compilers, the instructions."""
    texts = [file.read_bytes() for file in sorted(_HERE.glob("*.py"))]
    modules, waiting = set[str](), [function]
    for part in waiting:
        known = part.__globals__
        if part.__module__ not in modules:
            modules.add(part.__module__)
            fixed = {name: value for name, value in known.items() if isinstance(value, int | float | np.dtype)}
            texts += [Path(known["__file__"]).read_bytes(), repr(fixed).encode()]
            waiting += [value.py_func for value in known.values() if hasattr(value, "py_func")]
    versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    return hashlib.sha256(b"\0".join([*texts, repr((versions, instruction_set())).encode()])).hexdigest()[:16]


def put_away() -> None:
    """Give back what is not needed once everything is loaded and compiled: what the heap holds unused, and the pages of
    the compiler's own library that are as they are in its file, from where they come again if they are asked for."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # not glibc
        return
    libc.malloc_trim(0)
    with contextlib.suppress(OSError):  # a system that does not say
        for first, size in _clean_pages("libllvmlite"):
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _clean_pages(library: str) -> list[tuple[int, int]]:
    """Address and bytes of the mappings of a library that cannot be written to and never were: with no page that is not
    as in the file, in memory or swapped out (the loader writes where code must be relocated)."""
    found, place = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            usable = library in rest and "w" not in rest.split()[0]
            place = (int(first, 16), int(last, 16) - int(first, 16)) if usable else (0, 0)
        elif name == "Private_Dirty:" and rest.split()[0] != "0":
            place = (0, 0)
        elif name == "Swap:" and rest.split()[0] == "0" and place[1]:  # the later one of the two lines
            found.append(place)
    return found


class Entry:
    """A function of so many 64-bit integers, compiled when its address is first asked for.

    What several functions call is an entry of its own, called by its address: numba would otherwise work through it
    again for each of them.
    """

    def __init__(self, function: Callable[..., None], arguments: int = 1) -> None:
        self._function, self._arguments = function, arguments
        self._made: Any = None
        self._elsewhere: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> int:
        """Where the machine code lies. The first time takes seconds, or a tenth of one where it is on disk."""
        if self._made is None:
            with _one_at_a_time:
                self._made = self._made or self._compile()
        address: int = self._made.address
        return address

    def compiled_by(self, process: subprocess.Popen[bytes]) -> None:
        """Whoever asks for the address waits for this process, which leaves the code on disk, and takes it from there;
        if it failed, the function is compiled here."""
        self._elsewhere = process

    @property
    def name(self) -> str:
        """What :func:`compile_named` finds the function by."""
        return f"{self._function.__module__}:{self._function.__name__}:{self._arguments}"

    @property
    def is_kept(self) -> bool:
        """Whether the first use will be quick."""
        return self._made is not None or (_folder is not None and any(self._place().rglob("*.nbc")))

    def _place(self) -> Path:
        assert _folder is not None
        return _folder / _version(self._function)

    def _compile(self) -> Any:
        global _folder
        from numba import cfunc, config, types

        if self._elsewhere is not None:
            self._elsewhere.wait()
        settings: Any = config
        signature = types.void(*[types.int64] * self._arguments)
        if _folder is not None and _writable(self._place()):  # else numba would write beside the sources
            before = settings.CACHE_DIR
            settings.CACHE_DIR = str(self._place())
            try:
                return cfunc(signature, error_model="numpy", cache=True)(self._function)
            except OSError:  # a full disk: no other function need be compiled for nothing
                _folder = None
            finally:
                settings.CACHE_DIR = before
        return cfunc(signature, error_model="numpy")(self._function)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def compile_beside(*entries: Entry) -> None:
    """Begin to compile entries in a process of its own, which ends with this one. Nothing where there is no folder to
    keep them in."""
    if _folder is None or not _writable(_folder):
        return
    named = [str(_folder), *(entry.name for entry in entries)]
    command = [sys.executable, "-c", f"from {__name__} import compile_named; compile_named(*{named!r})"]
    try:
        process = subprocess.Popen(
            command,
            cwd=_HERE.parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no process is to be had: they are compiled here
        return
    atexit.register(process.kill)
    for entry in entries:
        entry.compiled_by(process)


def compile_named(folder: str, *entries: str) -> None:
    """Compile functions by their module, name and number of arguments, for another process to find in `folder`."""
    keep_in(Path(folder))
    for entry in entries:
        module, name, arguments = entry.split(":")
        _ = Entry(vars(importlib.import_module(module))[name], int(arguments)).address
