"""Files that are written whole or not at all. No other module replaces a file that a user names.

A regular file is written in a temporary folder beside it and then renamed over the old one. The next write there
removes the temporary folders of killed processes. Symbolic links are followed and stay; mode and, where that is
allowed, owner are kept; a new file obeys the umask; a write-protected file is not replaced. A device, a pipe, or a
descriptor of this process (/dev/stdout) is written through once the content is complete. Creates no folders.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from utils.errors import UsageError, UserError, shown
from utils.objects import Json

_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}
_BLOCKS, _BLOCK = 64, 4096  # blocks of a sampled file, bytes of each


class WriteError(UserError, OSError):
    """One line: `filename` cannot be written, why, and (also in `strerror`) what it holds now."""

    def __init__(self, path: str | Path, error: OSError, content: str) -> None:
        super().__init__(error.errno, f"{error.strerror or error} ({content})", str(path))

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}"


def own_folder(variable: str, usual: str) -> Path:
    """Return this program's folder under the one that an XDG `variable` names, else under ~/`usual`. A relative name is
    ignored, as the XDG specification says."""
    named = Path(os.environ.get(variable, "")).expanduser()
    return (named if named.is_absolute() else Path.home() / usual) / "speculative-console"


# -- writing --------------------------------------------------------------------------------------


@contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to and read back; `path` gets its content when the block ends without an error.

    Raises WriteError, also for an OSError of the block.
    """
    stream, target, content = stream_of(path), os.path.realpath(path), "nothing was saved"
    try:
        if stream is not None:
            memory = io.BytesIO()
            yield memory
            content = "it may hold a part"
            sys.stdout.flush()  # text that was printed before
            with open(os.dup(stream) if isinstance(stream, int) else stream, "wb") as out:
                out.write(memory.getvalue())
            return
        before = os.stat(target) if os.path.lexists(target) else None
        if before is not None:
            content = f"{content}, the old content stays"
            os.close(os.open(target, os.O_WRONLY))  # a write-protected file is left alone
        with scratch_folder(os.path.dirname(target)) as folder:
            temporary = os.path.join(folder, os.path.basename(target))
            with open(temporary, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if before is not None:
                with suppress(OSError):  # only root gives files away
                    os.chown(temporary, before.st_uid, before.st_gid)
                os.chmod(temporary, before.st_mode & 0o777)
            os.replace(temporary, target)
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(path, error, content) from error


def locked(path: str | Path, waits: Callable[[], object]) -> AbstractContextManager[object]:
    """Return a context in which this process alone works on `path`. As long as another one does, `waits` is called now
    and then; its exception ends the waiting."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock")
    while True:
        try:
            return lock.acquire(timeout=0.2)
        except Timeout:
            waits()


def scratch_folder(where: str | Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder in `where`, from which those of killed processes are removed. Raises OSError."""
    import psutil

    for left in Path(where).glob(".*-*.partial"):
        process = left.name[1:].partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(left, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f".{os.getpid()}-", suffix=".partial", dir=where)


def stream_of(path: str | Path) -> str | int | None:
    """Return the device or pipe, or the descriptor of this process, that `path` names; None for files and folders."""
    name = os.path.abspath(path)
    number = name.removeprefix("/proc/self").removeprefix("/dev").removeprefix("/fd/")
    if name in _STANDARD or number.isdigit():
        return _STANDARD.get(name) or int(number)
    return None if os.path.isfile(name) or os.path.isdir(name) or not os.path.exists(name) else name


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`. Raises WriteError."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, a question mark for lone surrogates. Raises WriteError."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path: str | Path, data: Mapping[str, object]) -> None:
    """Write `data` to `path` as JSON. Raises WriteError, and ValueError for values that JSON does not have."""
    write_text(path, json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def write_result(path: str | Path, data: Mapping[str, object]) -> bool:
    """Write the result of a run to `path` as JSON; return whether it was written.

    The result of a stopped run (`complete` is false) replaces only that of another stopped run. Raises as
    :func:`write_json`.
    """
    replaces = bool(data["complete"]) or not os.path.isfile(path) or not os.path.getsize(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        replaces = replaces or json.loads(Path(path).read_bytes())["complete"] is False
    if replaces:
        write_json(path, data)
    return replaces


def append(file: IO[bytes], data: bytes, path: str | Path) -> None:
    """Write `data` at the end of an unbuffered file: all of it, or nothing and a WriteError that names `path`."""
    size, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:  # one write may take only a part
            rest = rest[file.write(rest) :]
    except BaseException as error:
        with suppress(OSError):  # a device cannot be truncated
            os.ftruncate(file.fileno(), size)
        raise (WriteError(path, error, "its content is kept") if isinstance(error, OSError) else error) from None


def drop_half_line(path: Path) -> None:
    """Remove a line without its end, as a killed run leaves it, from the end of a file. Raises OSError."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


# -- checks before a long run ------------------------------------------------------------------------


def writable(path: str | Path, flag: str = "--out", *, folder: bool = False) -> None:
    """Raise UsageError if the file of `flag` cannot be written; `folder`: if files cannot be written to a folder there,
    which may not exist yet."""
    real = Path(os.path.realpath(os.path.expanduser(path)))
    if stream_of(path) is not None and not folder:
        return
    beside = next(parent for parent in (real, *real.parents) if parent.exists()) if folder else real.parent
    try:
        if not folder and os.path.lexists(real):
            os.close(os.open(real, os.O_WRONLY))
        tempfile.TemporaryFile(dir=beside).close()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror}") from None


def check_outputs(written: Mapping[str, str | Path | None], read: Iterable[str | Path | None] = ()) -> None:
    """Raise UsageError if a flag of `written` names a file that cannot be written, is one of `read`, or is another
    flag's.

    Links are followed; devices and pipes may be named several times.
    """
    taken: dict[str, str] = {}
    for flag, path in [*(("", path) for path in read), *written.items()]:
        target = os.path.realpath(os.path.expanduser(path or ""))
        if not path or stream_of(target) is not None or stream_of(path) is not None:
            continue
        if flag and target in taken:
            raise UsageError(f"{flag} {path} is {taken[target]}: name another")
        if flag:
            writable(path, flag)
        taken[target] = f"the file of {flag} as well" if flag else "the file to be read"


def first_difference(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the name of the first fact in which two runs differ; None if they are the same run."""
    return next((name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)), None)


# -- reading ----------------------------------------------------------------------------------------


def read_text(path: str | Path) -> str:
    """Return the text of a UTF-8 file, unpacked if its name ends in .gz. UserError if it cannot be read."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            return str(file.read())
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def numbered_lines(path: str | Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers. UserError if it cannot be read."""
    return [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]


def object_in(text: str, where: object) -> Json:
    """Return the JSON object in a text. UserError, which names `where`, if it holds none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: must be a JSON object, got {shown(data)}")
    return data


def read_object(path: str | Path) -> Json:
    """Return the JSON object in a file. UserError if it cannot be read or holds none."""
    return object_in(read_text(path), path)


def hash_of(files: Iterable[str | Path], *, sampled: bool = False) -> str:
    """Return sixteen hexadecimal digits of the SHA-256 of the files, concatenated; "" for none.

    `sampled`: only of each file's size and of 64 blocks of 4 KiB spread over it, which is quick for large files.
    UserError if one cannot be read.
    """
    digest, names = hashlib.sha256(), list(files)
    for name in names:
        try:
            with Path(name).expanduser().open("rb") as file:
                if sampled:
                    size = file.seek(0, os.SEEK_END)
                    digest.update(size.to_bytes(8, "little"))
                    for number in range(_BLOCKS):
                        file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
                        digest.update(file.read(_BLOCK))
                else:
                    hashlib.file_digest(file, lambda: digest)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror}") from None
    return digest.hexdigest()[:16] if names else ""
