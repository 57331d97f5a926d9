"""Beam search: transformers' answers where the definitions coincide, the best of all sequences where that can be
enumerated, and its rules one by one on scripted models.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling import BeamPlan, beam_generate, beam_search_generate
from sampling.drafters.draft_model import NoDrafter
from sampling.events import BeamStep, BeamTree, Event, Finished, Prefill
from sampling.models.causal import CausalLM, CausalSession
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Limits
from tests.sampling.models.test_cache_audit import CLOSE, build, uncached
from tests.support.refusals import refused
from tests.support.runs import answers
from tests.support.tiny import tiny_model
from tests.support.toys import PEAK, ScriptedLM, TableLM, ToyLM
from utils.logits_processors import GreedyProcessor, NucleusProcessor, TopKProcessor


def search(lm: Any, prompt: list[int], length: int = 8, plan: BeamPlan | None = None, **more: Any) -> list[Event]:
    """All events of one search."""
    stop, context = frozenset(more.pop("stop", ())), more.pop("context", 1 << 20)
    return list(beam_generate(lm, [prompt], Limits(length, stop, context), plan, **more))


def tree_of(events: Sequence[Event]) -> BeamTree:
    tree = BeamTree()
    for event in events:
        if isinstance(event, BeamStep):
            tree.add(event)
    if isinstance(events[-1], Finished) and events[-1].reason != "interrupted":
        tree.close()
    return tree


def best(events: Sequence[Event]) -> list[int]:
    return list(tree_of(events).best.tokens)


def steps_of(events: Sequence[Event]) -> list[BeamStep]:
    return [event for event in events if isinstance(event, BeamStep)]


def end_of(events: Sequence[Event]) -> str:
    last = events[-1]
    assert isinstance(last, Finished)
    return last.reason


def law(*probs: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probs]


# ---------------------------------------------------------------- against the truth


def every_answer(
    lm: ToyLM, prompt: list[int], length: int, stop: set[int], plan: BeamPlan
) -> dict[tuple[int, ...], float]:
    """The score of every answer there is: it ends at its first stop id, or at the limit."""
    found: dict[tuple[int, ...], float] = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(range(lm.vocab_size), repeat=size):
            ended = tokens[-1] in stop
            if any(token in stop for token in tokens[:-1]) or (size < length and not ended):
                continue
            if ended and size <= plan.min_length:
                continue
            laws = lm.logits([[*prompt, *tokens[:place]] for place in range(size)]).log_softmax(-1)
            found[tokens] = plan.score(float(laws[range(size), list(tokens)].sum()), size)
    return found


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(3, 4),
    length=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 0.5, 1.2, 3.0, -1.0]),
    min_length=st.integers(0, 3),
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_with_room_for_every_sequence_it_finds_the_best_of_all(
    seed: int, vocab: int, length: int, alpha: float, min_length: int, prompt: list[int]
) -> None:
    lm = TableLM(vocab, seed)
    plan = BeamPlan(vocab**length, min_length=min_length, alpha=alpha, early_stopping="never")
    tree = tree_of(search(lm, prompt, length, plan, stop={0}))
    truth = every_answer(lm, prompt, length, {0}, plan)
    assert truth[tree.best.tokens] == pytest.approx(max(truth.values()), abs=1e-9)  # several may be the best
    assert {beam.tokens: pytest.approx(beam.score, abs=1e-9) for beam in tree.finished} == truth


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5), stop=st.integers(0, 5))
def test_one_beam_is_greedy_decoding(seed: int, prompt: list[int], stop: int) -> None:
    lm = TableLM(6, seed)
    greedy = answers(lm, [prompt], NoDrafter(), KeyedSampler(GreedyProcessor()), length=12, stop={stop})[0]
    for early_stopping in (True, False):
        assert best(search(lm, prompt, 12, BeamPlan(1, early_stopping=early_stopping), stop={stop})) == greedy


# ---------------------------------------------------------------- against transformers


def transformers_beams(
    model: Any, prompt: list[int], length: int, eos: list[int], plan: BeamPlan, processor: Any = None
) -> list[int]:
    """What `generate` of transformers answers by the same plan; its `length_penalty` is α at m = 0."""
    from utils.loading.quiet import quiet_warnings

    ids = torch.tensor([prompt])
    with torch.no_grad(), quiet_warnings():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=plan.num_beams,
            max_new_tokens=length,
            min_new_tokens=plan.min_length or None,
            eos_token_id=eos,
            pad_token_id=eos[0],
            length_penalty=plan.alpha,
            early_stopping=plan.early_stopping,
            **(processor or {}),
        )
    new: list[int] = made[0, len(prompt) :].tolist()
    ends = [place for place, token in enumerate(new) if token in eos]
    return new[: ends[0] + 1] if ends else new


@cache
def tiny(seed: int) -> Any:
    """A random model with a flat enough law for beams to differ."""
    model = tiny_model(seed)
    model.lm_head.weight.data *= 0.3
    return model


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2),
    prompt=st.lists(st.integers(3, 299), min_size=1, max_size=6),
    num_beams=st.integers(2, 5),
    alpha=st.sampled_from([0.0, 1.0, 2.0, -0.5]),
    early_stopping=st.sampled_from([True, False, "never"]),
    min_length=st.sampled_from([0, 3]),
    at=st.integers(0, 6),
)
def test_the_answer_is_that_of_transformers_on_random_models(
    seed: int, prompt: list[int], num_beams: int, alpha: float, early_stopping: Any, min_length: int, at: int
) -> None:
    stops = [best(search(CausalLM(tiny(seed)), prompt, 10, BeamPlan(1)))[at]]  # a stop id that is likely to come
    plan = BeamPlan(num_beams, 0, min_length, alpha, 0.0, early_stopping)
    expected = transformers_beams(tiny(seed), prompt, 10, stops, plan)
    made = beam_search_generate(
        prompt,
        tiny(seed),
        num_beams=num_beams,
        alpha=alpha,
        penalty_offset=0.0,
        early_stopping=early_stopping,
        min_length=min_length,
        max_gen_len=10,
        end_tokens_id=stops,
    )
    assert made == expected


@pytest.mark.parametrize(
    ("text", "alpha", "early_stopping"),
    [
        ("What is the capital of France?", 0.0, "never"),
        ("Say yes or no: is 7 even?", 1.0, True),
        pytest.param("Write a short poem about the sea.", 1.0, False, marks=pytest.mark.exhaustive),
        pytest.param("Name a colour.", 0.0, False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_answer_is_that_of_transformers_on_the_default_model(
    default_pair: Any, reference_model: Any, text: str, alpha: float, early_stopping: Any
) -> None:
    prompt = default_pair.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    prompt = list(prompt if isinstance(prompt, list) else prompt["input_ids"])
    stop = sorted(default_pair.stop_ids)
    plan = BeamPlan(4, alpha=alpha, offset=0.0, early_stopping=early_stopping)
    expected = transformers_beams(reference_model, prompt, 16, stop, plan)
    lm = CausalLM(default_pair.target.model, "target", default_pair.vocab_size)
    assert best(search(lm, prompt, 16, plan, stop=stop)) == expected


# ---------------------------------------------------------------- caches


class Watched(CausalSession):
    """A session that compares every pass with one without a cache and counts what it is fed."""

    model: Any
    fed: list[int]
    passes: int

    def score(self, rows: list[list[int]], draft: Draft) -> torch.Tensor:
        held = self.held()
        logits = super().score(rows, draft)
        self.fed.append(sum(len(row) - have for row, have in zip(rows, held, strict=True)))
        for row, found in zip(rows, logits[:, 0], strict=True):
            assert (found - uncached(self.model, row)).abs().max() < CLOSE
        self.passes += 1
        return logits


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mistral, window", "gemma2, window"])
def test_reordered_caches_give_the_logits_of_a_fresh_pass(name: str) -> None:
    model = build(name)
    lm = CausalLM(model)
    session = Watched(lm.network, [[3, 9, 27, 5]], lm.vocab_size, False)
    session.model, session.fed, session.passes = model, [], 0
    events = search(lm, [3, 9, 27, 5], 9, BeamPlan(5, early_stopping="never"), session=session, stop={1})
    parents = [[beam.parent for beam in step.kept] for step in steps_of(events)[1:-1]]
    assert any(order != sorted(set(order)) for order in parents)  # some beam was dropped, another split
    assert session.fed == [3, 1, *[len(step.kept) for step in steps_of(events)[:-1]]]
    assert session.held() == [4 + 8]  # one row is left: all of the answer but its last token
    assert best(search(lm, [3, 9, 27, 5], 9, BeamPlan(5, early_stopping="never"), stop={1})) == best(events)


def test_the_prompt_is_read_once_and_every_later_pass_feeds_one_token_a_beam() -> None:
    lm = TableLM(9, seed=4)
    prompt = [number % 9 for number in range(600)]
    events = search(lm, prompt, 6, BeamPlan(4, early_stopping="never"))
    assert [event.done for event in events if isinstance(event, Prefill)] == [256, 512, 599]
    assert lm.fed == len(prompt) + 5 * 4
    assert lm.passes == 3 + 6
    assert [step.calls[0].passes for step in steps_of(events)] == [1] * 6


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_closed_search_leaves_one_sound_row(after: int) -> None:
    lm = TableLM(7, seed=3)
    session = lm.open([[1, 2, 3]])
    running = beam_generate(lm, [[1, 2, 3]], Limits(8), BeamPlan(4), session=session)
    for _ in range(after):
        next(running)
    running.close()  # type: ignore[attr-defined]
    assert len(session.cached) == 1
    assert best(search(lm, [1, 2, 3], 8, BeamPlan(4), session=session)) == best(search(lm, [1, 2, 3], 8, BeamPlan(4)))


# ---------------------------------------------------------------- the rules, one by one


def test_a_finished_beam_keeps_its_score_and_wins_by_it() -> None:
    lm = ScriptedLM(
        4,
        {(0,): law(0, 0.5, 0.3, 0.2), (0, 2): law(0, 0.0, 0.0, 1.0), (0, 3): law(0.0, 0.9, 0.1, 0.0)},
        law(0.25, 0.25, 0.25, 0.25),
    )
    tree = tree_of(search(lm, [0], 6, BeamPlan(3, alpha=0.0, early_stopping="never"), stop={1}))
    assert [beam.tokens for beam in tree.finished[:2]] == [(1,), (3, 1)]
    assert [beam.score for beam in tree.finished[:2]] == pytest.approx([math.log(0.5), math.log(0.18)])
    longer = tree_of(search(lm, [0], 6, BeamPlan(3, alpha=9.0, early_stopping="never"), stop={1}))
    assert len(longer.best.tokens) > 2  # a large penalty on short answers turns it round


@pytest.mark.parametrize(("early_stopping", "passes"), [(True, 2), (False, 3), ("never", 5)])
def test_when_it_stops_once_enough_have_finished(early_stopping: Any, passes: int) -> None:
    # Σ log p of the best running beam and the worst kept score: -1.20, -1.20; -3.51, -.71; -4.02, -.71; -4.53, -.71.
    # "never" divides by 6, the longest answer, "False" by the step.
    laws = {1: law(0.1, 0.3, 0.6), 2: law(0.1, 0.4, 0.5), 3: law(0.1, 0.8, 0.1)}
    lm = ToyLM(3, lambda prefix: laws.get(len(prefix), law(0.6, 0.1, 0.3)))
    events = search(lm, [0], 6, BeamPlan(2, alpha=1.0, offset=0.0, early_stopping=early_stopping), stop={1})
    assert len(steps_of(events)) == passes
    assert end_of(events) in ("eos", "length")


def test_answers_that_differ_in_their_stop_id_alone_merge() -> None:
    events = search(ScriptedLM(5, {(0,): law(0.0, 0.3, 0.2, 0.4, 0.1)}), [0], 3, BeamPlan(3, alpha=0.0), stop={1, 2})
    first = steps_of(events)[0]
    assert [(beam.token, beam.fate) for beam in first.beams] == [
        *((3, "kept"), (1, "finished"), (2, "merged"), (4, "kept"))
    ]
    assert [beam.tokens for beam in tree_of(events).finished].count((1,)) == 1
    assert (2,) not in [beam.tokens for beam in tree_of(events).finished]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_beams=st.integers(1, 6), stop=st.sets(st.integers(0, 4), max_size=2))
def test_no_two_beams_are_ever_the_same(seed: int, num_beams: int, stop: set[int]) -> None:
    tree = BeamTree()
    for event in search(TableLM(5, seed), [1], 6, BeamPlan(num_beams), stop=stop):
        if isinstance(event, BeamStep):
            tree.add(event)
            assert len(tree.running) <= num_beams
            said = [beam.tokens for beam in tree.running]
            said += [beam.tokens[:-1] if beam.tokens[-1] in stop else beam.tokens for beam in tree.finished]
            running, finished = said[: len(tree.running)], said[len(tree.running) :]
            assert len(set(running)) == len(running)
            assert len(set(finished)) == len(finished)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_beam_grows_by_its_top_k_tokens_only(top_k: int) -> None:
    events = search(TableLM(8, seed=5), [1], 5, BeamPlan(4, top_k))
    for step in steps_of(events):
        parents = [beam.parent for beam in step.beams]
        assert max(map(parents.count, parents)) <= top_k
    assert len(steps_of(events)[-1].beams) == {1: 1, 2: 8, 3: 8}[top_k]


@pytest.mark.parametrize("least", [0, 1, 2, 5, 8])
def test_no_answer_is_shorter_than_min_length(least: int) -> None:
    events = search(ToyLM(3, lambda prefix: [PEAK, 1.0, 0.0]), [2], 8, BeamPlan(3, min_length=least), stop={0})
    assert best(events) == [1] * least + ([0] if least < 8 else [])
    assert end_of(events) == ("eos" if least < 8 else "length")
    assert all(len(beam.tokens) > least or least == 8 for beam in tree_of(events).finished)


def test_the_models_law_is_not_renormalised_for_banned_stop_ids() -> None:
    first = steps_of(search(ScriptedLM(3, {(0,): law(0.6, 0.3, 0.1)}), [0], 3, BeamPlan(2, min_length=1), stop={0}))[0]
    assert [beam.log_p for beam in first.beams] == pytest.approx(law(0.3, 0.1))


def test_every_beam_ends_where_the_context_is_full() -> None:
    lm = TableLM(6, seed=1, context=6)
    assert len(best(search(lm, [1, 2], 50))) == 4
    assert len(best(search(lm, [1, 2], 50, context=5))) == 3
    refused(
        search,
        lm,
        [1, 2, 3, 4, 5, 0],
        50,
        match="the prompt is 6 tokens; the context holds 6, and at least one must be left",
    )


@pytest.mark.parametrize("after", range(5))
def test_an_interrupt_keeps_the_best_so_far(after: int) -> None:
    lm, looks = TableLM(6, seed=1), itertools.count()
    events = search(lm, [1, 2], 9, BeamPlan(4), interrupt=lambda: next(looks) > after)
    assert end_of(events) == "interrupted"
    assert len(steps_of(events)) == after  # the first look is the prefill's
    assert len(best(events)) == after
    whole = steps_of(search(lm, [1, 2], 9, BeamPlan(4)))
    assert [step.beams for step in steps_of(events)] == [step.beams for step in whole[:after]]


def test_a_processors_law_decides_where_one_is_set() -> None:
    lm = ScriptedLM(4, {}, law(0.4, 0.3, 0.2, 0.1))
    first = steps_of(search(lm, [0], 2, BeamPlan(4), processor=TopKProcessor(1.0, 2)))[0]
    assert [beam.token for beam in first.beams] == [0, 1]  # what it cuts off is never tried
    assert [beam.log_p for beam in first.beams] == pytest.approx(law(4 / 7, 3 / 7))
    banned = steps_of(search(lm, [0], 2, BeamPlan(4, min_length=1), stop={0}, processor=NucleusProcessor(1.0, 0.3)))
    assert [beam.token for beam in banned[0].beams] == [1]  # the nucleus of what may be chosen


def test_logits_that_are_no_numbers_are_an_error() -> None:
    lm = ToyLM(3, lambda prefix: [math.nan, 0.0, 0.0])
    refused(search, lm, [0], 3, kind=ValueError, match="NaN")
    lm = ToyLM(2, lambda prefix: [0.0, 0.0])
    refused(
        search, lm, [0], 3, BeamPlan(2, min_length=1), stop={0, 1}, kind=ValueError, match="no token is left to choose"
    )


def test_what_cannot_be_searched_is_told_in_a_line() -> None:
    lm = TableLM(6)
    refused(beam_generate, lm, [[1], [2]], Limits(4), match="beam search takes one prompt at a time, got 2")
    refused(search, lm, [1], 0, match="max_new_tokens must be at least 1, got 0")
    refused(beam_search_generate, [], tiny(0), match="the prompt is empty")


def test_the_one_call_function_takes_the_models_own_stop_ids_and_leaves_the_global_noise_alone(
    untouched_global_noise: None,
) -> None:
    model = tiny(1)
    model.generation_config.eos_token_id = 2
    own = beam_search_generate([5, 6, 7], model, max_gen_len=12, num_beams=3)
    assert own == beam_search_generate([5, 6, 7], model, max_gen_len=12, num_beams=3, eos_tokens_id=[2])
    assert own != beam_search_generate([5, 6, 7], model, max_gen_len=12, num_beams=3, end_tokens_id=own[1])
