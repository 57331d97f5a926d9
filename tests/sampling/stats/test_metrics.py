"""The figures: their identities over random streams of events, and the example of `run --json`."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.lanes.costs import event_of
from sampling.events import Call, Event, Finished, Prefill, Step, to_json
from sampling.stats.metrics import Meter
from sampling.stats.summary import Stats, disturbed, expected, merge, speedup, speedup_over
from sampling.stats.theory import best_gamma, efficiency, expected_speedup
from tests.support.runs import measure
from utils.remote.pieces import ServerFigures

KEYS = (
    *("stop_reason", "prompt_n", "prompt_ms", "ttft_ms", "predicted_n", "predicted_ms", "predicted_per_second"),
    *("draft_n", "draft_n_accepted", "draft_n_rejected", "target_passes", "tokens_per_pass", "acceptance_rate"),
    *("alpha", "alpha_per_position", "acceptance_histogram", "draft_ms", "verify_ms", "sample_ms", "calls", "call_ms"),
)


def step(drafted: int, accepted: int, *, gamma: int | None = None, stop: bool = False, **seconds: float) -> Step:
    """A round over a chain of drafts of which `accepted` were kept; `stop`: the last kept one ended the row."""
    times = {"draft_s": 0.0, "verify_s": 0.0, "sample_s": 0.0, "overhead_s": 0.0, **seconds}
    return Step(
        row=0,
        gamma=drafted if gamma is None else gamma,
        drafted=tuple(range(100, 100 + drafted)),
        parents=tuple(range(-1, drafted - 1)),
        source=(0,) * drafted,
        path=tuple(range(accepted)),
        token=None if stop else 7,
        target_p=(),
        draft_p=(),
        top2_gap=0.5 + drafted,
        calls=(
            *((Call("drafter", drafted, times["draft_s"]),) if drafted else ()),
            Call("target", 1, times["verify_s"]),
        ),
        **times,
    )


def opening(**seconds: float) -> Step:
    return step(0, 0, **seconds)


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Prefill pieces, an opening round, rounds over chains, perhaps an end."""
    time = st.floats(0.001, 2.0)
    events: list[Event] = [Prefill(256 * (i + 1), 900, draw(time)) for i in range(draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        events.append(opening(draft_s=draw(time), verify_s=draw(time), sample_s=draw(time), overhead_s=draw(time)))
        for _ in range(draw(st.integers(0, 12))):
            drafted = draw(st.integers(0, 6))
            accepted = draw(st.integers(0, drafted))
            stop = accepted > 0 and draw(st.integers(0, 5)) == 0
            gamma = drafted + draw(st.integers(0, 2))
            events.append(step(drafted, accepted, gamma=gamma, stop=stop, draft_s=draw(time), verify_s=draw(time)))
            if stop:
                break
    if draw(st.booleans()):
        events.append(Finished(0, draw(st.sampled_from(["eos", "length", "interrupted"]))))
    return events


@given(streams())
@settings(max_examples=150, deadline=None)
def test_the_figures_of_any_stream_fit_together(events: list[Event]) -> None:
    stats = measure(events)
    rounds = [event for event in events if isinstance(event, Step)][1:]
    truncated = sum(event.token is None for event in rounds)
    assert stats.predicted_n - stats.openings == stats.draft_n_accepted + stats.target_passes - truncated
    assert stats.draft_n == stats.draft_n_accepted + stats.draft_n_rejected + stats.draft_n_discarded
    assert stats.draft_n_discarded == sum(len(event.discarded) for event in rounds)
    assert sum(stats.acceptance_histogram) == stats.target_passes == len(rounds)
    assert sum(a * n for a, n in enumerate(stats.acceptance_histogram)) == stats.draft_n_accepted
    assert sum(stats.accepted_at) == stats.draft_n_accepted
    assert sum(stats.examined_at) == stats.draft_n_accepted + stats.draft_n_rejected
    assert all(later <= earlier for earlier, later in zip(stats.examined_at, stats.examined_at[1:], strict=False))
    assert stats.predicted_ms == pytest.approx(stats.draft_ms + stats.verify_ms + stats.sample_ms + stats.overhead_ms)
    assert stats.predicted_ms == pytest.approx(1000 * sum(event.seconds for event in rounds))
    assert len(stats.top2_gaps) == stats.predicted_n


@given(streams())
@settings(max_examples=150, deadline=None)
def test_no_figure_is_ever_nan_and_all_are_json(events: list[Event]) -> None:
    assert tuple(json.loads(json.dumps(measure(events).to_json(), allow_nan=False))) == KEYS


def example() -> list[Event]:
    """Rounds with the histogram of the documented example: 1, 4, 5, 4 and 11 rounds that kept 0 … 4 of 4."""
    rounds = [
        step(4, accepted, draft_s=0.012, verify_s=0.070, sample_s=0.0012, overhead_s=0.0008)
        for accepted, count in enumerate([1, 4, 5, 4, 11])
        for _ in range(count)
    ]
    return [
        Prefill(41, 41, 0.070),
        opening(verify_s=0.050, sample_s=0.015, overhead_s=0.005),
        *rounds,
        Finished(0, "eos"),
    ]


def test_the_documented_example_comes_out_of_its_events() -> None:
    assert measure(example(), prompt_n=42).to_json() == {
        "stop_reason": "eos",
        "prompt_n": 42,
        "prompt_ms": pytest.approx(120.0),
        "ttft_ms": pytest.approx(140.0),
        "predicted_n": 96,
        "predicted_ms": pytest.approx(2100.0),
        "predicted_per_second": pytest.approx(45.2, abs=0.05),
        "draft_n": 100,
        "draft_n_accepted": 70,
        "draft_n_rejected": 14,
        "target_passes": 25,
        "tokens_per_pass": 3.8,
        "acceptance_rate": 0.7,
        "alpha": pytest.approx(0.833, abs=5e-4),
        "alpha_per_position": [0.96, pytest.approx(0.833, abs=5e-4), 0.75, pytest.approx(0.733, abs=5e-4)],
        "acceptance_histogram": [1, 4, 5, 4, 11],
        "draft_ms": pytest.approx(300.0),
        "verify_ms": pytest.approx(1750.0),
        "sample_ms": pytest.approx(30.0),
        "calls": {"drafter": 100, "target": 25},
        "call_ms": {"drafter": pytest.approx(300.0), "target": pytest.approx(1750.0)},
    }


def test_the_opening_round_is_in_no_rate() -> None:
    slow, fast = (measure([opening(verify_s=s), step(0, 0, verify_s=0.1)]) for s in (9.0, 0.1))
    assert slow.predicted_per_second == fast.predicted_per_second == pytest.approx(10.0)
    assert (slow.tokens_per_pass, slow.predicted_n, slow.calls) == (1.0, 2, {"target": 1})


def review(
    model: str, drafted: int, accepted: int, *, inner: tuple[Step, ...] = (), stop: bool = False, source: int = 0
) -> Step:
    """A nested round: `model` let so many of its drafts pass."""
    made = replace(step(drafted, accepted, stop=stop), inner=inner, source=(source,) * drafted)
    return replace(made, calls=(Call("below", drafted, 0.001), Call(model, 1, 0.004)))


def cascade_round() -> Step:
    """base reviews twice (what small let pass, and nothing), then small once, then 3 drafts that nobody reviewed.

    base lets 2 of 3 and 0 of 0 through and adds one each time: 4 tokens. small's own part adds 1 + 1. All 6 and the
    first raw one are accepted, the second raw one is refused.
    """
    below = (review("small", 4, 1, source=2), review("small", 2, 0, source=2))
    reviews = (review("base", 3, 2, inner=below, source=1), review("base", 0, 0), review("small", 5, 1, source=2))
    calls = (Call("base", 2, 0.008), Call("small", 3, 0.012), Call("target", 1, 0.1))
    return replace(
        step(9, 7, draft_s=0.03, verify_s=0.1), source=(1, 2, 0, 0, 2, 1, 2, 2, 2), calls=calls, inner=reviews
    )


def test_reviews_of_every_level_are_counted() -> None:
    stats = measure([opening(), cascade_round(), cascade_round()])
    assert stats.reviews == {"base": (4, 6), "small": (4, 10)}
    assert stats.calls == {"base": 4, "small": 6, "target": 2}
    assert stats.call_ms == pytest.approx({"base": 16.0, "small": 24.0, "target": 200.0})
    assert stats.to_json()["reviews"] == {
        "base": {"accepted": 4, "examined": 6},
        "small": {"accepted": 4, "examined": 10},
    }
    assert tuple(stats.to_json()) == (*KEYS, "reviews")


def test_who_proposed_what_is_counted_by_source() -> None:
    stats = measure([opening(), cascade_round(), step(2, 1)])
    assert stats.sources == ((2 + 2, 2 + 1), (2, 2), (5, 3))
    assert sum(drafted for drafted, _ in stats.sources) == stats.draft_n
    assert sum(accepted for _, accepted in stats.sources) == stats.draft_n_accepted


def test_nested_rounds_survive_a_recording() -> None:
    event = cascade_round()
    assert event.inner[0].inner[1].calls[-1] == Call("small", 1, 0.004)
    assert event_of(json.loads(json.dumps(to_json(event)))) == event


def test_figures_of_nothing_are_none() -> None:
    for stats in (Stats(), measure([opening(verify_s=0.1)]), merge([])):
        figures = (stats.predicted_per_second, stats.tokens_per_pass, stats.acceptance_rate, stats.alpha)
        assert figures == (None, None, None, None)
        assert (stats.alpha_per_position, stats.acceptance_histogram) == ((), ())
    assert Stats().ttft_ms is None


def test_positions_that_were_never_examined_have_no_alpha() -> None:
    stats = measure([opening(), step(3, 0), step(1, 1, gamma=3)])
    assert (stats.alpha_per_position, stats.acceptance_histogram) == ((0.5, None, None), (1, 1, 0, 0))


def test_an_accepted_stop_token_ends_the_row_without_a_rejection() -> None:
    stats = measure([opening(), step(4, 2, stop=True), Finished(0, "eos")])
    assert (stats.draft_n_accepted, stats.draft_n_rejected, stats.draft_n_discarded) == (2, 0, 2)
    assert (stats.predicted_n, stats.stop_reason) == (3, "eos")


def test_refused_siblings_of_a_tree_are_examined_and_their_children_are_not() -> None:
    stats = measure([opening(), replace(step(4, 0, gamma=2), parents=(-1, -1, 0, 1), path=(1,), token=7)])
    assert (stats.draft_n_accepted, stats.draft_n_rejected, stats.draft_n_discarded) == (1, 1, 2)
    assert (stats.accepted_at, stats.examined_at) == ((1, 0), (1, 1))


def test_the_gap_is_known_where_a_round_ended() -> None:
    stats = measure([opening(), step(2, 2), step(1, 1, stop=True)])
    assert stats.top2_gaps == (0.5, None, None, 2.5, 1.5)
    assert stats.gap_at(3) == 2.5
    assert stats.gap_at(1) is stats.gap_at(9) is stats.gap_at(-1) is None


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "tokens", "factor"),
    [
        (0.8, 2, 0.1, 2.4400, 2.0333),
        (0.7, 4, 0.05, 2.7731, 2.3109),
        (0.8, 5, 0.05, 3.6893, 2.9514),
        (0.9, 8, 0.02, 6.1258, 5.2809),
        (0.5, 3, 0.1, 1.8750, 1.4423),
    ],
)
def test_the_expected_speedup_of_known_cases(alpha: float, gamma: int, c: float, tokens: float, factor: float) -> None:
    assert efficiency(alpha, gamma) == pytest.approx(tokens, abs=5e-5)
    assert expected_speedup(alpha, gamma, c) == pytest.approx(factor, abs=5e-5)


@pytest.mark.parametrize(
    ("alpha", "gamma", "factor"), [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)]
)
def test_the_best_gamma_of_known_cases(alpha: float, gamma: int, factor: float) -> None:
    best, found = best_gamma(alpha, 0.05)
    assert best == gamma
    assert found == pytest.approx(factor, abs=0.005)


def test_the_best_gamma_follows_what_verification_costs() -> None:
    assert best_gamma(0.8, 0.05, lambda n: float(n))[0] == 0  # a pass over n tokens costs n: drafting never pays
    assert best_gamma(0.8, 0.05, lambda n: 1.0 if n <= 4 else 9.0)[0] == 3


@given(st.floats(0.05, 0.95), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_a_planted_alpha_is_recovered(alpha: float, gamma: int) -> None:
    import random

    chance = random.Random(int(alpha * 1e6) + gamma)
    events: list[Event] = [opening()]
    for _ in range(4000):
        kept = 0
        while kept < gamma and chance.random() < alpha:
            kept += 1
        events.append(step(gamma, kept))
    stats = measure(events)
    assert stats.alpha == pytest.approx(alpha, abs=0.05)
    assert stats.tokens_per_pass == pytest.approx(efficiency(alpha, gamma), rel=0.07)


# -- speed-ups of several answers, and timings that cannot be ----------------------------------------


def timed(tokens: int, passes: int, ms: float, least: float | None = 1.0, wide: float | None = None) -> Stats:
    """An answer of so many tokens behind the first one; `least`, `wide`: its shortest passes over one and more."""
    more: Any = {"openings": 1, "target_passes": passes, "least_pass_ms": least, "least_wide_ms": wide}
    more["calls"] = {"target": passes}
    return Stats(predicted_n=tokens + 1, predicted_ms=ms, **more)


def test_the_speed_up_of_equal_texts_is_the_ratio_of_their_times() -> None:
    pairs = [(timed(40, 40, 80), timed(40, 20, 50)), (timed(10, 10, 30), timed(10, 5, 10))]
    assert speedup_over(pairs) == pytest.approx((80 + 30) / (50 + 10))
    assert speedup_over(pairs[:1]) == speedup(*pairs[0])
    assert speedup_over([]) is speedup_over([(Stats(), timed(3, 3, 3))]) is None


@given(st.lists(st.tuples(*[st.integers(1, 100), st.floats(1, 1e4)] * 2), min_size=1, max_size=5))
def test_several_answers_are_never_faster_than_each_of_them(given: list[tuple[int, float, int, float]]) -> None:
    pairs = [(timed(one, one, ms), timed(other, other, spent)) for one, ms, other, spent in given]
    each = [speedup(*pair) or 0.0 for pair in pairs]
    assert min(each) * (1 - 1e-9) <= (speedup_over(pairs) or 0.0) <= max(each) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        (timed(40, 20, 38, wide=1.0), True),  # 2.1 times as fast with 2 tokens a pass
        (timed(40, 20, 40, wide=1.0), False),
        (timed(40, 20, 38, wide=0.9), False),  # its wide passes are shorter, v < 1: it may well be
        (timed(40, 20, 38, least=0.8, wide=0.9), True),  # they are not: plain ones were disturbed
        (timed(40, 40, 70), True),  # nothing drafted, and faster all the same
        (timed(40, 20, 38, least=None), False),  # nobody timed its passes
        (replace(timed(40, 40, 20), calls={"drafter": 40}), False),  # another model
    ],
)
def test_a_speed_up_beyond_the_tokens_of_a_pass_means_a_disturbed_timing(drafted: Stats, expected: bool) -> None:
    assert disturbed(timed(40, 40, 80), drafted) is expected


def test_no_speed_up_is_expected_of_trees_by_the_formula_of_chains() -> None:
    plain, drafted = Meter(5), Meter(5)
    for _ in range(9):
        plain.add(step(0, 0, verify_s=1.0))
        drafted.add(step(4, 2, verify_s=1.1))
    assert expected(drafted.stats, plain.stats, 4) is not None
    drafted.add(replace(step(4, 2, verify_s=1.1), parents=(-1, 0, 0, 1)))
    assert expected(drafted.stats, plain.stats, 4) is None


def test_the_beginning_of_a_token_cut_at_a_stop_text_is_no_servers_piece() -> None:
    meter = Meter(prompt_n=0)
    meter.add(opening(verify_s=0.1))
    meter.add(replace(opening(), top2_gap=None))  # takes no time, since no pass was made for it
    assert not meter.stats.served
    assert meter.stats.counts_tokens


@pytest.mark.parametrize(("reported", "tokens", "counted"), [(0, 2, False), (None, 2, False), (3, 3, True)])
def test_a_server_that_counts_no_token_beside_a_text_has_not_counted(
    reported: int | None, tokens: int, counted: bool
) -> None:
    meter = Meter(prompt_n=0)
    for seconds in (0.1, 0.2):
        meter.add(Step(0, 0, (), (), (), (), 5, (), (), None, (), 0.0, seconds, 0.0))
    meter.add(Finished(0, "eos", ServerFigures(tokens=reported)))
    assert (meter.stats.predicted_n, meter.stats.counts_tokens) == (tokens, counted)
