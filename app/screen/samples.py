"""Several answers to one prompt as a tree: a beginning that answers share is one branch, with their number and its
probability; and a viewer's content that walks over the tree.

Knows no models: an answer is its tokens with their probabilities. The viewer returns the number of the answer that the
user takes; the caller enters it.
"""

import math
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, TypeAdapter

from app.screen.inspection import SaidToken
from app.screen.palette import Look
from app.screen.rows import Row, chunk, fit, flow, one_line, row_of, wrap
from app.screen.terminal import Action

UNKNOWN = "without probabilities: the server gives no log-probabilities of its tokens"
BranchPlace = tuple[int, ...]  # a branch's path from the top: at each level the index among the siblings


class Branch(BaseModel, frozen=True):
    """A stretch of text that `count` answers share after the branches above; `row`: the index of the first of them.

    `p`: the probability of all tokens up to its end in the distributions that they were drawn from, or as a server
    reports it; None if it is not known.
    """

    text: str
    count: int
    p: float | None
    row: int
    children: tuple["Branch", ...] = ()


BRANCHES: TypeAdapter[tuple[Branch, ...]] = TypeAdapter(tuple[Branch, ...])


def tree_of(
    answers: Sequence[Sequence[SaidToken]],
    rows: Sequence[int] | None = None,
    start: int = 0,
    p: float | None = 1.0,
) -> tuple[Branch, ...]:
    """Return the tree of the answers in `rows` (None: all) from token `start` on, the branch of most answers first.
    `p`: the probability of the tokens before `start`."""
    longer = [row for row in (range(len(answers)) if rows is None else rows) if start < len(answers[row])]
    branches = []
    for token in dict.fromkeys(answers[row][start].token for row in longer):
        group = [row for row in longer if answers[row][start].token == token]
        first, end = answers[group[0]], start + 1
        shortest = min(len(answers[row]) for row in group)
        while end < shortest and len({answers[row][end].token for row in group}) == 1:
            end += 1
        drawn = [choice.processed for token in first[start:end] for choice in token.choices if choice.fate == "said"]
        chance = None if p is None or None in drawn else p * math.prod(each for each in drawn if each is not None)
        branches.append(
            Branch(
                text="".join(token.text for token in first[start:end]),
                count=len(group),
                p=chance,
                row=group[0],
                children=tree_of(answers, group, end, chance),
            )
        )
    return tuple(sorted(branches, key=lambda branch: -branch.count))


class SampleTree:
    """A viewer's content: the tree with a cursor on one branch; Enter returns the index of its first answer."""

    help = "up/down branch  right open  left close  Enter takes it as the answer  q leave"

    def __init__(self, top: Sequence[Branch]) -> None:
        self.top, self.total, self.at = top, sum(branch.count for branch in top), 0
        self.closed: set[BranchPlace] = set()

    def shown(
        self, branches: Sequence[Branch] | None = None, above: BranchPlace = ()
    ) -> Iterator[tuple[BranchPlace, Branch]]:
        """Yield the branches that are not below a closed one, with their paths."""
        for index, branch in enumerate(self.top if branches is None else branches):
            path = (*above, index)
            yield path, branch
            if path not in self.closed:
                yield from self.shown(branch.children, path)

    def rows(self, look: Look) -> list[Row]:
        """Return a row for each branch that is open; in the viewer (`look.height` is given) those around the cursor,
        and the end of the text up to its branch."""
        every = list(self.shown())
        rows = [self._row(at, path, branch, look) for at, (path, branch) in enumerate(every)]
        if look.height is None:
            return rows + flow([chunk(UNKNOWN, "faint")] * any(branch.p is None for branch in self.top), look)
        cursor = every[self.at][0]
        said = "".join(branch.text for path, branch in every if path == cursor[: len(path)])
        text = [row_of(line, look) for line in wrap([(said, "question")], look.width, look.ascii)]
        room = max(1, look.height - min(len(text), look.height // 3) - 1)
        first = max(0, min(self.at - room // 2, len(rows) - room))
        return [*rows[first : first + room], [], *text[-(look.height // 3) :]][: look.height]

    def _row(self, at: int, path: BranchPlace, branch: Branch, look: Look) -> Row:
        cursor = look.height is not None and at == self.at
        start = f"{look.glyph('prompt') if cursor else ' '}{'+' if path in self.closed else ' '}"
        head = f"{start}{'  ' * (len(path) - 1)}{branch.count}/{self.total} {probability(branch.p)} "
        text = fit(one_line(branch.text, look), look.width - len(head), look)
        return row_of([(head, "strong" if cursor else "faint"), (text, "plain")], look)

    def move(self, by: int) -> None:
        """Go to another branch."""
        self.at = max(0, min(len(list(self.shown())) - 1, self.at + by))

    def fold(self, closed: bool) -> None:
        """Close the branch, or open it."""
        path, branch = list(self.shown())[self.at]
        (self.closed.add if closed and branch.children else self.closed.discard)(path)

    @property
    def keys(self) -> dict[str, Action]:
        return {
            "up": lambda: self.move(-1),
            "down": lambda: self.move(1),
            "left": lambda: self.fold(True),
            "right": lambda: self.fold(False),
            "enter": lambda: list(self.shown())[self.at][1].row,
        }


def probability(p: float | None) -> str:
    """Return a probability as .12, or as 4e-05 if it is small; "-" if it is not known."""
    if p is None:
        return "-"
    return f"{p:.2f}".removeprefix("0") if p >= 0.005 else f"{p:.0e}"
