"""Scripted models: every ending, every limit, interrupts, and each forward call counted.

`chain_lm` says a fixed answer whatever was fed, so what each round must do is known beforehand.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Finished, Prefill, Step
from sampling.loop import PIECE, generate
from sampling.types import Budget, Draft, Drafter, Limits, Rule, Sampler, Traits
from tests.support.reference import greedy_answer
from tests.support.refusals import refused
from tests.support.runs import after, answers, decode, emitted, greedy, reasons, sampler, steps
from tests.support.toys import PointDrafter, ScriptedLM, TableLM, ToyLM, chain_lm

V = 10
PROMPT = [8, 9, 8]
SCRIPT = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7]


def says(script: list[int] = SCRIPT, prompt: list[int] = PROMPT, name: str = "target") -> ToyLM:
    return chain_lm(V, prompt, script, name)


def empty() -> Drafter:
    return PointDrafter(V, lambda row: None)


def wrong() -> Drafter:
    return PointDrafter(V, lambda row: 0)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "perfect": lambda: ModelDrafter(says(name="drafter")),
    "empty": empty,
    "always wrong": wrong,
    "ngram": lambda: NgramDrafter(V),
    "right every other time": lambda: PointDrafter(V, lambda row: SCRIPT[len(row) - 3] if len(row) % 2 else 0),
}


# -- stop ids and limits --------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stop_at_every_index_ends_the_row_there(name: str, gamma: int) -> None:
    """Index by index: in the opening round, inside the accepted run, as the target's own token."""
    for index in range(len(SCRIPT)):
        script = [*SCRIPT[:index], 9, *SCRIPT[index + 1 :]]
        drafter = ModelDrafter(says(script)) if name == "perfect" else DRAFTERS[name]()
        events = decode(says(script), [PROMPT], drafter, greedy(), length=len(SCRIPT), gamma=gamma, stop={9})
        assert emitted(events) == [script[: index + 1]]
        assert reasons(events) == {0: "eos"}
        assert isinstance(events[-1], Finished)


def test_a_stop_inside_the_accepted_run_has_no_token_of_the_targets() -> None:
    script = [1, 2, 9, 4, 5, 6]
    last = steps(decode(says(script), [PROMPT], ModelDrafter(says(script)), greedy(), length=6, gamma=4, stop={9}))[-1]
    assert last.drafted == (2, 9, 4, 5)
    assert (last.path, last.token, last.emitted) == ((0, 1), None, (2, 9))
    assert (last.rejected, last.discarded) == ((), (2, 3))


def test_a_stop_that_was_drafted_wrongly_does_not_stop() -> None:
    events = decode(says(), [PROMPT], PointDrafter(V, lambda row: 9), greedy(), length=10, gamma=3, stop={9})
    assert emitted(events) == [SCRIPT[:10]]
    assert reasons(events) == {0: "length"}


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_limits_from_one_to_gamma_plus_two(name: str, gamma: int) -> None:
    for length in range(1, gamma + 3):
        events = decode(says(), [PROMPT], DRAFTERS[name](), greedy(), length=length, gamma=gamma)
        assert emitted(events) == [SCRIPT[:length]]
        assert reasons(events) == {0: "length"}
        for done, step in zip(running(events), steps(events), strict=True):
            assert len(step.drafted) <= max(0, min(gamma, length - done - 1))  # at most remaining − 1


def running(events: list[Any]) -> list[int]:
    """How many tokens were emitted before each step of row 0."""
    sizes = [len(step.emitted) for step in steps(events)]
    return [sum(sizes[:index]) for index in range(len(sizes))]


class Eager(Drafter):
    """Drafts the answer right to its end, whatever it is asked for."""

    traits = Traits(("eager",), Rule.POINT)

    def propose(self, rows: list[list[int]], budget: Budget, sampler: Sampler) -> Draft:
        return Draft.of([SCRIPT[len(rows[0]) - len(PROMPT) :]])


@pytest.mark.parametrize("length", range(1, 12))
def test_a_drafter_that_overdoes_it_gets_no_more_room(length: int) -> None:
    events = decode(says(), [PROMPT], Eager(), greedy(), length=length, gamma=2)
    assert emitted(events) == [SCRIPT[:length]]
    assert reasons(events) == {0: "length"}


@pytest.mark.parametrize("room", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_context_ends_a_row_as_length_and_is_never_overrun(name: str, room: int) -> None:
    """The toy itself raises if a pass goes beyond its context."""
    context = len(PROMPT) + room
    for lm, limit in ((chain_lm(V, PROMPT, SCRIPT, context=context), 1 << 30), (says(), context)):
        events = list(generate(lm, [PROMPT], DRAFTERS[name](), greedy(), Limits(100, context=limit)))
        assert emitted(events) == [SCRIPT[:room]]
        assert reasons(events) == {0: "length"}


@pytest.mark.parametrize("context", range(2, 10))
def test_a_drafter_with_less_context_falls_silent_and_the_answer_goes_on(context: int) -> None:
    drafter = ModelDrafter(chain_lm(V, PROMPT, SCRIPT, context=context))
    assert answers(says(), [PROMPT], drafter, greedy(), length=12, gamma=4) == [SCRIPT[:12]]


def test_prompts_that_cannot_be_answered_are_one_line_errors() -> None:
    refused(decode, chain_lm(V, PROMPT, SCRIPT, context=3), [PROMPT], None, greedy(), length=4, match="context")
    refused(decode, says(), [PROMPT], None, greedy(), length=0, match="max_new_tokens")


# -- calls counted --------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 6, 11, 14])
def test_full_acceptance_takes_the_fewest_passes(length: int, gamma: int) -> None:
    """Prefill of all but the last prompt token, the opening round, then gamma + 1 tokens a pass."""
    target, drafter = says(), says(name="drafter")
    events = decode(target, [PROMPT], ModelDrafter(drafter), greedy(), length=length, gamma=gamma)
    rounds = math.ceil((length - 1) / (gamma + 1))
    assert emitted(events) == [SCRIPT[:length]]
    assert target.passes == 1 + 1 + rounds
    assert len(steps(events)) == 1 + rounds
    drafted = [len(step.drafted) for step in steps(events)]
    assert drafter.passes == 1 + sum(drafted)  # its own prefill, then one pass a drafted token
    assert sum(len(step.path) for step in steps(events)) == sum(drafted)
    assert sum(call.passes for step in steps(events) for call in step.calls if call.model == "target") == 1 + rounds


def test_plain_decoding_takes_a_pass_a_token() -> None:
    target = says()
    decode(target, [PROMPT], None, greedy(), length=9)
    assert (target.passes, target.widths) == (1 + 9, [0] * 10)


@pytest.mark.parametrize("name", ["perfect", "always wrong", "right every other time", "ngram", "empty"])
def test_no_token_is_fed_twice(name: str) -> None:
    """Target: prompt, then each draft node once and each correction or bonus once."""
    target = says()
    events = decode(target, [PROMPT], DRAFTERS[name](), greedy(), length=12, gamma=4)
    drafted = sum(len(step.drafted) for step in steps(events))
    own = sum(step.token is not None for step in steps(events)) - 1  # the last own token is never fed
    assert target.fed == len(PROMPT) + drafted + own


def test_after_full_acceptance_the_drafter_is_one_behind_and_catches_up_in_one_pass() -> None:
    drafter = says(name="drafter")
    events = decode(says(), [PROMPT], ModelDrafter(drafter), greedy(), length=11, gamma=4)
    # 3 prompt + 10 answer tokens are read once each; the last bonus never.
    assert [len(step.drafted) for step in steps(events)] == [0, 4, 4]
    assert drafter.passes == 1 + 8
    assert drafter.fed == len(PROMPT) + 9  # all but the last draft and the last bonus


def test_after_a_refusal_the_drafter_feeds_only_the_correction() -> None:
    off = chain_lm(V, PROMPT, [1, 2, 0, 4, 5, 6, 7], name="drafter")  # wrong at the third token
    events = decode(says(), [PROMPT], ModelDrafter(off), greedy(), length=7, gamma=3)
    assert [step.emitted for step in steps(events)] == [(1,), (2, 3), (4, 5, 6, 7)]
    assert [step.rejected for step in steps(events)] == [(), (1,), ()]
    assert [step.discarded for step in steps(events)] == [(), (2,), ()]
    assert off.passes == 1 + 6
    assert off.fed == (2 + 1) + 3 + 3  # prompt; 1 2 0; then 3 (the correction) 4 5


def test_empty_drafts_cost_nothing_and_say_so() -> None:
    target = says()
    events = decode(target, [PROMPT], empty(), greedy(), length=6, gamma=4)
    assert target.passes == 1 + 6
    assert all(step.drafted == () and step.path == () for step in steps(events))


@pytest.mark.parametrize("size", [1, 2, PIECE, PIECE + 1, PIECE + 2, 2 * PIECE + 7])
def test_prompts_are_read_in_pieces(size: int) -> None:
    prompt = [8] * size
    target = says(prompt=prompt)
    events = decode(target, [prompt], None, greedy(), length=2)
    pieces = [event for event in events if isinstance(event, Prefill)]
    assert [piece.done for piece in pieces] == [min(PIECE * (i + 1), size - 1) for i in range(len(pieces))]
    assert len(pieces) == math.ceil((size - 1) / PIECE)
    assert all(piece.total == size - 1 for piece in pieces)
    assert emitted(events) == [SCRIPT[:2]]
    assert target.fed == size + 1


# -- rows -----------------------------------------------------------------------------------------

ROWS = [[1, 2, 3], [4], [5, 6, 5, 6, 5], [7, 7]]


@pytest.mark.parametrize("mode", [("rejection", "law"), ("rejection", "greedy"), ("gumbel", "law")])
@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("kind", ["none", "model", "ngram", "wrong"])
def test_ragged_rows_end_at_their_own_time(kind: str, gamma: int, mode: tuple[str, str]) -> None:
    """Greedy over a table toy: every row as if alone, though rows drop out at different rounds."""
    lm = TableLM(V, seed=41)
    makers: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "model": lambda: ModelDrafter(TableLM(V, seed=42)),
        "ngram": lambda: NgramDrafter(V),
        "wrong": wrong,
    }
    drawing = sampler(0.0, coupling=mode[0], draft_sampling=mode[1])  # type: ignore[arg-type]
    ended = set()
    for stop in ({0}, {1, 2}, {3, 9}, {6}):
        events = decode(lm, ROWS, makers[kind](), drawing, length=15, gamma=gamma, stop=stop)
        assert emitted(events, 4) == [greedy_answer(lm, row, 15, stop) for row in ROWS]
        last = {event.row: place for place, event in enumerate(events) if isinstance(event, Step)}
        finished = {event.row: place for place, event in enumerate(events) if isinstance(event, Finished)}
        assert sorted(finished) == [0, 1, 2, 3]
        assert all(finished[row] > last[row] for row in range(4))  # nothing after a row's Finished
        ended |= set(reasons(events).values())
    assert ended == {"eos", "length"}


def test_rows_of_one_batch_may_meet_the_context_at_different_rounds() -> None:
    lm = TableLM(V, seed=43, context=9)
    assert emitted(decode(lm, ROWS, NgramDrafter(V), greedy(), length=20, gamma=4), 4) == [
        greedy_answer(lm, row, 9 - len(row)) for row in ROWS
    ]


# -- interrupts and closing -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "perfect", "ngram", "right every other time"])
@pytest.mark.parametrize("looks", range(8))
def test_an_interrupt_between_rounds_keeps_what_there_is(name: str, looks: int) -> None:
    target, drafter = says(), DRAFTERS[name]()
    session = target.open([PROMPT])
    options = {"length": 12, "gamma": 2, "session": session}
    events = decode(target, [PROMPT], drafter, greedy(), interrupt=after(looks).__next__, **options)
    partial = emitted(events)[0]
    assert partial == SCRIPT[: len(partial)]
    assert len(partial) < 12 or looks > 3
    assert reasons(events) == {0: "interrupted" if len(partial) < 12 else "length"}
    held = session.cached[0]
    assert held == (PROMPT + SCRIPT)[: len(held)]  # nothing but committed tokens
    assert len(held) <= len(PROMPT) + max(len(partial) - 1, 0)
    # The same session and drafter go on, here with a shorter answer than the one broken off.
    assert answers(target, [PROMPT], drafter, greedy(), **options) == [SCRIPT[:12]]


def test_an_interrupt_while_the_prompt_is_read() -> None:
    prompt = [8] * (5 * PIECE)
    target = says(prompt=prompt)
    session = target.open([prompt])
    events = decode(target, [prompt], None, greedy(), length=3, session=session, interrupt=after(2).__next__)
    assert reasons(events) == {0: "interrupted"}
    assert emitted(events) == [[]]
    assert session.cached == [[8] * (2 * PIECE)]
    fed = target.fed
    assert answers(target, [prompt], None, greedy(), length=3, session=session) == [SCRIPT[:3]]
    assert target.fed - fed == 3 * PIECE + 2  # what was read is not read again


# -- events ---------------------------------------------------------------------------------------


def test_steps_tell_what_happened() -> None:
    """Two drafts, the second refused: figures of the examined ones, and the gap where it ended."""
    prompt = (8,)
    script = {
        prompt: [0.0, 9.0, 0.0, 0.0],
        (*prompt, 1): [0.0, 0.0, 3.0, 1.0],
        (*prompt, 1, 2): [4.0, 0.0, 0.0, 1.5],
    }
    wide = {(8 % 4, *key[1:]): row for key, row in script.items()}
    lm = ScriptedLM(4, wide)
    drafter = PointDrafter(4, lambda row: 2 if len(row) == 2 else 3)
    step = steps(decode(lm, [[0]], drafter, greedy(), length=4, gamma=2))[1]
    assert (step.drafted, step.parents, step.path, step.token) == ((2, 3), (-1, 0), (0,), 0)
    laws = [torch.tensor(wide[key]).softmax(dim=-1) for key in ((0, 1), (0, 1, 2))]
    assert step.target_p == pytest.approx((float(laws[0][2]), float(laws[1][3])))
    assert step.draft_p == (1.0, 1.0)
    assert step.top2_gap == pytest.approx(2.5)
    assert step.gamma == 2
    assert step.seconds >= step.verify_s > 0
