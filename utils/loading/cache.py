"""The folder of fetched and converted models, whether an entry is whole, and whether memory and disk have room.

An entry is a folder with a manifest: its source, and size, time and sha256 of each file. It appears by one rename, so a
folder without a manifest never counts. Knows no models.
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from utils import files
from utils.errors import UserError
from utils.files import own_folder, read_object, write_json
from utils.objects import Json
from utils.progress import SILENT, Progress

MANIFEST = "manifest.json"


def cache_folder() -> Path:
    """`SPEC_CACHE_DIR`, else `speculative-console` under `XDG_CACHE_HOME` or `~/.cache`. Not created."""
    return Path(os.environ.get("SPEC_CACHE_DIR") or own_folder("XDG_CACHE_HOME", ".cache")).expanduser()


def sha256(*files: Path, progress: Progress = SILENT) -> str:
    """Return the hex digest of the files' content, concatenated; `progress` can stop it."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                progress.check()
    return digest.hexdigest()


def remembered_sha256(path: Path, progress: Progress = SILENT) -> str:
    """Return the digest of a large file, read again only if its size or time has changed."""
    notes = cache_folder() / "hashes.json"
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    known: Json = {}
    with suppress(UserError):
        known = read_object(notes)
    if not isinstance(known.get(key), str):
        known[key] = sha256(path, progress=progress)
        with writing(notes.parent):
            notes.parent.mkdir(parents=True, exist_ok=True)
            write_json(notes, known)
    return str(known[key])


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of a full disk or an unwritable folder into a UserError, one line that says what helps."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left in the cache folder {folder}: free some, or set SPEC_CACHE_DIR") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"cannot write to the cache folder {folder} ({error.strerror}): set SPEC_CACHE_DIR to a writable folder"
            ) from error
        raise


def locked(name: Path, progress: Progress) -> AbstractContextManager[object]:
    """Let only one process create the entry `name`; others wait and can be cancelled."""
    with writing(name.parent):
        name.parent.mkdir(parents=True, exist_ok=True)
        return files.locked(name, lambda: progress("waiting: another process is preparing the same files"))


def is_whole(entry: Path, source: dict[str, object]) -> bool:
    """Return whether the entry was made from `source` and all its files are as they were.

    Sizes are always compared; contents only if a file's time has changed.
    """
    with suppress(UserError, OSError, AttributeError, KeyError, TypeError):  # no manifest, or one of another form
        manifest = read_object(entry / MANIFEST)
        noted = {entry / name: each for name, each in manifest["files"].items()}
        return manifest["source"] == source and bool(noted) and all(_same(path, noted[path]) for path in noted)
    return False


def _same(path: Path, noted: dict[str, object]) -> bool:
    stat = path.stat()
    as_noted = (stat.st_size, stat.st_mtime_ns) == (noted["size"], noted["mtime_ns"])
    return as_noted or (stat.st_size == noted["size"] and sha256(path) == noted["sha256"])


def publish(folder: Path, entry: Path, source: dict[str, object]) -> None:
    """Flush the files of `folder` to disk, write its manifest and rename it to `entry`, whose old content goes."""
    with writing(entry.parent):
        noted = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            stat = path.stat()
            noted[path.relative_to(folder).as_posix()] = {
                "size": stat.st_size,
                "mtime_ns": stat.st_mtime_ns,
                "sha256": sha256(path),
            }
        write_json(folder / MANIFEST, {"source": source, "made": time.time(), "files": noted})
        if os.path.exists(real := os.path.realpath(entry)):  # a link stays
            shutil.rmtree(real)
        shutil.move(folder, real)


def filled(
    entry: Path,
    source: dict[str, object],
    fill: Callable[[Path], None],
    progress: Progress,
) -> Path:
    """Return the entry; if it is not whole, `fill` writes its files into an empty folder, in one process at a time."""
    if not is_whole(entry, source):
        with locked(entry, progress):
            if not is_whole(entry, source):  # another process may have been faster
                with scratch(entry) as folder:
                    fill(folder)
                    publish(folder, entry, source)
    return entry


@contextmanager
def scratch(entry: Path) -> Iterator[Path]:
    """Yield an empty folder beside `entry`, removed afterwards. Earlier ones that were left there are removed too, so
    use it under :func:`locked`."""
    with writing(entry.parent):
        for left in entry.parent.glob(f"{entry.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = entry.with_name(f"{entry.name}.partial-{os.getpid()}")
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_memory(what: str, needed: float, instead: str) -> None:
    """Raise UserError if `needed` bytes are not free; `what` needs them, `instead` says what to do."""
    import psutil

    if needed > (free := psutil.virtual_memory().available):
        raise UserError(f"{what} needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free: {instead}")


def check_disk(what: str, needed: float, folder: Path) -> None:
    """Raise UserError if the disk of `folder`, in the cache, has fewer than `needed` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    if needed > (free := shutil.disk_usage(existing).free):
        raise UserError(
            f"{what} needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free in {cache_folder()}: free some, "
            "or set SPEC_CACHE_DIR"
        )
