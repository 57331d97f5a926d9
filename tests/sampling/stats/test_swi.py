"""The standardised walltime improvement: the published tables, names of models, what is in no table, measured costs."""

from dataclasses import replace

import pytest

from sampling.stats.summary import Stats
from sampling.stats.swi import TABLES, SwiModel, costs_of, every_swi, normalised, swi

FLAN = {
    "target": SwiModel("google/flan-t5-xxl"),
    "base": SwiModel("google/flan-t5-base"),
    "small": SwiModel("flan-t5-small"),
}
LLAMA = {"target": SwiModel("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616), "drafter": SwiModel("JackFram/llama-160m")}


def run(tokens: int, calls: dict[str, int], call_ms: dict[str, float] | None = None, openings: int = 1) -> Stats:
    return Stats(predicted_n=tokens + openings, openings=openings, calls=calls, call_ms=call_ms or {})


def test_a_cascade_of_three_by_the_published_tables() -> None:
    # K [[5,14,10],[0,1,10],[0,0,10]], 40 tokens: 3 calls of the target, 9 of base, 20 of small; max-gram calls nothing.
    # Parameters: 40 · 11300 / (3 · 11300 + 9 · 220 + 20 · 60) = 452000 / 37080
    # Earlier work: 40 · 1 / (3 · 1 + 9 · 0.04 + 20 · 0.02) = 40 / 3.76
    told = every_swi(run(40, {"base": 9, "small": 20, "target": 3}), FLAN)
    assert list(told) == ["model_parameters", "previous_work", "published", "measured"]
    assert told["model_parameters"] == told["published"] == pytest.approx(452000 / 37080)
    assert told["model_parameters"] == pytest.approx(12.1899, abs=5e-5)
    assert told["previous_work"] == pytest.approx(10.6383, abs=5e-5)


def test_the_slip_of_the_published_table_is_kept_apart() -> None:
    # 7 target calls and 30 of llama-160m for 35 tokens: 35 · 7000 / (7 · 7000 + 30 · 160) = 245000 / 53800,
    # and with 70000 for the 7b model 2450000 / (490000 + 4800).
    told = every_swi(run(35, {"target": 7, "drafter": 30}), LLAMA)
    assert told["model_parameters"] == pytest.approx(245000 / 53800)
    assert told["published"] == pytest.approx(2450000 / 494800)
    assert told["previous_work"] is None
    assert TABLES["published"]["llama-7b"] == 10 * TABLES["model_parameters"]["llama-7b"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("google/flan-t5-base", "flan-t5-base"),
        ("FLAN-T5-XXL", "flan-t5-xxl"),
        ("google/flan-t5-xl-finetuned", "flan-t5-xl"),
        ("t5-base", "t5-base"),
        ("flan-t5", "flan-t5"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("huggyllama/llama-7b", "llama-7b"),
        ("Llama-2-7B.Q4_0", "llama-7b"),
        ("JackFram/llama-68m", "llama-68m"),
        ("codellama-7b", "codellama-7b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b-instruct"),
        ("org/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
    ],
)
def test_models_are_known_by_their_names(name: str, known: str) -> None:
    assert normalised(name) == known


def test_a_model_in_no_table_costs_its_own_parameters_or_nothing_can_be_said() -> None:
    models = {"target": SwiModel("SmolLM2-135M-Instruct", 134_515_008), "glide": SwiModel("glide", 5_980_000)}
    stats = run(20, {"target": 10, "glide": 40})
    told = every_swi(stats, models)
    assert told["model_parameters"] == pytest.approx(20 * 134.515008 / (10 * 134.515008 + 40 * 5.98))
    assert told["previous_work"] is told["published"] is None
    assert every_swi(stats, {**models, "glide": SwiModel("glide")})["model_parameters"] is None
    assert every_swi(stats, {})["model_parameters"] is None
    assert costs_of("model_parameters", {**models, "drafter": SwiModel("google/flan-t5-small", 76_961_152)}) == {
        "target": 134.515008,
        "glide": 5.98,
        "drafter": 60.0,  # a listed model costs what the table says
    }


@pytest.mark.parametrize(
    ("calls", "costs", "expected"),
    [
        ({"target": 10}, {"target": 7.0}, 3.0),
        ({"target": 10, "idle": 0}, {"target": 7.0}, 3.0),
        ({}, {"target": 1.0}, None),
        ({"target": 10, "other": 1}, {"target": 1.0}, None),
        ({"target": 10}, {"other": 1.0}, None),
    ],
)
def test_drafts_without_calls_cost_nothing_and_what_cannot_be_told_is_none(
    calls: dict[str, int], costs: dict[str, float], expected: float | None
) -> None:
    assert swi(30, calls, costs) == expected


def test_another_model_can_be_the_target_and_a_run_without_times_tells_nothing() -> None:
    assert swi(30, {"drafter": 30}, {"drafter": 1.0}, target="drafter") == 1.0
    assert set(every_swi(Stats(), LLAMA).values()) == {None}
    assert set(every_swi(run(3, {"target": 2}), {}).values()) == {None}  # no time was taken either


def test_measured_costs_are_the_means_of_the_runs_own_calls() -> None:
    stats = run(24, {"target": 8, "glide": 40}, {"target": 400.0, "glide": 80.0})
    assert every_swi(stats, {})["measured"] == pytest.approx(24 * 50 / (400 + 80))


def test_tokens_of_opening_rounds_are_in_no_improvement() -> None:
    one, many = run(24, {"target": 8}, {"target": 8.0}), run(24, {"target": 8}, {"target": 8.0}, openings=5)
    assert every_swi(one, {}) == every_swi(many, {})
    assert every_swi(one, {})["measured"] == 3.0
    assert every_swi(replace(one, predicted_n=17), {})["measured"] == 2.0
