"""`bench`: the order of the methods, sums over prompts, whole runs and the identity check, of trees too."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import app.bench.run
import sampling.loop
from app.bench.run import BenchReport, Difference, run_bench
from app.bench.summary import PromptItem, summarise
from app.command_line.arguments import read_request
from app.lanes.answers import PACKED_TIE, Answer, Variant, order, run_lane
from app.lanes.costs import Terms
from app.prompts.questions import Question
from app.settings.table import ModelOptions, Settings
from sampling.stats.summary import Stats
from sampling.stats.swi import SwiModel
from tests.support.bench import bench_with
from tests.support.refusals import refused
from tests.support.tiny import tiny_pair, write_prompts
from utils.errors import UsageError

SHAPE = {"context": 300}


def test_its_flags_say_what_is_measured() -> None:
    words = "bench --methods ar,spec --gammas 1,auto --repeat 2 --limit 3 --turns 1"
    asked = bench_with(None, methods=("ar", "spec"), gammas=(1, "auto"), repeat=2, limit=3, turns=1)
    assert read_request(words.split(), {}).own == asked


# -- order and sums -----------------------------------------------------------------------------

PLAIN, FOUR = Variant("ar"), Variant("spec", 4)


def test_every_method_comes_first_and_last_equally_often() -> None:
    variants = [Variant("spec", gamma) for gamma in range(1, 6)]
    rounds = [order(variants, turn) for turn in range(10)]
    assert all(sorted(round_, key=lambda v: v.gamma or 0) == variants for round_ in rounds)
    assert set(Counter(round_[0] for round_ in rounds).values()) == {2}
    assert set(Counter(round_[-1] for round_ in rounds).values()) == {2}
    before = Counter((a, b) for round_ in rounds for i, a in enumerate(round_) for b in round_[i + 1 :])
    assert all(before[a, b] == before[b, a] for a in variants for b in variants)


def timed(method: str, tokens: int, seconds: float, *, ids: int = 0, drafted: int = 0, kept: int = 0) -> Answer:
    passes = tokens - kept
    stats = Stats(
        stop_reason="length",
        ttft_ms=10.0,
        predicted_n=tokens + 1,
        openings=1,
        predicted_ms=1000 * seconds,
        draft_n=drafted,
        draft_n_accepted=kept,
        draft_n_rejected=drafted - kept,
        target_passes=passes,
        draft_ms=100 * seconds if drafted else 0.0,
        verify_ms=900 * seconds,
    )
    return Answer(method, (ids, 1, 2), "", stats)


def item(category: str | None, *rounds: dict[Variant, Answer]) -> PromptItem:
    return PromptItem(0, Question(("x",), category), 0, [], list(rounds))


def test_a_speedup_is_the_ratio_of_summed_times_and_the_median_of_the_repeats() -> None:
    def pair(plain: float, other: float) -> dict[Variant, Answer]:
        return {PLAIN: timed("ar", 100, plain), FOUR: timed("spec", 100, other, drafted=100, kept=60)}

    plain, spec = summarise(
        [item("a", pair(10, 2), pair(10, 4), pair(10, 8)), item("b", pair(1, 2), pair(1, 4), pair(1, 1))], [PLAIN, FOUR]
    )
    assert spec["speedup_per_repeat"] == [11 / 4, 11 / 8, pytest.approx(11 / 9, abs=1e-4)]
    assert spec["speedup"] == pytest.approx(11 / 8)  # the mean of the prompts' ratios would be 1.97
    assert spec["categories"]["a"]["speedup"] == pytest.approx(10 / 4)
    assert spec["categories"]["b"]["speedup"] == pytest.approx(1 / 2)
    assert plain["speedup"] is None
    assert spec["predicted_per_second"]["repeats"] == [50.0, 25.0, pytest.approx(200 / 9, abs=1e-4)]
    assert spec["predicted_per_second"]["spread"] == pytest.approx(15.2988, abs=1e-3)
    assert (spec["prompts"], spec["answers"], spec["differs"], spec["compared"]) == (2, 6, 0, 6)
    assert spec["acceptance_rate"] == 0.6
    assert spec["tokens_per_pass"] == 2.5


def test_only_prompts_that_both_answered_are_compared() -> None:
    whole = {PLAIN: timed("ar", 100, 10), FOUR: timed("spec", 100, 5, drafted=10, kept=5, ids=9)}
    _, spec = summarise([item(None, whole), item(None, {FOUR: timed("spec", 100, 50)})], [PLAIN, FOUR])
    assert spec["speedup"] == 2.0
    assert (spec["compared"], spec["differs"], spec["answers"]) == (1, 1, 2)
    assert spec["categories"] == {}


def test_cost_ratios_and_the_expected_speedup_come_from_the_same_runs() -> None:
    _, spec = summarise(
        [item(None, {PLAIN: timed("ar", 40, 4), FOUR: timed("spec", 40, 2, drafted=40, kept=30)})], [PLAIN, FOUR]
    )
    assert spec["v"] == pytest.approx((1800 / 10) / (3600 / 40))
    assert spec["c"] == pytest.approx((200 / 40) / (3600 / 40), abs=1e-4)
    alpha = 30 / 40
    assert spec["expected_speedup"] == pytest.approx((1 - alpha**5) / (1 - alpha) / (4 * 200 / 40 / 90 + 2), abs=1e-3)


def test_the_calls_and_reviews_of_a_cascade_are_counted_and_priced() -> None:
    def cascade() -> Answer:
        stats = replace(
            timed("cascade", 40, 2, drafted=40, kept=30).stats,
            accepted_at=(10, 10, 10),
            examined_at=(10, 10, 10),
            calls={"glide": 20, "target": 10},
            call_ms={"glide": 180.0, "target": 1800.0},
            reviews={"glide": (20, 40)},
        )
        terms = Terms(True, None, {"target": SwiModel("t", 90_000_000), "glide": SwiModel("g", 9_000_000)})
        return Answer("cascade", (0, 1, 2), "", stats, terms=terms)

    plan = Variant("cascade")
    plain, row = summarise([item(None, {PLAIN: timed("ar", 40, 4), plan: cascade()})], [PLAIN, plan])
    # A one-token pass takes 90 ms, one over drafts 180, a call of glide 9.
    assert (row["c"], row["v"]) == (pytest.approx(5 / 90, abs=1e-4), 2.0)
    assert row["expected_speedup"] is None
    assert (row["calls_per_pass"], row["ms_per_call"]) == (
        {"glide": 2.0, "target": 1.0},
        {"glide": 9.0, "target": 180.0},
    )
    assert row["reviews"] == {"glide": {"accepted": 20, "examined": 40}}
    wanted = {"model_parameters": 40 * 90 / (10 * 90 + 20 * 9), "measured": 40 * 180 / 1980}
    assert row["swi"] == {name: pytest.approx(value, abs=1e-4) for name, value in wanted.items()} | {
        "previous_work": None,
        "published": None,
    }
    assert (plain["swi"], plain["reviews"], plain["expected_speedup"], plain["c"], plain["v"]) == (
        None,
        {},
        *[None] * 3,
    )


# -- whole runs ---------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"turns": ["hello there", "and now?"], "category": "chat", "question_id": 11},
        {"prompt": "x" * 400, "category": "long"},
        {"prompt": "[bold]what[/bold] is 2 + 2", "category": "maths"},
    ]
    return write_prompts(tmp_path / "prompts.jsonl", rows)


SETTINGS = Settings(max_new_tokens=12, quiet=True)


def benched(options: ModelOptions, prompts: Path, settings: Settings = SETTINGS, **given: Any) -> int:
    """The exit code of a bench with these arguments."""
    return run_bench(settings, options, bench_with(prompts, **given))


def test_a_whole_benchmark(
    options: ModelOptions, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert benched(options, prompts, methods=("ar", "spec", "ngram"), gammas=(1, 3), repeat=2, out=out) == 0
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "prompt 2, turn 1 skipped: the prompt is 4" in printed.err
    methods = [line[:8].strip() for line in printed.out.splitlines() if line.startswith(("ar", "spec ", "ngram"))]
    assert methods[:5] == ["ar", "spec 1", "spec 3", "ngram 1", "ngram 3"]
    data = json.loads(out.read_text())
    assert data["complete"] is True
    assert {"cpu_count", "torch", "date"} <= set(data["machine"])
    assert [(row["method"], row["gamma"]) for row in data["summary"]] == [
        ("ar", None),
        ("spec", 1),
        ("spec", 3),
        ("ngram", 1),
        ("ngram", 3),
    ]
    assert [row["differs"] for row in data["summary"]] == [None, 0, 0, 0, 0]
    assert set(data["summary"][1]["categories"]) == {"chat", "maths"}
    assert [(entry["question_id"], entry["turn"]) for entry in data["prompts"]] == [(11, 0), (11, 1), (None, 0)]
    for entry in data["prompts"]:
        assert len(entry["results"]) == 10
        assert len({tuple(result["ids"]) for result in entry["results"]}) == 1
        assert {result["prompt_n"] for result in entry["results"]} == {entry["results"][0]["prompt_n"]}
        assert {result["same_output"] for result in entry["results"]} == {None, True}
    first, second = data["prompts"][:2]
    assert second["results"][0]["prompt_n"] > first["results"][0]["prompt_n"] + 12  # the answer is part of it
    assert not list(tmp_path.glob("*.partial"))


def test_sampled_texts_may_be_other_draws_of_the_same_distribution(
    options: ModelOptions, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert (
        benched(
            options,
            prompts,
            SETTINGS.changed(temperature=0.8),
            methods=("ar", "spec", "ngram"),
            gammas=(2,),
            repeat=1,
            turns=1,
            out=out,
        )
        == 0
    )
    data = json.loads(out.read_text())
    assert [row["differs"] for row in data["summary"]] == [None, None, 0]
    assert data["summary"][1]["may_differ"] == 2
    partings = [result["parting"] for entry in data["prompts"] for result in entry["results"]]
    assert all(parted is None or parted["kind"] == "other draw" for parted in partings)
    assert any(partings)


@pytest.mark.parametrize("check", [False, True])
def test_nothing_measured_is_no_success(
    check: bool, options: ModelOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = None if check else tmp_path / "out.json"
    args = bench_with(write_prompts(tmp_path / "p.jsonl", [{"prompt": "x" * 4000}]), out=out, check_identity=check)
    told = "nothing was compared" if check else "nothing was measured"
    refused(run_bench, SETTINGS, options, args, match=f"{told}: none of the 1 prompts fits into the context")
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("skipped: the prompt is 4")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


def test_lanes_that_ignore_gamma_run_once_for_all_numbers(options: ModelOptions, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # Whatever the settings' own gamma is: without a number of its own a cascade must not run under auto.
    settings = SETTINGS.changed(gamma="auto", cascade="model,maxgram", k_matrix="[[2,3],[0,3]]")
    methods = ("ar", "spec", "cascade", "chain")
    assert benched(options, prompts, settings, methods=methods, gammas=(1, 3, "auto"), repeat=1, limit=1, out=out) == 0
    data = json.loads(out.read_text())
    assert [(row["method"], row["gamma"]) for row in data["summary"]] == [
        ("ar", None),
        *(("spec", gamma) for gamma in (1, 3, "auto")),
        *((method, gamma) for method in ("cascade", "chain") for gamma in (None, "auto")),
    ]
    rows = {(row["method"], row["gamma"]): row for row in data["summary"]}
    drafting = [row for row in data["summary"] if row["method"] != "ar"]
    assert [row["differs"] for row in drafting] == [0] * 7
    assert all(row["swi"]["model_parameters"] > 0 and row["swi"]["published"] is None for row in drafting)
    assert rows["cascade", None]["reviews"]["drafter"]["examined"] > 0
    assert rows["chain", None]["reviews"] == {}
    assert all(rows[method, "auto"]["expected_speedup"] is None for method in methods[1:])
    for result in data["prompts"][0]["results"]:
        if (result["method"], result["gamma"]) in (("cascade", None), ("chain", None)):
            assert result["calls"]["drafter"] >= result["target_passes"] - 1  # the last round has no room to draft
    assert benched(options, prompts, settings, methods=("cascade",), gammas=("auto",), repeat=1, limit=1, out=out) == 0
    assert [(row["method"], row["gamma"]) for row in json.loads(out.read_text())["summary"]] == [("cascade", "auto")]


# -- identity -----------------------------------------------------------------------------------


def test_the_lanes_and_transformers_agree(
    options: ModelOptions, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benched(options, prompts, methods=("ar", "spec", "ngram"), gammas=(1, 4), check_identity=True) == 0
    printed = capsys.readouterr()
    assert printed.out == "identity: 2 prompts × 12 tokens × 5 lanes: 0 differ\n"
    assert "prompt 2, turn 1 skipped: the prompt is 4" in printed.err


def test_a_lossy_lane_is_not_checked_and_its_answers_are_other_texts(
    options: ModelOptions, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benched(options, prompts, methods=("ar", "ngram", "lossy"), gammas=(2,), check_identity=True) == 0
    assert capsys.readouterr().out == "identity: 2 prompts × 12 tokens × 2 lanes: 0 differ\n"
    out = tmp_path / "out.json"
    assert benched(options, prompts, methods=("ar", "lossy"), gammas=(2,), repeat=1, out=out) == 0
    (row,) = (row for row in json.loads(out.read_text())["summary"] if row["method"] == "lossy")
    assert (row["compared"], row["other_draws"], row["may_differ"]) == (0, 0, 3)
    assert "identical" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rules", "methods", "told"),
    [
        (
            {"repetition_penalty": 1.7, "no_repeat_ngram": 2},
            ("ar", "ngram"),
            r"identity: 2 prompts × 12 tokens × 2 lanes: 0 differ\n",
        ),
        (
            {"presence_penalty": 1.0},
            ("ngram",),
            r"(?s).*0 differ \(transformers not compared: settings that it lacks\).*",
        ),
    ],
)
def test_rules_of_repetition_are_the_references_too_or_it_is_not_compared(
    rules: dict[str, Any],
    methods: tuple[str, ...],
    told: str,
    options: ModelOptions,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    how: dict[str, Any] = {"methods": methods, "gammas": (2,), "check_identity": True}
    assert benched(options, prompts, SETTINGS.changed(**rules), **how) == 0
    assert re.fullmatch(told, capsys.readouterr().out)


def broken(lane: Any, *given: Any, **named: Any) -> Answer:
    """Lanes at gamma 4 get their sixth token wrong."""
    answer = run_lane(lane, *given, **named)
    if lane.name != "spec" or lane.settings.gamma != 4:
        return answer
    return replace(answer, ids=(*answer.ids[:5], answer.ids[5] ^ 1, *answer.ids[6:]))


def test_a_lane_that_changes_the_output_is_found(
    options: ModelOptions, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.bench.run, "run_lane", broken)
    assert benched(options, prompts, gammas=(1, 4), check_identity=True, limit=1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("prompt 1: spec gamma 4 differs from ar at token 6, top-2 gap ")
    assert lines[1].startswith("prompt 1: spec gamma 4 differs from transformers at token 6, top-2 gap ")
    assert lines[2] == "identity: 1 prompts × 12 tokens × 3 lanes: 2 differ, 0 of them at a near tie"


def test_plain_decoding_that_leaves_transformers_is_found(
    options: ModelOptions, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(lane: Any, *given: Any, **named: Any) -> Answer:
        answer = run_lane(lane, *given, **named)
        return replace(answer, ids=answer.ids[:-1])

    monkeypatch.setattr(app.bench.run, "run_lane", wrong)
    assert benched(options, prompts, methods=("ngram",), gammas=(2,), check_identity=True, limit=1) == 1
    assert "prompt 1: ar differs from transformers at token 12" in capsys.readouterr().out


def test_sampled_lanes_are_compared_with_the_seeds_own_text(
    options: ModelOptions, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS.changed(temperature=0.8)
    assert benched(options, prompts, settings, methods=("spec", "ngram"), gammas=(2, 5), check_identity=True) == 0
    told = "identity: 2 prompts × 12 tokens × 2 lanes: 0 differ (transformers not compared: sampled)\n"
    assert capsys.readouterr().out == told
    refused(
        run_bench,
        settings,
        options,
        bench_with(prompts, methods=("ar", "spec"), gammas=(2, 5), check_identity=True),
        match="no lane must equal ar",
        kind=UsageError,
    )


@pytest.mark.parametrize(
    ("prompts", "differences", "passed"),
    [
        (50, [], True),
        (50, [(3, 0.0009)], True),
        (50, [(3, 0.0011)], False),
        (50, [(3, None)], False),
        (50, [(3, 0.0001), (3, 0.0002)], True),  # several lanes meet the same tie
        (50, [(3, 0.0001), (4, 0.0001)], False),
        (100, [(3, 0.0001), (4, 0.0001)], True),
        (6, [(3, 0.0001)], True),
    ],
)
def test_the_rule_of_near_ties(prompts: int, differences: list[tuple[int, float | None]], passed: bool) -> None:
    found = [Difference(prompt, "spec gamma 4", "ar", 3, gap) for prompt, gap in differences]
    assert BenchReport(lanes=3, tokens=128, prompts=prompts, differences=found).passed is passed


@pytest.mark.parametrize(("against", "gap", "passed"), [("ar", 0.0, False), ("transformers", 0.009, True)])
def test_over_packed_weights_plain_decoding_is_met_and_float32_up_to_near_ties(
    against: str, gap: float, passed: bool
) -> None:
    ties = {"ar": 0.0, "transformers": PACKED_TIE}
    found = [Difference(prompt, "spec", against, 3, gap, ties[against]) for prompt in (3, 4, 5)]
    assert BenchReport(3, 128, tolerated=3, prompts=50, differences=found).passed is passed
    assert not BenchReport(3, 128, tolerated=3, prompts=50, differences=[*found, replace(found[0], prompt=6)]).passed


# -- identity of trees -----------------------------------------------------------------------------


def test_trees_pass_the_check_and_are_really_grown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is off by much, so that siblings are taken."""
    options = tiny_pair(tmp_path, noise=0.3, stop=False).options()
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "hello there"}, {"prompt": "what is 2 + 2"}])
    verify, trees = sampling.loop.verify, []

    def noted(logits: Any, draft: Any, *rest: Any) -> Any:
        trees.append(not all(tree.is_chain for tree in draft.trees))
        return verify(logits, draft, *rest)

    monkeypatch.setattr(sampling.loop, "verify", noted)
    settings = Settings(max_new_tokens=40, quiet=True, expand="dynamic", nodes=12)
    assert benched(options, prompts, settings, methods=("ar", "spec"), gammas=(2, 6), check_identity=True) == 0
    assert capsys.readouterr().out == "identity: 2 prompts × 40 tokens × 3 lanes: 0 differ\n"
    assert sum(trees) > 5
