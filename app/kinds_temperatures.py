"""The kind of a list of temperatures. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.kinds import Number, RefusedError, plain


@dataclass(frozen=True)
class Temperatures:
    """A comma list of temperatures, in the order given; one may come more often than another unless `once`."""

    once: bool = False
    metavar: str = "LIST"
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        return "a comma list of numbers from 0 to 5" + (", each once" if self.once else "")

    def read(self, value: object) -> tuple[float, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise RefusedError(self.allowed)
        try:
            found = tuple(Number(0, 5).read(part.strip() if isinstance(part, str) else part) for part in parts)
        except RefusedError:
            raise RefusedError(self.allowed) from None
        if self.once and len(set(found)) != len(found):
            raise RefusedError(self.allowed)
        return found

    def show(self, value: Any) -> str:
        return ",".join(map(plain, value))
