"""The figures of an answer: a record, how several become one, and two lanes against each other: speed-up, the measured
costs c and v, and the speed-up to expect of them.

Pure arithmetic; knows no events (sampling/stats/metrics.py makes the record of them), no text, no tensors and no
models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sampling.events import Reason
from sampling.stats.theory import expected_speedup
from utils.objects import Json
from utils.remote.pieces import ServerFigures

TARGET = "target"  # the outermost target's name in calls


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None where one is unknown, or the whole is 0."""
    return part / whole if part is not None and whole else None


def least(values: Iterable[float | None]) -> float | None:
    """Return the least of the known values; None if there is none."""
    return min((value for value in values if value is not None), default=None)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a figure with `digits` digits after the point; None stays."""
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class Stats:
    """The figures of one answer (or of several, see :func:`merge`); all times in milliseconds.

    `predicted_n` counts every emitted token, the opening round's included; `openings` is how many
    of them opening rounds yielded (1 for an answer that has begun), and rates leave those out.
    `predicted_ms`, `draft_ms`, `verify_ms`, `sample_ms`, `overhead_ms`, `calls`, `target_passes` and
    everything about drafts cover the rounds after the opening one. `prompt_ms` is the time of reading
    the prompt, the opening pass included, `ttft_ms` adds the rest of the opening round (None before the first token).
    Of prompts answered together, all times but `ttft_ms` are one prompt's share.
    `accepted_at[j]` and `examined_at[j]` count drafts at depth j (0 = first after the prefix);
    `acceptance_histogram[a]` counts rounds that accepted a drafts, `draft_histogram[n]` those that drafted n nodes.
    `top2_gaps[i]` is the gap of the
    target's two best logits at emitted token i, None where it was not recorded (inside a run of
    accepted drafts). Figures that are undefined are None, never NaN.

    `calls` and `call_ms` are forward passes and milliseconds by model. `sources[i]` is (drafted, accepted) of what the
    drafter's i-th name proposed. Of a cascade, all levels together: `reviews` has (accepted, examined) of each
    reviewer. `beams` are those of a beam search, 0 for any other way of decoding.
    `least_pass_ms` is the shortest target pass of a round without drafts, `least_wide_ms` of one with drafts or of a
    beam search (None before one was timed, and for prompts answered together); `branched` counts the rounds that
    drafted a tree, not a chain.

    A server's answer comes in `pieces` of text (0 for an answer decoded here), and `report` has the server's figures
    for it. `predicted_n` and `prompt_n` are the server's counts then; without its count of tokens `predicted_n` counts
    the pieces, and there is no rate.
    """

    stop_reason: Reason | None = None
    prompt_n: int = 0
    prompt_ms: float = 0.0
    ttft_ms: float | None = None
    predicted_n: int = 0
    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_n_rejected: int = 0
    draft_n_discarded: int = 0
    target_passes: int = 0
    accepted_at: tuple[int, ...] = ()
    examined_at: tuple[int, ...] = ()
    acceptance_histogram: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    overhead_ms: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    call_ms: dict[str, float] = field(default_factory=dict)
    reviews: dict[str, tuple[int, int]] = field(default_factory=dict)
    sources: tuple[tuple[int, int], ...] = ()
    openings: int = 0
    top2_gaps: tuple[float | None, ...] = ()
    beams: int = 0
    draft_histogram: tuple[int, ...] = ()
    least_pass_ms: float | None = None
    least_wide_ms: float | None = None
    branched: int = 0
    pieces: int = 0
    report: ServerFigures | None = None

    @property
    def served(self) -> bool:
        """Whether a server gave the answer, not only the probabilities that drafts were verified by."""
        return self.pieces > 0 or (self.report is not None and not self.target_passes)

    @property
    def counts_tokens(self) -> bool:
        """Whether `predicted_n` is a number of tokens."""
        return not self.pieces or (self.report is not None and self.report.tokens is not None)

    @property
    def predicted_per_second(self) -> float | None:
        """Tokens a second after the first token; None before a round has been timed."""
        return ratio(1000.0 * (self.predicted_n - self.openings), self.predicted_ms) if self.counts_tokens else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Block efficiency: tokens emitted a target pass, the target's own token included."""
        return ratio(self.predicted_n - self.openings, self.target_passes)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        return ratio(self.draft_n_accepted, self.draft_n)

    @property
    def alpha(self) -> float | None:
        """Accepted / examined: the chance that an examined draft is accepted."""
        return ratio(self.draft_n_accepted, self.draft_n_accepted + self.draft_n_rejected)

    @property
    def alpha_per_position(self) -> tuple[float | None, ...]:
        """Accepted at j / examined at j for every draft position up to gamma."""
        return tuple(ratio(a, e) for a, e in zip(self.accepted_at, self.examined_at, strict=True))

    def gap_at(self, position: int) -> float | None:
        """The top-2 gap at emitted token `position` (from 0), None where it is not known."""
        return self.top2_gaps[position] if 0 <= position < len(self.top2_gaps) else None

    def to_json(self) -> Json:
        """The figures under the names of `run --json`, in their order; times in milliseconds.

        `reviews` is there only if something was reviewed, `openings` only above 1, `beams` only of a beam search,
        `pieces` and `report` only of a server.
        """
        figures: Json = {
            "stop_reason": self.stop_reason,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "ttft_ms": rounded(self.ttft_ms, 3),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_second": rounded(self.predicted_per_second, 3),
            "draft_n": self.draft_n,
            "draft_n_accepted": self.draft_n_accepted,
            "draft_n_rejected": self.draft_n_rejected,
            "target_passes": self.target_passes,
            "tokens_per_pass": rounded(self.tokens_per_pass, 4),
            "acceptance_rate": rounded(self.acceptance_rate, 4),
            "alpha": rounded(self.alpha, 4),
            "alpha_per_position": [rounded(alpha, 4) for alpha in self.alpha_per_position],
            "acceptance_histogram": list(self.acceptance_histogram),
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "sample_ms": round(self.sample_ms, 3),
            "calls": dict(self.calls),
            "call_ms": {model: round(spent, 3) for model, spent in self.call_ms.items()},
        }
        optional = {
            "reviews": {
                model: {"accepted": passed, "examined": seen} for model, (passed, seen) in self.reviews.items()
            },
            "openings": self.openings if self.openings > 1 else None,
            "beams": self.beams,
            "pieces": self.pieces,
            "report": None if self.report is None else self.report._asdict(),
        }
        return figures | {name: value for name, value in optional.items() if value}


def _added(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def _by_model(parts: Sequence[Mapping[str, Any]], add: Callable[[list[Any]], Any] = sum) -> dict[str, Any]:
    models = dict.fromkeys(model for part in parts for model in part)
    return {model: add([part[model] for part in parts if model in part]) for model in models}


_SUMMED = (
    *("prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "openings", "target_passes"),
    *("draft_n", "draft_n_accepted", "draft_n_rejected", "draft_n_discarded", "branched"),
    *("draft_ms", "verify_ms", "sample_ms", "overhead_ms", "pieces"),
)


def merge(stats: Iterable[Stats]) -> Stats:
    """One Stats for several answers: counts and times add up, so rates are Σ tokens / Σ time.

    `ttft_ms` is the mean over the answers that have begun; `stop_reason` is theirs if they agree.
    """
    parts = list(stats)
    reasons = {part.stop_reason for part in parts}
    begun = [part for part in parts if part.ttft_ms is not None]
    fields: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    fields |= {
        name: _added(getattr(part, name) for part in parts)
        for name in ("accepted_at", "examined_at", "acceptance_histogram", "draft_histogram")
    }
    fields |= {name: _by_model([getattr(part, name) for part in parts]) for name in ("calls", "call_ms")}
    fields["reviews"] = _by_model([part.reviews for part in parts], _added)
    fields["sources"] = tuple(map(_added, zip_longest(*(part.sources for part in parts), fillvalue=())))
    return Stats(
        **fields,
        stop_reason=reasons.pop() if len(reasons) == 1 else None,
        ttft_ms=ratio(
            sum((part.ttft_ms or 0.0) * part.openings for part in begun), sum(part.openings for part in begun)
        ),
        top2_gaps=tuple(gap for part in parts for gap in part.top2_gaps),
        beams=max((part.beams for part in parts), default=0),
        least_pass_ms=least(part.least_pass_ms for part in parts),
        least_wide_ms=least(part.least_wide_ms for part in parts),
        report=_summed([part.report for part in parts]),
    )


def _summed(reports: Sequence[ServerFigures | None]) -> ServerFigures | None:
    """Add up a server's reports on several answers; None without a report on each, or for a count that one lacks."""
    known = [report for report in reports if report is not None]
    if not known or len(known) < len(reports):
        return None
    counts: dict[str, list[Any]] = {
        name: [getattr(report, name) for report in known]
        for name in ServerFigures._fields
        if name not in ("problem", "rate", "load_s")
    }
    summed: dict[str, Any] = {name: None if None in column else sum(column) for name, column in counts.items()}
    return ServerFigures(**summed)


AS_FAST = 0.02  # rates this close (as a share) are called equal
FULL = 0.9  # share of gamma a drafter must fill for the expected speed-up to describe it


def speedup(plain: Stats, other: Stats) -> float | None:
    """How many times faster `other` emits tokens than `plain`; None where either has no rate."""
    return ratio(other.predicted_per_second, plain.predicted_per_second)


def speedup_over(pairs: Iterable[tuple[Stats, Stats]]) -> float | None:
    """Seconds that plain decoding takes for the other answers' tokens / seconds that the others took.

    `pairs` are (plain, other) of the same prompts; of equal texts it is Σ time_plain / Σ time_other. Where texts differ
    it is still a mean of the pairs' own speed-ups, weighted by the time of the others, and so never beyond them. None
    where no pair has both rates.
    """
    known = [(factor, other.predicted_ms) for plain, other in pairs if (factor := speedup(plain, other)) is not None]
    return ratio(sum(factor * spent for factor, spent in known), sum(spent for _, spent in known))


def disturbed(plain: Stats, other: Stats) -> bool:
    """Return whether the timing is impossible: `other` is faster than its tokens a pass allow without shorter passes.

    A round yields `tokens_per_pass` tokens and takes at least one pass; where a pass over more tokens is not shorter
    than one over a single token (v ≥ 1), that bounds the speed-up. A disturbance can only lengthen a pass, so v is
    judged by the shortest ones. False where these were not timed, and for another model than the target.
    """
    gained, most = speedup(plain, other), other.tokens_per_pass
    narrow, wide = least((plain.least_pass_ms, other.least_pass_ms)), other.least_wide_ms
    timed = wide is not None or other.least_pass_ms is not None
    if gained is None or most is None or narrow is None or not timed or TARGET not in other.calls:
        return False
    return gained > (1 + AS_FAST) * most and (wide is None or wide >= (1 - AS_FAST) * narrow)


def cost_ratio(drafted: Stats, plain: Stats) -> float | None:
    """c: seconds a drafted token / seconds of a one-token target pass; `plain` is a run without drafts."""
    return ratio(ratio(drafted.draft_ms, drafted.draft_n), ratio(plain.verify_ms, plain.target_passes))


def verify_ratio(drafted: Stats, plain: Stats) -> float | None:
    """v: seconds of a target pass over drafts / seconds of a one-token pass; `plain` is a run without drafts."""
    return ratio(ratio(drafted.verify_ms, drafted.target_passes), ratio(plain.verify_ms, plain.target_passes))


def expected(drafted: Stats, plain: Stats, gamma: int | str | None) -> float | None:
    """Return the speed-up to expect at the alpha, c and v of these runs; `plain` is a run without drafts.

    None for "auto", for a drafter that ignores gamma (None), where drafts often were shorter than gamma, and for trees:
    the formula (:func:`sampling.stats.theory.expected_speedup`) describes chains of `gamma` drafts.
    """
    if not isinstance(gamma, int) or gamma < 1 or drafted.branched:
        return None
    most = gamma * drafted.target_passes
    c, v = cost_ratio(drafted, plain), verify_ratio(drafted, plain)
    if not FULL * most <= drafted.draft_n <= most or drafted.alpha is None or c is None or v is None:
        return None
    return expected_speedup(drafted.alpha, gamma, c, v)
