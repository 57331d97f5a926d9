"""Models whose positions turn by the length of the text: LongRoPE's two tables, and dynamic scaling's many."""

from typing import Any

import pytest
import torch
import transformers

from sampling.api import autoregressive_generate, ngram_assisted_speculative_generate, speculative_generate
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Limits
from tests.support.refusals import refused
from utils.logits_processors import GreedyProcessor

LIMIT, NEW = 300, 10  # a prompt of more than 256 tokens is read in pieces
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
    "original_max_position_embeddings": LIMIT,
    "factor": 2.0,
}
KINDS = {
    "longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}, 2 * LIMIT),
    "longrope of a Llama": ("Llama", {"rope_parameters": LONGROPE}, 2 * LIMIT),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, LIMIT),
}
PROMPT = [token % 60 + 3 for token in range(7, 7 + 15 * LIMIT, 5)]  # repeats itself, so that tables draft


def model_of(kind: str, seed: int = 1) -> Any:
    family, more, context = KINDS[kind]
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": context}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **ends, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(3 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    return model


def naive(model: Any, prompt: list[int], kind: str) -> list[int]:
    """Plain decoding as transformers has it. LongRoPE: every token from the whole text anew. Dynamic scaling: from
    transformers' own cache, which keeps what was turned before."""
    row, cache, fed = list(prompt), None, list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            out = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        row.append(int(out.logits[0, -1].argmax()))
        cache, fed = (out.past_key_values, row[-1:]) if kind == "dynamic" else (None, row)
    return row[len(prompt) :]


@pytest.mark.parametrize("length", [LIMIT - 5, LIMIT, LIMIT + 60])  # across it; from it on; beyond it, read in pieces
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_transformers_with_and_without_drafts_on_both_sides_of_the_limit(kind: str, length: int) -> None:
    prompt = PROMPT[:length]
    expected = naive(model_of(kind), prompt, kind)
    model, drafter = model_of(kind), model_of(kind)
    assert autoregressive_generate(prompt, model, max_gen_len=NEW, end_tokens_id=[]) == expected
    assert speculative_generate(prompt, drafter, model, gamma=4, max_gen_len=NEW, end_tokens_id=[])[0] == expected
    other = speculative_generate(prompt, model_of(kind, seed=2), model, gamma=4, max_gen_len=NEW, end_tokens_id=[])
    assert other[0] == expected
    tables = ngram_assisted_speculative_generate(prompt, None, model, gamma=6, max_gen_len=NEW, end_tokens_id=[])
    assert tables[0] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_on_both_sides_of_the_limit_gives_each_row_its_own_text(kind: str) -> None:
    model = model_of(kind)
    rows = [PROMPT[:length] for length in (LIMIT - 3, LIMIT - 40, LIMIT + 20)]
    texts: list[list[int]] = [[] for _ in rows]
    sampler, limits = KeyedSampler(GreedyProcessor()), Limits(NEW, frozenset(), 2 * LIMIT)
    for event in generate(CausalLM(model), rows, NoDrafter(), sampler, limits):
        if isinstance(event, Step):
            texts[event.row].append(int(event.token))
    assert texts == [naive(model, row, kind) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_goes_back_and_forth_over_the_limit(kind: str) -> None:
    lm = CausalLM(model_of(kind))
    session = None
    for length in (LIMIT + 9, LIMIT - 9, LIMIT + 9, LIMIT + 10, LIMIT - 1):
        row = PROMPT[:length]
        session = lm.open([row], previous=session)
        fresh = lm.open([row]).score([row], Draft.empty(1))
        assert torch.allclose(session.score([row], Draft.empty(1)), fresh, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_itself_goes_on_as_it_did(kind: str) -> None:
    model, fresh = model_of(kind), model_of(kind)
    autoregressive_generate(PROMPT[: LIMIT - 2], model, max_gen_len=5, end_tokens_id=[])
    for length in (LIMIT - 2, LIMIT + 9):
        ids = torch.tensor([PROMPT[:length]])
        assert torch.equal(model(ids).logits, fresh(ids).logits)


def test_dynamic_scaling_multiplies_the_context() -> None:
    assert (CausalLM(model_of("dynamic")).context, CausalLM(model_of("longrope")).context) == (2 * LIMIT, 2 * LIMIT)
    prompt = PROMPT[: 2 * LIMIT - 2]
    assert len(autoregressive_generate(prompt, model_of("dynamic"), max_gen_len=9, end_tokens_id=[])) == 2


@pytest.mark.parametrize("other", ["chooses", "begins"])
def test_a_rotary_part_of_another_make_stays_within_its_first_table(other: str) -> None:
    model, ids = model_of("longrope"), torch.tensor([PROMPT[:9]])
    if other == "chooses":  # its tables by itself, as PhiMoE's does
        model.model.rotary_emb.rope_init_fn = None
    else:  # with a table of its own, as HunYuan's does
        model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.original_inv_freq / 2
    expected = model(ids).logits
    lm = CausalLM(model)
    assert lm.context == LIMIT
    assert torch.allclose(lm.open([PROMPT[:9]]).score([PROMPT[:9]], Draft.empty(1))[0], expected[0, -1:], atol=1e-5)
    refused(
        autoregressive_generate, PROMPT[:LIMIT], model, max_gen_len=5, end_tokens_id=[], match="the context holds 300"
    )
