"""What rounds cost here, learned from the rounds themselves: c and v(n).

c = seconds a drafted token / seconds of a 1-token target pass, v(n) = T_target(n) / T_target(1).
Machines are shared: passes last a fifth more or less from second to second, now and then one lasts many times as long.
So every time is taken relative to how slow passes are at the moment, whatever their width, and every figure is the
median of the latest such times (of two and three the least). A width counts as measured only after two passes, a narrow
pass is never dearer than a wider one, and one over n tokens never than n passes. Knows no tokens and no acceptance.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import exp, log

KEPT = 15  # latest samples of each figure
TWICE = 2  # samples that make a measurement: of two the faster one counts
SLOPE = 0.03  # v(n) − 1 per further token, before it is measured
DRAFT_COST = 0.1  # c, before it is measured
DISTURBED = 1.15  # T(1) over the least T(n) from which on T(1) is not believed
ENOUGH = 4  # measured up to this width, the measured slope replaces the guessed one
IDLE = 2  # undrafted rounds after which a drafter has catching up to do
STALE = 0.02  # how far a width's figure may move before the curve is drawn anew
NEWEST = 0.4
ODD = 0.7  # a pass that lasts e^ODD times as long as expected is odd: it says something only together with the next
BACK = 0.02  # what the moment's share of a slower machine loses from pass to pass: in the end it is the machine's


class _Moment:
    """How slow passes are now, as a factor on what their widths took in the mean."""

    def __init__(self) -> None:
        self._log, self._odd = 0.0, False
        self.slowness = 1.0

    def learn(self, factor: float) -> None:
        """A pass took `factor` times what its width takes."""
        found = log(factor)
        odd = abs(found - self._log) > ODD
        if odd and not self._odd:
            self._odd = True
            return
        self._log = (1 - BACK) * (found if odd else self._log + NEWEST * (found - self._log))
        self._odd, self.slowness = False, exp(self._log)


class _Times:
    """The latest samples of one figure, and what they say: their median, of two and three the least."""

    __slots__ = ("_latest", "middle")

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=KEPT)
        self.middle = 0.0

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self.middle = sorted(self._latest)[(len(self) - 1) // 2 if len(self) > 3 else 0]


class Costs:
    """Running estimates of c and v(n); `table` (n → v(n)) and `c` seed them with earlier measurements.

    A measured `table` stands for passes not seen yet. Raises ValueError for a cost that is not positive.
    """

    def __init__(self, c: float | None = None, table: Mapping[int, float] | None = None) -> None:
        seeds = {n: value for n, value in sorted((table or {}).items()) if n > 1}
        if any(value <= 0 for value in seeds.values()) or (c is not None and c < 0):
            raise ValueError(f"costs must be positive, got c {c} and v {dict(seeds)}")
        self._seeded_c, self._seeds = c, seeds
        self.borrowed = False  # from a batch of another size: here a plain pass may cost anything
        self._moment = _Moment()
        # All times are over the moment's slowness.
        self._passes: dict[int, _Times] = {}  # by width n
        self._widest = 1  # of those that count as measured
        self._drawn: dict[int, float] = {}  # what the curve was drawn with
        self._one: float | None = None  # a 1-token pass
        self._drafting = _Times()  # a drafted token
        self._calling = False  # whether those are of rounds in which the drafter ran a model
        self._looking = _Times()  # a drafted token where it has one and did not run it
        self._sampling = _Times()  # sampling of a round without drafts
        self._waking = _Times()  # a drafted token of a drafter that was idle
        self._prior = _Curve({1: 1.0, **seeds})
        self._batches: dict[int, Costs] = {1: self}
        self._v: list[float] = []  # the curve as it was drawn last

    def of(self, rows: int) -> Costs:
        """The costs of a batch of so many rows, learned apart: its passes are other passes.

        What is known of the next larger batch (else the next smaller) seeds them; first guesses are not handed on.
        """
        if rows not in self._batches:
            known = [count for count, costs in self._batches.items() if costs.measured]
            near = min(known, key=lambda count: (count < rows, abs(count - rows)), default=None)
            self._batches[rows] = Costs() if near is None else self._batches[near].handed_on()
        return self._batches[rows]

    @property
    def measured(self) -> bool:
        """Whether c and wider passes were timed here."""
        return len(self._drafting) >= TWICE and self.reach > 1 and self.references > 0

    def handed_on(self) -> Costs:
        """New costs that begin with what these are now."""
        given = Costs(self.c, {n: value for n, value in enumerate(self.v(self.reach), start=1) if n > 1})
        given.borrowed = True
        return given

    def add(
        self,
        width: int,
        drafted: int,
        idle: int,
        draft_s: float,
        verify_s: float,
        called: bool = False,
        sample_s: float = 0.0,
    ) -> None:
        """One round: the pass scored `width` positions; `drafted` counts the tokens paid for (0: nothing was asked).

        `idle` counts the rounds just before in which nothing was asked of the drafter. Seconds are of
        the whole round, all rows together; rounds without a duration teach nothing. `called`: the drafter ran
        a model; where it sometimes does (tables with a trained drafter behind them), c is that of those rounds.
        What judging drafts takes beyond the sampling of a round without any is part of c.
        """
        if called and not self._calling:
            self._calling, self._drafting, self._waking = True, _Times(), _Times()
        if verify_s > 0:
            laps = self._passes.setdefault(width, _Times())
            if len(laps) >= TWICE:
                self._moment.learn(verify_s / laps.middle)
            laps.add(verify_s / self._moment.slowness)
            if len(laps) == TWICE:
                self._widest = max(self._widest, width)
            # The curve is drawn anew when that changes something: most rounds repeat what is known.
            if len(laps) <= TWICE or abs(laps.middle - self._drawn.get(width, 0.0)) > STALE * laps.middle:
                self._v, self._one = [], None
        if width == 1 and not drafted:
            self._sampling.add(sample_s / self._moment.slowness)
        draft_s += self.judging(sample_s)
        if draft_s >= 0 and called >= self._calling and drafted:
            (self._waking if idle >= IDLE else self._drafting).add(draft_s / drafted / self._moment.slowness)
        elif draft_s > 0 and self._calling and not called:
            self._looking.add(draft_s / self._moment.slowness)

    def judging(self, sample_s: float) -> float:
        """Of the seconds that a round sampled those that one without drafts does not need."""
        return max(0.0, sample_s - self._sampling.middle * self._moment.slowness) if self._sampling else 0.0

    @property
    def plain(self) -> float | None:
        """Seconds of a 1-token target pass now; None before any pass was timed."""
        one = self._plain
        return None if one is None else one * self._moment.slowness

    @property
    def _plain(self) -> float | None:
        """A wider pass is never faster: where wider ones were faster by far, the narrow ones were disturbed."""
        if self._one is None and self._passes:
            self._one, self._drawn = self._narrow(), {n: laps.middle for n, laps in self._passes.items()}
        return self._one

    def _narrow(self) -> float:
        if 1 not in self._passes:
            return min(laps.middle / self._prior(n) for n, laps in self._passes.items())
        own = self._passes[1].middle
        least = min((laps.middle for laps in self._passes.values() if len(laps) >= TWICE), default=own)
        return own if own <= DISTURBED * least else least

    @property
    def references(self) -> int:
        """How many 1-token passes were timed."""
        return len(self._passes.get(1, ()))

    @property
    def c(self) -> float:
        """Of a drafted token; the seed, or a guess, before two were timed."""
        return self._relative(self._drafting, DRAFT_COST if self._seeded_c is None else self._seeded_c)

    @property
    def asking(self) -> float:
        """Of c what the drafter's model takes: the rest is paid in rounds without it too."""
        return max(0.0, self.c - self._relative(self._looking, 0.0))

    @property
    def waking(self) -> float:
        """Of a drafted token after idle rounds: c and the catching up."""
        return max(self.c, self._relative(self._waking, self.c))

    @property
    def drafting_known(self) -> bool:
        """Whether c was measured (or given) rather than guessed."""
        return self._seeded_c is not None or (len(self._drafting) >= TWICE and bool(self._passes))

    @property
    def reach(self) -> int:
        """The widest pass that was measured or given; 1 at first."""
        return max(self._widest if self.references else 1, *self._seeds, 1)

    def v(self, limit: int) -> list[float]:
        """v(1) … v(`limit`): measured widths, straight lines between them, the seed's or a guessed slope beyond."""
        if len(self._v) < limit:
            self._v = self._table(limit)
        return self._v[:limit]

    def _table(self, limit: int) -> list[float]:
        plain = self._plain
        anchors = {1: 1.0}
        if plain:
            for n, laps in sorted(self._passes.items()):
                if n > 1 and len(laps) >= TWICE:
                    anchors[n] = min(float(n), max(1.0, laps.middle / plain))
        found = _Curve(anchors, self._prior)
        widest = max(limit, *anchors)
        return list(accumulate((found(n) for n in range(widest, 0, -1)), min))[::-1]

    def _relative(self, samples: _Times, unknown: float) -> float:
        plain = self._plain
        return samples.middle / plain if plain and len(samples) >= TWICE else unknown


def pass_times(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Seconds of a pass over n tokens from those that were measured or given, by n: as `Costs.v`, between and beyond.

    A single one holds for every n. ValueError for none, or one that is not positive.
    """
    if not seconds or min(seconds.values()) <= 0:
        raise ValueError(f"seconds of passes must be given and positive, got {dict(seconds)}")
    first = seconds[min(seconds)]
    if len(seconds) == 1:
        return lambda n: first
    costs = Costs(table={n: one / first for n, one in seconds.items()})
    return lambda n: first * costs.v(n)[n - 1]


class _Curve:
    """A curve through points: straight between them; beyond the last one parallel to `shape` as far as that
    has points, then as steep as the way there (before ENOUGH is known: or as `shape`, whichever is steeper)."""

    def __init__(self, points: Mapping[int, float], shape: _Curve | None = None) -> None:
        self.points, self.shape = dict(sorted(points.items())), shape
        self._known = list(self.points)

    def __call__(self, n: int) -> float:
        if n in self.points:
            return self.points[n]
        behind = bisect(self._known, n)
        left = self._known[behind - 1]
        if behind < len(self._known):
            right = self._known[behind]
            share = (n - left) / (right - left)
            return self.points[left] * (1 - share) + self.points[right] * share
        if self.shape is None:
            return self.points[left] + SLOPE * (n - left)
        shaped = self.shape(n) - self.shape(left)
        if n <= self.shape._known[-1]:
            return self.points[left] + shaped
        # Measured curves bend down, if at all: going on as steeply as they came errs on the dear side.
        chord = (n - left) * (self.points[left] - 1) / (left - 1) if left > 1 else 0.0
        return self.points[left] + (chord if left >= ENOUGH else max(shaped, chord))
