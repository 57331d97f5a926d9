"""Best-first trees of matches and tables: by hand, in falling worth, exact, and never less than the chain brings.

They may recall what the target thought likely behind a token, and look at the noise of the target's draw: better
guesses, the same text.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from app.lanes.drafters import PairDrafters
from app.settings.table import Settings
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.tables.prompt_lookup import CHANCE, TablesDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.drafters.tables.tree import RECALLED, SHARES, Recalled, TableTreeDrafter, thought_likely
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Rows, Verdict
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support.branching import softmax
from tests.support.reference import NaiveLaw
from tests.support.runs import answers, decode, drafting, emitted, enumeration_error, sampler, steps
from tests.support.toys import ALONE, TableLM, parents_of
from training.tables.build import Passage, build
from utils.logits_processors import make_processor

SAMPLER = KeyedSampler(make_processor(0.0))

AGAIN = [1, 2, 3, 1, 2, 4, 1, 2]

LENGTH = 24


def tree(drafter: TablesDrafter, row: list[int], nodes: int) -> tuple[list[int], list[int], Draft]:
    drafter.start([row], ALONE, ALONE)
    draft = drafter.propose([row], Budget([nodes]), SAMPLER)
    tokens = draft.tokens[0].tolist()
    return tokens, parents_of(draft), draft


def test_a_tree_of_matches_by_hand() -> None:
    """1 2 was followed by 3 (.42), then matches grow longer: 9 (.5), 7 (.7), 2 and 5 (.85 each). Of each of these
    .85 is hoped for, .0554 in all. 2 alone was last followed by 5: .17 of the .58 left at the root, .0986.
    """
    row = [1, 2, 3, 9, 7, 2, 5, 1, 2]
    tokens, parents, draft = tree(TableTreeDrafter(None, least=0.05), row, 6)
    assert tokens == [3, 9, 7, 5, 2, 5]
    assert parents == [-1, 0, 1, -1, 2, 4]
    assert CHANCE == (0.0, 0.17, 0.42, 0.5, 0.7, 0.85)
    assert draft.probs is None
    assert draft.source is not None
    assert draft.source.tolist() == [[0] * len(tokens)]


def test_what_comes_behind_drafted_tokens_is_learned_where_they_were_accepted() -> None:
    row = [1, 2, 3, 9, 7, 2, 5, 1, 2]
    drafter = TableTreeDrafter(None, least=0.05)
    found = [drafter.further.value]
    for path in ([0], [0, 1, 2], [], [-1]):
        _, _, draft = tree(drafter, row, 3)  # 3, 9, 7
        nodes = [*path, *[-1] * (3 - len(path))]
        drafter.observe([row], draft, Verdict(torch.tensor([nodes]), torch.tensor([0]), torch.ones(1), torch.ones(1)))
        found.append(drafter.further.value)
    assert found[1] < found[0] < found[2]  # 9 was refused, then 9 and 7 were taken
    assert found[2] == found[3] == found[4]  # nothing was accepted: nothing is known of what comes behind it
    other = Draft(torch.tensor([[3, 9, 8]]))
    tree(drafter, row, 3)
    drafter.observe([row], other, Verdict(torch.tensor([[0, -1, -1]]), torch.tensor([0]), torch.ones(1), torch.ones(1)))
    assert drafter.further.value == found[4]  # somebody else's draft


def test_nothing_known_drafts_nothing() -> None:
    assert tree(TableTreeDrafter(None), [1, 2, 3], 8)[0] == []


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> StaticTables:
    file = Path(tmp_path_factory.mktemp("tables"), "t.bin")
    noise = torch.Generator().manual_seed(1)
    texts = [Passage(torch.randint(0, 6, (60,), generator=noise).tolist(), 0) for _ in range(30)]
    build(texts, file, vocab_size=6, fingerprint=None, source="noise", max_mb=1.0)
    return StaticTables.open(file)


@given(row=st.lists(st.integers(0, 5), min_size=2, max_size=40), nodes=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_nodes_come_best_first_and_siblings_differ(row: list[int], nodes: int, tables: StaticTables) -> None:
    drafter = TableTreeDrafter(tables, least=0.01)
    tokens, parents, _ = tree(drafter, row, nodes)
    assert len(tokens) <= nodes
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
    assert all(parent < node for node, parent in enumerate(parents))
    fewer = tree(drafter, row, max(1, nodes // 2))
    assert tokens[: len(fewer[0])] == fewer[0]  # a smaller tree is the beginning of a larger one
    whole = tree(drafter, row, 1 << 10)
    chain = tree(TablesDrafter(tables, least=0.01), row, 1)[0]
    roots = {token for token, parent in zip(*whole[:2], strict=True) if parent == -1}
    assert set(chain) <= roots  # what a chain would begin with is one of what the tree may begin with


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_trees_of_tables_are_exact(nodes: int) -> None:
    prompt = [*PROMPT, 2, 0, 1, 1, 2, 0, 1, 0]
    target = TableLM(3, seed=1)
    make = lambda: TableTreeDrafter(None, least=0.0)  # noqa: E731
    error = enumeration_error(target, make, prompt=prompt, length=4, gamma=nodes, law=NaiveLaw(top_k=2))
    assert error < EXACT


def test_sampled_text_is_plain_decodings_with_the_same_seed(tables: StaticTables) -> None:
    target, processor = TableLM(6, seed=4), make_processor(0.8, 0, 0.95, 0.0)
    prompt: Rows = [[0, 1, 2, 3, 0, 1]]
    for seed in range(6):
        plain = answers(target, prompt, None, KeyedSampler(processor, seed), length=40)
        drafter = TableTreeDrafter(tables, least=0.0)
        assert answers(target, prompt, drafter, KeyedSampler(processor, seed), length=40, gamma=9) == plain


def test_rows_of_a_batch_get_chains(tables: StaticTables) -> None:
    rows = [[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]]
    one, other = TableTreeDrafter(tables), TablesDrafter(tables)
    for drafter in (one, other):
        drafter.start(rows, ALONE, ALONE)
    found, wanted = (drafter.propose(rows, Budget([4, 3]), SAMPLER) for drafter in (one, other))
    assert found.parents is None
    assert torch.equal(found.tokens, wanted.tokens)


def test_softmax_is_the_targets_law() -> None:
    """An uncertain start, all three tokens."""
    make = lambda: TableTreeDrafter(None, least=0.0)  # noqa: E731
    assert enumeration_error(sure_start(3, 1), make, prompt=PROMPT, length=4, gamma=3, law=softmax) < EXACT


# -- what is recalled ------------------------------------------------------------------------------


def recalling(recall: bool = True, **how: Any) -> TableTreeDrafter:
    return TableTreeDrafter(None, least=0.0, recall=recall, **how)


def verdict(path: list[int], laws: torch.Tensor) -> Verdict:
    return Verdict(torch.tensor([path]), torch.tensor([0]), laws[None], laws[None].log())


def test_the_likeliest_few_of_the_latest_law_are_kept() -> None:
    laws = torch.tensor([[0.1, 0.2, 0.05, 0.4, 0.25, 0.0], [0.9, 0.1, 0, 0, 0, 0]])
    known = Recalled()
    thought = thought_likely(verdict([0], laws), [-1, 0])
    known.learn([5, 7, 8], thought)  # the laws behind 5 7 and 7 8
    assert known.behind([5], 1) == known.behind([9, 7], 2) == []
    for size in (1, 2):
        likely = known.behind([5, 7], size)
        assert [token for token, _ in likely] == [3, 4, 1, 0]
        assert [chance for _, chance in likely] == pytest.approx([SHARES[size] * p for p in (0.4, 0.25, 0.2, 0.1)])
        assert [token for token, _ in known.behind([7, 8], size)] == [0, 1]  # what cannot come is not offered
    known.learn([6, 7], thought[1:])
    assert known.behind([5, 7], 1) == known.behind([7, 8], 1)
    assert known.behind([5, 7], 2) != known.behind([6, 7], 2)


def test_a_law_that_leaves_no_choice_is_not_kept() -> None:
    known = Recalled()
    known.learn([7], thought_likely(verdict([], torch.eye(6)[:1]), [-1]))
    assert known.behind([7], 1) == []


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("peek", [False, True])
def test_the_text_is_plain_decodings_with_that_seed(peek: bool, temperature: float) -> None:
    recalled = 0
    for seed in range(20):
        alone = answers(TableLM(8, seed=4), [AGAIN], NoDrafter(), sampler(temperature, seed), length=24)
        run = decode(
            TableLM(8, seed=4), [AGAIN], recalling(shared_noise=peek), sampler(temperature, seed), length=24, gamma=6
        )
        assert emitted(run) == alone
        recalled += sum(step.source.count(RECALLED) for step in steps(run))
    assert (recalled > 100) == (temperature > 0)  # a greedy target's distribution says no more than its text


def test_more_is_accepted() -> None:
    held = {}
    for recall in (False, True):
        model = TableLM(12, seed=4, sharpness=1.5)
        runs = [
            decode(model, [[1, 2]], recalling(recall), sampler(1.0, seed), length=150, gamma=4) for seed in range(8)
        ]
        held[recall] = sum(len(step.path) for run in runs for step in steps(run))
    assert held[True] > 1.1 * held[False]


def test_the_default_pairs_tables_recall_and_matches_alone_do_not(default_pair: Any) -> None:
    from app.lanes.lane import PairEngine

    made: PairDrafters = PairEngine(default_pair).drafters
    found = {kind: made.make(kind, Settings(gamma="auto")) for kind in ("tables", "match", "static")}
    assert all(isinstance(one, TableTreeDrafter) for one in found.values())
    assert found["tables"].traits.names == ("match", "tables", "recalled")
    assert found["match"].traits.names == found["static"].traits.names == ("match", "tables")


def peeking(peek: bool) -> TableTreeDrafter:
    return TableTreeDrafter(None, least=0.0, shared_noise=peek)


def proposed(made: TableTreeDrafter, rows: Rows, drawing: KeyedSampler, nodes: int = 6) -> Any:
    made.start(rows, ALONE, ALONE)
    return made.propose(rows, Budget([nodes]), drafting(drawing, rows))


# -- the noise that is told is the noise that decides ----------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.6])
def test_logits_and_noise_together_say_what_is_drawn(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = list(range(40))
    for position in range(60):
        logits = torch.randn(1, 40, generator=generator) * 2
        drawing = sampler(temperature, seed=position)
        drawn = drawing.draw(drawing.probs(logits, []), torch.tensor([[3, position]]))
        told = torch.tensor(drafting(drawing, [[1]]).shared_noise(3, position, ids))
        assert int(drawn) == int((logits[0].log_softmax(-1) + told).argmax())


def test_it_is_centred_and_grows_with_the_temperature() -> None:
    many = sampler(0.8).shared_noise(0, 5, range(20_000))
    assert abs(sum(many) / len(many)) < 0.02
    spread = stats.tstd(many)
    assert abs(spread - 0.8 * math.pi / math.sqrt(6)) < 0.02
    assert sampler(1.6).shared_noise(0, 5, [7]) == [2 * sampler(0.8).shared_noise(0, 5, [7])[0]]
    assert sampler(0.0).shared_noise(0, 5, [7, 8]) == [0.0, 0.0]


# -- the drafter -----------------------------------------------------------------------------------


def test_without_noise_nothing_changes() -> None:
    for drawing in (sampler(0.0), sampler(0.7)):
        plain = proposed(peeking(False), [AGAIN], drawing)
        same = proposed(peeking(drawing.processor.greedy), [AGAIN], drawing)
        assert torch.equal(plain.tokens, same.tokens)


def test_rows_keep_their_noise_when_others_have_ended() -> None:
    rows = [AGAIN, [5, 6, 5], AGAIN]
    made = peeking(True)
    made.start(rows, ALONE, ALONE)
    made.select(torch.tensor([2]))
    asked: list[tuple[int, int]] = []

    class Noted:
        greedy = False

        def shared_noise(self, row: int, position: int, ids: list[int]) -> list[float]:
            asked.append((row, position))
            return [0.0] * len(ids)

    made.propose([AGAIN], Budget([3]), Noted())  # type: ignore[arg-type]
    assert asked[0] == (2, len(AGAIN))
    assert {row for row, _ in asked} == {2}
    assert [position for _, position in asked] == [len(AGAIN) + depth for depth in range(len(asked))]


# -- what is said ------------------------------------------------------------------------------------


def lm() -> TableLM:
    return TableLM(8, seed=4)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_look_at_the_noise_leaves_plain_decodings_text(temperature: float) -> None:
    for seed in range(20):
        said = [
            answers(lm(), [AGAIN], made, sampler(temperature, seed), length=LENGTH, gamma=6)[0]
            for made in (NoDrafter(), peeking(False), peeking(True))
        ]
        assert said[0] == said[1] == said[2]


def test_the_first_two_tokens_have_the_targets_law() -> None:
    """Over seeds, where every draft was chosen by the very noise that judges it."""
    model, counts, rounds = lm(), torch.zeros(8, 8), 1500
    for seed in range(rounds):
        said = answers(model, [AGAIN], peeking(True), sampler(1.0, seed), length=3, gamma=4)[0]
        counts[said[0], said[1]] += 1
    law = make_processor(1.0)
    first = law(model.logits([AGAIN]))[0]
    joint = (first[:, None] * law(model.logits([[*AGAIN, token] for token in range(8)]))).flatten()
    seen = joint * rounds >= 5
    observed, wanted = counts.flatten()[seen], joint[seen] * rounds
    rest = torch.tensor([rounds - float(observed.sum()), rounds - float(wanted.sum())])
    result = stats.chisquare([*observed.tolist(), float(rest[0])], [*wanted.tolist(), float(rest[1])])
    assert result.pvalue > 1e-4


def test_guesses_get_better() -> None:
    """Of equally many drafts more are accepted: the noise tells which of the likely tokens it will be."""
    held = {}
    for peek in (False, True):
        model = TableLM(4, seed=4, sharpness=1.0)
        runs = [decode(model, [[1, 2]], peeking(peek), sampler(1.0, seed), length=150, gamma=4) for seed in range(8)]
        rounds = [step for run in runs for step in steps(run)]
        held[peek] = sum(len(step.path) for step in rounds) / sum(len(step.drafted) for step in rounds)
    assert held[True] > 1.1 * held[False]
