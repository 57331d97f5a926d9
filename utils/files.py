"""Files that are written whole or not at all. No other module replaces a file.

What stands at a path decides how it is written:
- a regular file, or none: in one step, from a temporary beside it, which is gone after an error or an interrupt (after
  a kill, when the path is next written). Symbolic links are followed and stay; mode and, where that is allowed, owner
  are kept; a new file obeys the umask. Other hard links to the file keep the old content. A file that may not be
  written is not replaced either;
- a regular file that cannot be replaced (its folder is read-only, or it is a mount point): in place. After an error or
  an interrupt its old content is put back; only a kill at that very moment leaves a part;
- a device, a pipe, or a descriptor of this process (/dev/stdout): written through, when all of the content is there.

Makes no folders. Knows JSON, and nothing else of what it writes.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from utils.errors import UsageError, UserError

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]


_MOST_LINKS = 40
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
_NOTHING, _PART = "nothing was saved", "only a part of it was saved"
_PIECE = 1 << 20
_SAMPLES, _SAMPLE = 64, 4096  # blocks, bytes of one


class WriteError(UserError, OSError):
    """One line: `filename` cannot be written, why, and (in `strerror` too) what it holds now."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


# -- writing --------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write to, and to read back from; what it holds is at `path` when the block ends without an error.

    Raises WriteError, also for an OSError of the block that names no file.
    """
    with _writing(path) as one:
        try:
            yield one.file
        except OSError as error:
            if error.filename is not None:
                raise
            raise one.refused(error) from error
        one.settle()
        one.publish()


def write_bytes(path: str | Path, data: bytes) -> None:
    """Let `path` hold `data`. Raises WriteError."""
    write_together({path: data})


def write_text(path: str | Path, text: str) -> None:
    """Let `path` hold `text` in UTF-8, a question mark for what that cannot say. Raises WriteError."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Let `path` hold `data` as JSON. Raises WriteError, and ValueError for what JSON cannot say."""
    write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def write_result(path: str | Path, data: Mapping[str, Any]) -> bool:
    """Let `path` hold what a run found, as JSON; whether it was written. What a stopped run found (`complete` is false)
    replaces only what another stopped one has left: a finished result stays. Raises as :func:`write_json`."""
    if not data["complete"] and _is_regular(path) and not _is_part(Path(path)):
        return False
    write_json(path, data)
    return True


def _is_part(file: Path) -> bool:
    """Whether a file is empty, or holds what a stopped run has found."""
    try:
        content = file.read_bytes()
        return not content or json.loads(content)["complete"] is False
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False


def write_together(contents: Mapping[Any, bytes]) -> None:
    """Write files that belong together: all are on the disk before the first one takes its place. Raises WriteError."""
    with contextlib.ExitStack() as stack:
        files = [(stack.enter_context(_writing(path)), data) for path, data in contents.items()]
        for one, data in files:
            with one.refusing():
                one.file.write(data)
            one.settle()
        for one, _ in files:
            one.publish()


def put(made: Path, path: str | Path) -> None:
    """Let `path` hold what the file `made` holds. Raises WriteError."""
    with made.open("rb") as source, replacing(path) as out:
        shutil.copyfileobj(source, out, _PIECE)


def put_folder(made: Path, place: Path) -> None:
    """Let the folder `made` take the place of the folder `place`; where that is a link it stays. Raises OSError."""
    real = Path(os.path.realpath(place))
    if real.exists():
        shutil.rmtree(real)
    shutil.move(made, real)


@dataclass
class _Writing:
    """New content of a path: it comes into `file`, is on the disk after `settle` and at the path after `publish`."""

    path: str | Path
    file: IO[bytes] = field(default_factory=io.BytesIO)
    _place: str | int = ""
    _before: os.stat_result | None = None
    _temporary: str = ""
    _holds: str = _NOTHING

    def refused(self, error: OSError) -> WriteError:
        return WriteError(error.errno, f"{error.strerror or error} ({self._holds})", str(self.path))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.refused(error) from error

    def open(self) -> None:
        with self.refusing():
            self._place = _led_to(self.path)
            if isinstance(self._place, int):
                return
            if os.path.exists(self._place):
                self._before = os.stat(self._place)
                if stat.S_ISDIR(self._before.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not stat.S_ISREG(self._before.st_mode):
                    return
                self._holds = f"{_NOTHING}, the old content stays"
                os.close(os.open(self._place, os.O_WRONLY))  # a file that is write-protected is left alone
            self._open_beside(self._place)

    def _open_beside(self, place: str) -> None:
        folder, name = os.path.split(place)
        begin = os.path.join(folder, f".{name[:40]}.")
        for left in glob.glob(f"{glob.escape(begin)}{'[0-9a-f]' * 16}.partial"):
            # A killed process has left it where nobody holds its lock.
            with contextlib.suppress(OSError, AttributeError), open(left, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(left)
        mode = 0o666 if self._before is None else 0o600  # the kernel takes the umask off
        while True:
            self._temporary = f"{begin}{secrets.token_hex(8)}.partial"  # before it is made: an interrupt may come
            try:
                descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            except OSError as error:
                self._temporary = ""
                if self._before is None or error.errno not in _IRREPLACEABLE:
                    raise
                return
            self.file = os.fdopen(descriptor, "w+b")
            with contextlib.suppress(OSError, AttributeError):  # a system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return
            self.file.close()  # taken for a dead one's, before it was locked

    def settle(self) -> None:
        """Have it on the disk, with the mode and the owner that the path has."""
        if not self._temporary:
            return
        with self.refusing():
            self.file.flush()
            os.fsync(self.file.fileno())
        if self._before is not None:
            with contextlib.suppress(OSError, AttributeError):  # only root gives files away; no POSIX
                os.chown(self._temporary, self._before.st_uid, self._before.st_gid)
            with contextlib.suppress(OSError):  # a file system without modes
                os.chmod(self._temporary, self._before.st_mode & 0o777)

    def publish(self) -> None:
        with self.refusing():
            if isinstance(self._place, int):
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                self._write_through(os.dup(self._place))
            elif self._temporary:
                self._replace(self._place)
            elif self._before is not None and stat.S_ISREG(self._before.st_mode):
                self._write_in_place(self._place)
            else:
                self._write_through(os.open(self._place, os.O_WRONLY | getattr(os, "O_NOCTTY", 0)))

    def _replace(self, place: str) -> None:
        self.file.flush()
        try:
            os.replace(self._temporary, place)
            self._temporary = ""
        except OSError as error:
            if self._before is None or error.errno not in _IRREPLACEABLE:
                raise
            self._write_in_place(place)

    def _content(self) -> bytes:
        self.file.seek(0)
        return self.file.read()

    def _write_through(self, descriptor: int) -> None:
        with open(descriptor, "wb", buffering=0) as file:
            rest = memoryview(self._content())
            while rest:
                rest = rest[file.write(rest) :]
                self._holds = _PART

    def _write_in_place(self, place: str) -> None:
        content = self._content()
        with open(place, "r+b", buffering=0) as file:
            before = file.read()
            file.seek(0)
            try:
                _write_all(file, content)
                file.truncate(len(content))
                os.fsync(file.fileno())
            except BaseException:
                holds, self._holds = self._holds, _PART
                changed, size = file.tell(), os.fstat(file.fileno()).st_size
                for start, end in ((0, changed), (size, len(before))):  # nothing else is touched: it may not be allowed
                    file.seek(start)
                    _write_all(file, before[start:end])
                file.truncate(len(before))
                self._holds = holds
                raise

    def discard(self) -> None:
        """What is not published is gone."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):  # published, or there was none
            os.unlink(self._temporary)


@contextmanager
def _writing(path: str | Path) -> Iterator[_Writing]:
    one = _Writing(path)
    try:
        one.open()
        yield one
    finally:
        one.discard()


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write to an unbuffered file, which takes as much at a time as it likes."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _led_to(path: str | Path) -> str | int:
    """Where `path` leads by all its links, or the descriptor of this process that it stands for. Raises OSError."""
    place = os.fspath(path)
    if "\0" in place:
        raise OSError(errno.EINVAL, "a name with a null character")
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(place)
        folder = os.path.realpath(folder or ".")
        place = os.path.join(folder, name)
        if name.isdecimal() and folder in (f"/proc/{os.getpid()}/fd", "/dev/fd"):
            return int(name)
        if not os.path.islink(place):
            return place
        place = os.path.join(folder, os.readlink(place))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


# -- appending ------------------------------------------------------------------------------------


def append(file: IO[bytes], data: bytes, path: str | Path) -> None:
    """Write `data` at the end of an unbuffered file: all of it, or nothing and a WriteError that names `path`."""
    size = os.fstat(file.fileno()).st_size
    try:
        _write_all(file, data)
    except BaseException as error:
        with contextlib.suppress(OSError):  # no regular file
            os.ftruncate(file.fileno(), size)
        if isinstance(error, OSError):
            raise WriteError(error.errno, f"{error.strerror or error} (what it holds is kept)", str(path)) from error
        raise


def drop_half_line(path: Path) -> None:
    """Take a line without its end, as a killed run leaves it, off the end of a file. Raises OSError."""
    if path.is_file():
        with path.open("rb+") as file:
            content = file.read()
            if not content.endswith(b"\n"):
                file.truncate(content.rfind(b"\n") + 1)


# -- before hours of work ---------------------------------------------------------------------------


def writable(path: Path, flag: str = "--out", *, makes_folder: bool = False) -> None:
    """UsageError, before hours of work, if the file of `flag` cannot be written there.

    `makes_folder`: its folder is made where it is not there.
    """
    try:
        place = _led_to(path)
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if isinstance(place, int):
        return
    if os.path.isdir(place):
        raise UsageError(f"{flag} {path} is a folder: name a file")
    folder = Path(place).parent
    if os.path.exists(place):
        if not _permitted(place, os.W_OK):
            raise UsageError(f"{flag} {path} is there and cannot be written to")
    elif makes_folder:
        writable_folder(folder, flag)
    elif not _takes_files(folder):
        raise UsageError(f"{flag} {path}: the folder {folder} is not there or cannot be written to")


def writable_folder(path: Path, flag: str = "--out") -> None:
    """UsageError, before hours of work, if the folder of `flag` cannot be written to, or made where it is not there."""
    real = Path(os.path.realpath(path))
    known = next((one for one in (real, *real.parents) if one.exists()), real)
    if not known.is_dir():
        raise UsageError(f"{flag} {path} is a file: name a folder" if known == real else f"{known} is no folder")
    if not _takes_files(known):
        raise UsageError(f"{flag} {path}: the folder {known} cannot be written to")


def beside(path: Path, name: str) -> Path | None:
    """The place of another file beside `path`, for work in progress; None where there can be none.

    That is where the folder takes no files, and where `path` is no regular file: nothing belongs beside a device.
    """
    ordinary = not path.exists() or _is_regular(path)
    return path.with_name(name) if ordinary and _takes_files(path.absolute().parent) else None


def separate(written: Mapping[str, str | Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """UsageError, before any work, where a file or folder that a flag of `written` names is read as well, or is also
    written for another flag. They are told apart by where they lead; devices and pipes take what comes."""
    taken = {place: "the file to be read" for path in read if (place := _kept_at(path)) is not None}
    for flag, path in written.items():
        if (place := _kept_at(path)) is not None:
            if place in taken:
                raise UsageError(f"{flag} {path} is {taken[place]}: name another")
            taken[place] = f"the file of {flag} as well"


def _kept_at(path: str | Path | None) -> str | None:
    """Where that lies which `path` names; None where nothing is kept, as in a device."""
    try:
        place = None if path is None else _led_to(os.path.expanduser(path))
    except OSError:
        return None  # told when it is opened
    kept = isinstance(place, str) and (not os.path.exists(place) or os.path.isfile(place) or os.path.isdir(place))
    return place if kept and isinstance(place, str) else None


def _is_regular(path: str | Path) -> bool:
    return os.path.isfile(path) and isinstance(_led_to(path), str)


def _takes_files(folder: Path) -> bool:
    return folder.is_dir() and _permitted(folder, os.W_OK | os.X_OK)


def _permitted(path: str | Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


# -- going on with a file ---------------------------------------------------------------------------


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first fact in which the run that began a file and this one differ, by name; None if they are the same run.

    `weights` is not compared with a file that was begun before it was noted.
    """
    names = [name for name in dict.fromkeys([*here, *there]) if name != "weights" or name in there]
    return next((name for name in names if there.get(name) != here.get(name)), None)


# -- reading ----------------------------------------------------------------------------------------


def sampled_hash(files: Iterable[str | Path]) -> str:
    """As :func:`hash_of`, of each file's size and of 64 blocks of 4 KiB spread over it: what large files tell at once.

    UserError if one cannot be read.
    """
    found, names = hashlib.sha256(), list(files)
    for name in names:
        try:
            with Path(name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(size.to_bytes(8, "little"))
                for number in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
                    found.update(file.read(_SAMPLE))
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return found.hexdigest()[:16] if names else ""


def hash_of(files: Iterable[str | Path]) -> str:
    """Sixteen hexadecimal digits of the files' SHA-256, one behind the other; "" for none.

    UserError if one cannot be read.
    """
    found, names = hashlib.sha256(), list(files)
    for name in names:
        try:
            with Path(name).expanduser().open("rb") as file:
                while block := file.read(_PIECE):
                    found.update(block)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return found.hexdigest()[:16] if names else ""
