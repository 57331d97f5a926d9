"""`/plot` and `/heat`: expected speed-up by gamma, ranks of the target's tokens in the drafter's lists and the time of
a round as bars of one row each; an answer tinted by how sure the target was of each token, with its perplexity.

The figures come from the answers' own rounds: a lane that ran under `gamma auto` has learned α (how often a draft is
accepted), c (the cost of drafting one token, in plain passes of the target) and v(n) (the cost of a pass over n tokens,
in the same unit); for any other lane a new :class:`sampling.gamma.controller.Controller` observes its recorded rounds.
Both say which gamma `gamma auto` would choose. Probabilities and entropies are those of the target at temperature 1.
Knows no commands and no models.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from app.lanes.answers import plain_answer
from app.lanes.lane import Lane
from app.screen.inspection import SaidToken
from app.screen.live import Track
from app.screen.palette import HEAT, Look
from app.screen.rows import Drawn, Piece, Row, chunk, flow, plural, row_of, share, wrap
from app.screen.view import gamma_text
from sampling.drafters.registry import is_simulated, oracle_of
from sampling.events import Step
from sampling.gamma.constants import GAMMA_MAX
from sampling.gamma.controller import Controller, best
from sampling.stats.summary import Stats, disturbed, speedup
from sampling.stats.theory import expected_speedup
from utils.errors import UserError

RANKS = 5  # ranks in a drafter's list with a bar each


@dataclass(frozen=True)
class Bar:
    """One row: `name` and `figure` left of a bar that takes `share` (0 to 1) of the width for bars, `note` after it.

    `solid` bars are measured, the others extrapolated; `marked` rows are bold.
    """

    name: str
    figure: str
    share: float
    note: str = ""
    solid: bool = True
    marked: bool = False


class Bars(Drawn):
    """Bars under a title, remarks below them."""

    def __init__(self, title: str, bars: Sequence[Bar], look: Look, remarks: Sequence[str] = ()) -> None:
        self.title, self.bars, self.look, self.remarks = title, bars, look, remarks

    def rows(self) -> list[Row]:
        rows = flow([chunk(word, before=" ") for word in self.title.split()], self.look, 2)
        name, figure, note = (
            max((len(getattr(bar, part)) for bar in self.bars), default=0) for part in ("name", "figure", "note")
        )
        room = self.look.width - name - figure - note - 8
        rows += [self._bar(bar, name, figure, room) for bar in self.bars]
        for remark in self.remarks:
            rows += flow([chunk(word, "faint", " ") for word in remark.split()], self.look, 2)
        return rows

    def _bar(self, bar: Bar, name: int, figure: int, room: int) -> Row:
        drawn = self.look.glyph("bar" if bar.solid else "rest") * round(bar.share * room)
        role = "strong" if bar.marked else "plain"
        pieces = [
            (f"  {bar.name.rjust(name)}  {bar.figure.rjust(figure)}", role),
            (f"  {drawn}" if drawn else "", "accent" if bar.solid else "faint"),
            (f"  {bar.note}" if bar.note else "", role),
        ]
        return row_of(pieces, self.look)


def rank_bars(tracks: Sequence[Track], look: Look) -> list[Bars]:
    """Return, for every drafting lane, the rank of the target's token in the drafter's list after each rejection.

    UserError if nothing was rejected, or the drafter's lists were not recorded.
    """
    if not (plots := [_ranks(track, look) for track in tracks if any(_refusals(track))]):
        raise UserError("no draft of the last answer was rejected with the drafter's list on record")
    return plots


def _refusals(track: Track) -> Iterator[tuple[Step, int | None]]:
    """Yield the rounds that ended in a rejection, with the rank of the target's token in the drafter's list there
    (None: not in it)."""
    for step in track.steps:
        recorded = step.rejected and step.token is not None and len(step.positions) == len(step.emitted)
        if recorded and (listed := step.positions[-1].drafter):
            yield step, next((each.rank for each in listed if each.token == step.token), None)


def _ranks(track: Track, look: Look) -> Bars:
    ranks = [rank for _, rank in _refusals(track)]
    counted = {str(rank): ranks.count(rank) for rank in range(1, RANKS + 1)}
    counted[f"{RANKS + 1} on"] = sum(rank is not None and rank > RANKS for rank in ranks)
    counted["not named"] = ranks.count(None)
    total, rounds = len(ranks), max(1, len(track.steps) - 1)
    bars = [
        Bar(name, str(count), count / total, f"{count / total:.0%}")
        for name, count in counted.items()
        if count or name not in ("1", "not named")
    ]
    remarks = [
        "rank 1 is the drafter's first choice; of a tree further ones were drafted and rejected too",
        f"the second choice was right in {counted['2']} of {total}: a second branch would have brought about a token "
        f"each time, {counted['2'] / rounds:.2f} a round (/plot gamma has v, the cost of a wider pass)",
    ]
    title = f"{track.lane.name}: rank of the target's token in the drafter's list, after {plural(total, 'rejection')}"
    return Bars(title, bars, look, remarks)


def time_bars(tracks: Sequence[Track], look: Look) -> list[Bars]:
    """Return, for every lane of an answer but beam searches, the mean time of a round by its parts. UserError if no
    round was timed."""
    timed = [track for track in tracks if track.meter.stats.predicted_ms and not track.meter.stats.beams]
    if not timed:
        raise UserError("no round of the last answer was timed")
    return [_times(track.lane.name, track.meter.stats, look) for track in timed]


def _times(name: str, stats: Stats, look: Look) -> Bars:
    parts = {"draft": stats.draft_ms, "verify": stats.verify_ms, "sample": stats.sample_ms, "other": stats.overhead_ms}
    rounds, whole = stats.target_passes, stats.predicted_ms
    bars = [
        Bar(part, f"{spent / rounds:.2f} ms", spent / whole, f"{spent / whole:.0%}") for part, spent in parts.items()
    ]
    calls = [f"{model} {ms / rounds:.2f} ms" for model, ms in stats.call_ms.items() if ms]
    title = f"{name}: time of a round, mean of {rounds}: {whole / rounds:.2f} ms"
    return Bars(title, bars, look, [f"passes of models in it: {', '.join(calls)}"] if calls else ())


def gamma_bars(answers: Sequence[Sequence[Track]], look: Look) -> Bars:
    """Return the expected speed-up of the last drafting lane for gamma 0 … 16, from what this run's answers measured.

    UserError if gamma changes nothing in any lane of the last answer, or too few rounds with drafts were timed.
    """
    lanes = [(track, track.running) for track in answers[-1] if track.running and track.running.takes_gamma]
    if not lanes:
        raise UserError("no lane of the last answer drafts by gamma: /compare ar,spec adds one")
    track, lane = lanes[-1]
    controller = lane.pace or _learned(lane, answers)
    if not controller.costs.drafting_known:
        raise UserError("too few rounds were timed to know what drafting costs here: another answer will do")
    rates, auto = controller.expected(GAMMA_MAX), best(controller.expected(controller.reach))
    used = track.lane.settings.gamma
    theory, marks = dict[int, str](), {auto: "auto"}
    if isinstance(used, int):
        marks[used] = "this one, and auto" if used == auto else "this one"
    if is_simulated(track.lane.name):
        alpha, cost = oracle_of(track.lane.name)
        theory = {gamma: f"theory {expected_speedup(alpha, gamma, cost):.2f}x" for gamma in range(len(rates))}
    bars = [
        Bar(
            str(gamma),
            f"{rate:.2f}x",
            rate / max(rates),
            ", ".join(notes[gamma] for notes in (theory, marks) if gamma in notes),
            gamma < controller.costs.reach,
            gamma in marks,
        )
        for gamma, rate in enumerate(rates)
    ]
    title = f"{track.lane.name}: expected speed-up by {look.glyph('gamma')}"
    return Bars(title, bars, look, _remarks(track, controller, answers[-1], look))


def _learned(lane: Lane, answers: Sequence[Sequence[Track]]) -> Controller:
    """Return a controller that has observed the rounds of this lane's drafter, and those of plain decoding."""
    controller = Controller()
    for track in chain.from_iterable(answers):
        other = track.running
        if (
            other is None
            or (other.lm is not lane.lm or other.beams is not None)
            or (other.drafts and other.drafter is not lane.drafter)
        ):
            continue
        controller.begin()
        left = other.settings.max_new_tokens
        for number, step in enumerate(track.steps):
            if number:  # the opening round reads the prompt
                controller.budget([step.row])
                # drafts that the answer's limit cut short are not ones that the drafter ended
                controller.observe([replace(step, gamma=min(step.gamma, left - 1))])
            left -= len(step.emitted)
    return controller


def _remarks(track: Track, controller: Controller, last: Sequence[Track], look: Look) -> list[str]:
    """Return the figures that the bars are made from, and the measured speed-up."""
    costs, reach = controller.costs, controller.costs.reach
    alphas = " ".join(f"{alpha:.2f}" for alpha in controller.acceptance.alphas[:4])
    v = "".join(f", v({n}) {costs.v(n)[-1]:.2f}" for n in (2, 4, 8, 16) if n <= reach)
    alpha, more = look.glyph("alpha"), look.glyph("ellipsis")
    remarks = [f"as gamma auto sees it: {alpha} by position {alphas} {more}, c {costs.c:.3f}{v}"]
    if reach <= GAMMA_MAX:
        remarks.append(
            f"{look.glyph('bar') * 2} from timed passes, {look.glyph('rest') * 2} guessed: "
            f"no pass over more than {plural(reach, 'token')} was timed"
        )
    if not costs.references:
        remarks.append("no plain pass was timed: /compare ar,spec does")
    plain = plain_answer([other.answer() for other in last])
    return remarks if plain is None else [*remarks, *_measured(track, plain.stats)]


def _measured(track: Track, plain: Stats) -> list[str]:
    """Return a line with the speed-up of the last answer; none if it is unknown."""
    own = track.meter.stats
    factor, tokens = speedup(plain, own), own.tokens_per_pass
    if not factor or not tokens:
        return []
    if disturbed(plain, own):
        return [f"timing of the last answer disturbed: faster than {tokens:.2f} tok/pass allows"]
    return [
        f"measured in the last answer: {factor:.2f}x at gamma {gamma_text(track.lane.settings, track.pane().gamma)}"
    ]


PROBABILITY, ENTROPY = "p", "entropy"
# The bounds between the tints of HEAT: the least probability, or the largest entropy in bits, of each but the last.
LIMITS = {PROBABILITY: (0.9, 0.5, 0.2, 0.05), ENTROPY: (0.5, 1.0, 2.0, 4.0)}


def probability(token: SaidToken) -> float | None:
    """Return the target's probability of the token; None if it was not recorded."""
    return next((choice.p for choice in token.choices if choice.token == token.token), None)


def perplexity(probabilities: Sequence[float]) -> float:
    """Return exp of the mean of −ln p; ∞ if a probability is 0."""
    return math.inf if min(probabilities) <= 0 else math.exp(-sum(map(math.log, probabilities)) / len(probabilities))


class Heat(Drawn):
    """The answer, tinted, with its perplexity and a legend of the tints. UserError if no probability was recorded."""

    def __init__(self, tokens: Sequence[SaidToken], by: str, look: Look) -> None:
        self.tokens, self.by, self.look = tokens, by, look
        self.probabilities = [p for token in tokens if (p := probability(token)) is not None]
        self.entropies = [token.entropy for token in tokens if token.entropy is not None]
        if not self.probabilities:
            raise UserError("the target's probabilities of this answer were not recorded")

    def rows(self) -> list[Row]:
        lines = wrap(list(chain.from_iterable(map(self._pieces, self.tokens))), self.look.width, self.look.ascii)
        while len(lines) > 1 and not lines[-1]:
            lines.pop()
        return [
            *(row_of(line, self.look) for line in lines),
            *flow([chunk(words, role) for words, role in self._below()], self.look, 2),
        ]

    def _pieces(self, token: SaidToken) -> list[Piece]:
        value = probability(token) if self.by == PROBABILITY else token.entropy
        level = 0 if value is None else self._level(value)
        figure = "" if self.look.color or level == 0 or value is None else f"({self._figure(value)})"
        return [(token.text, HEAT[level]), (figure, "faint")]

    def _level(self, value: float) -> int:
        return sum(value < limit if self.by == PROBABILITY else value > limit for limit in LIMITS[self.by])

    def _figure(self, value: float) -> str:
        return share(value) if self.by == PROBABILITY else f"{value:.1f}"

    def _below(self) -> list[tuple[str, str]]:
        known = len(self.probabilities)
        limits = [self._figure(limit) for limit in LIMITS[self.by]]
        sign, first = ("<", f"p {limits[0]} or more") if self.by == PROBABILITY else (">", f"up to {limits[0]} bits")
        levels = [(f"{sign} {limit}", role) for limit, role in zip(limits, HEAT[1:], strict=True)]
        parts = [f"perplexity {perplexity(self.probabilities):.2f} over {plural(known, 'token')}"]
        if self.entropies:
            parts.append(f"mean entropy {sum(self.entropies) / len(self.entropies):.2f} bits")
        if known < len(self.tokens):
            parts.append(f"{len(self.tokens) - known} not recorded")
        return [*([(first, HEAT[0]), *levels] if self.look.color else []), *((part, "plain") for part in parts)]
