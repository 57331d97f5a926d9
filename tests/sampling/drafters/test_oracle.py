"""The simulated drafter: its text is plain decoding's, its acceptance and its charge are the chosen ones."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.settings.table import Settings
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.oracle import Oracle
from sampling.drafters.registry import oracle_of
from sampling.events import Event, Step
from sampling.types import LM, Rows, Session
from tests.support.refusals import refused
from tests.support.runs import decode, emitted, measure, sampler, steps
from tests.support.toys import TableLM
from utils.errors import UsageError

PROMPT = [[1, 2, 3]]


def oracle(lm: LM, alpha: float, cost: float, heat: float, pass_s: float = 0.0) -> Oracle:
    """An oracle whose reference passes take `pass_s` each, where that is given."""
    drafter = Oracle(alpha, cost)

    def plain(rows: Rows, session: Session) -> Iterator[Event]:
        for event in decode(lm, rows, NoDrafter(), sampler(heat), length=400, session=session):
            yield replace(event, verify_s=pass_s) if pass_s and isinstance(event, Step) else event

    drafter.plain = plain
    return drafter


@pytest.mark.parametrize("heat", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_the_text_is_plain_decodings_and_drafts_are_right_with_the_chosen_chance(alpha: float, heat: float) -> None:
    lm = TableLM(50, sharpness=0.3)
    plain = emitted(decode(lm, PROMPT, None, sampler(heat), length=400))
    events = decode(lm, PROMPT, oracle(lm, alpha, 0.0, heat), sampler(heat), length=400, gamma=3)
    assert emitted(events) == plain
    stats = measure(events)
    examined = sum(stats.examined_at)
    assert abs(stats.draft_n_accepted / examined - alpha) <= 3 * (alpha * (1 - alpha) / examined) ** 0.5
    assert examined > 150


def test_a_round_is_charged_its_drafted_tokens_and_none_of_the_reference_passes() -> None:
    lm = TableLM(50)
    events = decode(lm, PROMPT, oracle(lm, 0.7, 0.25, 0.0, pass_s=8.0), sampler(), length=60, gamma=3)
    for step in steps(events):
        assert step.draft_s == pytest.approx(len(step.drafted) * 0.25 * 8.0, abs=0.5)
    assert sum(step.draft_s for step in steps(events)) > 100


@pytest.mark.parametrize(
    ("typed", "shown"), [("oracle", "oracle"), ("oracle:0.80", "oracle:.8"), ("oracle:1:c=0.10", "oracle:1:c=.1")]
)
def test_a_lane_may_name_acceptance_and_cost(typed: str, shown: str) -> None:
    assert Settings(compare=f"ar,{typed}").compare == ("ar", shown)
    assert oracle_of(shown) == oracle_of(typed)


@pytest.mark.parametrize("typed", ["oracle:1.5", "oracle:-1", "oracle:.8:c=11", "oracle:.8:.1", "oracle:", "oracle:a"])
def test_an_oracle_that_cannot_be_is_refused_with_what_may_be(typed: str) -> None:
    refused(
        Settings,
        compare=f"ar,{typed}",
        match=r"oracle:ALPHA:c=C, ALPHA from 0 to 1, C from 0 to 10, got 'ar,oracle",
        kind=UsageError,
    )


def test_the_same_oracle_twice_is_one_lane_too_many() -> None:
    refused(Settings, compare="oracle:.8,oracle:0.8", match="each once", kind=UsageError)
