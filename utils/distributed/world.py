"""Which of several processes this one is, as torchrun says it in the environment. No torch, nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True)
class World:
    """One process among `size`; on its machine it is `local_rank` of `local_size`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def of(environ: Mapping[str, str]) -> World:
        """What torchrun wrote; where any part of it is missing this process is alone."""
        numbers = [environ.get(name, default) for name, default in _NUMBERS.items()]
        complete = all(environ.get(name, "").strip() for name in _TOLD) and all(number.isdigit() for number in numbers)
        return World(*map(int, numbers)) if complete else World()

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1
