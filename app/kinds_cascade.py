"""Kinds of setting for cascades: a list of drafters, large to small, and the matrix of how much each adds.

What only a loaded pair can tell (which models it has, whether rows and drafters agree) is not asked here. No torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from app.kinds import RefusedError
from utils.cascade_spec import unknown_member
from utils.errors import UserError
from utils.k_matrix import Matrix, check_shape
from utils.specs import MEMBERS

NONE = "(none)"
PUBLISHED = ("[[5,10],[0,10]]", "[[13,10],[0,10]]", "[[5,14,10],[0,1,10],[0,0,10]]")


@dataclass(frozen=True)
class Drafters:
    """A comma list (or a sequence) of drafters: words, or names of models that the pair brings. Empty: the pair's."""

    choices: tuple[str, ...] = MEMBERS
    metavar: str = "LIST"

    @property
    def allowed(self) -> str:
        return f"a comma list of {', '.join(self.choices)} or names of the pair's models, each once, large to small"

    def read(self, value: object) -> tuple[str, ...]:
        if value in ("", NONE, (), []):
            return ()
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise RefusedError(self.allowed)
        names = tuple(part.strip() for part in parts)
        if len(set(names)) != len(names) or not all(name and name.isprintable() and "," not in name for name in names):
            raise RefusedError(self.allowed)
        if (meant := next(filter(None, map(unknown_member, names)), None)) is not None:
            raise RefusedError(f"{self.allowed} (did you mean {meant}?)")
        return names

    def show(self, value: Any) -> str:
        return ",".join(value) or NONE


@dataclass(frozen=True)
class KMatrix:
    """A K matrix as JSON text or as rows of numbers; see sampling/k_matrix.py. Empty: the pair's."""

    choices: tuple[str, ...] = PUBLISHED
    metavar: str = "ROWS"
    allowed: str = "rows of whole numbers like [[5,10],[0,10]], upper triangular"

    def read(self, value: object) -> Matrix:
        if value in ("", NONE, (), []):
            return ()
        try:
            return check_shape(json.loads(value) if isinstance(value, str) else value)
        except (ValueError, RecursionError):
            raise RefusedError(self.allowed) from None
        except UserError as error:
            why = str(error).partition(", got ")[0]  # the value given stands in the line already
            raise RefusedError(re.sub(r"^k_matrix must (be|hold) ", "", why)) from None

    def show(self, value: Any) -> str:
        return json.dumps(value, separators=(",", ":")) if value else NONE
