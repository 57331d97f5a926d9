"""Files that are written whole or not at all. No other module replaces a file.

What stands at a path decides how it is written:
- a regular file, or none: in one step, from a temporary folder beside it, which is gone after an error or an interrupt
  (a kill leaves it). Symbolic links are followed and stay; mode and, where that is allowed, owner are kept; a new file
  obeys the umask. Other hard links to the file keep the old content. A file that may not be written is not replaced;
- a regular file that cannot be replaced (its folder is read-only, or it is a mount point): in place. After an error or
  an interrupt its old content is put back;
- a device, a pipe, or a descriptor of this process (/dev/stdout): written through, when all of the content is there.

Makes no folders. Knows JSON, and nothing else of what it writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from utils.errors import UsageError, UserError

_MOST_LINKS = 40
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
_NOTHING, _PART = "nothing was saved", "it may hold a part"
_SINK = os.O_WRONLY | getattr(os, "O_NOCTTY", 0)
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
    temporary, before, file, holds = "", None, cast(IO[bytes], io.BytesIO()), _NOTHING
    with contextlib.ExitStack() as stack:
        with _refusing(path, holds):
            place = _led_to(path)
            if isinstance(place, str) and os.path.isdir(place):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if isinstance(place, str) and os.path.isfile(place):
                before, holds = os.stat(place), f"{_NOTHING}, the old content stays"
        with _refusing(path, holds):
            if before is not None:
                os.close(os.open(str(place), os.O_WRONLY))  # a write-protected file is left alone
            if isinstance(place, str) and (before is not None or not os.path.exists(place)):
                try:
                    near = tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=Path(place).parent)
                    temporary = os.path.join(stack.enter_context(near), os.path.basename(place))
                    file = open(temporary, "w+b")  # noqa: SIM115  (the kernel takes the umask off)
                    stack.callback(_close, file)
                except OSError as error:
                    if before is None or error.errno not in _IRREPLACEABLE:
                        raise
        try:
            yield file
            file.flush()
        except OSError as error:
            if error.filename is not None:
                raise
            raise _refused(path, error, holds) from error
        with _refusing(path, holds if before is not None else _PART if not temporary else _NOTHING):
            if not (temporary and isinstance(place, str) and _replaced(temporary, place, before)):
                file.seek(0)
                _write_through(place, file.read(), before is not None)


def _replaced(temporary: str, place: str, before: os.stat_result | None) -> bool:
    """Put the file in its place, with the mode and owner of the one before; False where that one must stay."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    if before is not None:
        with contextlib.suppress(OSError, AttributeError):  # only root gives files away; no POSIX
            os.chown(temporary, before.st_uid, before.st_gid)
        with contextlib.suppress(OSError):  # a file system without modes
            os.chmod(temporary, before.st_mode & 0o777)
    try:
        os.replace(temporary, place)
    except OSError as error:
        if before is None or error.errno not in _IRREPLACEABLE:
            raise
        return False
    return True


def _write_through(place: str | int, content: bytes, regular: bool) -> None:
    """Write to a device, a pipe, a descriptor, or into a file that cannot be replaced: that one keeps its old content
    after an error."""
    for stream in (sys.stdout, sys.stderr) if isinstance(place, int) else ():
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    opened = os.dup(place) if isinstance(place, int) else os.open(place, os.O_RDWR if regular else _SINK)
    with open(opened, "r+b" if regular else "wb", buffering=0) as file:
        before = file.read() if regular else b""
        try:
            _overwrite(file, content, regular)
        except BaseException:
            if regular:
                _overwrite(file, before, regular)
            raise


def _overwrite(file: IO[bytes], data: bytes, regular: bool) -> None:
    if regular:
        file.seek(0)
    rest = memoryview(data)
    while rest:  # an unbuffered file takes as much at a time as it likes
        rest = rest[file.write(rest) :]
    if regular:
        file.truncate(len(data))
        os.fsync(file.fileno())


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk has been reported already
        file.close()


def _refused(path: str | Path, error: OSError, holds: str) -> WriteError:
    return WriteError(error.errno, f"{error.strerror or error} ({holds})", str(path))


@contextmanager
def _refusing(path: str | Path, holds: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refused(path, error, holds) from error


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
        for path, data in contents.items():
            file = stack.enter_context(replacing(path))
            file.write(data)
            file.flush()
            with contextlib.suppress(io.UnsupportedOperation):  # what goes to a device waits in memory
                os.fsync(file.fileno())


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
        with _refusing(path, "what it holds is kept"):
            _overwrite(file, data, False)
    except BaseException:
        with contextlib.suppress(OSError):  # no regular file
            os.ftruncate(file.fileno(), size)
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
    """The first fact in which the run that began a file and this one differ, by name; None if they are the same run."""
    return next((name for name in dict.fromkeys([*here, *there]) if there.get(name) != here.get(name)), None)


# -- reading ----------------------------------------------------------------------------------------


def sampled_hash(files: Iterable[str | Path]) -> str:
    """As :func:`hash_of`, of each file's size and of 64 blocks of 4 KiB spread over it: what large files tell at once.

    UserError if one cannot be read.
    """

    def read(file: IO[bytes]) -> Iterator[bytes]:
        size = file.seek(0, os.SEEK_END)
        yield size.to_bytes(8, "little")
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
            yield file.read(_SAMPLE)

    return hash_of(files, read)


def hash_of(
    files: Iterable[str | Path],
    read: Callable[[IO[bytes]], Iterable[bytes]] = lambda file: iter(lambda: file.read(_PIECE), b""),
) -> str:
    """Sixteen hexadecimal digits of the files' SHA-256, one behind the other; "" for none.

    UserError if one cannot be read.
    """
    digest, names = hashlib.sha256(), list(files)
    for name in names:
        try:
            with Path(name).expanduser().open("rb") as file:
                for block in read(file):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return digest.hexdigest()[:16] if names else ""
