"""Files that are written whole or not at all. No other module replaces a file.

A regular file is written in a temporary folder beside it and takes its place in one step. Symbolic links are followed
and stay; mode and, where that is allowed, owner are kept; a new file obeys the umask; a file that may not be written is
not replaced. A device, a pipe, or a descriptor of this process (/dev/stdout) is written through, when all of the
content is there.

Makes no folders. Knows JSON, and nothing else of the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from utils.errors import UsageError, UserError

_DESCRIPTORS = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
_SAMPLES, _SAMPLE = 64, 4096  # blocks, bytes of each


class WriteError(UserError, OSError):
    """One line: `filename` cannot be written, why, and (in `strerror` too) what it holds now."""

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


def _refused(path: str | Path, error: OSError, holds: str) -> WriteError:
    return WriteError(error.errno, f"{error.strerror or error} ({holds})", str(path))


# -- writing --------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write to and read back; its content is at `path` when the block ends without an error.

    Raises WriteError, also for an OSError of the block.
    """
    stream, place, holds = _stream(path), os.path.realpath(path), "nothing was saved"
    try:
        if stream is not None:
            memory = io.BytesIO()
            yield memory
            holds = "it may hold a part"
            sys.stdout.flush()  # before what comes through another buffer
            with open(os.dup(stream) if isinstance(stream, int) else stream, "wb") as out:
                out.write(memory.getvalue())
            return
        before = os.stat(place) if os.path.lexists(place) else None
        if before is not None:
            holds = f"{holds}, the old content stays"
            os.close(os.open(place, os.O_WRONLY))  # a write-protected file is left alone
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=os.path.dirname(place)) as folder:
            temporary = os.path.join(folder, os.path.basename(place))
            with open(temporary, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                with contextlib.suppress(OSError):  # only root gives files away
                    os.chown(temporary, before.st_uid, before.st_gid)
                os.chmod(temporary, before.st_mode & 0o777)
            os.replace(temporary, place)
    except WriteError:
        raise
    except OSError as error:
        raise _refused(path, error, holds) from error


def _stream(path: str | Path) -> str | int | None:
    """The device or pipe, or the descriptor of this process, that `path` names; None for a file, a folder, nothing."""
    place = os.path.abspath(path)
    descriptor = _DESCRIPTORS.fullmatch(place)
    if descriptor is not None or place in _STANDARD:
        return int(descriptor[1]) if descriptor is not None else _STANDARD[place]
    return None if os.path.isfile(place) or os.path.isdir(place) or not os.path.exists(place) else place


def write_bytes(path: str | Path, data: bytes) -> None:
    """Let `path` hold `data`. Raises WriteError."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Let `path` hold `text` in UTF-8, a question mark for what that cannot say. Raises WriteError."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Let `path` hold `data` as JSON. Raises WriteError, and ValueError for what JSON cannot say."""
    write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def write_result(path: str | Path, data: Mapping[str, Any]) -> bool:
    """Let `path` hold the result of a run, as JSON; whether it was written. The result of a stopped run (`complete` is
    false) replaces only that of another stopped one: a finished result stays. Raises as :func:`write_json`."""
    if not data["complete"] and os.path.isfile(path) and _stream(path) is None and not _is_part(Path(path)):
        return False
    write_json(path, data)
    return True


def _is_part(file: Path) -> bool:
    """Whether a file is empty, or holds the result of a stopped run."""
    try:
        content = file.read_bytes()
        return not content or json.loads(content)["complete"] is False
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False


def append(file: IO[bytes], data: bytes, path: str | Path) -> None:
    """Write `data` at the end of an unbuffered file: all of it, or nothing and a WriteError that names `path`."""
    size, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:  # an unbuffered file takes as much at a time as it likes
            rest = rest[file.write(rest) :]
    except BaseException as error:
        with contextlib.suppress(OSError):  # no regular file
            os.ftruncate(file.fileno(), size)
        raise (_refused(path, error, "what it holds is kept") if isinstance(error, OSError) else error) from None


def drop_half_line(path: Path) -> None:
    """Take a line without its end, as a killed run leaves it, off the end of a file. Raises OSError."""
    if path.is_file():
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


# -- before hours of work ---------------------------------------------------------------------------


def writable(path: Path, flag: str = "--out") -> None:
    """UsageError, before hours of work, if the file of `flag` cannot be written there."""
    place = os.path.realpath(path)
    if os.path.isdir(place):
        raise UsageError(f"{flag} {path} is a folder: name a file")
    if _stream(path) is not None:
        return
    if os.path.ismount(place) or (os.path.lexists(place) and not _permitted(place, os.W_OK)):
        raise UsageError(f"{flag} {path} is there and cannot be written to")
    if not _takes_files(Path(place).parent):
        raise UsageError(f"{flag} {path}: the folder {Path(place).parent} is not there or cannot be written to")


def writable_folder(path: Path, flag: str = "--out") -> None:
    """UsageError, before hours of work, if the folder of `flag` cannot be written to, or made where it is not there."""
    real = Path(os.path.realpath(path))
    known = next((folder for folder in (real, *real.parents) if folder.exists()), real)
    if not known.is_dir():
        raise UsageError(f"{flag} {path} is a file: name a folder" if known == real else f"{known} is no folder")
    if not _takes_files(known):
        raise UsageError(f"{flag} {path}: the folder {known} cannot be written to")


def beside(path: Path, name: str) -> Path | None:
    """The path of another file beside `path`, for work in progress; None beside a device or a folder, and where the
    folder takes no files."""
    ordinary = _stream(path) is None and not path.is_dir()
    return path.with_name(name) if ordinary and _takes_files(path.absolute().parent) else None


def separate(written: Mapping[str, str | Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """UsageError, before any work, where a file or folder that a flag of `written` names is read as well, or is also
    written for another flag. They are compared with links followed; devices and pipes take anything."""
    taken: dict[str, str] = {}
    for flag, path in [*(("", path) for path in read), *written.items()]:
        place = os.path.realpath(os.path.expanduser(path or ""))
        if path is None or _stream(place) is not None or _stream(path) is not None:
            continue
        if flag and place in taken:
            raise UsageError(f"{flag} {path} is {taken[place]}: name another")
        taken[place] = f"the file of {flag} as well" if flag else "the file to be read"


def _takes_files(folder: Path) -> bool:
    return folder.is_dir() and _permitted(folder, os.W_OK | os.X_OK)


def _permitted(path: str | Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first fact in which the run that began a file and this one differ, by name; None if they are the same run."""
    return next((name for name in dict.fromkeys([*here, *there]) if there.get(name) != here.get(name)), None)


# -- reading ----------------------------------------------------------------------------------------


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file. UserError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def hash_of(files: Iterable[str | Path], *, sampled: bool = False) -> str:
    """Sixteen hexadecimal digits of the files' SHA-256, one behind the other; "" for none.

    `sampled`: of each file's size and of 64 blocks of 4 KiB spread over it, which is quick for large files.
    UserError if one cannot be read.
    """
    digest, names = hashlib.sha256(), list(files)
    for name in names:
        try:
            with Path(name).expanduser().open("rb") as file:
                if sampled:
                    size = file.seek(0, os.SEEK_END)
                    digest.update(size.to_bytes(8, "little"))
                    for number in range(_SAMPLES):
                        file.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
                        digest.update(file.read(_SAMPLE))
                else:
                    hashlib.file_digest(file, lambda: digest)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return digest.hexdigest()[:16] if names else ""
