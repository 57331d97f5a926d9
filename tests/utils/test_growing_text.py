"""Texts of tokens, joined, are the text of all: of tokenizers that fall back to bytes too, which decode a run of them
only as a whole."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st

from utils.growing_text import REPLACEMENT, Window

HELLO, WORLD = 256, 257


@cache
def falling_back() -> Any:
    """A tokenizer as Llama 2's and Gemma's are: what its vocabulary lacks is spelt byte by byte."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁hello": HELLO, "▁world": WORLD, "<unk>": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return made


def decode(ids: list[int]) -> str:
    return str(falling_back().decode(ids))


def grown(ids: list[int], context: int = 0) -> str:
    """What is handed out of `ids`, of which the first so many were there before."""
    window = Window(decode, ids[:context])
    return "".join(map(window.push, ids[context:])) + window.rest()


SPELT = ["สวัสดีครับผมชื่อ", "안녕하세요반갑습니다저는", "😀" * 9, "Grüße, façade, naïve"]


@given(
    st.lists(st.one_of(st.text(st.characters(codec="utf-8", exclude_characters=REPLACEMENT)), st.sampled_from(SPELT)))
)
def test_whatever_is_spelt_in_bytes_is_handed_out_as_it_reads(texts: list[str]) -> None:
    ids = [HELLO, *(one for text in texts for one in (*text.encode(), WORLD))]
    assert grown(ids) == decode(ids)


@pytest.mark.parametrize("text", SPELT)
def test_what_goes_on_behind_other_text_is_handed_out_alone(text: str) -> None:
    """Wherever that was cut, between characters or inside one."""
    spelt = text.encode()
    for cut in range(1, len(spelt)):
        assert grown([HELLO, *spelt], 1 + cut) == text[len(spelt[:cut].decode(errors="ignore")) :]


@pytest.mark.parametrize("before", ["", "a", "😀"])
@pytest.mark.parametrize("words", [1, 5, 60])
def test_a_stray_byte_costs_no_more_than_itself(before: str, words: int) -> None:
    ids = [HELLO, *before.encode(), 0xFF, *[WORLD] * words]
    assert grown(ids).replace(REPLACEMENT, "") == f"hello{before}" + " world" * words
