"""Streams: joined, the pieces are the text and the ids of the call that waits, whoever drafts and whenever it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import Engine, MaxGramDrafter, speculative_generate, speculative_stream
from sampling.drafters.cascade import cascade_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Finished, Prefill, Step
from sampling.models.causal import CausalLM
from sampling.stream import Piece, decode_of, pieces
from tests.support.runs import after
from tests.support.students import make_student
from tests.support.tiny import VOCAB, noisy_copy, tiny_model, tiny_tokenizer
from utils.errors import UserError
from utils.logits_processors import NucleusProcessor

MODEL, TOKENIZER = tiny_model(3), tiny_tokenizer(chat=False)
DRAFTER = noisy_copy(MODEL, 0.05)
PROMPTS = ["the end", "one two one two one two", "x"]
ROWS = [TOKENIZER(text)["input_ids"] for text in PROMPTS]
WARM = {"logits_processor": NucleusProcessor(0.9, 0.95), "max_gen_len": 40, "seed": 5}
DECODE = decode_of(TOKENIZER)

WAYS: dict[str, Any] = {
    "ar": lambda: None,
    "spec": lambda: DRAFTER,
    "maxgram": MaxGramDrafter,
    "ngram": lambda: NgramDrafter(VOCAB, n=3, top_k_filler=3, stop_if_unknown=True),
    "cascade": lambda: cascade_of([ModelDrafter(CausalLM(DRAFTER)), MaxGramDrafter()], [[2, 4], [0, 4]], 2.0),
}


def joined(found: Iterable[Piece], rows: int) -> list[tuple[str, list[int]]]:
    """Text and ids of each row, after a look at the form: a row's last piece, and no other, says why it ended."""
    by_row: list[list[Piece]] = [[] for _ in range(rows)]
    for piece in found:
        by_row[piece.row].append(piece)
    for row in by_row:
        assert [piece.reason is not None for piece in row] == [False] * (len(row) - 1) + [True]
        assert all((piece.round is None) == (not piece.ids) == (piece.reason is not None) for piece in row)
    return [("".join(one.text for one in row), [token for one in row for token in one.ids]) for row in by_row]


@pytest.mark.parametrize("way", WAYS)
def test_pieces_joined_are_the_answer_of_the_call_that_waits(way: str) -> None:
    for row in ROWS:
        found = list(speculative_stream(row, WAYS[way](), MODEL, TOKENIZER, **WARM))
        [(text, ids)] = joined(found, 1)
        drafted = [token for piece in found if piece.from_draft for token in piece.ids]
        rounds = list({id(piece.round): piece.round for piece in found if piece.round}.values())
        if way != "ar":
            most = {"gamma": 6} if way == "cascade" else {}
            waited, rate = speculative_generate(row, WAYS[way](), MODEL, TOKENIZER, **WARM, **most)
            assert ids == waited
            assert rate == pytest.approx(len(drafted) / max(1, sum(len(one.drafted) for one in rounds)))
        assert text == DECODE(ids)
        assert bool(drafted) == (way != "ar") or way in ("maxgram", "ngram")
        assert [token for one in rounds for token in one.emitted] == ids


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_streams_every_row(way: str) -> None:
    found = joined(speculative_stream(ROWS, WAYS[way](), MODEL, TOKENIZER, max_gen_len=24), len(ROWS))
    assert found == [joined(speculative_stream(row, None, MODEL, TOKENIZER, max_gen_len=24), 1)[0] for row in ROWS]
    assert all(text == DECODE(ids) for text, ids in found)


def test_several_prompts_may_be_the_rows_of_a_tensor() -> None:
    prompts = [[5, 6, 7], [8, 9, 10]]
    found = joined(speculative_stream(torch.tensor(prompts), DRAFTER, MODEL, TOKENIZER, max_gen_len=9), 2)
    assert found == joined(speculative_stream(prompts, DRAFTER, MODEL, TOKENIZER, max_gen_len=9), 2)


@pytest.mark.parametrize("looks", range(0, 12, 3))
def test_an_interrupted_stream_has_said_what_it_decoded(looks: int) -> None:
    whole = joined(speculative_stream(ROWS, DRAFTER, MODEL, TOKENIZER, max_gen_len=40), len(ROWS))
    asked = after(looks)
    found = list(speculative_stream(ROWS, DRAFTER, MODEL, TOKENIZER, max_gen_len=40, interrupt=lambda: next(asked)))
    assert "interrupted" in {piece.reason for piece in found}
    for (text, ids), (_, every) in zip(joined(found, len(ROWS)), whole, strict=True):
        assert text == DECODE(ids)
        assert ids == every[: len(ids)]


def test_without_a_tokenizer_the_pieces_are_ids() -> None:
    [(text, ids)] = joined(speculative_stream(ROWS[0], DRAFTER, MODEL, max_gen_len=9), 1)
    assert (text, ids) == ("", speculative_generate(ROWS[0], DRAFTER, MODEL, max_gen_len=9)[0])


SHORT = {"max_new_tokens": 24}


def engine(way: str = "model") -> Engine:
    made = Engine(MODEL, TOKENIZER)
    drafters = {"model": lambda: DRAFTER, "feature": lambda: make_student("feature", MODEL, seed=2)}
    if way in drafters:
        made.enable_spec_dec(drafters[way](), 3)
    return made


@pytest.mark.parametrize("way", ["none", "model", "feature"])
def test_an_engine_streams_what_it_generates(way: str) -> None:
    made = engine(way)
    texts, ids = made.generate(PROMPTS, SHORT, return_token_ids=True)
    waited = made.last
    assert joined(made.stream(PROMPTS, SHORT), len(PROMPTS)) == list(zip(texts, ids, strict=True))
    assert made.last == waited


@pytest.mark.parametrize("way", ["none", "model", "feature"])
def test_an_engine_goes_on_after_a_stream_that_was_left(way: str) -> None:
    fresh = engine(way).generate(PROMPTS, SHORT)
    for count in (1, 2, 5):
        made = engine(way)
        stream = made.stream(PROMPTS, SHORT)
        read = [next(stream) for _ in range(count)]
        assert 0 < made.last.tokens <= len(PROMPTS) * made.last.passes * 4
        assert read
        stream.close()
        assert made.generate(PROMPTS, SHORT) == fresh


def test_two_streams_of_one_engine_do_not_mix() -> None:
    made = engine()
    first, second = made.stream(PROMPTS, SHORT), made.stream(PROMPTS[:1], SHORT)
    next(first)
    next(second)
    with pytest.raises(UserError, match="one stream at a time"):
        list(first)
    assert "".join(piece.text for piece in second) != ""


def step(tokens: list[int], accepted: int) -> Step:
    own = tokens[accepted] if accepted < len(tokens) else None
    drafted = tuple(tokens[:accepted])
    return Step(0, 4, drafted, tuple(range(-1, accepted - 1)), (0,) * accepted, tuple(range(accepted)), own, (), (), 0.5, (), 0, 0, 0)  # fmt: skip # noqa: E501


@given(st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), st.integers(0, 5)), max_size=30))
@settings(max_examples=150)
def test_any_ids_read_like_the_whole(rounds: list[tuple[list[int], int]]) -> None:
    """Halves of characters, garbage and special tokens included."""
    steps = [step(tokens[: accepted + 1], min(accepted, len(tokens))) for tokens, accepted in rounds]
    events = [Prefill(3, 3, 0.1), *steps, Finished(0, "length")]
    [(text, ids)] = joined(pieces(events, DECODE), 1)
    assert text == DECODE(ids)
