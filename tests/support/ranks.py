"""Several processes as torchrun starts them: forked from one that has imported everything, so that they start at once.

What torchrun puts into the environment is put there by hand; signals, deaths and files are real.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.support.warm import CONTEXT

PATIENCE = 240.0  # seconds; a busy machine starts and joins three processes slowly


class Ranks:
    """Running processes. `act(*details)` is what each runs, its result the exit code."""

    def __init__(self, folder: Path, count: int, act: Callable[..., int], *details: Any) -> None:
        self.folder = folder
        self.store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)  # torchrun's own process
        self.processes = [
            CONTEXT.Process(target=_begin, args=(str(folder), rank, count, self.store.port, act, details))
            for rank in range(count)
        ]
        for rank, process in enumerate(self.processes):
            (folder / f"{rank}.out").touch()
            (folder / f"{rank}.err").touch()
            process.start()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def codes(self, patience: float = PATIENCE) -> list[int | None]:
        """The exit codes, once all have ended; None for one that has not."""
        until = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid or 0, number)

    def out(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text(encoding="utf-8")

    def errors(self, rank: int) -> list[str]:
        """What a rank wrote to stderr, by lines."""
        return (self.folder / f"{rank}.err").read_text(encoding="utf-8").splitlines()


def infer(words: Sequence[str]) -> int:
    """infer.py with these words, in this process."""
    from app.command_line.main import main

    return main(words)


def _begin(folder: str, rank: int, count: int, port: int, act: Callable[..., int], details: Sequence[Any]) -> None:
    os.setsid()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in told.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["OMP_NUM_THREADS"] = "1"
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    import torch

    from utils.processes import this_process

    torch.set_num_threads(1)
    this_process.cache_clear()
    code = act(*details)
    sys.stdout.flush()
    os._exit(code)
