"""`cascade_generate`: transformers models and other drafters in, new ids out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from sampling import MaxGramDrafter, RecordedLM, autoregressive_generate, cascade_generate
from sampling.causal import CausalLM
from sampling.drafters import ModelDrafter
from tests.students import make_target
from tests.test_tables import tables_of
from tests.tiny import noisy_copy, tiny_model, tiny_tokenizer
from utils.errors import UserError
from utils.logits_processors import NucleusProcessor

PROMPT = [5, 17, 40, 5, 17]
K2, K3 = [[4, 4], [0, 4]], [[4, 3, 3], [0, 1, 3], [0, 0, 3]]


@pytest.fixture(scope="module")
def models() -> list[LlamaForCausalLM]:
    """Target, base and small; nothing ends an answer."""
    target = tiny_model(3)
    target.lm_head.weight.data[2] = 0.0
    return [target, noisy_copy(target, 0.01, seed=1), noisy_copy(target, 0.03, seed=2)]


@pytest.fixture(scope="module")
def plain(models: list[LlamaForCausalLM]) -> list[int]:
    return autoregressive_generate(PROMPT, models[0], max_gen_len=40)


@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_greedy_ids_are_plain_decodings(models: list[LlamaForCausalLM], plain: list[int], lenience: float) -> None:
    target, base, small = models
    for drafters, matrix in (
        ([base, small, MaxGramDrafter()], K3),
        ([base, MaxGramDrafter()], K2),
        ([base, small], K2),
        ([ModelDrafter(CausalLM(base, "base")), small], K2),
        ([small], [[4]]),
        ([MaxGramDrafter()], [[4]]),
    ):
        ids, rate = cascade_generate(PROMPT, drafters, target, matrix, lenience, 40)
        assert ids == plain
        assert 0 <= rate <= 1
    assert len(plain) == 40


def test_the_rate_is_that_of_the_targets_reviews(models: list[LlamaForCausalLM]) -> None:
    """A base that is the target has every token accepted, whatever it refused itself."""
    target, _, small = models
    assert cascade_generate(PROMPT, [target, small], target, [[5, 0], [0, 3]], 1.0, 24)[1] == 1
    assert cascade_generate(PROMPT, [small], target, [[5]], 1.0, 24)[1] < 1
    assert cascade_generate(PROMPT, [small], target, [[0]], 1.0, 24)[1] == 0
    assert len(cascade_generate(PROMPT, [MaxGramDrafter()], target, [[5]])[0]) == 200  # the published length


def test_limits_and_stop_ids(models: list[LlamaForCausalLM], plain: list[int]) -> None:
    target, base, _ = models
    stop = plain[11]
    first = plain.index(stop) + 1
    run = {"drafters": [base, MaxGramDrafter()], "target": target, "k_matrix": K2}
    assert cascade_generate(PROMPT, **run, max_gen_len=1)[0] == plain[:1]
    assert cascade_generate(PROMPT, **run, max_gen_len=7)[0] == plain[:7]
    assert cascade_generate(PROMPT, **run, end_tokens_id=stop)[0] == plain[:first]
    assert cascade_generate(PROMPT, **run, eos_tokens_id=[299, stop], pad_token_id=0)[0] == plain[:first]
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    assert cascade_generate(PROMPT, **run, tokenizer=tokenizer)[0] == plain[:first]


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_a_seed_gives_one_answer_and_global_noise_stays(
    models: list[LlamaForCausalLM], coupling: Any, untouched_global_noise: None
) -> None:
    target, base, small = models

    def run(seed: Any) -> list[int]:
        drafters, processor = [base, small, MaxGramDrafter()], NucleusProcessor(1.0, 0.95)
        options = {"logits_processor": processor, "seed": seed, "coupling": coupling, "max_gen_len": 24}
        return cascade_generate(PROMPT, drafters, target, K3, 2.0, **options)[0]

    assert run(1) == run(1) != run(2)
    assert run(torch.Generator().manual_seed(7)) == run(torch.Generator().manual_seed(7))
    if coupling == "gumbel":
        processor = NucleusProcessor(1.0, 0.95)
        assert run(1) == autoregressive_generate(PROMPT, target, logits_processor=processor, seed=1, max_gen_len=24)


def test_padded_vocabularies_are_cut_to_what_all_share() -> None:
    """The target has 44 ids, base 40 and small 42: nothing beyond 39 is said."""
    target, base, small = make_target(44, seed=1), make_target(40, seed=2), make_target(42, seed=3)
    processor = NucleusProcessor(3.0, 1.0)
    own = ModelDrafter(CausalLM(small, "small"))
    for coupling in ("rejection", "gumbel"):
        options = {"logits_processor": processor, "coupling": coupling, "max_gen_len": 60, "end_tokens_id": []}
        ids, _ = cascade_generate([1, 2, 3], [base, own], target, K2, 2.0, **options)
        assert len(ids) == 60
        assert max(ids) < 40
    wide = autoregressive_generate([1, 2, 3], target, logits_processor=processor, max_gen_len=60, end_tokens_id=[])
    assert max(wide) > 39, "the target would say more"


# -- a recorded target ----------------------------------------------------------------------------


def test_a_recorded_target_gives_the_recorded_answer(models: list[LlamaForCausalLM], plain: list[int]) -> None:
    target, base, small = models
    lm = RecordedLM({tuple(PROMPT): plain}, end_id=2, vocab_size=300)
    for drafters, matrix in (([base, small, MaxGramDrafter()], K3), ([small], [[4]])):
        live = cascade_generate(PROMPT, drafters, target, matrix, 2.0, 40)
        assert cascade_generate(PROMPT, drafters, lm, matrix, 2.0, 40) == live
        assert live[0] == plain


def test_a_recording_ends_with_its_own_end(models: list[LlamaForCausalLM]) -> None:
    """Nobody need name it."""
    lm = RecordedLM({tuple(PROMPT): [9, 8, 7]}, end_id=2)
    assert cascade_generate(PROMPT, [models[1], MaxGramDrafter()], lm, K2)[0] == [9, 8, 7, 2]
    assert cascade_generate(PROMPT, [models[1]], lm, [[4]], end_tokens_id=8)[0] == [9, 8]


def test_a_recording_is_left_as_it_was(models: list[LlamaForCausalLM]) -> None:
    """Its vocabulary is cut for a run with a smaller drafter, and only for that."""
    lm = RecordedLM({tuple(PROMPT): [9, 8, 7]}, end_id=2, vocab_size=1000)
    cascade_generate(PROMPT, [models[1]], lm, [[4]])
    assert lm.vocab_size == 1000


def test_a_recording_with_ids_that_a_drafter_does_not_have_is_refused(models: list[LlamaForCausalLM]) -> None:
    lm = RecordedLM({tuple(PROMPT): [9, 8, 300]}, end_id=2)
    with pytest.raises(UserError) as caught:
        cascade_generate(PROMPT, [models[1], MaxGramDrafter()], lm, K2)
    assert str(caught.value) == "the recording of target holds id 300, its vocabulary ends at 299"


def test_an_unknown_prompt_is_refused(models: list[LlamaForCausalLM]) -> None:
    lm = RecordedLM({(1,): [9]}, end_id=2)
    with pytest.raises(UserError, match=r"^the recording of target holds no answer to this prompt of 5 tokens$"):
        cascade_generate(PROMPT, [models[1]], lm, [[4]])


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"k_matrix": [[4, 4]]}, "k_matrix must be square: 1 rows, but one of them has 2 numbers"),
        ({"k_matrix": [[4]]}, "k_matrix must have a row for each of the 2 drafters, got 1"),
        ({"k_matrix": [[4, -4], [0, 4]]}, "k_matrix must hold whole numbers from 0 to 1000, got -4 in row 1"),
        ({"k_matrix": [[4, 4], [1, 4]]}, "k_matrix must be upper triangular: row 2, column 1 must be 0, got 1"),
        ({"lenience": 0.5}, "lenience must be a number, at least 1, got 0.5"),
        ({"drafters": []}, "a cascade needs at least one drafter"),
        ({"max_gen_len": 0}, "max_gen_len must be a whole number, at least 1, got 0"),
        ({"input_ids": [300]}, "id 300 is outside the vocabulary of target (0 … 299)"),
        ({"coupling": "none"}, "coupling must be rejection or gumbel, got 'none'"),
        (
            {"drafters": [MaxGramDrafter(), MaxGramDrafter()]},
            "maxgram is no model and cannot review drafts: only the last drafter of a cascade may be one",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(models: list[LlamaForCausalLM], change: Any, line: str) -> None:
    sound = {"input_ids": PROMPT, "drafters": [models[1], MaxGramDrafter()], "target": models[0], "k_matrix": K2}
    with pytest.raises(UserError) as caught:
        cascade_generate(**(sound | change))
    assert str(caught.value) == line


def test_bigrams_beyond_the_shared_vocabulary_end_the_chain(models: list[LlamaForCausalLM], plain: list[int]) -> None:
    """Tables of a larger vocabulary, as beside a recording whose own is only as large as its highest id."""
    tables = tables_of(*[[token, 5000] for token in range(300)])
    assert cascade_generate(PROMPT, [models[1], MaxGramDrafter(tables)], models[0], K2, 1.0, 40)[0] == plain
