"""Places that are hard to write to: a device, a folder that refuses also root, a disk that is full."""

import contextlib
import ctypes
import os
import resource
import sys
import threading
import tty
from collections.abc import Iterator
from pathlib import Path

_END = b"\n-- end of what came --\n"
_VERSION_3 = 0x20080522
_OVERRIDES = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: what lets root write where the mode forbids it


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def modes_count() -> Iterator[None]:
    """Modes bind this thread as they bind everybody, if it is root's too."""
    if os.geteuid() or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, known = _Header(_VERSION_3, 0), (_Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), known) == 0
    before = known[0].effective
    known[0].effective &= ~_OVERRIDES
    assert libc.capset(ctypes.byref(header), known) == 0
    try:
        yield
    finally:
        known[0].effective = before
        assert libc.capset(ctypes.byref(header), known) == 0


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No file can be made in `folder`, or taken away."""
    folder.chmod(0o555)
    try:
        with modes_count():
            yield
    finally:
        folder.chmod(0o755)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing more is an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Device:
    """A character device that everybody can make: a terminal that hands on every byte. `read` is what came."""

    def __enter__(self) -> "Device":
        self._reader, self._writer = os.openpty()
        tty.setraw(self._writer)
        self.path = Path(os.ttyname(self._writer))
        self._came = b""
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def _listen(self) -> None:
        while not self._came.endswith(_END):
            self._came += os.read(self._reader, 1 << 16)

    def read(self) -> bytes:
        """All that came; no more is listened to."""
        if self._thread.is_alive():
            os.write(self._writer, _END)
            self._thread.join()
        return self._came.removesuffix(_END)

    def __exit__(self, *_: object) -> None:
        self.read()
        os.close(self._writer)
        os.close(self._reader)
