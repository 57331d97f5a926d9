"""Several processes under torchrun: rank 0 runs the program, the others serve it, and one of them says what went wrong.

Knows who is to do what; how the ranks speak is utils/distributed/process_group.py's, what they do
sampling/models/sharded.py's. torch is imported only when the others are met.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, NoReturn

from utils.distributed.world import World
from utils.errors import UsageError
from utils.files import write_json

if TYPE_CHECKING:
    from app.settings.table import ModelOptions
    from utils.catalogue.specs import PairSpec
    from utils.distributed.process_group import ProcessGroup
    from utils.loading.loaded import LoadedPair, LoadOptions
    from utils.progress import Progress


TERMINATED = 128 + signal.SIGTERM


def check_world(command: str, options: ModelOptions, world: World, sharing: Sequence[str]) -> None:
    """UsageError if this sub-command or this --tp-size does not go with so many processes. Every rank decides alike.

    `sharing` are the sub-commands whose target several processes can share.
    """
    if world.several and command not in sharing:
        able = ", ".join(sharing)
        raise UsageError(f"{command} runs in one process, torchrun started {world.size} ({able} can share a target)")
    if options.tp_size not in ("auto", world.size):
        run = f"torchrun --nproc_per_node {options.tp_size} infer.py {command} …"
        started = f"torchrun started {world.size}" if world.several else "one process runs"
        raise UsageError(f"tp_size is {options.tp_size}, but {started} (that many start with: {run})")


def hush(world: World, verbose: bool) -> IO[str]:
    """Take the terminal from a process that serves; what it may still write a last word to."""
    word = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if verbose else (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return word


def serve(options: ModelOptions, world: World, word: IO[str]) -> int:
    """Serve rank 0 until it leaves; the exit code. Ctrl-C is rank 0's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sampling.models.sharded import serve as obey
    from utils.distributed.process_group import LostError, joined, known
    from utils.loading.quiet import quiet_environment
    from utils.loading.shards import load_shard, share_cores
    from utils.progress import never, silent

    quiet_environment()
    share_cores(world.local_size)

    def load(spec: Any, given: Any) -> Any:
        return load_shard(group, spec, given, silent, never)[0].model

    try:
        group = joined(world, options.device)
        obey(group, load)
    except LostError as error:
        met = known()
        if met is not None and met.failure.left:
            return 0
        if met is not None and not met.failure.speaks():
            return 1
        time.sleep(0.3)  # where all are being ended, so is this one, without a word
        word.write(f"error: {error}\n")
        return 1
    return 0


@contextmanager
def leading(options: ModelOptions, world: World) -> Iterator[None]:
    """Rank 0's whole run: the others are told to leave when it ends, however it ends."""
    if not world.several:
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends everybody when one has died: there is more to say
        leave(options, world)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


_seen: list[str] = []  # who had died when torchrun began to end the rest


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    look()
    raise SystemExit(TERMINATED)


def look() -> None:
    """Being ended, remember who has died: when all are, that can no longer be told."""
    _seen.append(died())


def leave(options: ModelOptions, world: World) -> None:
    """Let the other ranks go. They wait for rank 0 even if it never came to load anything."""
    from utils.distributed.process_group import LostError, joined

    with contextlib.suppress(LostError):
        joined(world, options.device).leave()


def died() -> str:
    """Which processes have died, in words; "" if none has, or none was met."""
    if _seen:
        return _seen[0]
    group = _group()
    return group.failure.lost() if group is not None else ""


def load_pair(spec: PairSpec, options: LoadOptions, progress: Progress, cancelled: Callable[[], bool]) -> LoadedPair:
    """As utils.loading.loading's; where processes share the target, it is the one that stands for all their parts."""
    from utils.loading import loading

    loaded = loading.load_pair(spec, options, progress, cancelled)
    if loaded.target.shard is None:
        return loaded
    from sampling.models.sharded import ShardedNetwork
    from utils.distributed.process_group import known

    group = known()
    assert group is not None
    network = ShardedNetwork(loaded.target.model, group, loaded.target.shard)
    return replace(loaded, target=replace(loaded.target, model=network))


def tell_launcher(text: str) -> None:
    """Leave the error's line where torchrun looks for it: its table shows it in place of a hint about tracebacks."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            more = {"py_callstack": text, "timestamp": str(int(time.time()))}
            write_json(file, {"message": {"message": text, "extraInfo": more}})


def broken() -> bool:
    """Whether the others are lost: nothing can be decoded any more."""
    group = _group()
    return group is not None and group.broken not in ("", "left")


def end(code: int) -> None:
    """Leave the process here and now if it has met others.

    Where they are lost the libraries' own ends would wait for them. Where all is well gloo's threads may still hold
    the last collective while the interpreter ends, and letting go of it then aborts the process ("terminate called
    without an active exception"; pytorch/pytorch pull request 179291).
    """
    if _group() is not None:
        leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's end, which would wait for threads that cannot be called off."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)


def _group() -> ProcessGroup | None:
    """The group, if it has been joined; torch is not imported for the question."""
    if "utils.distributed.process_group" not in sys.modules:
        return None
    from utils.distributed.process_group import known

    return known()
