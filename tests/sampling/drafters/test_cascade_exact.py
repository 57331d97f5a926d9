"""Cascades and chains emit exactly the target's distribution, for every lenience: by every branch, and by counting.

Passing the reviewer's own law up, or the right one a position late, is seen by both.
"""

import pytest

from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.cascades import LENIENCES, MAKERS, drafter, shifted, unmended, with_review
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import crossed, enumeration_error, sample_counts, sampler, tiers
from tests.support.toys import TableLM

CAUGHT, FAIL_BELOW = 1e-3, 1e-6
LENIENT = [name for name in MAKERS if not name.startswith("chain of m") and name != "chain"]
NARROW = NaiveLaw(top_k=2)  # two of three tokens: fewer forks


def error(name: str, lenience: float, drafts: str = "law", law: NaiveLaw | None = None, length: int = 4) -> float:
    options = {
        "prompt": PROMPT,
        "length": length,
        "gamma": 64,
        "drafts": drafts,
        "law": law or NaiveLaw(),
        "together": 128,
    }
    return enumeration_error(sure_start(3, 1), lambda: drafter(name, lenience, 3), **options)


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize(("name", "lenience"), crossed(LENIENT, LENIENCES))
def test_every_lenience_leaves_the_law_as_it_is(name: str, lenience: float, drafts: str) -> None:
    assert error(name, lenience, drafts, NARROW if name.count("<") > 1 or "of" in name else None) < EXACT


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize("name", ["chain", "chain of models"])
def test_chains_leave_the_law_as_it_is(name: str, drafts: str) -> None:
    assert error(name, 1.0, drafts) < EXACT


@pytest.mark.parametrize("law", [NaiveLaw(temperature=0.5), NaiveLaw(top_p=0.7), NaiveLaw(temperature=0)])
@pytest.mark.parametrize("name", ["model < points", "model < model"])
def test_processors_shape_every_level_alike(name: str, law: NaiveLaw) -> None:
    assert error(name, 2.0, law=law) < EXACT


@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_a_stop_inside_a_cascades_draft_truncates_rightly(lenience: float) -> None:
    options = {"prompt": PROMPT, "length": 4, "gamma": 64, "stop": {1}}
    assert enumeration_error(sure_start(3, 5), lambda: drafter("model < points", lenience, 3), **options) < EXACT


@pytest.mark.parametrize("name", ["model < points", "model < model"])
def test_passing_the_reviewers_own_law_up_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(name, 2.0) < EXACT
    with_review(unmended, monkeypatch.setattr)
    assert error(name, 2.0) > CAUGHT
    assert error(name, 1.0) < EXACT  # without lenience the two are the same


def test_laws_one_position_late_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_review(shifted, monkeypatch.setattr)
    assert error("model < points", 1.0) > CAUGHT


# -- counting -------------------------------------------------------------------------------------

V = 8
START = [3, 1, 3, 1, 3]
SAMPLERS = {
    "rejection": ({}, NaiveLaw()),
    "rejection, shaped": ({}, NaiveLaw(temperature=0.7, top_p=0.9)),
    "gumbel": ({"coupling": "gumbel"}, NaiveLaw()),
    "greedy drafts": ({"draft_sampling": "greedy"}, NaiveLaw(temperature=0.8)),
}


def counted(name: str, lenience: float, case: str, samples: int) -> float:
    options, law = SAMPLERS[case]
    target = TableLM(V, seed=21, sharpness=1.2)
    found = sample_counts(
        target,
        lambda: drafter(name, lenience, V),
        lambda seed: sampler(law.temperature, 5000 + seed, law.top_p, law.top_k, law.min_p, **options),
        prompt=START,
        samples=samples,
        batch=2_500,
        length=4,
        gamma=64,
    )
    return chi_square_p(found, exact_law(target, START, law, 3))


@pytest.mark.parametrize("samples", tiers(2_500, 20_000))
@pytest.mark.parametrize("lenience", [pytest.param(1.0, marks=pytest.mark.exhaustive), 2.0])
@pytest.mark.parametrize("name", LENIENT)
def test_sampled_tokens_have_the_targets_law(name: str, lenience: float, samples: int) -> None:
    assert counted(name, lenience, "rejection", samples) > FAIL_BELOW


@pytest.mark.parametrize("samples", tiers(2_500, 20_000))
@pytest.mark.parametrize(
    ("name", "case"),
    crossed(
        ["model < points", "model < model < points", "chain", "chain of models"],
        ["rejection, shaped", "gumbel", "greedy drafts"],
    ),
)
def test_other_ways_of_sampling_too(name: str, case: str, samples: int) -> None:
    assert counted(name, 3.0, case, samples) > FAIL_BELOW


def test_the_count_sees_the_reviewers_own_law(monkeypatch: pytest.MonkeyPatch) -> None:
    with_review(unmended, monkeypatch.setattr)
    assert counted("model < points", 3.0, "rejection", 2_500) < FAIL_BELOW
