"""The speed table measures what it says: passes of every length, in turns, that leave the cache alone."""

import copy
from types import SimpleNamespace
from typing import Any

import torch

from app.lanes import warm
from app.lanes.lane import PairEngine
from app.measure import plan
from app.settings.table import Settings
from sampling.models.causal import CausalLM
from sampling.models.llama import LlamaNetwork
from sampling.types import Draft
from tests.support.architectures import architecture
from tests.support.panes import printed
from tests.support.tiny import VOCAB, tiny_model


class Slow:
    """A network whose pass over n tokens moves a fake clock by 2 + n seconds."""

    def __init__(self, inner: Any, clock: list[float]) -> None:
        self.inner, self.clock, self.fed = inner, clock, []
        self.vocab_size, self.context, self.layers = inner.vocab_size, inner.context, inner.layers
        self.device, self.dtype, self.reduced_ids = inner.device, inner.dtype, inner.reduced_ids

    def new_cache(self, rows: int) -> Any:
        return self.inner.new_cache(rows)

    def forward(self, ids: Any, positions: Any, mask: Any, cache: Any, keep: int, hidden: bool = False) -> Any:
        self.fed.append((ids.shape[1], int(positions[0, 0]), cache.length, keep))
        self.clock[0] += 2 + ids.shape[1]
        return self.inner.forward(ids, positions, mask, cache, keep, hidden)


def engine(model: Any, kind: str = "none", drafter: Any = None) -> PairEngine:
    def entry(inner: Any) -> Any:
        return SimpleNamespace(model=inner, bytes=1e6, device=torch.device("cpu"), vocabulary=None)

    loaded = SimpleNamespace(
        target=entry(model),
        drafter=None if drafter is None else entry(drafter),
        drafter_word=kind,
        drafts_by=kind,
        draft_head=None,
        tokenizer=None,
        stop_ids=frozenset(),
        context=512,
        vocab_size=VOCAB,
    )
    return PairEngine(loaded)  # type: ignore[arg-type]


def table(given: PairEngine) -> str:
    return printed(plan.speed_table(given, context=16, repeats=1))


def test_costs_are_the_seconds_of_passes_over_n_tokens_behind_the_context(clock: list[float]) -> None:
    network = Slow(LlamaNetwork(tiny_model()), clock)
    assert warm.measure_costs(network, counts=(1, 4, 8), context=20, repeats=3) == {1: 3.0, 4: 6.0, 8: 10.0}
    assert network.fed[0] == (20, 0, 0, 1)
    assert set(network.fed[1:]) == {(1, 20, 20, 1), (4, 20, 20, 4), (8, 20, 20, 8)}
    # a warm-up and three repeats, never one length several times in a row
    assert [count for count, *_ in network.fed[1:]] == [1, 4, 8] * 4


def test_a_context_longer_than_the_model_is_cut(clock: list[float]) -> None:
    network = Slow(LlamaNetwork(tiny_model(context=64)), clock)
    warm.measure_costs(network, counts=(1, 16), context=256, repeats=1)  # type: ignore[arg-type]
    assert network.fed[0][0] == 48


def test_the_table_shows_every_length_for_target_and_drafter() -> None:
    model = tiny_model()
    text = table(engine(model, "model", copy.deepcopy(model)))
    lines = text.splitlines()
    assert lines[0].split() == ["n", "target", "ms", "v(n)", "drafter", "ms", "v(n)"]
    assert [int(line.split()[0]) for line in lines[1:17]] == list(range(1, 17))
    assert lines[1].split()[2] == lines[1].split()[4] == "1.00"
    assert "v(8) = " in text
    assert "a drafted token costs c = " in text


def test_a_drafter_that_drafts_nothing_has_no_cost() -> None:
    lane, prompt = plan.drafting_lane(engine(tiny_model(), "ngram"), Settings(), 16)
    lane.drafter.propose = lambda rows, k, sampler: Draft.empty(1)  # type: ignore[method-assign]
    assert plan.proposals(lane, prompt) == {}
    assert "a drafted token" not in table(engine(tiny_model()))


def test_longer_passes_over_a_mixture_touch_more_of_its_experts() -> None:
    lm, touched = CausalLM(architecture("qwen3_moe")), list[int]()
    ways = warm.passes(lm.network, (1, 4, 8), 16)

    def look(_module: Any, args: Any) -> None:
        touched.append(len(args[1].unique()))

    lm.network.model.model.layers[0].mlp.experts.register_forward_pre_hook(look)  # type: ignore[attr-defined]
    for run in ways.values():
        run()
    assert touched[0] < touched[1] < touched[2]
