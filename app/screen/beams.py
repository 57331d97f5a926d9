"""A beam search as it reads and as it is drawn: the best beam's text as the answer so far, the others with their ranks
and scores in a few lines under it, and the steps for /trace.

Texts are joined when they are needed, not at every step: beams that lead change as they grow. Beams mostly
begin alike, so of each only the words from where it leaves the best one are shown. Knows no models and no torch, and
of tokens only their texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len

from app.screen.palette import Look
from app.screen.rows import Chunk, Drawn, Line, Row, chunk, fit, flow, one_line, quoted, share
from app.screen.spans import Span, common
from sampling.events import Beam, BeamStep, BeamTree, Event, Finished, Hypothesis
from utils.growing_text import NO_TEXT, REPLACEMENT, Decode, Window

LIST_FROM = 36  # columns of text from which the beams are listed; below that they are counted
_LEFT = 4  # lines of text that the list must leave to the answer
_WIDE = 60  # columns from which a step's beams have every figure
_TEXT = 18
_ROLES = {"kept": "accepted", "finished": "target", "dropped": "faint", "merged": "faint"}


class BeamLine(NamedTuple):
    """One beam: its text (what it adds to a continued answer), its score, and whether it has finished."""

    text: str
    score: float
    finished: bool


def grown_by(decode: Decode, parent: Hypothesis, token: int) -> str:
    """What a beam says with one more token."""
    return Window(decode, parent.tokens).ahead([token])[0]


class BeamReader:
    """Turns the events of a beam search into text; takes the place of :class:`app.screen.spans.Spanner`.

    `context` holds ids that came before and are on the screen already (an answer that is continued).
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode, self._context = decode, list(context)
        self._before = decode(self._context).rstrip(REPLACEMENT) if self._context else ""
        self._tree = BeamTree()
        self._most = 0
        self._lines: tuple[BeamLine, ...] | None = None  # until they are needed

    def feed(self, event: Event) -> None:
        """Take in one event."""
        self._lines = None
        if isinstance(event, BeamStep):
            self._tree.add(event)
            self._most = event.num_beams
        elif isinstance(event, Finished) and event.reason != "interrupted":
            self._tree.close()

    @property
    def beams(self) -> tuple[BeamLine, ...]:
        """The best beams, best first, at most as many as run at a time; none before the first step."""
        if self._lines is None:
            ranked = self._tree.ranked[: self._most]
            self._lines = tuple(BeamLine(self._text(beam), beam.score, beam.finished) for beam in ranked)
        return self._lines

    @property
    def spans(self) -> list[Span]:
        """The best beam's text."""
        text = self.beams[0].text if self.beams else ""
        return [Span(text, "plain")] if text else []

    def _text(self, beam: Hypothesis) -> str:
        whole = self._decode([*self._context, *beam.tokens])[len(self._before) :]
        return whole if beam.finished else whole.rstrip(REPLACEMENT)  # a character may not be complete yet


def below(beams: Sequence[BeamLine], text: Sequence[Line], width: int, room: int | None, look: Look) -> list[Line]:
    """The text's lines with the beams under them; where `room` (lines) or `width` is short only how many there are."""
    if not beams:
        return list(text)
    count: Line = ((fit(f"best of {len(beams)} beams" if len(beams) > 1 else "one beam", width, look), "faint"),)
    listed = width >= LIST_FROM and (room is None or room >= min(_LEFT, len(text)) + len(beams))
    under = _listed(beams, width, look) if listed else [count]
    gap: list[Line] = [()] if room is None or len(text) + 1 + len(under) <= room else []
    return [*text, *gap, *under]


def _listed(beams: Sequence[BeamLine], width: int, look: Look) -> list[Line]:
    scores = [f"{beam.score:.2f}" for beam in beams]
    rank, score = len(str(len(beams))), max(map(len, scores))
    lines: list[Line] = []
    for number, (beam, figure) in enumerate(zip(beams, scores, strict=True), start=1):
        head = f"{number:>{rank}}  {figure:>{score}}  "
        words = "the text above" if number == 1 else _leaving(beams[0].text, beam.text, look)
        end = f" {'<end>' if look.ascii else NO_TEXT}" if beam.finished else ""
        shown = fit(words, width - len(head) - len(end), look)
        lines.append(((head, "faint"), (shown, "faint" if number == 1 else "plain"), (end, "faint")))
    return lines


def _leaving(best: str, other: str, look: Look) -> str:
    """What `other` says from the word on in which it leaves `best`; its last word if it only ends sooner."""
    alike = other[: common(best, other)]
    start = max(alike.rstrip().rfind(mark) for mark in " \n") + 1
    return (look.glyph("ellipsis") if start else "") + one_line(other[start:].strip(), look)


class BeamTrace(Drawn):
    """The steps of a search: every candidate with its parent, probability, score and fate."""

    first = 1

    def __init__(self, steps: Sequence[BeamStep], decode: Decode, look: Look, *, rule: str = "") -> None:
        self.steps, self.look, self.rule = list(steps), look, rule
        self._decode = decode

    def rows(self) -> list[Row]:
        """All rows; only `look.width` bounds them."""
        if not self.steps:
            return flow([chunk("no steps yet", "faint")], self.look)
        rows, tree = self._head(), BeamTree()
        for number, step in enumerate(self.steps, start=1):
            rows += self._step(number, step, tree)
            tree.add(step)
        return rows

    def picture(self, number: int) -> list[Row]:
        """Step `number`, from 1, and how the search goes."""
        tree = BeamTree()
        for step in self.steps[: number - 1]:
            tree.add(step)
        return [*self._step(number, self.steps[number - 1], tree), *self._head()]

    def _head(self) -> list[Row]:
        return flow([chunk(self.rule, "faint")], self.look) if self.rule else []

    def _step(self, number: int, step: BeamStep, tree: BeamTree) -> list[Row]:
        count: Counter[str] = Counter(beam.fate for beam in step.beams)
        fates = ", ".join(f"{count[fate]} {fate}" for fate in _ROLES if count[fate])
        faint = [chunk(text, "faint") for text in (fates, f"{step.seconds * 1000:.1f} ms")]
        rows = flow([chunk(f"step {number}", "strong"), *faint], self.look, 2)
        for place, beam in enumerate(step.beams, start=1):
            rows += flow(self._beam(place, beam, tree), self.look, 4)
        return rows

    def _beam(self, place: int, beam: Beam, tree: BeamTree) -> list[Chunk]:
        parent = tree.running[beam.parent]
        word = grown_by(self._decode, parent, beam.token)
        wide = self.look.width >= _WIDE
        shown = quoted(word, self.look, _TEXT)
        chunks = [chunk(f"{place:>2}"), chunk(shown, _ROLES[beam.fate])]
        if wide:
            chunks.append(chunk(" " * (_TEXT - cell_len(shown)), "plain", ""))
            origin = f"behind {beam.parent + 1}" if parent.tokens else "opens"
            chunks.append(chunk(f"{origin:<9}"))
        p = share(math.exp(beam.log_p - parent.log_p))
        figures = f"p {p:>4}  log p {beam.log_p:7.2f}  score {beam.score:6.2f}" if wide else f"p{p} {beam.score:.2f}"
        chunks += [chunk(figures), chunk(beam.fate, "strong" if beam.fate == "finished" else "plain")]
        return [item for item in chunks if item.width]


def search_of(num_beams: int, alpha: float, offset: float) -> str:
    """What a beam search does, in words."""
    many = f"the {num_beams} likeliest go on" if num_beams > 1 else "the likeliest goes on"
    penalty = f"(({offset:g} + n) / {offset + 1:g})^{alpha:g}"
    return f"beam search: of all continuations {many}; score = log p / {penalty} over n tokens, the best score wins"
