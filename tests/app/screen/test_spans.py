"""Events become coloured text: whole characters, refused drafts in context, and not a byte of the answer changed."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from app.screen.spans import Span, Spanner, committed_text, differing
from sampling.events import Finished, Prefill, Step
from utils.growing_text import NO_TEXT, REPLACEMENT

Decode = Callable[[list[int]], str]

CORPUS = [
    "A river is a natural stream of water that flows toward the sea, a lake or another river. ",
    "def main():\n    return [x for x in range(10)]\n\tdone\n",
    "Grüße, façade, naïve — 日本語のテキスト 한국어 😀👍🏽👩‍👩‍👧 é́ \u2028 end",
]


@cache
def tiny() -> object:
    """A real byte-level BPE tokenizer: every byte is a token, frequent pairs are merged, two ids are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<stop>", "<start>"]
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def decode(ids: list[int]) -> str:
    return tiny().decode(ids, skip_special_tokens=True)  # type: ignore[attr-defined]


def encode(text: str) -> list[int]:
    return list(tiny().encode(text).ids)  # type: ignore[attr-defined]


def in_bytes(text: str) -> list[int]:
    """The text with one token a byte, whatever could be merged."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [tiny().token_to_id(char) for piece, _ in pieces for char in piece]  # type: ignore[attr-defined]


def step(drafted: list[int], accepted: int, token: int | None, row: int = 0, source: int = 0) -> Step:
    n = len(drafted)
    parents, sources = tuple(range(-1, n - 1)), (source,) * n
    return Step(row, n, tuple(drafted), parents, sources, tuple(range(accepted)), token, (), (), 0.5, (), 0.0, 0.0, 0.0)


def fed(*events: Step | Finished | Prefill, with_decode: Decode = decode, drafting: bool = True) -> Spanner:
    spanner = Spanner(with_decode, drafting)
    for event in events:
        spanner.feed(event)
    return spanner


def end(reason: str = "eos", row: int = 0) -> Finished:
    return Finished(row, reason)  # type: ignore[arg-type]


def test_each_kind_of_token_becomes_a_span_in_reading_order() -> None:
    words = {1: "A", 2: " river", 3: " is", 4: " down", 5: " on", 6: " toward"}
    spanner = fed(
        step([], 0, 1), step([2, 3, 4, 5], 2, 6), end(), with_decode=lambda ids: "".join(words[i] for i in ids)
    )
    assert spanner.spans == [
        Span("A", "target"),
        Span(" river is", "accepted"),
        Span(" down", "rejected"),
        Span(" on", "discarded"),
        Span(" toward", "target"),
    ]
    assert committed_text(spanner.spans) == "A river is toward"
    assert spanner.ids == [1, 2, 3, 6]


def test_plain_decoding_is_one_plain_span() -> None:
    ids = encode(CORPUS[0])
    assert fed(*(step([], 0, token) for token in ids), end(), drafting=False).spans == [Span(CORPUS[0], "plain")]


def test_sources_keep_their_spans_apart() -> None:
    one, two = step([5], 1, None, source=0), step([6], 1, None, source=1)
    assert [span.source for span in fed(one, two, with_decode=lambda ids: "x" * len(ids)).spans] == [0, 1]


def test_a_character_split_over_tokens_shows_whole_in_the_colour_of_the_token_that_completed_it() -> None:
    a, b, c, d = in_bytes("😀")
    spanner = fed(step([], 0, a), step([b, c], 2, d))
    assert spanner.spans == [Span("😀", "bonus")]
    spanner = fed(step([], 0, a), step([b, c, d], 3, in_bytes("!")[0]))
    assert spanner.spans == [Span("😀", "accepted"), Span("!", "bonus")]


def test_incomplete_bytes_wait_and_show_once_at_the_end() -> None:
    head = in_bytes("x日")[:-1]
    spanner = fed(*(step([], 0, token) for token in head))
    assert committed_text(spanner.spans) == "x"
    spanner.feed(end("interrupted"))
    assert committed_text(spanner.spans) == "x" + REPLACEMENT == decode(head)


def test_a_rejected_draft_reads_as_it_would_have_in_its_place() -> None:
    a, b, c = in_bytes("日")
    other = in_bytes("本")
    spanner = fed(step([], 0, in_bytes("x")[0]), step([a, b, c], 2, c), end())
    assert [span.kind for span in spanner.spans] == ["target", "rejected", "target"]
    assert [span.text for span in spanner.spans] == ["x", "日", "日"]
    spanner = fed(step([], 0, a), step([other[0], other[1]], 0, b), step([], 0, c), end())
    assert [span.text for span in spanner.spans if span.kind == "rejected"] == [REPLACEMENT]
    assert committed_text(spanner.spans) == "日"


def test_a_rejected_stop_token_is_seen() -> None:
    spanner = fed(step([], 0, encode("A")[0]), step([0], 0, encode(" b")[0]), end())
    assert [span.text for span in spanner.spans if span.kind == "rejected"] == [NO_TEXT]
    assert NO_TEXT not in committed_text(spanner.spans)


def test_discarded_drafts_are_read_after_the_rejected_one() -> None:
    a, b, c = in_bytes("日")
    assert [
        (span.text, span.kind)
        for span in fed(step([], 0, in_bytes("x")[0]), step([a, b, c], 0, in_bytes("y")[0]), end()).spans
    ] == [
        ("x", "target"),
        (REPLACEMENT, "rejected"),
        (REPLACEMENT + "日", "discarded"),
        ("y", "target"),
    ]


def rounds(data: st.DataObject, ids: list[int], size: int) -> list[Step]:
    """The ids as a run: rounds of any shape, with arbitrary refused and discarded drafts among them."""
    steps, done = [step([], 0, ids[0])], 1
    token = st.integers(0, size - 1)
    while done < len(ids):
        accepted = data.draw(st.integers(0, min(4, len(ids) - done)))
        drafts = ids[done : done + accepted]
        done += accepted
        own = ids[done] if done < len(ids) else None
        done += 1
        steps.append(step(drafts + (data.draw(st.lists(token, max_size=3)) if own is not None else []), accepted, own))
    return steps


def check_exact(data: st.DataObject, ids: list[int], size: int, with_decode: Decode) -> None:
    spanner = fed(*rounds(data, ids, size), with_decode=with_decode)
    before = committed_text(spanner.spans)
    spanner.feed(end())
    assert committed_text(spanner.spans) == with_decode(ids)
    assert committed_text(spanner.spans).startswith(before)
    assert all((a.kind, a.source) != (b.kind, b.source) for a, b in zip(spanner.spans, spanner.spans[1:], strict=False))
    assert all(span.text for span in spanner.spans)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_committed_spans_are_exactly_the_decoded_answer_for_any_ids(data: st.DataObject) -> None:
    size = tiny().get_vocab_size()  # type: ignore[attr-defined]
    check_exact(data, data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=60)), size, decode)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.text(min_size=1, max_size=60))
def test_committed_spans_are_exactly_the_decoded_answer_for_any_text(data: st.DataObject, text: str) -> None:
    ids = data.draw(st.sampled_from([encode, in_bytes]))(text)
    check_exact(data, ids, tiny().get_vocab_size(), decode)  # type: ignore[attr-defined]
    assert committed_text(fed(*(step([], 0, token) for token in ids), end()).spans) == text


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tokenizer_that_strips_the_first_space_and_falls_back_to_bytes_is_read_as_a_whole(
    data: st.DataObject,
) -> None:
    """The manner of SentencePiece: a leading space goes, and a broken run of bytes changes what it began with."""
    words = [" river", " is", " a", "s", ".", "\n"]

    def sentence(ids: list[int]) -> str:
        text, run = "", b""
        for token in [*ids, 0]:
            if token >= len(words):
                run += bytes([token - len(words)])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            text, run = text + words[token], b""
        return text[: len(text) - len(words[0])].removeprefix(" ")

    ids = data.draw(
        st.lists(st.integers(0, 5) | st.integers(0, 255).map(lambda byte: byte + 6), min_size=1, max_size=40)
    )
    assert committed_text(fed(*rounds(data, ids, 262), end(), with_decode=sentence).spans) == sentence(ids)


@pytest.fixture(scope="module")
def default_tokenizer(default_pair: Any) -> Any:
    """The default model's tokenizer as its library has it."""
    return default_pair.tokenizer.backend_tokenizer


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_default_models_tokenizer_is_read_exactly(default_tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 49_151), min_size=1, max_size=50))
    check_exact(data, ids, 49_152, lambda some: default_tokenizer.decode(some, skip_special_tokens=True))


def test_the_words_that_another_text_has_not_are_marked_and_nothing_else_changes() -> None:
    spans = [
        Span("A river ", "accepted", 1),
        Span("lake", "rejected"),
        Span("runs to", "target"),
        Span(" sea.", "bonus"),
    ]
    assert differing(spans, "A river runs to the sea.") == (*spans[:3], Span(" sea.", "bonus"))
    other = differing(spans, "A brook runs to sea.")
    assert other == (Span("A", "accepted", 1), Span(" river", "differs", 1), Span(" ", "accepted", 1), *spans[1:])
    assert committed_text(differing(spans, "")) == committed_text(spans)
    assert {span.kind for span in differing(spans, "")} == {"differs", "rejected"}
