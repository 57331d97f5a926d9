"""The session of a feature drafter: one pass for what was committed, own states only where no target's are.

Also what drafters ask of the target's session: states, kept through forks and next turns.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support.runs import decode, sampler, steps
from tests.support.students import (
    STATES,
    close,
    fed,
    make_drafter,
    make_student,
    make_target,
    spread_logits,
    text,
    watched,
)

NOTHING = Draft.empty(1)


@pytest.mark.parametrize(("layers", "reads"), [(1, ()), (2, ()), (1, STATES)])
def test_every_round_reads_the_new_tokens_with_their_true_states_in_one_pass(
    layers: int, reads: tuple[int, ...]
) -> None:
    target = make_target(8, seed=10)
    lm, prompt = CausalLM(target), text(1, 12, 8)
    student = make_student("feature", target, num_hidden_layers=layers, seed=2, reads=reads)

    def whole(ids: list[int]) -> Tensor:
        states = fed(target, [ids], [len(ids)], hidden=reads or True).hidden()
        return spread_logits(student, student.states(torch.tensor([ids]), hidden=states)[0])[0, -1]

    drafter = make_drafter(student)
    rounds = watched(drafter, whole)
    run = steps(decode(lm, [prompt], drafter, sampler(0.9, seed=3), length=160, gamma=3))[1:]
    assert {0, 1, 2, 3} <= {len(step.path) for step in run if len(step.drafted) == 3}
    before: int | None = None
    for step, widths in zip(run, rounds, strict=False):
        if before is not None:
            assert widths == [before + 1, 1, 1][: len(widths)]
        before = len(step.path)


@pytest.mark.parametrize(("kind", "reads"), [("glide", ()), ("feature", ()), ("feature", STATES), ("eagle", (0, 1, 2))])
def test_states_follow_a_target_that_goes_back_and_on(kind: str, reads: tuple[int, ...]) -> None:
    """Another text in the target, as many tokens as before: nothing of the old one is left in the answers."""
    target = make_target()
    student = make_student(kind, target, num_hidden_layers=2, reads=reads)
    drafter, start = make_drafter(student), text(4, 10)
    held = CausalLM(target).open([start], hidden=STATES)
    drafter.start([start], held, held)
    for row in (start + text(5, 6), start + text(6, 6), start[:4] + text(7, 12), start + text(5, 3)):
        held.score([row[:-1]], NOTHING)
        fresh = make_drafter(student)
        theirs = fed(target, [row], [len(row) - 1], hidden=STATES)
        fresh.start([row], theirs, theirs)
        for more in ([], [3], [3, 4]):
            found, wanted = (one.sessions[0].score([row + more], NOTHING) for one in (drafter, fresh))
            close(found, wanted)


def test_a_failed_pass_leaves_a_session_that_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    ids, drafter = text(7, 9), FeatureDrafter(make_student("feature", target))
    held = fed(target, [ids], [8], hidden=True)
    drafter.start([ids], held, held)
    session: Any = drafter.sessions[0]
    wanted = session.score([ids], NOTHING)
    with monkeypatch.context() as broken:

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        broken.setattr(session.network, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            session.score([[*ids, 4]], NOTHING)
    assert session.held() == [0]
    close(session.score([ids], NOTHING), wanted)
