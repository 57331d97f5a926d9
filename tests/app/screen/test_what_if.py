"""A token under other settings: the whole distribution lies within the bounds, and often on them."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings as tries, strategies as st

from app.lanes.costs import kept
from app.lanes.lane import PairEngine
from app.screen.inspection import Candidates, Inspection, Refused, SaidToken, Supposed
from app.screen.palette import Look
from app.screen.what_if import RankedToken, drafter_rest_bounds, overlap, shaped, target_rest_bounds
from app.settings.table import Settings
from sampling.events import ENOUGH, INVERSE_TEMPERATURES, Filters, Position, Step, to_json
from sampling.verify.facts import AllFacts
from utils.logits_processors import LogitsProcessor

V = 400
shapes = st.builds(
    Filters,
    st.sampled_from([0.0, 0.02, 0.1, 0.2, 0.25, 0.4, 0.5, 2 / 3, 0.8, 1.0, 1.1, 4 / 3, 1.7, 2.0, 3.0]),
    st.sampled_from([0, 1, 3, 19, 20, 21, 60, V]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)


def position(seed: int, sharp: float) -> tuple[torch.Tensor, list[RankedToken], tuple[float, ...]]:
    """Logits, the 20 likeliest and three unlikely tokens by rank, and the sums over all others."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * sharp
    known, order = AllFacts(logits), logits.argsort(descending=True).tolist()
    ids = [*order[:20], order[40], order[77], order[V - 1]]
    return logits, [RankedToken(token, known.p(token), order.index(token) + 1) for token in ids], known.rest(ids)


def whole(logits: torch.Tensor, shape: Filters) -> torch.Tensor:
    return LogitsProcessor(shape.temperature, shape.top_k, shape.top_p, shape.min_p)(logits.double())


@tries(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 2.0, 5.0]), shapes)
def test_the_whole_distribution_lies_within_the_bounds(seed: int, sharp: float, shape: Filters) -> None:
    logits, named, sums = position(seed, sharp)
    beta = 1 / shape.temperature if shape.temperature else 1.0
    truth, bounds = whole(logits, shape), shaped(named, target_rest_bounds(sums, beta), shape)
    edge = 1e-5  # sums in float32: a token at the very border of a filter may fall otherwise
    for token, (low, high) in bounds.items():
        assert low - edge <= float(truth[token]) <= high + edge
    exact = beta in INVERSE_TEMPERATURES and (not shape.top_k or shape.top_k <= 20) and shape.top_p == 1
    if exact and not shape.min_p:
        assert all(high - low < edge for low, high in bounds.values())


@tries(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 4.0]), st.sampled_from([0.4, 0.5, 0.9, 1.0, 1.5]))
def test_the_chance_of_a_drawn_draft_lies_within_its_bounds(seed: int, sharp: float, temperature: float) -> None:
    (logits, named, sums), (others, drafted, _) = position(seed, sharp), position(seed + 1, sharp)
    mixed = logits + others / 2  # a drafter that knows the target a little
    known, order = AllFacts(mixed), mixed.argsort(descending=True).tolist()
    drafted = [RankedToken(token, known.p(token), at + 1) for at, token in enumerate(order[:20])]
    shape, beta = Filters(temperature, top_p=0.95), 1 / temperature
    p = shaped(named, target_rest_bounds(sums, beta), shape)
    low, high = overlap(p, shaped(drafted, drafter_rest_bounds(drafted, V, beta), shape))
    assert low - 1e-5 <= float(torch.minimum(whole(logits, shape), whole(mixed, shape)).sum()) <= high + 1e-5


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.7, 0.9, 1.2])
def test_bounds_are_narrow_for_a_distribution_of_a_language_model(temperature: float) -> None:
    """Its twenty likeliest tokens hold most of the mass; between the kept temperatures the rest moves little."""
    _, named, sums = position(3, 5.0)
    bounds = shaped(named, target_rest_bounds(sums, 1 / temperature), Filters(temperature))
    assert max(high - low for low, high in bounds.values()) < 0.02


def drawn(seed: int, number: float) -> tuple[torch.Tensor, torch.Tensor, SaidToken]:
    """Logits of target and drafter, and the token said after the drafter's second likeliest one was rejected."""
    logits, named, sums = position(seed, 4.0)
    mixed = logits + torch.randn(V, generator=torch.Generator().manual_seed(seed + 1)) * 2
    order, q = mixed.argsort(descending=True).tolist(), mixed.softmax(0)
    ranks = {token: at for at, token in enumerate(order[:20], start=1)}
    p = {each.token: each for each in named}
    draft, said = order[1], named[0].token if named[0].token != order[1] else named[1].token
    fates = {draft: "rejected", said: "said"}
    choices = tuple(
        Candidates(token, f"<{token}>", *((p[token].p, None, p[token].rank) if token in p else (None, None, None)), 0.0,
               float(q[token]) if token in ranks else None, ranks.get(token), "model", fates.get(token, ""))
        for token in dict.fromkeys([*p, *ranks])
    )  # fmt: skip
    refused = (Refused(draft, f"<{draft}>", 0.1, number),)
    return logits, mixed, SaidToken(said, "", "", 1, "correction", "ratio", choices=choices, refused=refused, rest=sums)


@tries(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 0.99), shapes)
def test_the_fate_that_is_told_is_the_one_of_the_whole_distributions(seed: int, number: float, shape: Filters) -> None:
    logits, mixed, token = drawn(seed, number)
    draft, text = token.refused[0].token, " ".join(Supposed(token, shape, Settings()).lines(Look(200, color=False)))
    p, q = whole(logits, shape), whole(mixed, shape)
    ratio = min(1.0, float(p[draft] / q[draft])) if q[draft] else 1.0
    if shape.temperature == 0:
        assert ("would be accepted" in text) == (int(p.argmax()) == draft)
    elif told := re.search(r"chance (\S+)(?: to (\S+))?, u (\S+): (\w+)", text):
        if q[draft]:
            assert float(told[1]) - 0.006 <= ratio <= float(told[2] or told[1]) + 0.006
        if abs(number - ratio) > 1e-4 and q[draft]:
            assert told[4] in ("open", "accepted" if number < ratio else "rejected")
    if told := re.search(r"drawn here is accepted with chance (\S+?)(?: to (\S+?))?,", text):
        truth = float(torch.minimum(p, q).sum())
        assert float(told[1]) - 0.006 <= truth <= float(told[2] or told[1]) + 0.006


def test_keys_change_the_settings_of_one_token_and_what_is_cut_stays_there() -> None:
    content = Inspection([drawn(3, 0.5)[2]] * 2, settings=Settings(temperature=1))

    def panel() -> str:
        return "\n".join("".join(part.text for part in row) for row in content.panel(Look(100, None, False)))

    before = panel()
    for key in "kk":
        content.keys[key]()
    assert "what if T 1, top-p 1, top-k 2, min-p 0:" in panel()
    assert panel().count(" cut") == len(content.token.choices) - 2 - sum(
        not each.rank for each in content.token.choices
    )
    content.keys["T"]()
    assert "what if T 0.9" in panel()
    content.keys["r"]()
    assert panel() == before
    content.keys["m"]()
    content.keys["right"]()
    assert "what if" not in panel()  # it was another token's
    content.keys["p"]()
    content.keys["P"]()
    assert "top-p 1," in panel()


def test_a_what_if_without_numbers_says_why() -> None:
    token = drawn(3, 0.5)[2]
    assert "--log-top 20" in Supposed(replace(token, rest=()), Filters(1.0), Settings()).lines(Look())[0]
    for fixed, why in [
        ({"repetition_penalty": 1.2}, "penalties"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"typical_p": 0.9}, "penalties"),
        ({"regex": "a+"}, "penalties"),
        ({"verify": "block"}, "every draft in it (--verify block)"),
    ]:
        assert why in Supposed(token, Filters(1.0), Settings().changed(**fixed)).lines(Look())[0]


def test_a_file_with_fewer_alternatives_holds_no_more_than_they_are(engine: PairEngine) -> None:
    settings = Settings(temperature=0.9, max_new_tokens=20, gamma=4)
    runs = [
        [event for event in engine.lane("spec", settings).run([5, 6, 7], alternatives=count) if isinstance(event, Step)]
        for count in (5, ENOUGH)
    ]

    def named(position: Position) -> list[tuple[int, int]]:  # q is computed in passes of another width
        return [(proposal.token, proposal.rank) for proposal in position.drafter]

    for five, twenty in zip(*runs, strict=True):
        trimmed = [(position.target, *named(position)) for position in kept(twenty, 5).positions]  # type: ignore[union-attr]
        assert trimmed == [(position.target, *named(position)) for position in five.positions]
        assert kept(twenty, 0).positions == ()  # type: ignore[union-attr]
        assert {len(position) for position in to_json(five)["positions"]} == {3}
        assert all(len(position.rest) == len(INVERSE_TEMPERATURES) for position in twenty.positions)


@pytest.mark.parametrize("sharp", [0.5, 2.0])
@pytest.mark.parametrize("beta", [0.1, 0.6, 1.2, 3.0, 5.0, 10.0])
def test_a_sum_that_is_not_kept_lies_within_its_bounds(beta: float, sharp: float) -> None:
    logits, named, sums = position(5, sharp)
    others = torch.ones(V, dtype=torch.bool)
    others[[each.token for each in named]] = False
    truth = float((logits.double().log_softmax(0)[others] * beta).logsumexp(0))
    low, high = target_rest_bounds(sums, beta)
    assert low <= truth <= high
    assert math.isclose(target_rest_bounds(sums, 1.0)[0], target_rest_bounds(sums, 1.0)[1])
