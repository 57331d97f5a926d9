"""Costs of rounds on this machine, learned from the rounds themselves: c and v(n).

c = seconds per drafted token / seconds of a 1-token target pass, v(n) = T_target(n) / T_target(1).
Machines are shared: passes vary by a fifth from second to second, and sometimes one takes many times as long. So every
pass is divided by how slow passes are at the moment, drafting by the pass of the same round, and every figure is the
median of the latest samples. A width is measured after two passes; v(n) never falls with n and never exceeds n. Knows
no tokens and no acceptance.
"""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from math import exp, log

from sampling.gamma.constants import (
    DISTURBED,
    DRAFT_COST,
    EARLIER,
    EARLIER_PASSES,
    IDLE,
    MEASURED,
    NEWEST,
    NODES_MAX,
    OUTLIER,
    RETURN,
    SAMPLES,
    SLOPE,
    SLOPE_MEASURED,
    STALE,
)


class _Speed:
    """The factor by which passes are slower than usual at the moment."""

    def __init__(self) -> None:
        self._log, self._outlier = 0.0, False
        self.slowness = 1.0

    def learn(self, factor: float) -> None:
        """Count a pass that took `factor` times its usual time."""
        newest = log(factor)
        outlier = abs(newest - self._log) > OUTLIER
        self._outlier = outlier and not self._outlier
        if not self._outlier:
            self._log = (1 - RETURN) * (newest if outlier else self._log + NEWEST * (newest - self._log))
            self.slowness = exp(self._log)


class _Samples:
    """The latest samples of one figure and their median; of two and three without an earlier measurement the least.

    An earlier measurement counts as `worth` samples, so that a first sample that is far off has little weight.
    """

    __slots__ = ("_few", "_latest", "count", "median")

    def __init__(self, *earlier: float, worth: int = EARLIER_PASSES) -> None:
        self._latest = deque(earlier * worth, SAMPLES)
        self._few = 0 if earlier else 3
        self.count = 0
        self.median = earlier[0] if earlier else 0.0

    def add(self, sample: float) -> None:
        self._latest.append(sample)
        self.count += 1
        ordered = sorted(self._latest)
        self.median = ordered[(len(ordered) - 1) // 2 if len(ordered) > self._few else 0]


class Costs:
    """Running estimates of c and v(n).

    `references`: 1-token passes that were timed, earlier ones included. `reach`: the widest pass that was measured or
    given; 1 at first. `c`: the seed, or a guess, before it is measured; `drafting_known`: it is no guess.
    `model_cost`: a pass of the drafter's model, before it is measured c. `waking`: c of the first token after idle
    rounds, which includes reading the missed tokens; c before it is measured, and never less.

    Args:
        c: an earlier measurement of c.
        table: earlier measurements of v(n) by n.
        plain: an earlier measurement of a 1-token pass, in seconds.
        borrowed: the measurements are of a batch of another size, so the plain pass must be timed again.

    Raises:
        ValueError: v(n) or a time that is not positive, or a negative c.
    """

    def __init__(
        self,
        c: float | None = None,
        table: Mapping[int, float] | None = None,
        plain: float | None = None,
        borrowed: bool = False,
    ) -> None:
        seeds = {n: value for n, value in sorted((table or {}).items()) if n > 1}
        if any(value <= 0 for value in (*seeds.values(), 1.0 if plain is None else plain)) or (c is not None and c < 0):
            raise ValueError(f"costs must be positive, got c {c}, v {dict(seeds)} and {plain} s")
        # Measured beside other programs a wider pass may have been faster; v(n) never falls with n and is at most n.
        rising = [*accumulate((min(float(n), max(1.0, v)) for n, v in reversed(seeds.items())), min)][::-1]
        seeds = dict(zip(seeds, rising, strict=True))
        self._seeded, self._seeds = c is not None, seeds
        self.borrowed = borrowed
        self._timed = 0 if plain is None else EARLIER  # 1-token passes that the seed is worth
        self._speed = _Speed()
        self._passes: dict[int, _Samples] = {1: _Samples(*([] if plain is None else [plain]))}  # seconds / slowness
        self._reach = max(seeds, default=1)
        # In units of the plain pass of the same round:
        self._drafting = _Samples(*([] if c is None else [c]), worth=EARLIER)  # a drafted token
        self._waking = _Samples()  # a drafted token after idle rounds
        self._model = _Samples()  # a pass of the drafter's model
        self._sampling = _Samples()  # sampling in a round without drafts
        self._runs_model = False  # whether c counts only rounds in which the drafter ran a model
        self._prior = {1: 1.0, **seeds}
        self._batches: dict[int, Costs] = {1: self}
        self._note_figures()
        self._v: list[float] = []
        self._tabled: dict[int, float] = {}  # the medians from which `_v` was computed
        self._usual = 0.0  # T(1), 0: to be worked out again

    def of(self, rows: int) -> "Costs":
        """Return the costs of a batch of `rows` rows, which are learned separately.

        They are seeded from the next larger measured batch, else from the next smaller one.
        """
        if rows not in self._batches:
            known = (count for count, costs in self._batches.items() if costs.measured)
            near = self._batches[min(known, key=lambda count: (count < rows, abs(count - rows)), default=1)]
            table = dict(enumerate(near.v(near.reach), start=1))
            self._batches[rows] = Costs(near.c, table, borrowed=True) if near.measured else Costs()
        return self._batches[rows]

    @property
    def measured(self) -> bool:
        """Whether c was timed on this machine, and a 1-token and a wider pass were timed or given."""
        return self._drafting.count >= MEASURED and self.reach > 1 and self.references > 0

    def add(
        self,
        width: int,
        drafted: int,
        idle: int,
        draft_s: float,
        verify_s: float,
        model_s: float = 0.0,
        sample_s: float = 0.0,
    ) -> None:
        """Count one round. Seconds are of the whole round, all rows together; a pass of zero seconds is ignored.

        Args:
            width: positions that the pass scored.
            drafted: tokens by which the drafter's time is divided; 0 if it did not draft.
            idle: rounds just before this one in which it did not draft.
            model_s: a pass of the drafter's model, 0 if it ran none. For a drafter that runs a model in some
                rounds, c counts those rounds only.
            sample_s: sampling; the excess over a round without drafts counts as drafting.
        """
        if verify_s <= 0:
            return
        ran_model = model_s > 0
        if ran_model and not self._runs_model:
            self._runs_model, self._waking = True, _Samples()
            if not self._seeded:
                self._drafting = _Samples()
        self._add_pass(width, verify_s)
        plain = verify_s / self.v(width)[width - 1]
        if width == 1 and not drafted:
            self._sampling.add(sample_s / plain)
        further_sampling = sample_s / plain - self._sampling.median if self._sampling.count else 0.0
        spent = draft_s / plain + max(0.0, further_sampling)
        if drafted and ran_model >= self._runs_model:
            (self._waking if idle >= IDLE else self._drafting).add(spent / drafted)
        if ran_model and idle < IDLE:  # after idle rounds its pass also reads the tokens that it missed
            self._model.add(model_s / plain)
        self._note_figures()

    def _note_figures(self) -> None:
        """Set the figures that every round asks for."""
        self.references = self._passes[1].count + self._timed
        self.drafting_known = self._seeded or self._drafting.count >= MEASURED
        self.reach = self._reach if self.references or self._seeds else 1
        self.c = self._drafting.median if self.drafting_known else DRAFT_COST
        self.model_cost = self._model.median if self._model.count >= MEASURED else self.c
        self.waking = max(self.c, self._waking.median) if self._waking.count >= MEASURED else self.c

    def _add_pass(self, width: int, seconds: float) -> None:
        if (samples := self._passes.get(width)) is None:
            expected = self._usual_plain * self.v(width)[width - 1] if self._seeds else 0.0
            samples = self._passes[width] = _Samples(*([expected] if expected else []))
        if usual := samples.median if samples.count >= MEASURED or self._seeds else 0.0:
            self._speed.learn(seconds / usual)
        samples.add(seconds / self._speed.slowness)
        if samples.count == MEASURED:
            self._reach = max(self._reach, width)
        before = self._tabled.get(width, 0.0)
        if samples.count <= MEASURED or abs(samples.median - before) > STALE * before:
            self._v = []
        self._usual = 0.0

    @property
    def plain(self) -> float | None:
        """Seconds of a 1-token target pass at the moment; None before any pass was timed."""
        return self._usual_plain * self._speed.slowness or None

    @property
    def _usual_plain(self) -> float:
        """T(1), 0 if no pass was timed. A wider pass cannot be faster: if one was, by far, T(1) follows from it."""
        if not self._usual:
            own = self._passes[1].median
            wider = [
                samples.median / (1.0 if own else _curve(self._prior, n)[-1])
                for n, samples in self._passes.items()
                if samples.count >= MEASURED
            ]
            least = min(wider, default=own)
            self._usual = own if own and own <= DISTURBED * least else least
        return self._usual

    def timed(self, width: int) -> bool:
        """Whether passes of this width were timed here, not only given."""
        return width in self._passes and self._passes[width].count >= MEASURED

    def v(self, limit: int) -> list[float]:
        """Return v(1) … v(`limit`): measured, straight lines between, the slope of the seed or a guess beyond."""
        if len(self._v) < limit:
            plain = self._usual_plain
            points = {1: 1.0} | {
                n: min(float(n), max(1.0, samples.median / plain))
                for n, samples in self._passes.items()
                if samples.count >= MEASURED and n > 1 and plain
            }
            self._tabled = {n: samples.median for n, samples in self._passes.items()}
            curve = _curve(points, max(limit, NODES_MAX + 1, *points), self._prior)
            self._v = list(accumulate(reversed(curve), min))[::-1]
        return self._v[:limit]


def pass_times(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Return the function n → seconds of a pass over n tokens, interpolated as in `Costs.v`.

    A single time holds for every n. ValueError for no times, or one that is not positive.
    """
    if not seconds or min(seconds.values()) <= 0:
        raise ValueError(f"seconds of passes must be given and positive, got {dict(seconds)}")
    first = seconds[min(seconds)]
    if len(seconds) == 1:
        return lambda n: first
    costs = Costs(table={n: time / first for n, time in seconds.items()})
    return lambda n: first * costs.v(n)[n - 1]


def _curve(points: Mapping[int, float], count: int, shape: Mapping[int, float] | None = None) -> list[float]:
    """Return a curve through points, of which the first is at 1, at 1 … `count`.

    Straight lines between the points; beyond the last one parallel to the curve of `shape` within its points, then with
    the mean slope so far (if the last point is below SLOPE_MEASURED: or the slope of `shape`, whichever is steeper).
    Without a `shape` the slope beyond is SLOPE.
    """
    values, last = list[float](), max(points)
    for (left, low), (right, high) in pairwise(sorted(points.items())):
        shares = ((n - left) / (right - left) for n in range(left, right))
        values += [low * (1 - share) + high * share for share in shares]
    top, further = points[last], range(last, count + 1)
    if shape is None:
        return [*values, *(top + SLOPE * (n - last) for n in further)][:count]
    parallel = _curve(shape, count)
    # Measured curves bend down, if at all, so the mean slope overestimates the cost.
    slope = (top - 1) / (last - 1) if last > 1 else 0.0
    for n in further:
        rise, chord = parallel[n - 1] - parallel[last - 1], slope * (n - last)
        if n > max(shape):
            rise = chord if last >= SLOPE_MEASURED else max(rise, chord)
        values.append(top + rise)
    return values[:count]
