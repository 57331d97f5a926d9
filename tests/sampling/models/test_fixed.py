"""Passes of fixed width over a preallocated cache say what the ordinary pass says, replayed as a graph would be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.models.causal import CausalLM
from sampling.models.llama import FixedNetwork
from sampling.models.network import network_of
from sampling.types import Draft
from tests.support.runs import answers, sampler
from tests.support.students import close, make_drafter, make_student, make_target, text
from tests.support.tiny import noisy_copy


class Tape(TorchDispatchMode):
    """Stands for a graph: notes the operations of a call with their tensors and numbers, and runs just these again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self, result: Any) -> Any:
        renewed: dict[int, Any] = {}
        for func, args, kwargs, old in self.calls:
            args, kwargs = _replaced((args, kwargs), renewed)
            renewed |= zip(map(id, tree_leaves(old)), tree_leaves(func(*args, **kwargs)), strict=True)
        return _replaced(result, renewed)


def _replaced(value: Any, renewed: dict[int, Any]) -> Any:
    return tree_map(lambda leaf: renewed.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


class Recorder:
    """What captures in the place of :class:`utils.device_map.Graphs`; counts its recordings and replays."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1
        with Tape() as tape:
            result = function()

        def replay() -> Any:
            self.replayed += 1
            return tape.replay(result)

        return replay


@pytest.fixture(scope="module")
def dense() -> Any:
    return make_target(dtype=torch.float64)


def fixed(model: Any) -> tuple[CausalLM, Recorder]:
    recorder = Recorder()
    return CausalLM(FixedNetwork(network_of(model), recorder)), recorder  # type: ignore[arg-type]


def test_passes_of_every_width_give_the_logits_and_states_of_the_ordinary_pass(dense: Any) -> None:
    row, (lm, recorder) = text(1, 120), fixed(dense)
    sessions = [one.open([row[:3]], hidden=(-1, 1)) for one in (lm, CausalLM(dense))]
    length = 3
    for width in [*range(1, 18), 5, 3, 1, 4]:
        drafted = Draft.of([row[length : length + width - 1]])
        ours, theirs = (session.score([row[:length]], drafted) for session in sessions)
        close(ours, theirs, 1e-9)
        for session in sessions:
            session.commit([list(range(max(0, width - 3)))])  # some drafts are refused
        length += max(0, width - 3) + 1
        length = min(length, 90)
    close(sessions[0].hidden((-1, 1)), sessions[1].hidden((-1, 1)), 1e-9)
    assert recorder.recorded < recorder.replayed


def test_trees_are_inputs_of_a_recorded_pass(dense: Any) -> None:
    row, (lm, recorder) = text(2, 20), fixed(dense)
    sessions = [one.open([row[:3]]) for one in (lm, CausalLM(dense))]
    for parents in ([-1, -1, 0, 0, 1], [-1, 0, 1, 2, 3], [-1, 0, -1, 2, 2]):
        draft = Draft.of([row[3:8]], parents=parents)
        ours, theirs = (session.score([row[:3]], draft) for session in sessions)
        close(ours, theirs, 1e-9)
    for session in sessions:
        session.commit([[2, 4]])
    longer = [*row[:3], row[5], row[7], 11]
    close(*(session.score([longer], Draft.empty(1)) for session in sessions), within=1e-9)
    assert recorder.recorded <= 3


def test_a_cache_that_grows_or_is_copied_records_again(dense: Any) -> None:
    row, (lm, recorder) = text(3, 250), fixed(dense)
    ours, theirs = (one.open([row]) for one in (lm, CausalLM(dense)))
    for end in range(248, 250):
        close(ours.score([row[:end]], Draft.empty(1)), theirs.score([row[:end]], Draft.empty(1)), 1e-9)
    before = recorder.recorded
    close(ours.fork().score([row], Draft.empty(1)), theirs.score([row], Draft.empty(1)), 1e-9)
    assert recorder.recorded == before + 1
    close(ours.score([row], Draft.empty(1)), theirs.score([row], Draft.empty(1)), 1e-9)
    close(ours.score([[*row, 1, 2]], Draft.empty(1)), theirs.score([[*row, 1, 2]], Draft.empty(1)), 1e-9)


@pytest.mark.parametrize("kind", ["model", "tree", "feature"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_with_drafts_are_those_of_the_ordinary_pass(kind: str, temperature: float, dense: Any) -> None:
    guess, student = noisy_copy(dense, 0.1).double(), make_student("feature", dense, dtype=torch.float64)

    def drafter(model: Any) -> Any:
        if kind == "tree":
            return LookupDrafter(tree=True, recall=True, shared_noise=True)
        return make_drafter(student) if kind == "feature" else ModelDrafter(model)

    prompt, sampling = [text(4, 9) * 2], sampler(temperature, 2)
    (lm, recorder), (small, _) = fixed(dense), fixed(guess)
    assert answers(lm, prompt, drafter(small), sampling, length=24) == answers(
        CausalLM(dense), prompt, drafter(CausalLM(guess)), sampling, length=24
    )
    assert recorder.replayed > recorder.recorded


def test_several_rows_run_as_the_network_itself_runs_them(dense: Any) -> None:
    prompts, (lm, recorder) = [text(5, 6), text(6, 3)], fixed(dense)
    assert answers(lm, prompts, None, sampler(), length=8) == answers(
        CausalLM(dense), prompts, None, sampler(), length=8
    )
    assert recorder.recorded <= 8  # of the row that is left


def test_a_buffer_that_is_not_an_input_shows(dense: Any) -> None:
    """The stand-in replays numbers as they were: a pass that took its slots from Python would write the old ones."""
    tape = Tape()
    values, start = torch.zeros(4), 0
    with tape:
        values[start : start + 1] = 1.0
    values.zero_()
    start = 2
    tape.replay(None)
    assert values.tolist() == [1.0, 0.0, 0.0, 0.0]
