"""A model of the hub → its folder in the hub's own cache, or one line that says why it cannot be fetched.

Follows HF_HOME, HF_TOKEN and HF_ENDPOINT.
"""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.errors import UserError
from utils.loading.cache import remembered_sha256
from utils.progress import Cancelled, Progress, check

_SMALL = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken"]
_WEIGHTS = ("*.safetensors", "*.bin")  # the first kind that a repository has is fetched
_UNWANTED = ["*/*", "consolidated*", "training_args.bin"]  # other formats and copies of the weights


def hub_folder(
    name: str, revision: str | None, offline: bool, progress: Progress, cancelled: Callable[[], bool]
) -> Path:
    """The snapshot of `name` at `revision`, fetched if it is not cached. Raises UserError or Cancelled.

    Without a connection, or while the hub fails, the cached snapshot is taken, as it is with `offline`.
    """
    from huggingface_hub import constants, errors

    offline = offline or constants.HF_HUB_OFFLINE
    at = f" at revision {revision}" if revision else ""
    progress(f"looking up {name}{at}", None)
    try:
        return _snapshot(name, revision, offline, _bar(f"fetching {name}", progress, cancelled))
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
        other = f"cannot fetch {name}: {text[:200] or type(error).__name__}"
        if "No space left" in text:
            other = f"no space left for {name} in {constants.HF_HUB_CACHE}: set HF_HOME elsewhere"
        raise UserError(next((line for kind, line in known.items() if isinstance(error, kind)), other)) from error


def hub_file(
    name: str,
    file: str,
    revision: str | None,
    digest: str,
    *,
    offline: bool,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Path | None:
    """The file from the hub's cache, else fetched; None if neither has it with this sha256. Raises Cancelled."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    def right(path: object) -> bool:
        return isinstance(path, str) and remembered_sha256(Path(path), cancelled) == digest

    cached = try_to_load_from_cache(name, file, revision=revision)
    if right(cached):
        return Path(str(cached))
    if offline or constants.HF_HUB_OFFLINE or not _reachable():
        return None
    progress(f"looking up {name}", None)
    try:
        bar = _bar(f"fetching {file}", progress, cancelled)
        fetched = hf_hub_download(name, file, revision=revision, tqdm_class=bar)
    except Cancelled:
        raise
    except Exception:  # the packages have the file too
        return None
    return Path(fetched) if right(fetched) else None


def _reachable() -> bool:
    """Whether the hub's name can be resolved: an unreachable hub costs half a minute of retries."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().get(address.scheme or "https"):
        return True
    try:
        socket.getaddrinfo(address.hostname, address.port or address.scheme or "https")
    except OSError:
        return False
    return True


def is_cached(name: str, revision: str | None) -> bool:
    """Whether the hub's cache has a snapshot of `name`, perhaps incomplete. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def _snapshot(name: str, revision: str | None, offline: bool, bar: Any) -> Path:
    """Return the snapshot with the first kind of weights that it has; offline it may lack the other kinds."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch = partial(
        snapshot_download,
        name,
        revision=revision,
        local_files_only=offline,
        ignore_patterns=_UNWANTED,
        tqdm_class=bar,
    )
    first, last = _WEIGHTS
    with suppress(LocalEntryNotFoundError):
        folder = Path(fetch(allow_patterns=[*_SMALL, first]))
        if any(folder.glob(first)):
            return folder
    return Path(fetch(allow_patterns=[*_SMALL, last]))


def _bar(stage: str, progress: Progress, cancelled: Callable[[], bool]) -> Any:
    """Return a class of progress bars for the hub's downloads, which reports bytes instead of drawing; cancelling
    raises in it."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "disable": False, "file": nowhere})

        def update(self, n: float | None = 1) -> bool | None:
            check(cancelled)
            shown = super().update(n)
            if self.unit == "B" and self.total:
                progress(stage, min(1.0, self.n / self.total))
            return shown

    nowhere = open(os.devnull, "w")  # noqa: SIM115  # closed with the last bar that holds it
    return Reporting
