"""Which of several processes this one is, as torchrun says it in the environment. No torch, nothing started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        if not all(environ.get(name, "").strip() for name in _TOLD):
            return World()
        numbers = [environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        numbers.append(environ.get("LOCAL_WORLD_SIZE", "1"))
        if not all(number.isdigit() for number in numbers):
            return World()
        return World(*map(int, numbers))

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1
