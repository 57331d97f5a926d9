"""One answer of one lane with its figures, and its form in `run --json` and `bench --out`.

Knows lanes by name and ids, not how they decode, and nothing of terminals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from app.lanes.comparison import (
    BY_CONSTRUCTION,
    Comparison,
    difference,
    gap_between,
    gap_text,
    may_differ,
    near_tie,
    speed_of,
)
from app.lanes.costs import Terms, swi_of
from app.settings.table import OUTPUT, SETTING_FIELDS
from sampling.drafters.registry import is_simulated
from sampling.stats.metrics import Meter
from sampling.stats.summary import Stats, disturbed, speedup
from utils.remote.server import is_server

if TYPE_CHECKING:
    from app.lanes.lane import Lane
    from app.settings.table import Settings
    from sampling.events import Event


@dataclass(frozen=True)
class Answer:
    """A lane's answer to a prompt. `ids` holds every emitted id, a closing stop id included."""

    method: str
    ids: tuple[int, ...]
    text: str
    stats: Stats
    may_differ: bool = False  # from `ar`, rightly
    terms: Terms = field(default_factory=Terms)

    @property
    def interrupted(self) -> bool:
        return self.stats.stop_reason == "interrupted"

    def to_json(self) -> dict[str, Any]:
        """Return one entry of `results` of `run --json`."""
        answer = {"method": self.method, "text": self.text, "ids": list(self.ids)}
        return {**answer, **self.stats.to_json(), "swi": swi_of(self.stats, self.terms)}


def run_lane(
    lane: Lane,
    prompt: list[int],
    decode: Callable[[list[int]], str],
    *,
    interrupt: Callable[[], bool],
    show: Callable[[Event], None] | None = None,
    terms: Terms | None = None,
) -> Answer:
    """Decode one prompt to its end. The lane reads the prompt itself; `show` sees every event.

    `terms` go with the answer; without them it has no figures that need them.
    """
    meter = Meter(prompt_n=len(prompt))
    for event in lane.run(prompt, interrupt=interrupt):
        meter.add(event)
        if show is not None:
            show(event)
    return answer_of(lane, meter, decode, terms or Terms())


def answer_of(lane: Lane, meter: Meter, decode: Callable[[list[int]], str], terms: Terms) -> Answer:
    """Return the answer of a lane whose events the meter has counted."""
    return Answer(lane.name, tuple(meter.ids), decode(meter.ids), meter.stats, may_differ(lane, lane.settings), terms)


def agrees(plain: Answer, other: Answer) -> bool | None:
    """Return whether `other` is the text of plain decoding; None if it may rightly differ or is not known.

    An interrupted answer is only known to differ: its part may be equal.
    """
    if other.may_differ:
        return None
    at = difference(plain.ids, other.ids)
    if plain.interrupted or other.interrupted:
        return False if at is not None and at < min(len(plain.ids), len(other.ids)) else None
    return at is None


PartingKind = Literal["near tie", "beyond", "other draw", "other text"]


class Parting(NamedTuple):
    """The first position (from 0) where an answer differs from plain decoding's, and the target's top-2 gap there
    (None: not recorded).

    `kind`: a near tie, which rounding may turn; beyond one, which is an alarm; if it may rightly differ another draw
    of the same distribution, or another text (of another model, or of a search).
    """

    kind: PartingKind
    position: int
    gap: float | None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "gap": self.gap if math.isfinite(self.gap or 0.0) else None}


def parting(plain: Answer, other: Answer) -> Parting | None:
    """Return where and how two whole answers part; None if they are the same."""
    at = difference(plain.ids, other.ids)
    if at is None:
        return None
    gap = gap_between(plain.stats, other.stats, at)
    if other.may_differ:
        another = other.method == "draft" or other.stats.beams or is_server(other.method)
        return Parting("other text" if another else "other draw", at, gap)
    tied = gap is not None and gap < near_tie(plain.terms.precision)
    return Parting("near tie" if tied else "beyond", at, gap)


def plain_answer(answers: Sequence[Answer]) -> Answer | None:
    """Return the answer of `ar`, if there is one."""
    return next((answer for answer in answers if answer.method == "ar"), None)


def baseline(answers: Sequence[Answer]) -> Answer | None:
    """Return the answer to compare the others with: that of `ar`, or without it a first lane that is a server's."""
    return plain_answer(answers) or next((answer for answer in answers[:1] if is_server(answer.method)), None)


def comparisons_of(answers: Sequence[Answer]) -> list[Comparison]:
    """Compare every other lane with the baseline, if there is one; each is named if there are more than two."""
    plain, comparisons = baseline(answers), list[Comparison]()
    for answer in answers:
        if plain is not None and answer is not plain and (comparison := compare(plain, answer)) is not None:
            name = f"{answer.method}: " if len(answers) > 2 else ""
            comparisons.append(Comparison(f"{name}{comparison.text}", comparison.style))
    return comparisons


def compare(plain: Answer, last: Answer) -> Comparison | None:
    """Compare an answer with plain decoding's; None without two answers that have tokens.

    A difference is an alarm where none may be and rounding does not explain it. A beam search looks for a better text
    than plain decoding's, so that another text is no other draw. If a lane was stopped, the common length is compared.
    """
    if not plain.ids or not last.ids:
        return None
    if is_server(plain.method) or is_server(last.method):
        return _compare_texts(plain, last)
    stopped, precision = plain.interrupted or last.interrupted, plain.terms.precision
    invariant = plain.terms.invariant and last.terms.invariant
    speed, style = speed_of(plain.stats, last.stats)
    speed += " (simulated)" if speed and is_simulated(last.method) else ""
    ending = ", stopped" if stopped else ""
    at = difference(plain.ids, last.ids, prefix=stopped)
    if at is None:
        same = "same output so far" if stopped else "same output"
        if invariant and not last.may_differ:
            same = BY_CONSTRUCTION
    elif not last.may_differ:
        gap = gap_between(plain.stats, last.stats, at)
        parts = [f"differs at token {at + 1}{gap_text(gap, precision, invariant)}{ending}", speed]
        rounded = precision != "float32" and gap is not None and gap < near_tie(precision)
        return Comparison("; ".join(filter(None, parts)), "plain" if rounded else "alarm")
    elif last.stats.beams:
        same = "another text, as beam search may find"
    else:
        up_to = "" if precision == "float32" or invariant else f" up to {precision} rounding"
        same = f"same distribution{up_to}, different draw"
    return Comparison(", ".join(filter(None, (speed, same))) + ending, style)


def _compare_texts(first: Answer, other: Answer) -> Comparison:
    """Compare two answers by their texts, as their ids are not of one tokenizer: a server gave one."""
    speed, style = speed_of(first.stats, other.stats)
    stopped = first.interrupted or other.interrupted
    at = difference(first.text, other.text, prefix=stopped)
    same = "same output so far" if stopped else "same output"
    if at is not None:
        same = f"the texts part at character {at + 1}"
    return Comparison(", ".join(filter(None, (speed, same))) + (", stopped" if stopped else ""), style)


def compared(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return `speedup` (the last lane's rate over ar's), `disturbed` (whether that timing was, `speedup` is None then)
    and `same_output` (of every lane that must equal ar)."""
    plain, last = baseline(answers), answers[-1]
    if plain is None or len(answers) < 2:
        return {"speedup": None, "disturbed": False, "same_output": None}
    wrong = disturbed(plain.stats, last.stats)
    ratio = None if last is plain or wrong else speedup(plain.stats, last.stats)
    same = {agrees(plain, answer) for answer in answers if answer is not plain}
    rounded = None if ratio is None else round(ratio, 4)
    return {"speedup": rounded, "disturbed": wrong, "same_output": False if False in same else True in same or None}


def shown_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that an answer depends on: all but those of the display."""
    return {name: getattr(settings, name) for name, field in SETTING_FIELDS.items() if field.group != OUTPUT}
