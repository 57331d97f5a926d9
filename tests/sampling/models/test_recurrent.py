"""Models with recurrent layers: their text with drafts is that of `generate`, their states go back wherever rows do."""

import random
from functools import cache
from typing import Any

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM, CausalSession
from sampling.models.recurrent import KEPT, recurrent_layers
from sampling.types import Draft, FixedPace, Limits
from tests.support.architectures import PROMPTS, architecture, differing
from tests.support.runs import crossed, emitted, greedy
from tests.support.tiny import noisy_copy
from utils.errors import UserError

WAYS = {
    "mamba2": "a state alone, scanned in chunks",
    "lfm2": "short convolutions beside attention",
    "jamba": "a scan that takes no state for several tokens",
    "qwen3_next": "the gated delta rule beside attention",
    "zamba2": "attention and a state in one layer",
}


@cache
def model_of(name: str) -> Any:
    return architecture(name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("qwen3_next", "zamba2") else name for name in WAYS]
)
def test_the_text_with_drafts_is_that_of_generate(name: str) -> None:
    assert recurrent_layers(model_of(name).config)
    assert differing(model_of(name), model_of(name), ("alone", "ngram", "model")) == []


def uncached(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def check(session: CausalSession, model: Any, row: list[int], draft: list[int]) -> None:
    """The logits behind the row and behind each drafted token are those of a pass without a cache."""
    logits = session.score([row], Draft.of([draft]))[0]
    right = uncached(model, row + draft)[len(row) - 1 :]
    assert (logits - right).abs().max() < 1e-3 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize(("name", "seed"), crossed(WAYS, range(2)))
def test_wherever_the_rows_go_back_the_logits_are_right(name: str, seed: int) -> None:
    draw = random.Random(seed)
    model, row = model_of(name), [draw.randrange(20, 60) for _ in range(30)]
    session = CausalLM(model).open([row])
    for _ in range(8):
        draft = [draw.randrange(20, 60) for _ in range(draw.choice([0, 1, 4, 7]))]
        check(session, model, row, draft)
        accepted = draw.randint(0, len(draft))
        session.commit([list(range(accepted))])
        row = [*row, *draft[:accepted], draw.randrange(20, 60)]
        if draw.random() < 0.3:  # as /undo and /regen do
            row = row[: draw.randint(5, len(row))]
        if draw.random() < 0.3:
            check(session.fork(), model, [*row, 33], [34, 35])


@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_a_round_reads_again_only_what_was_accepted_and_keeps_no_more_states_than_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CausalLM(model_of(name))
    session, fed = lm.open([PROMPTS[1]]), list[int]()
    run = type(session.network).forward

    def counting(self: Any, ids: Any, *rest: Any) -> Any:
        if self is session.network:
            fed.append(ids.shape[1])
        return run(self, ids, *rest)

    monkeypatch.setattr(type(session.network), "forward", counting)
    drafter = ModelDrafter(CausalLM(noisy_copy(model_of(name), 0.03), "drafter"))
    events = list(generate(lm, [PROMPTS[1]], drafter, greedy(), Limits(40), pace=FixedPace(4), session=session))
    steps = [event for event in events if hasattr(event, "drafted")]
    again = 0
    for step, count in zip(steps[1:], fed[-len(steps) + 1 :], strict=True):
        assert count == again + 1 + len(step.drafted)
        again = len(step.path) if len(step.path) < len(step.drafted) else 0
    assert any(0 < len(step.path) < len(step.drafted) for step in steps), "nothing was refused in part"
    row = [*PROMPTS[1], *emitted(events)[0]]
    kept = {session.fork().rollback([row[:end]])[0] for end in range(len(PROMPTS[1]) + 2, len(row))}
    assert len(kept) <= 4, "more states are kept than a round drafts tokens"


def test_time_steps_keep_to_their_limits_in_passes_over_a_token_too() -> None:
    """As transformers' scan over several tokens has it, its step over a single token does not."""
    model, row = model_of("nemotron_h"), [20 + at * at % 61 for at in range(40)]
    right, session = uncached(model, row), CausalLM(model).open([row[:8]])
    for end in range(8, len(row)):
        logits = session.score([row[:end]], Draft.empty(1))[0, 0]
        assert (logits - right[end - 1]).abs().max() < 1e-4 * right.abs().max()


def test_the_next_turn_reads_what_is_new() -> None:
    lm = CausalLM(model_of("lfm2"))
    session = lm.open([PROMPTS[1]])
    row = list(PROMPTS[1])
    row += emitted(generate(lm, [row], NgramDrafter(lm.vocab_size), greedy(), Limits(30), session=session))[0]
    known = lm.open([[*row, 50, 51]], previous=session).rollback([[*row, 50, 51]])
    assert known[0] >= len(row) - 6, "at most the last round is read again"
    back = lm.open([PROMPTS[1]], previous=session).rollback([PROMPTS[1]])
    assert back == [len(PROMPTS[1]) - 1], "the states at the end of a prompt are kept"


def test_no_more_states_are_kept_than_a_bound() -> None:
    lm = CausalLM(model_of("mamba2"))
    row = [20 + at % 40 for at in range(9 * 256)]
    session = lm.open([row])
    for end in range(256, len(row), 256):
        session.score([row[:end]], Draft.empty(1))
    kept = [session.fork().rollback([row[:end]])[0] for end in range(1, len(row) - 256, 64)]
    assert 1 < len(set(kept)) <= KEPT + 1


def test_several_rows_and_trees_are_refused_by_name() -> None:
    lm = CausalLM(model_of("mamba2"))
    assert not lm.takes_trees
    with pytest.raises(UserError, match=r"Mamba2ForCausalLM decodes a single row at a time"):
        lm.open([[3, 4], [5, 6]]).score([[3, 4], [5, 6]], Draft.empty(2))
