"""One answer of one lane with its figures, its form in `run --json` and `bench --out`, and the comparison of lanes.

The comparison says how fast a lane is, whether its text may differ and does, by which rule its drafts are accepted, and
how far equal text is promised. Works on figures, ids and texts; knows lanes by name, not how they decode; no terminals.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from app.lanes.costs import LaneRecord, Terms, swi_of
from app.settings.table import OUTPUT, SETTING_FIELDS, Settings
from sampling.drafters.registry import LOSSY, is_simulated
from sampling.events import DELTA, EPSILON, Event, Likely, Step
from sampling.stats.metrics import Meter
from sampling.stats.summary import AS_FAST, Stats, disturbed, rounded, speedup
from utils.logits_processors import ARGUMENTS
from utils.objects import Json
from utils.progress import INTERRUPTED
from utils.remote.server import ServerMessage

if TYPE_CHECKING:
    from app.lanes.lane import Lane


LaneRule = Literal["argmax", "match", "ratio", "coupled", "typical"]

RULES: dict[LaneRule, str] = {
    "argmax": "greedy: a draft x is accepted if x = argmax p",
    "match": "point mass: the target draws its own token, x is accepted if that is x; chance p(x)",
    "ratio": "x drawn from q is accepted with chance min(1, p(x)/q(x))",
    "coupled": "drafter and target draw with the same noise; x is accepted if both drew it",
    "typical": f"lossy: a draft x is accepted if p(x) > min({EPSILON:g}, {DELTA:g} exp(-H)), H the entropy of p",
}

# The rule "ratio" under `verify block` (sampling/verify/rules.py).
BLOCK_RULE = "block: of a chain drawn from q the longest part is accepted whose coin accepts it, by p/q along the chain"
OTHER_TEXT = ("draft", "beam", LOSSY)  # lanes that do not decode as the target alone does
NEAR_TIE = 1e-3  # logit gap under which two tokens are tied in float32
# By number format, as measured on the default target and rounded up: the largest difference between a token's logits in
# passes of different width, and the top-2 gap under which two tokens may change places
# (docs/notes.md, "The same token in passes of different width").
ROUNDING = {"float32": (8e-5, NEAR_TIE), "float16": (0.11, 0.1), "bfloat16": (1.2, 0.5)}
# The top-2 gap under which kernels over packed weights and float32 over the same weights may choose different tokens.
# Over 576 greedy tokens of the default target logits differ by up to 0.0094, gaps by up to 0.0041; no choice differs.
PACKED_TIE = 1e-2
BY_CONSTRUCTION = "identical by construction"

Style = Literal["good", "bad", "alarm", "plain"]


def rule_of(lane: "Lane | LaneRecord") -> LaneRule:
    """Return the rule by which a lane's drafts are accepted (tables and n-grams are point masses)."""
    settings = lane.settings
    if lane.name == LOSSY:
        return "typical"
    if settings.temperature == 0:
        return "argmax"
    if not lane.drawn_drafts or settings.draft_sampling == "greedy":
        return "match"
    return "coupled" if settings.coupling == "gumbel" else "ratio"


def rule_text(lane: "Lane | LaneRecord") -> str:
    """Return the rule in words."""
    rule = rule_of(lane)
    return BLOCK_RULE if rule == "ratio" and lane.settings.verify == "block" else RULES[rule]


def may_differ(lane: "Lane | LaneRecord") -> bool:
    """Return whether the lane's text may rightly differ from that of `ar` with the same seed."""
    return lane.name in OTHER_TEXT or lane.served or rule_of(lane) == "ratio"


def chance(rule: LaneRule, q: float, p: float) -> float | None:
    """Return the probability that a draft is accepted; None for a rule that does not draw, or that has no formula."""
    if rule == "match":
        return p
    # Theorem (Leviathan 2023): x ~ q, accepted with min(1, p/q) or else drawn again from the residual, is ~ p.
    return (min(1.0, p / q) if q > 0 else 0.0) if rule == "ratio" else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison as a line in plain ASCII ("2.11x faster, same output"), and the style to show it in."""

    text: str
    style: Style


def near_tie(precision: str) -> float:
    """Return the logit gap under which rounding may let two tokens change places; 0 if none is measured."""
    return ROUNDING.get(precision, (0.0, 0.0))[1]


def promise(precision: str, invariant: bool = False) -> str:
    """Return the promise about the output. `precision`: the dtype of the target's pass, or its quantization.
    `invariant`: a pass gives each token the same logits, whatever else is in the pass."""
    if invariant:
        return (
            f"the target's own, {BY_CONSTRUCTION}: the compiled pass over {precision} weights gives a token the same "
            "logits, bit for bit, whatever else is in the pass"
        )
    if precision not in ROUNDING:
        return f"the target's own up to {precision} rounding, which is not measured: tokens may change places"
    moved, tie = ROUNDING[precision]
    return (
        f"the target's own up to {precision} rounding: logits of passes of different width differ by up to {moved:g} "
        f"(default target, CPU), so two tokens closer than {tie:g} may change places"
    )


def difference(ids: Sequence[int] | str, other: Sequence[int] | str, *, prefix: bool = False) -> int | None:
    """Return the first position (from 0) where two lists of ids (or two texts) differ; None if they do not.

    With `prefix` the shorter one may end early; otherwise ending early is a difference.
    """
    common = min(len(ids), len(other))
    at = next((index for index in range(common) if ids[index] != other[index]), None)
    return common if at is None and not prefix and len(ids) != len(other) else at


def speed_of(plain: Stats, other: Stats) -> tuple[str, Style]:
    """Return the speed of `other` relative to plain decoding, in words; "" if it is not known."""
    if not (ratio := speedup(plain, other)):
        return "", "plain"
    if disturbed(plain, other):
        return f"timing disturbed: faster than {other.tokens_per_pass:.2f} tok/pass allows", "plain"
    if abs(ratio - 1) <= AS_FAST:
        return "as fast", "plain"
    return (f"{ratio:.2f}x faster", "good") if ratio > 1 else (f"{1 / ratio:.2f}x slower", "bad")


def gap_between(plain: Stats, other: Stats, position: int) -> float | None:
    """Return the target's top-2 gap at a position, from the answer that recorded it."""
    gap = plain.gap_at(position)
    return other.gap_at(position) if gap is None else gap


def gap_text(gap: float | None, precision: str, invariant: bool = False) -> str:
    """Return a top-2 gap in words, by the target's number format."""
    if invariant:
        shown = "" if gap is None else f", top-2 gap {gap:.3g}"
        return f"{shown} (impossible in the compiled pass)"
    if gap is None:
        return "" if precision == "float32" else f" ({precision})"
    if precision not in ROUNDING:
        return f", top-2 gap {gap:.3f} ({precision} rounding is not measured)"
    if precision != "float32":
        return f", top-2 gap {gap:.3f} ({'within' if gap < near_tie(precision) else 'beyond'} {precision} rounding)"
    if gap < NEAR_TIE:
        return f", top-2 gap {gap:.1e} (near tie)" if gap else ", top-2 gap 0 (tie)"
    return f", top-2 gap {gap:.3f}"


@dataclass(frozen=True)
class Variant:
    """A method to time, at one gamma if it drafts."""

    method: str
    gamma: int | str | None = None

    @property
    def label(self) -> str:
        return self.method + ("" if self.gamma is None else f" gamma {self.gamma}")


def order(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Return the variants in the order of repetition `turn` (from 0): rotated by one more after every two repetitions,
    and reversed in every second."""
    start = (turn // 2) % len(variants)
    rotated = [*variants[start:], *variants[:start]]
    return rotated[::-1] if turn % 2 else rotated


@dataclass(frozen=True)
class Answer:
    """A lane's answer to a prompt. `ids` holds every emitted id, a closing stop id included."""

    method: str
    ids: tuple[int, ...]
    text: str
    stats: Stats
    may_differ: bool = False  # whether its text may rightly differ from that of `ar`
    terms: Terms = field(default_factory=Terms)
    logprobs: Json | None = None  # as OpenAI's chat format has them

    @property
    def interrupted(self) -> bool:
        return self.stats.stop_reason == "interrupted"

    @property
    def problem(self) -> str:
        """Why a server's answer is not whole; "" for any other answer."""
        return "" if self.stats.report is None else self.stats.report.problem

    @property
    def exit_code(self) -> int:
        """The exit code of a program that gives this answer: 1 if a server broke it off, 130 if interrupted, else 0."""
        return 1 if self.problem else INTERRUPTED if self.interrupted else 0

    def to_json(self) -> Json:
        """Return one entry of `results` of `run --json`."""
        return {
            **{"method": self.method, "text": self.text, "ids": list(self.ids)},
            **({} if self.logprobs is None else {"logprobs": self.logprobs}),
            **self.stats.to_json(),
            "swi": swi_of(self.stats, self.terms),
        }


UNLIKELY = -9999.0  # stands for the log-probability of a token with p = 0, as in OpenAI's API


def logprobs_of(steps: Iterable[Step], spelled: Callable[[int], bytes], count: int) -> Json:
    """Return `logprobs` as OpenAI's chat format has them, with the `count` likeliest tokens of each position.

    They are the target's at temperature 1, with the bias but no other setting, from the pass that decided the token. A
    token that a stop string has cut off has no entry. `spelled` returns a token's bytes.
    """

    def entry(likely: Likely) -> Json:
        letters, p = spelled(likely.token), likely.p
        return {
            "token": letters.decode(errors="replace"),
            "logprob": math.log(p) if p else UNLIKELY,
            "bytes": list(letters),
        }

    positions = (each for step in steps for each in zip(step.emitted, step.positions, strict=False))
    return {
        "refusal": None,
        "content": [
            entry(next(likely for likely in position.target if likely.token == token))
            | {"top_logprobs": [entry(likely) for likely in position.target[:count]]}
            for token, position in positions
        ],
    }


def run_lane(
    lane: "Lane",
    prompt: list[int],
    decode: Callable[[list[int]], str],
    *,
    interrupt: Callable[[], bool],
    show: Callable[[Event], None] | None = None,
    terms: Terms | None = None,
    messages: Sequence[ServerMessage] = (),
) -> Answer:
    """Decode one prompt to its end. The lane reads `prompt`, a server's lane `messages`; `show` sees every event.

    `terms`: those of the returned answer; without them the answer lacks the figures that need them.
    """
    meter = Meter(prompt_n=len(prompt))
    for event in lane.run(prompt, interrupt=interrupt, messages=messages):
        meter.add(event)
        if show is not None:
            show(event)
    ids = meter.ids
    return Answer(lane.name, tuple(ids), decode(ids), meter.stats, may_differ(lane), terms or Terms())


def _parts(plain: Answer, other: Answer) -> tuple[Sequence[int] | str, Sequence[int] | str]:
    """Return the parts of two answers to compare: the ids, or the texts if a server, whose ids are others, gave one."""
    served = plain.stats.served or other.stats.served
    return (plain.text, other.text) if served else (plain.ids, other.ids)


def agrees(plain: Answer, other: Answer) -> bool | None:
    """Return whether `other` has the ids of plain decoding (the text, beside a server's answer); None if it may rightly
    differ, or if that is not known.

    If an answer was interrupted, a difference in the common part gives False, an equal common part None.
    """
    if other.may_differ:
        return None
    parts = _parts(plain, other)
    if plain.interrupted or other.interrupted:
        return None if difference(*parts, prefix=True) is None else False
    return difference(*parts) is None


PartingKind = Literal["near tie", "beyond", "other draw", "other text"]


class Parting(NamedTuple):
    """The first position (from 0) where an answer differs from plain decoding's, and the target's top-2 gap there
    (None: not recorded).

    `kind`: "near tie", a gap so small that rounding may decide; "beyond", a larger or unknown gap, which is an alarm.
    An answer that may rightly differ is an "other draw" of the same distribution, or an "other text" (of another model,
    a server, a search, or a lossy rule).
    """

    kind: PartingKind
    position: int
    gap: float | None

    def to_json(self) -> Json:
        return {**self._asdict(), "gap": self.gap if math.isfinite(self.gap or 0.0) else None}


def parting(plain: Answer, other: Answer) -> Parting | None:
    """Return where and how two whole answers part; None if they are the same."""
    if (at := difference(plain.ids, other.ids)) is None:
        return None
    gap = gap_between(plain.stats, other.stats, at)
    if other.may_differ:
        return Parting("other text" if other.method in OTHER_TEXT or other.stats.served else "other draw", at, gap)
    tied = gap is not None and gap < near_tie(plain.terms.precision)
    return Parting("near tie" if tied else "beyond", at, gap)


def plain_answer(answers: Sequence[Answer]) -> Answer | None:
    """Return the answer of `ar`, if there is one."""
    return next((answer for answer in answers if answer.method == "ar"), None)


def baseline(answers: Sequence[Answer]) -> Answer | None:
    """Return the answer to compare the others with: that of `ar`, or without it a first lane that is a server's."""
    return plain_answer(answers) or next((answer for answer in answers[:1] if answer.stats.served), None)


def comparisons_of(answers: Sequence[Answer]) -> list[Comparison]:
    """Compare every other answer with the baseline, if there is one; lanes are named if there are more than two."""
    plain, named = baseline(answers), len(answers) > 2
    others = [] if plain is None else [(each.method, compare(plain, each)) for each in answers if each is not plain]
    return [Comparison(f"{name}: " * named + each.text, each.style) for name, each in others if each is not None]


def compare(plain: Answer, last: Answer) -> Comparison | None:
    """Compare an answer with plain decoding's; None without two answers that have tokens.

    If the lane's text must equal plain decoding's, a difference is an alarm, unless the target does not run in float32
    and the gap there is within its rounding. A beam search looks for a better text than plain decoding's, and the
    drafter alone is another model, so their differences are not called another draw; a lossy lane is called lossy. If a
    lane was stopped, the common length is compared; if a server gave an answer, whose ids are not this tokenizer's, the
    texts are compared.
    """
    if not plain.ids or not last.ids:
        return None
    stopped, precision = plain.interrupted or last.interrupted, plain.terms.precision
    lossy = "lossy: " * (last.method == LOSSY)
    served = plain.stats.served or last.stats.served
    invariant = plain.terms.invariant and last.terms.invariant
    speed, style = speed_of(plain.stats, last.stats)
    speed += " (simulated)" if speed and is_simulated(last.method) else ""
    ending = ", stopped" if stopped else ""
    if (at := difference(*_parts(plain, last), prefix=stopped)) is None:
        same = "same output so far" if stopped else "same output this time" if lossy else "same output"
        if invariant and not last.may_differ:
            same = BY_CONSTRUCTION
    elif served:
        same = f"the texts part at character {at + 1}"
    elif not last.may_differ:
        gap = gap_between(plain.stats, last.stats, at)
        parts = [f"differs at token {at + 1}{gap_text(gap, precision, invariant)}{ending}", speed]
        rounded = precision != "float32" and gap is not None and gap < near_tie(precision)
        return Comparison("; ".join(filter(None, parts)), "plain" if rounded else "alarm")
    elif last.stats.beams:
        same = "another text, as beam search may find"
    elif lossy:
        same = f"differs from token {at + 1}"
    elif last.method == "draft":
        same = "another text, of another model"
    else:
        up_to = "" if precision == "float32" or invariant else f" up to {precision} rounding"
        same = f"same distribution{up_to}, different draw"
    return Comparison(", ".join(filter(None, (speed, lossy + same))) + ending, style)


def compared(answers: Sequence[Answer]) -> Json:
    """Return `speedup` (the last lane's rate over the baseline's), `disturbed` (whether that timing was; `speedup` is
    then None) and `same_output` (whether every lane that must equal the baseline does)."""
    plain, last = baseline(answers), answers[-1]
    if plain is None or len(answers) < 2:
        return {"speedup": None, "disturbed": False, "same_output": None}
    wrong = disturbed(plain.stats, last.stats)
    ratio = None if last is plain or wrong else speedup(plain.stats, last.stats)
    same = {agrees(plain, answer) for answer in answers if answer is not plain}
    return {
        "speedup": rounded(ratio),
        "disturbed": wrong,
        "same_output": False if False in same else True in same or None,
    }


def other_processors(settings: Settings, *known: str) -> bool:
    """Return whether a form, a bias or a processor other than the `known` ones shapes the answers."""
    return bool(settings.form or settings.logit_bias) or any(
        getattr(settings, at) != ARGUMENTS[at].off for at in ARGUMENTS.keys() - {*known}
    )


def shown_settings(settings: Settings) -> Json:
    """Return the settings that an answer depends on: all but those of the display."""
    return {name: getattr(settings, name) for name, field in SETTING_FIELDS.items() if field.group != OUTPUT}
