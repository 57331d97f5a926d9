"""The compiled look-ups and the compiled walk down a draft, beside their Python twins."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling.drafters.draft_model import ModelSource
from sampling.drafters.tables import lookup
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.suffix import SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, DraftTree, Rule, Verdict
from sampling.verify import distributions
from sampling.verify.rules import verify
from tests.support.quantized import keep_code, needs_kernels
from tests.support.runs import drafting, sampler
from tests.support.toys import TableLM
from training.tables.build import Passage, arrays_of, count_levels
from utils.kernels.bindings import load
from utils.logits_processors import LogitsProcessor

pytestmark = needs_kernels

keep_code()


def tables_of(seed: int) -> StaticTables:
    chance = random.Random(seed)
    passages = [Passage(chance.choices(range(7), k=30)) for _ in range(20)]
    return StaticTables({}, [arrays_of(level) for level in count_levels(passages, 4)])


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    assert load()


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    seed=st.integers(0, 50),
    temperature=st.sampled_from([0.0, 0.8]),
    which=st.integers(1, 7),
    model=st.booleans(),
)
def test_a_draft_is_the_same_node_by_node_with_and_without_compiled_look_ups(
    row: list[int], seed: int, temperature: float, which: int, model: bool
) -> None:
    """Tokens, order, sources, probabilities; matches, tables, recalled tokens and finished answers in any mixture, with
    and without a model beside them."""
    finished = SuffixIndex()
    finished.add([1, 2, 3], random.Random(seed).choices(range(6), k=40))
    drafts, target = list[Draft](), TableLM(7).open([row])
    for at_hand in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookup, "at_hand", lambda at_hand=at_hand: at_hand)
            drafter = LookupDrafter(
                tables_of(seed) if which & 1 else None,
                matches=bool(which & 2),
                recall=True,
                finished=finished if which & 4 else None,
                tree=True,
                shared_noise=True,
                model=ModelSource(TableLM(7, seed)) if model else None,
                least=0.0,
            )
            drawing = sampler(temperature, seed)
            drafter.start([row], target, target)
            for count in (len(row), max(1, len(row) // 2)):  # and again of a row that went back
                drafts.append(drafter.propose([row[:count]], Budget([6], 12), drafting(drawing, [row[:count]])))
    assert [draft.trees for draft in drafts[:2]] == [draft.trees for draft in drafts[2:]]
    assert [draft.promised for draft in drafts[:2]] == pytest.approx([draft.promised for draft in drafts[2:]], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.7, 1.3]), st.integers(0, 6), st.integers(1, 2))
def test_a_compiled_walk_accepts_what_single_steps_accept(seed: int, temperature: float, count: int, rows: int) -> None:
    source, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    logits = torch.randn(rows, count + 1, 4112, generator=source) * 8
    sampling = KeyedSampler(LogitsProcessor(temperature), seed)
    parents = [chance.randrange(-1, node) for node in range(count)]
    keys = [(row, 5) for row in range(rows)]
    tokens = list[list[int]]()
    for row in range(rows):  # nodes that are likely to be drawn
        drafted, depths = list[int](), DraftTree.of([0] * count, parents).depths
        for node, parent in enumerate(parents):
            law = sampling.probs(logits[row, parent + 1][None], [])
            drafted.append(
                int(sampling.draw(law, torch.tensor([[row, 4 + depths[node]]]))) if chance.random() < 0.8 else node
            )
        tokens.append(drafted)
    verdicts = list[Verdict]()
    for at_hand in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributions, "at_hand", lambda at_hand=at_hand: at_hand)
            verdicts.append(verify(logits, Draft.of(tokens, parents=parents), [[1]] * rows, keys, sampling, Rule.POINT))
    quick, slow = verdicts
    assert (quick.path, quick.token) == (slow.path, slow.token)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_are_an_error_of_the_compiled_walk_too(broken: float, temperature: float) -> None:
    logits = torch.randn(1, 2, 4112)
    logits[0, 1, 4000] = broken
    draft = Draft.of([[int(logits[0, 0].argmax())]])
    sampling = KeyedSampler(LogitsProcessor(temperature, top_k=0), 1)
    if temperature:
        logits[0, 0] = -100.0
        logits[0, 0, 7] = 100.0
        draft = Draft.of([[7]])
    with pytest.raises(ValueError, match=r"NaN|infinite|finite"):
        verify(logits, draft, [[1]], [(0, 5)], sampling, Rule.POINT)
