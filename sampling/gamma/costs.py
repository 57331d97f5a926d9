"""What rounds cost here, learned from the rounds themselves: c and v(n).

c = seconds a drafted token / seconds of a 1-token target pass, v(n) = T_target(n) / T_target(1).
Machines are shared and disturbances only make a pass slower, so every figure is the lower third of
the latest samples (of two and three the least), a width counts as measured only after two passes, a
narrow pass is never dearer than a wider one, and one over n tokens never than n passes. Knows no
tokens and no acceptance.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate

KEPT = 15  # latest samples of each figure
TWICE = 2  # samples that make a measurement: of two the faster one counts
SLOPE = 0.03  # v(n) − 1 per further token, before it is measured
DRAFT_COST = 0.1  # c, before it is measured
DISTURBED = 1.15  # T(1) over the least T(n) from which on T(1) is not believed
ENOUGH = 4  # measured up to this width, the measured slope replaces the guessed one
IDLE = 2  # undrafted rounds after which a drafter has catching up to do
STALE = 0.02  # how far a width's figure may move before the curve is drawn anew


class Costs:
    """Running estimates of c and v(n); `table` (n → v(n)) and `c` seed them with earlier measurements.

    A measured `table` stands for passes not seen yet. Raises ValueError for a cost that is not positive.
    """

    def __init__(self, c: float | None = None, table: Mapping[int, float] | None = None) -> None:
        seeds = {n: value for n, value in sorted((table or {}).items()) if n > 1}
        if any(value <= 0 for value in seeds.values()) or (c is not None and c < 0):
            raise ValueError(f"costs must be positive, got c {c} and v {dict(seeds)}")
        self._seeded_c, self._seeds = c, seeds
        self._passes: dict[int, deque[float]] = {}  # width n → seconds of the latest passes
        self._lows: dict[int, float] = {}  # their lower thirds
        self._drawn: dict[int, float] = {}  # those of them that the curve was drawn with
        self._plain: float | None = None
        self._drafting: deque[float] = deque(maxlen=KEPT)  # seconds a drafted token
        self._calling = False  # whether those are of rounds in which the drafter ran a model
        self._waking: deque[float] = deque(maxlen=KEPT)  # seconds a drafted token of a drafter that was idle
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
        return Costs(self.c, {n: value for n, value in enumerate(self.v(self.reach), start=1) if n > 1})

    def add(self, width: int, drafted: int, idle: int, draft_s: float, verify_s: float, called: bool = False) -> None:
        """One round: the pass scored `width` positions; `drafted` counts the tokens paid for (0: nothing was asked).

        `idle` counts the rounds just before in which nothing was asked of the drafter. Seconds are of
        the whole round, all rows together; rounds without a duration teach nothing. `called`: the drafter ran
        a model; where it sometimes does (tables with a trained drafter behind them), c is that of those rounds.
        """
        if called and not self._calling:
            self._calling = True
            self._drafting.clear()
            self._waking.clear()
        if verify_s > 0:
            laps = self._passes.setdefault(width, deque(maxlen=KEPT))
            laps.append(verify_s)
            self._lows[width] = low = _low(laps)
            # The curve is drawn anew when that changes something: most rounds repeat what is known.
            if len(laps) <= TWICE or abs(low - self._drawn.get(width, 0.0)) > STALE * low:
                self._v, self._plain = [], None
        if drafted and draft_s >= 0 and called >= self._calling:
            (self._waking if idle >= IDLE else self._drafting).append(draft_s / drafted)

    @property
    def plain(self) -> float | None:
        """Seconds of a 1-token target pass; None before any pass was timed.

        A wider pass is never faster: where wider ones were faster by far, the narrow ones were disturbed.
        """
        if self._plain is None and self._passes:
            self._plain, self._drawn = self._narrow(), dict(self._lows)
        return self._plain

    def _narrow(self) -> float:
        if 1 not in self._passes:
            return min(low / self._prior(n) for n, low in self._lows.items())
        own = self._lows[1]
        least = min((self._lows[n] for n, laps in self._passes.items() if len(laps) >= TWICE), default=own)
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
    def waking(self) -> float:
        """Of a drafted token after idle rounds: c and the catching up."""
        return max(self.c, self._relative(self._waking, self.c))

    @property
    def drafting_known(self) -> bool:
        """Whether c was measured (or given) rather than guessed."""
        return self._seeded_c is not None or (len(self._drafting) >= TWICE and self.plain is not None)

    @property
    def reach(self) -> int:
        """The widest pass that was measured or given; 1 at first."""
        measured = [n for n, laps in self._passes.items() if len(laps) >= TWICE and self.references]
        return max([1, *self._seeds, *measured])

    def v(self, limit: int) -> list[float]:
        """v(1) … v(`limit`): measured widths, straight lines between them, the seed's or a guessed slope beyond."""
        if len(self._v) < limit:
            self._v = self._table(limit)
        return self._v[:limit]

    def _table(self, limit: int) -> list[float]:
        plain = self.plain
        anchors = {1: 1.0}
        if plain:
            for n, laps in sorted(self._passes.items()):
                if n > 1 and len(laps) >= TWICE:
                    anchors[n] = min(float(n), max(1.0, self._lows[n] / plain))
        found = _Curve(anchors, self._prior)
        widest = max(limit, *anchors)
        return list(accumulate((found(n) for n in range(widest, 0, -1)), min))[::-1]

    def _relative(self, samples: deque[float], unknown: float) -> float:
        plain = self.plain
        return _low(samples) / plain if plain and len(samples) >= TWICE else unknown


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


def _low(samples: deque[float]) -> float:
    """The lower third: of two and three samples the least, of 15 the fifth."""
    return sorted(samples)[(len(samples) - 1) // 3]


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
