"""A round as it reads: every draft's text, probabilities and fate, and the reviews inside it.

A review of a cascade is a round within the round: its drafts read on from what was committed and from the draft
that had grown before it. Knows no screen, no names and no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.spans import Decode, Window
from sampling.events import Step


class Drafted(NamedTuple):
    """One draft of a round. q and p are None where it was not examined; `source` where it is not known.

    `depth` says how far in it stands: of a chain 0 everywhere, of a tree the nodes above it.
    """

    number: int
    text: str
    source: int | None
    q: float | None
    p: float | None
    fate: str  # accepted, rejected or discarded
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A round with its texts. `own` is the verifier's own token ("" if an accepted draft ended the row)."""

    step: Step
    drafts: tuple[Drafted, ...]
    own: str
    inner: tuple[Round, ...] = ()


def read(step: Step, window: Window, ahead: Sequence[int] = ()) -> Round:
    """The texts of a round behind the committed tokens of `window` and behind `ahead`; nothing is committed.

    Where a character is split over tokens that are not committed its text is only near.
    """
    tree = step.is_tree
    texts = _texts(step, window, ahead)
    examined = [*step.path, *step.rejected]
    figures = {node: pair for node, *pair in zip(examined, step.draft_p, step.target_p, strict=False)}
    fates = dict.fromkeys(step.path, "accepted") | dict.fromkeys(step.rejected, "rejected")
    drafts, depths = [], step.depths
    for node in _downwards(step) if tree else range(len(texts)):
        q, p = figures.get(node, (None, None))
        source = step.source[node] if node < len(step.source) else None
        depth = depths[node] if tree else 0
        drafts.append(Drafted(node + 1, texts[node], source, q, p, fates.get(node, "discarded"), depth))
    own = "" if step.token is None else window.ahead([*ahead, *step.emitted])[-1]
    inner = zip(step.inner, starts(step), strict=True)
    reviews = tuple(read(one, window, [*ahead, *step.drafted[:start]]) for one, start in inner)
    return Round(step, tuple(drafts), own, reviews)


def _texts(step: Step, window: Window, ahead: Sequence[int]) -> list[str]:
    """What each draft reads like behind those above it."""
    if not step.is_tree:
        return window.ahead([*ahead, *step.drafted])[len(ahead) :]
    paths: list[list[int]] = []
    for token, parent in zip(step.drafted, step.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else ahead), token])
    return [window.ahead(path)[-1] for path in paths]


def _downwards(step: Step) -> list[int]:
    """The nodes of a tree, each followed by those below it."""
    kids: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parents):
        kids.setdefault(parent, []).append(node)
    found, waiting = [], list(reversed(kids.get(-1, [])))
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += reversed(kids.get(node, []))
    return found


class Rounds:
    """The rounds of a row one after the other, each read behind what was committed before it."""

    def __init__(self, decode: Decode) -> None:
        self._window = Window(decode)

    def read(self, step: Step) -> Round:
        """The texts of the next round."""
        found = read(step, self._window)
        self.skip(step)
        return found

    def skip(self, step: Step) -> None:
        """Go on behind a round that is not asked for."""
        for token in step.emitted:
            self._window.push(token)


def starts(step: Step) -> list[int]:
    """Behind how many of the round's drafts each of its reviews began.

    What a review emitted stands in the round's drafts, cut where they end; drafts that nobody reviewed leave no
    review and may stand between. A review whose tokens are not found there began behind the one before it.
    """
    found, at = [], 0
    for review in step.inner:
        place = _find(step.drafted, review.emitted, at)
        found.append(at if place is None else place)
        at = at if place is None else min(len(step.drafted), place + len(review.emitted))
    return found


def _find(tokens: Sequence[int], part: Sequence[int], start: int) -> int | None:
    """Where `part`, or as much of it as there is room for, stands in `tokens` from `start` on."""
    for place in range(start, len(tokens)):
        there = tuple(tokens[place : place + len(part)])
        if there and there == tuple(part[: len(there)]):
            return place
    return None
