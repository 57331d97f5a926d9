"""A small form for answers, as a table of states, and laws under it. Knows no library of grammars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sampling.constraint import FormConstraint
from tests.support.branching import softmax

SIZE, END = 6, 5
PROMPT = [0, 1, 0]
TABLE: dict[str, dict[int, str | None]] = {
    "begin": {1: "one", 2: "two"},
    "one": {3: "three"},  # 3 4 0 are forced after 1
    "three": {4: "four"},
    "four": {0: "open"},
    "open": {1: "one", 2: "two", END: None},
    "two": {0: "open", 3: "two", 4: "last"},
    "last": {END: None},
}


@dataclass(frozen=True)
class TableState:
    """A state of the table: a `FormState` of sampling/types.py."""

    name: str = "begin"

    @property
    def forced(self) -> int | None:
        return next(iter(TABLE[self.name])) if len(TABLE[self.name]) == 1 else None

    @property
    def refused(self) -> Tensor:
        return torch.tensor([token not in TABLE[self.name] for token in range(SIZE)])

    def after(self, token: int) -> "TableState | None":
        name = TABLE[self.name].get(token)
        return None if name is None else TableState(name)


def fits(answer: Sequence[int]) -> bool:
    """Whether an answer is the beginning of one in the form; nothing follows its end."""
    name: str | None = "begin"
    for token in answer:
        if name is None or token not in TABLE[name]:
            return False
        name = TABLE[name][token]
    return True


@cache
def _allowed(answer: tuple[int, ...]) -> tuple[bool, ...]:
    return tuple(fits((*answer, token)) for token in range(SIZE))


class NaiveForm:
    """A law masked by trying each token of the vocabulary; texts that do not fit are left alone."""

    needs_prefixes = True

    def __init__(self, law: Callable[[Tensor], Tensor] = softmax) -> None:
        self.law = law

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]]) -> Tensor:
        flat = logits.double().reshape(-1, SIZE).clone()
        for row, prefix in zip(flat, prefixes, strict=True):
            allowed = torch.tensor(_allowed(tuple(prefix[len(PROMPT) :])))
            row[~allowed] = -torch.inf if bool(allowed.any()) else row[~allowed]
        return self.law(flat).view(logits.shape)


class MaskedForm(NaiveForm):
    """The same law as the sampler makes it, and the constraint that drafters see."""

    def __init__(self, law: Callable[[Tensor], Tensor] = softmax) -> None:
        super().__init__(law)
        self.constraint = FormConstraint(TableState())

    def __call__(self, logits: Tensor, prefixes: Sequence[Sequence[int]]) -> Tensor:
        return self.law(self.constraint.masked(logits.double(), [list(prefix) for prefix in prefixes]))
