"""`check --plan`: the mathematics by known cases, tables that fit and say what is in them."""

import json

import pytest

from app.command_line.main import main
from sampling.stats.theory import best_gamma, break_even, expected_speedup, roofline
from tests.support.tiny import TinyPair

SHAPE = {"stop": True, "context": 600}

# From the formula: alpha, gamma, c, S; and best gammas at c = .05.
VECTORS = [(0.8, 2, 0.1, 2.0333), (0.7, 4, 0.05, 2.3109), (0.8, 5, 0.05, 2.9514), (0.9, 8, 0.02, 5.2809)]
BEST = {0.5: (3, 1.63), 0.6: (4, 1.92), 0.7: (6, 2.35), 0.8: (8, 3.09), 0.9: (13, 4.67)}


@pytest.mark.parametrize(
    ("c", "alpha"),
    [
        *((c, pytest.approx(c, abs=1e-9)) for c in (0.02, 0.05, 0.3, 0.9)),  # S = (1 + alpha) / (1 + c) at gamma 1
        (0.0, 0.0),
        (1.0, pytest.approx(1.0)),
        (1.5, None),
    ],
)
def test_with_flat_verification_drafting_pays_from_alpha_c_on(c: float, alpha: object) -> None:
    assert break_even(c) == alpha


def test_at_the_break_even_alpha_the_best_gamma_gains_nothing() -> None:
    def step(n: int) -> float:
        return 1.0 if n == 1 else 1.6  # the first draft costs, further ones do not

    even = break_even(0.05, step)
    assert even is not None
    assert even < 0.05 + 0.6  # of gamma 1: longer drafts pay earlier
    assert max(expected_speedup(even, gamma, 0.05, step(gamma + 1)) for gamma in range(1, 65)) == pytest.approx(1)
    assert best_gamma(even - 0.001, 0.05, step)[0] == 0
    assert best_gamma(even + 0.001, 0.05, step)[0] > 1
    assert break_even(0.0, lambda n: float(n)) == pytest.approx(1, abs=1e-6)  # a pass over n tokens costs n
    assert break_even(0.01, lambda n: float(n)) is None


def test_a_described_pass_reads_its_weights_until_computing_takes_longer() -> None:
    seconds = roofline(7e9, 2, 3.5e12, 1e15)
    assert seconds(1) == seconds(100) == pytest.approx(0.004)  # 14 GB at 3.5 TB/s
    assert seconds(1000) == pytest.approx(0.014)  # 14 Tflop at 1 Pflop/s
    assert roofline(7e9, 2, 3.5e12)(10_000) == pytest.approx(0.004)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert main(["check", "--plan", *words, "--json"]) == 0
    found: list[dict] = json.loads(capsys.readouterr().out)["options"]
    return found


def test_a_plan_of_given_costs_has_the_known_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for alpha, gamma, c, speedup in VECTORS:
        (one,) = planned(capsys, "--c", str(c), "--alphas", str(alpha), "--gammas", str(gamma))
        assert one["expected_speedup"] == [[speedup]]
    (one,) = planned(capsys, "--c", "0.05", "--alphas", ",".join(map(str, BEST)))
    assert one["best_gamma"] == [gamma for gamma, _ in BEST.values()]
    assert [round(found, 2) for found in one["best_speedup"]] == [speedup for _, speedup in BEST.values()]
    assert one["break_even_alpha"] == 0.05


def test_a_described_target_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target-params", "70e9", "--bandwidth", "3.35e12", "--drafter-params", "7e8,1.4e9"]
    one, two = planned(capsys, *words)
    assert (one["c"], two["c"], one["v"]["17"]) == (0.01, 0.02, 1.0)
    assert one["t_verify"] == pytest.approx(140e9 / 3.35e12)
    assert planned(capsys, *words, "--flops", "1e14")[0]["v"]["17"] == 1.0
    assert planned(capsys, *words, "--flops", "1e13")[0]["v"]["17"] == pytest.approx(
        17 * 0.014 / (140 / 3350), rel=1e-3
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--target-params", "7e9"], "--target-params needs --bandwidth"),
        (["--target-params", "7e9", "--bandwidth", "1e12"], "--target-params needs --drafter-params or --c"),
        (["--bandwidth", "1e12"], "--bandwidth describes"),
        (["--c", "0.1", "--drafter-params", "1e9"], "--drafter-params describes"),
        (["--c", "-1"], "--c must be a comma list of numbers from 0 to 1000"),
        (["--alphas", "0.5,2"], "--alphas must be a comma list of numbers from 0 to 1"),
        (["--target-params", "0"], "--target-params must be above 0"),
        (["--gammas", "0"], "--gammas must be a comma list of whole numbers from 1 to 64"),
    ],
)
def test_what_does_not_go_together_is_told(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plan", *words]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--c", "0.1"], "--c belongs to --plan: give that too"),
        (["--plan", "--c", "0.1", "--speed"], "--plan is a table by itself: leave --for and --speed out"),
    ],
)
def test_flags_of_a_plan_belong_to_it(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert capsys.readouterr().err == f"error: {why}\n"


# -- with models ------------------------------------------------------------------------------------


def test_a_pair_is_measured(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    model, ngram = planned(capsys, *pair.flags(), "--methods", "spec,ngram", "--gammas", "1,4", "--quiet")
    assert (model["drafter"], ngram["drafter"]) == ("spec", "ngram")
    assert model["c"] > ngram["c"] > 0
    assert model["v"]["1"] == 1.0
    assert model["v"] == ngram["v"]
    assert model["t_verify"] > 0
    assert len(model["expected_speedup"]) == 2
