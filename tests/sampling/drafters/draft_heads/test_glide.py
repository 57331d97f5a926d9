"""The session of a GLIDE drafter: what it keeps, what it computes anew, and that it reads without copying."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.draft_heads.glide import GlideLM, GlideSession
from sampling.drafters.draft_model import ModelDrafter
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Rows, Sampler
from tests.support.runs import decode, steps
from tests.support.students import close, fed, make_student, make_target, spread_logits, text
from tests.support.toys import TableLM
from utils.errors import UserError
from utils.logits_processors import make_processor

NOTHING = Draft.empty(1)
SAMPLER = KeyedSampler(make_processor(0.9), seed=3)


class Watched(ModelDrafter):
    """Looks at each first pass of a round: its logits against the whole sequence, and how many tokens it fed."""

    def __init__(self, student: Any, target: Any) -> None:
        lm = GlideLM(student, 3)
        super().__init__(lm)
        self.student, self.target, self.widths, self.rounds = student, target, [], []
        run = lm.network.run  # type: ignore[attr-defined]

        def counting(x: Tensor, *rest: Any) -> Tensor:
            self.widths.append(x.shape[1])
            return run(x, *rest)

        lm.network.run = counting  # type: ignore[attr-defined]

    def propose(self, rows: Rows, budget: Budget, sampler: Sampler) -> Draft:
        ids = rows[0]
        held = fed(self.target, [ids], [len(ids)])
        kv = [held.kv(layer)[:2] for layer in self.student.target_layers(3)]
        whole = self.student.states(torch.tensor([ids]), kv=kv, lag=0)[0]
        got = self.sessions[0].fork().score(rows, NOTHING)[0, 0]
        close(got, spread_logits(self.student, whole)[0, -1])
        self.widths.clear()
        draft = super().propose(rows, budget, sampler)
        self.rounds.append(list(self.widths))
        return draft


@pytest.mark.parametrize("layers", [1, 2])
def test_every_round_starts_from_fully_informed_states(layers: int) -> None:
    """Several layers feed accepted drafts again, and once only; one layer never does."""
    target = make_target(8, seed=10)
    lm, prompt = CausalLM(target), text(1, 12, 8)
    student = make_student("glide", target, num_hidden_layers=layers, seed=2)
    drafter = Watched(student, target)
    run = steps(decode(lm, [prompt], drafter, SAMPLER, length=60, gamma=3))[1:]
    deep = [len(step.path) for step in run if len(step.drafted) == 3]
    assert {0, 1, 3} <= set(deep), "the run met too few kinds of rounds"
    before: int | None = None
    for step, widths in zip(run, drafter.rounds, strict=False):
        if before is not None:
            kept = before - 1 if layers == 1 and before == 3 else before  # the last draft of all was never fed
            again = 1 + (kept if layers > 1 else before - kept)
            assert widths == [again, 1, 1][: len(widths)]
        before = len(step.path) if len(step.drafted) == 3 else None


@pytest.mark.parametrize("layers", [1, 2])
def test_a_reviewer_keeps_what_it_accepted(layers: int) -> None:
    """score, keep and score again give the logits of a session that never saw the refused draft."""
    target = make_target()
    student = make_student("glide", target, num_hidden_layers=layers)
    ids, lm = text(3, 12), GlideLM(student, 3)
    held = fed(target, [ids], [11])
    session = lm.open([ids], target=held)
    session.score([ids], Draft(torch.tensor([[5, 6, 7]])))
    session.commit(torch.tensor([[0, 1, -1]]))
    assert session.held() == [14]
    row = [*ids, 5, 6, 9]
    found = session.score([row], Draft(torch.tensor([[1, 2]])))
    close(found, lm.open([row], target=held).score([row], Draft(torch.tensor([[1, 2]]))))


def test_states_follow_a_target_that_goes_back_and_on() -> None:
    """Another text in the target, as many tokens as before: nothing of the old one is left in the answers."""
    target = make_target()
    student = make_student("glide", target, num_hidden_layers=2)
    lm = GlideLM(student, 3)
    start, held = text(4, 10), CausalLM(target).open([text(4, 10)])
    session = lm.open([start], target=held)
    for row in (start + text(5, 6), start + text(6, 6), start[:4] + text(7, 12), start + text(5, 3)):
        held.score([row[:-1]], NOTHING)
        for more in ([], [3], [3, 4]):
            fresh = lm.open([row], target=fed(target, [row], [len(row) - 1]))
            fresh.score([row], NOTHING)
            close(session.score([row + more], NOTHING), fresh.score([row + more], NOTHING))


def test_a_session_beside_another_target_is_not_taken_over() -> None:
    target, other = make_target(), make_target(seed=1)
    lm, ids = GlideLM(make_student("glide", target), 3), text(8, 6)
    session = lm.open([ids], target=fed(target, [ids], [5]))
    session.score([ids], NOTHING)
    assert isinstance(session, GlideSession)
    fresh = lm.open([ids], previous=session, target=fed(other, [ids], [5]))
    assert fresh is not session
    assert lm.open([ids, ids], previous=session, target=fed(target, [ids, ids], [5, 5])) is not session
    again = CausalLM(session.target.network).open([ids])  # the same target in another session
    again.score([ids[:-1]], NOTHING)
    assert lm.open([ids], previous=session, target=again) is session
    assert session.target is again
    assert session.rollback([ids]) == [6]


def test_a_target_without_a_cache_is_refused_by_name() -> None:
    lm = GlideLM(make_student("glide", make_target()), 3, name="glide")
    for target, name in ((None, "none"), (TableLM(8).open([[1]]), "ToySession")):
        with pytest.raises(UserError, match=name) as error:
            lm.open([[1]], target=target)
        assert "\n" not in str(error.value)


def test_rows_of_a_session_can_be_chosen() -> None:
    target = make_target()
    student = make_student("glide", target, num_hidden_layers=2)
    rows = [text(9, 9), text(10, 5), text(11, 12)]
    held = fed(target, rows, [8, 4, 11])
    session = GlideLM(student, 3).open(rows, target=held)
    session.score(rows, Draft(torch.tensor([[1], [2], [3]])))
    order = torch.tensor([2, 0])
    held.select(order)
    session.select(order)
    rows = [[*rows[2], 3, 7], [*rows[0], 6]]
    held.score([row[:-1] for row in rows], Draft.empty(2))
    fresh = GlideLM(student, 3).open(rows, target=fed(target, rows, [13, 9]))
    close(session.score(rows, Draft.empty(2)), fresh.score(rows, Draft.empty(2)))
