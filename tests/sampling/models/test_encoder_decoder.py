"""Encoder-decoder sessions and every drafter above them, on small random T5s in float64.

After every round the cache's logits are those of the model without a cache; the encoder runs once an answer; sampled
texts have the target's distribution. What a pair does in the console: tests/app/lanes/test_encoder_decoder.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from sampling import (
    autoregressive_generate_encoder_decoder,
    cascade_generate,
    ngram_assisted_speculative_generate,
    speculative_generate_encoder_decoder,
)
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Prefill
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import EncDecLM, EncDecSession
from sampling.recorded import RecordedLM
from sampling.types import Budget, Draft, Drafter, Rows
from tests.support.reference import chi_square_p, exact_law, greedy_answer
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, decode, emitted, greedy, sample_counts, sampler, steps
from tests.support.tiny import tiny_model

V, END = 12, 1
FAIL_BELOW = 1e-6
PROMPTS: Rows = [[5, 6, 7, 5, 6, END], [9, 8, END], [4] * 20 + [END]]


def t5(seed: int = 0, vocab: int = V, scale: float = 0.7, like: Any = None, noise: float = 0.0, **more: Any) -> Any:
    """A random T5 whose logits lie apart; `like`: the same with noise, which agrees often but not always."""
    usual: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": 0,
    }
    config = T5Config(vocab_size=vocab, **(usual | more))
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = T5ForConditionalGeneration(config).double().eval()
    if like is not None:
        model.load_state_dict(like.state_dict())
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            scaled = (4.0 if "bias" in name or "shared" in name else scale) * drawn
            weight.data.copy_(scaled if like is None else weight + noise * weight.std() * drawn)
    return model.requires_grad_(False)


def bart() -> Any:
    config = BartConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BartForConditionalGeneration(config).double().eval().requires_grad_(False)


class Oracle:
    """The model without any cache, for one prompt: `contexts` are decoder rows of one length."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model, self.prompt = model, prompt

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        out: Tensor = self.model(
            input_ids=torch.tensor([self.prompt] * len(contexts)),
            decoder_input_ids=torch.tensor([list(row) for row in contexts]),
        ).logits
        return out[:, -1]


class Passes:
    """Counts the encoder's forward passes, and the rows they read."""

    def __init__(self, model: Any) -> None:
        self.count = self.rows = 0
        model.get_encoder().register_forward_hook(self._note, with_kwargs=True)

    def _note(self, _module: Any, _args: Any, named: dict[str, Any], _out: Any) -> None:
        self.count += 1
        self.rows += len(named["input_ids"])


@pytest.fixture(scope="module")
def target() -> Any:
    return t5()


@pytest.fixture(scope="module")
def small(target: Any) -> Any:
    return t5(7, like=target, noise=0.05)


def drafters(small: Any) -> dict[str, Callable[[], Drafter]]:
    model = lambda: ModelDrafter(EncDecLM(small, "drafter"))  # noqa: E731
    return {
        "none": NoDrafter,
        "model": model,
        "ngram": lambda: NgramDrafter(V),
        "tables": lambda: LookupDrafter(least=0.0),
        "maxgram": MaxGramDrafter,
        "cascade": lambda: cascade_of([model(), MaxGramDrafter()], [[2, 4], [0, 3]], 2.0),
        "chain": lambda: chain_of([model(), MaxGramDrafter()], [2, 3]),
    }


def test_an_answer_begins_behind_the_token_that_a_translation_model_forces() -> None:
    model = t5(5, 30, 1.6)
    model.generation_config.forced_bos_token_id = 9
    row = [0, 9]
    for _ in range(12):
        row.append(int(Oracle(model, PROMPTS[0]).logits([row])[0].argmax()))
    for make in drafters(t5(7, 30, like=model, noise=0.05)).values():
        assert answers(EncDecLM(model), PROMPTS[:1], make(), greedy(), length=12) == [row[2:]]
    assert answers(EncDecLM(t5(5, 30, 1.6)), PROMPTS[:1], None, greedy(), length=12) != [row[2:]]


def audit(model: Any, session: EncDecSession, rows: Rows) -> None:
    """The session's logits behind the rows are those of the model without a cache."""
    found = session.score(rows, Draft.empty(len(rows)))[:, 0]
    for row, source, logits in zip(rows, session.source, found, strict=True):
        torch.testing.assert_close(logits, Oracle(model, source).logits([row])[0], rtol=0, atol=1e-10)


# -- the session ----------------------------------------------------------------------------------


def test_ragged_prompts_rows_and_drafts_score_as_without_a_cache(target: Any) -> None:
    session = EncDecLM(target).open(PROMPTS)
    assert session.initial == [[0], [0], [0]]
    rows, draft = [[0, 3, 4, 5, 6], [0], [0, 9]], [[3, 4], [5, 6, 7], [2]]
    logits = session.score(rows, Draft.of(draft))
    for place, (row, new) in enumerate(zip(rows, draft, strict=True)):
        for depth in range(len(new) + 1):
            wanted = Oracle(target, PROMPTS[place]).logits([row + new[:depth]])[0]
            torch.testing.assert_close(logits[place, depth], wanted, rtol=0, atol=1e-10)
    session.commit([[0, 1], [0], []])
    assert session.held() == [7, 2, 2]
    audit(target, session, [[0, 3, 4, 5, 6, 3, 4, 8], [0, 5, 9, 9], [0, 9, 4]])
    audit(target, session, [[0, 3], [0, 5, 9], [0, 1, 2, 3]])  # cropped back to what is shared


def test_forks_and_selected_rows_keep_their_prompts(target: Any) -> None:
    session = EncDecLM(target).open(PROMPTS)
    session.score([[0, 3], [0], [0, 4, 5]], Draft.empty(3))
    fork = session.fork()
    fork.select(torch.tensor([2, 0, 0]))
    assert fork.source == [PROMPTS[2], PROMPTS[0], PROMPTS[0]]
    audit(target, fork, [[0, 4, 5, 6], [0, 3], [0, 3, 8]])
    audit(target, session, [[0, 3], [0, 6], [0, 4]])


def test_a_tree_is_placed_by_depth(target: Any) -> None:
    session = EncDecLM(target).open([PROMPTS[0]])
    logits = session.score([[0, 3]], Draft.of([[4, 5, 6]], parents=[-1, -1, 1]))[0]
    for node, row in enumerate([[0, 3], [0, 3, 4], [0, 3, 5], [0, 3, 5, 6]]):
        torch.testing.assert_close(logits[node], Oracle(target, PROMPTS[0]).logits([row])[0], rtol=0, atol=1e-10)
    session.commit([[1, 2]])
    audit(target, session, [[0, 3, 5, 6, 2]])


def test_other_models_decode_one_row_and_say_so_for_ragged_ones() -> None:
    model = bart()
    lm = EncDecLM(model)
    assert (lm.context, lm.start_id, lm.network.layers) == (32, 2, 2)
    session = lm.open([[5, 6, 7]])
    for row in ([2], [2, 9, 4, 30], [2, 9, 5]):
        audit(model, session, [row])
    refused(
        lm.open([[5], [6]]).score,
        [[2], [2, 3]],
        Draft.empty(2),
        match=r"^BartForConditionalGeneration takes no positions for its decoder; ragged rows",
    )
    refused(lm.open, [[5] * 33], match=r"^the prompt is 33 tokens, the encoder of target takes 32$")


def test_what_such_a_model_lacks_is_refused_by_name(target: Any) -> None:
    lm = EncDecLM(target, "big")
    refused(lm.open, [[3]], hidden=True, match=r"^big is an encoder-decoder model: it has no hidden states")
    refused(lm.open([[3]]).kv, 0, match="has no keys and values")
    refused(CausalLM, target, match=r"^T5ForConditionalGeneration is an encoder-decoder model")
    refused(EncDecLM, tiny_model(), match=r"^target must be an encoder-decoder model, got LlamaForCausalLM$")
    refused(lm.open, [[]], match=r"^the prompt is empty")
    refused(lm.open, [[12]], match=r"^id 12 is outside the vocabulary of big")


# -- the encoder runs once ------------------------------------------------------------------------


def test_each_encoder_runs_once_an_answer_and_is_on_the_clock() -> None:
    big, little = t5(), t5(7, like=t5(), noise=0.05)
    mine, theirs = Passes(big), Passes(little)
    lm, drafter = EncDecLM(big), ModelDrafter(EncDecLM(little, "drafter"))
    run = decode(lm, PROMPTS, drafter, greedy(), length=20)
    assert (mine.count, mine.rows, theirs.count, theirs.rows) == (1, 3, 1, 3)
    assert isinstance(run[0], Prefill)
    assert run[0].done == run[0].total == 21
    assert run[0].seconds > 0
    assert not any(isinstance(event, Prefill) for event in run[1:])
    decode(lm, [[3, END]], drafter, greedy(), length=4)
    assert (mine.count, theirs.count) == (2, 2)


def test_a_session_of_the_same_prompt_serves_again_without_its_encoder(target: Any) -> None:
    model = t5()
    lm, passes = EncDecLM(model), Passes(model)
    first = lm.open([PROMPTS[0]])
    run = decode(lm, [PROMPTS[0]], None, greedy(), length=6, session=first)
    again = lm.open([PROMPTS[0]], previous=first)
    assert again is first
    assert emitted(decode(lm, [PROMPTS[0]], None, greedy(), length=6, session=again)) == emitted(run)
    assert passes.count == 1
    assert lm.open([PROMPTS[1]], previous=again) is not again
    with pytest.raises(ValueError, match="opened for another prompt"):
        decode(lm, [PROMPTS[1]], None, greedy(), length=6, session=again)


# -- every drafter --------------------------------------------------------------------------------

NAMES = ("none", "model", "ngram", "tables", "maxgram", "cascade", "chain")


@pytest.mark.parametrize(("name", "gamma"), crossed(NAMES, [1, 4, 7]))
def test_greedy_text_is_the_models_own(target: Any, small: Any, name: str, gamma: int) -> None:
    lm, make = EncDecLM(target), drafters(small)[name]
    wanted = [greedy_answer(Oracle(target, prompt), [0], 16, [END]) for prompt in PROMPTS]
    assert answers(lm, PROMPTS, make(), greedy(), length=16, gamma=gamma, stop=[END]) == wanted
    drafter = make()
    for prompt, text in zip(PROMPTS, wanted, strict=True):  # one drafter, answer after answer
        session = lm.open([prompt])
        run = decode(lm, [prompt], drafter, greedy(), length=16, gamma=gamma, stop=[END], session=session)
        assert emitted(run) == [text]
        audit(target, session, [[0, *text]])


def test_drafters_are_accepted_and_draft_from_the_prompt(target: Any, small: Any) -> None:
    """A model that agrees is accepted; matches begin in the encoder's prompt, which no decoder row holds."""
    run = decode(EncDecLM(target), [PROMPTS[0]], drafters(small)["model"](), greedy(), length=24)
    assert sum(len(step.path) for step in steps(run)) >= 8
    session = EncDecLM(target).open([[7, 8, 9, 10, END]])
    for make in (MaxGramDrafter, lambda: LookupDrafter(least=0.0), lambda: NgramDrafter(V)):
        drafter = make()
        drafter.start(session.source, session, session)
        assert drafter.propose([[0, 7]], Budget([3]), greedy()).tokens == [[8, 9, 10]]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("seed", range(3))
def test_gumbel_text_is_that_of_plain_decoding(target: Any, small: Any, name: str, seed: int) -> None:
    lm = EncDecLM(target)
    drawing = sampler(1.0, seed, coupling="gumbel")
    assert answers(lm, PROMPTS, drafters(small)[name](), drawing, length=12, stop=[END]) == answers(
        lm, PROMPTS, None, drawing, length=12, stop=[END]
    )


def test_every_row_of_a_batch_says_what_it_says_alone(target: Any, small: Any) -> None:
    """One, four and eight prompts of very different lengths, whose answers end at different times."""
    lm, sizes = EncDecLM(target), range(1, 40, 5)
    prompts = [[2 + (place * size) % 10 for place in range(size)] + [END] for size in sizes]
    stop = answers(lm, prompts[:1], None, greedy(), length=7)[0][-1:]  # what the first says at last
    alone = [answers(lm, [prompt], None, greedy(), length=14, stop=stop)[0] for prompt in prompts]
    assert len({len(row) for row in alone}) > 1
    for name, make in drafters(small).items():
        for rows in (1, 4, 8):
            found = answers(lm, prompts[:rows], make(), greedy(), length=14, gamma=4, stop=stop)
            assert found == alone[:rows], (name, rows)


@pytest.mark.parametrize("name", ["model", "cascade", "ngram"])
def test_sampled_text_has_the_targets_law(target: Any, small: Any, name: str) -> None:
    prompt, make = PROMPTS[1], drafters(small)[name]
    law = exact_law(Oracle(target, prompt), [0], lambda logits: (logits / 1.3).softmax(-1), 3)
    found = sample_counts(
        EncDecLM(target),  # type: ignore[arg-type]
        make,
        lambda seed: sampler(1.3, 900 + seed),
        prompt=prompt,
        samples=1_500,
        batch=500,
        length=3,
        gamma=3,
    )
    assert chi_square_p(found, law) > FAIL_BELOW
    other = exact_law(Oracle(target, PROMPTS[0]), [0], lambda logits: (logits / 1.3).softmax(-1), 3)
    assert chi_square_p(found, other) < FAIL_BELOW  # another prompt has another law


# -- the library ----------------------------------------------------------------------------------


def test_the_calls_give_the_models_own_greedy_text(target: Any, small: Any) -> None:
    prompt = PROMPTS[0]
    wanted = greedy_answer(Oracle(target, prompt), [0], 20, [END])
    options: dict[str, Any] = {"max_gen_len": 20, "end_tokens_id": END}
    assert autoregressive_generate_encoder_decoder(prompt, target, **options) == wanted
    ids, rate = speculative_generate_encoder_decoder(prompt, small, target, gamma=3, **options)
    assert ids == wanted
    assert 0 < rate <= 1
    assert ngram_assisted_speculative_generate(prompt, None, target, **options)[0] == wanted
    assert cascade_generate(prompt, [small, MaxGramDrafter()], target, [[2, 3], [0, 3]], 2.0, **options)[0] == wanted
    recorded = RecordedLM({tuple(prompt): wanted}, END, V, start_id=0)
    assert cascade_generate(prompt, [small], recorded, [[3]], **options)[0] == wanted
