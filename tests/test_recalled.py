"""Trees that recall what the target thought likely behind a token: more accepted, the same text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.drafters import Drafters
from app.settings import Settings
from sampling.drafters.none import NoDrafter
from sampling.drafters.recalled import SHARES, Recalled
from sampling.drafters.table_tree import RECALLED, TableTreeDrafter
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Verdict
from tests.runs import answers, decode, emitted, steps
from tests.toys import TableLM
from utils.logits_processors import make_processor

PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]


def sampler(temperature: float, seed: int = 0) -> KeyedSampler:
    return KeyedSampler(make_processor(temperature), seed)


def drafter(recall: bool = True, **how: Any) -> TableTreeDrafter:
    return TableTreeDrafter(None, least=0.0, recall=recall, **how)


def verdict(path: list[int], laws: torch.Tensor) -> Verdict:
    return Verdict(torch.tensor([path]), torch.tensor([0]), laws[None], laws[None].log())


def test_the_likeliest_few_of_the_latest_law_are_kept() -> None:
    laws = torch.tensor([[0.1, 0.2, 0.05, 0.4, 0.25, 0.0], [0.9, 0.1, 0, 0, 0, 0]])
    known = Recalled()
    known.learn([5, 7, 8], laws)  # the laws behind 5 7 and 7 8
    assert known.behind([5], 1) == known.behind([9, 7], 2) == []
    for size in (1, 2):
        likely = known.behind([5, 7], size)
        assert [token for token, _ in likely] == [3, 4, 1, 0]
        assert [chance for _, chance in likely] == pytest.approx([SHARES[size] * p for p in (0.4, 0.25, 0.2, 0.1)])
        assert [token for token, _ in known.behind([7, 8], size)] == [0, 1]  # what cannot come is not offered
    known.learn([6, 7], laws[1:])
    assert known.behind([5, 7], 1) == known.behind([7, 8], 1)
    assert known.behind([5, 7], 2) != known.behind([6, 7], 2)


def test_a_law_that_leaves_no_choice_is_not_kept() -> None:
    known = Recalled()
    known.learn([7], torch.eye(6)[:1])
    assert known.behind([7], 1) == []


def test_laws_are_kept_by_the_tokens_before_them_where_the_row_stood() -> None:
    """A tree whose second branch was taken: the root, nodes 1 and 3; what no one stood at is not looked at."""
    made = drafter()
    made.start([PROMPT], None, None)  # type: ignore[arg-type]
    laws = torch.full((5, 6), 0.1)
    laws[torch.arange(5), torch.arange(5)] = 0.5
    draft = Draft(torch.tensor([[3, 4, 5, 0]]), parents=torch.tensor([-1, -1, 0, 1]))
    made.observe([PROMPT], draft, verdict([1, 3, -1], laws))
    known = made._recalled
    assert known is not None
    assert {context: likely[0][0] for context, likely in known._behind.items()} == {
        **{(1, 2): 0, (2, 4): 2, (4, 0): 4},
        **{(2,): 0, (4,): 2, (0,): 4},
    }


def test_an_answer_knows_nothing_of_the_one_before_and_rows_of_a_batch_keep_nothing() -> None:
    made = drafter()
    made.start([PROMPT], None, None)  # type: ignore[arg-type]
    made.observe([PROMPT], Draft.empty(1), verdict([], torch.full((1, 6), 1 / 6)))
    assert made._recalled is not None
    assert made._recalled.behind([2], 1)
    made.start([PROMPT], None, None)  # type: ignore[arg-type]
    assert not made._recalled.behind([2], 1)
    law = torch.full((2, 1, 6), 1 / 6)
    two = Verdict(torch.zeros((2, 0), dtype=torch.long), torch.zeros(2, dtype=torch.long), law, law.log())
    made.observe([PROMPT, PROMPT], Draft.empty(2), two)
    assert not made._recalled._behind


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("peek", [False, True])
def test_the_text_is_plain_decodings_with_that_seed(peek: bool, temperature: float) -> None:
    recalled = 0
    for seed in range(20):
        alone = answers(TableLM(8, seed=4), [PROMPT], NoDrafter(), sampler(temperature, seed), length=24)
        run = decode(TableLM(8, seed=4), [PROMPT], drafter(peek=peek), sampler(temperature, seed), length=24, gamma=6)
        assert emitted(run) == alone
        recalled += sum(step.source.count(RECALLED) for step in steps(run))
    assert (recalled > 100) == (temperature > 0)  # a greedy target's law says no more than its text


def test_more_is_accepted() -> None:
    held = {}
    for recall in (False, True):
        model = TableLM(12, seed=4, sharpness=1.5)
        runs = [decode(model, [[1, 2]], drafter(recall), sampler(1.0, seed), length=150, gamma=4) for seed in range(8)]
        held[recall] = sum(len(step.path) for run in runs for step in steps(run))
    assert held[True] > 1.1 * held[False]


def test_the_default_pairs_tables_recall_and_matches_alone_do_not(default_pair: Any) -> None:
    from app.lanes import Engine

    made: Drafters = Engine(default_pair).drafters
    found = {kind: made.make(kind, Settings(gamma="auto")) for kind in ("tables", "match", "static")}
    assert all(isinstance(one, TableTreeDrafter) for one in found.values())
    assert found["tables"].names == ("match", "tables", "recalled")
    assert found["match"].names == found["static"].names == ("match", "tables")
