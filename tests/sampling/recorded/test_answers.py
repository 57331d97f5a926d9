"""Recordings of all formats: what was written is read back, and what is broken is named by file and line."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sampling.recorded import PEAK, RecordedLM, read_answers
from sampling.types import Draft
from tests.support.refusals import refused

SAMPLE = """tensor([[  518, 799, 596, 18873,  1265,   322,  1510,   372,  1283,   304,   596,
         7875, 29991, 2]])
"""
ROW = (518, 799, 596, 18873, 1265, 322, 1510, 372, 1283, 304, 596, 7875, 29991, 2)


def written(folder: Path, text: str) -> Path:
    file = folder / "recording"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_sample_of_the_demo_format_is_read(tmp_path: Path) -> None:
    (one,) = read_answers(written(tmp_path, SAMPLE), prompt_tokens=4).answers
    assert (one.prompt, one.answer) == (ROW[:4], ROW[4:])


def test_rows_and_tensors_follow_each_other(tmp_path: Path) -> None:
    text = "tensor([[1, 2, 3],\n        [4, 5,\n 6]])\n\ntensor([7, 8, 9], device='cuda:0', dtype=torch.int32)\n"
    found = read_answers(written(tmp_path, text), prompt_tokens=2).answers
    assert [(one.prompt, one.answer) for one in found] == [((1, 2), (3,)), ((4, 5), (6,)), ((7, 8), (9,))]
    starts = [[[9], [1]], [[4, 5]], [[7, 8]]]
    found = read_answers(written(tmp_path, text), starts).answers
    assert [(one.prompt, one.answer) for one in found] == [((1,), (2, 3)), ((4, 5), (6,)), ((7, 8), (9,))]
    alone = read_answers(written(tmp_path, text), starts, 0).answers
    assert [(one.prompt, one.answer) for one in alone] == [((9,), (1, 2, 3)), ((4, 5), (4, 5, 6)), ((7, 8), (7, 8, 9))]


rows = st.lists(st.lists(st.integers(0, 200_000), min_size=2, max_size=60), min_size=1, max_size=4)


@given(rows, st.integers(8, 120), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_ids_wrapped_at_any_width_are_read_back(
    tmp_path_factory: Any, ids: list[list[int]], width: int, together: bool, data: Any
) -> None:
    counts = [data.draw(st.integers(1, len(row) - 1)) for row in ids]
    bodies = ["[" + ", ".join(map(str, row)) + "]" for row in ids]
    whole = [f"tensor([{','.join(bodies)}])"] if together else [f"tensor([{body}])" for body in bodies]
    wrapped = "\n".join("\n".join(textwrap.wrap(one, width, break_long_words=False)) for one in whole)
    file = written(tmp_path_factory.mktemp("any"), wrapped + "\n")
    found = read_answers(file, [[row[:count]] for row, count in zip(ids, counts, strict=True)]).answers
    assert [[*one.prompt, *one.answer] for one in found] == ids
    assert [len(one.prompt) for one in found] == counts


def test_what_torch_prints_is_read(tmp_path: Path) -> None:
    tensor = torch.randint(0, 49_152, (3, 90), generator=torch.Generator().manual_seed(0))
    found = read_answers(written(tmp_path, f"{tensor}\n{tensor[0]}\n"), prompt_tokens=1).answers
    assert [[*one.prompt, *one.answer] for one in found] == [*tensor.tolist(), tensor[0].tolist()]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("tensor([[1, 2]])\nhello", 2, "expected tensor([[…]]), rows of ids, got 'hello'"),
        ("tensor([[1, 2]])\ntensor([[1,\n 2]", 2, "expected tensor([[…]]), rows of ids, got 'tensor([[1,'"),
        ("\n\ntensor([[1, x]])", 3, "a row must be a list of ids, at least one"),
        ("tensor([[1, 2],\n [3, ..., 4]])", 2, "a row (torch has shortened a tensor: torch.set_printoptions"),
        (
            "tensor([[1, 2], ..., [3, 4]])",
            1,
            "expected tensor([[…]]), rows of ids, got 'tensor([[1,' (torch has shortened a tensor",
        ),
        ("tensor([[1, 2],\n\n [-3, 4]])", 3, "a row must be a list of ids, at least one, none below 0"),
        ("tensor([[1, 2.5]])", 1, "a row must be a list of ids, at least one"),
        ("tensor([[[1, 2]]])", 1, "expected tensor([[…]]), rows of ids"),
        ("tensor([])", 1, "a row must be a list of ids, at least one"),
        ("tensor([[1, 2]])\ntensor([[4]])", 2, "row 2 of 1 tokens has no answer after its prompt"),
        (
            '{"vocab_size": 9, "end_id": 2}\n{"prompt_ids": [1], "answer_ids": [2.5]}',
            2,
            "answer_ids must be a list of ids",
        ),
        ('{"vocab_size": 9, "end_id": 2}\n[1]\n{}', 2, "must be a JSON object, got [1]"),
        ('{"vocab_size": 9, "end_id": 2}\n{"prompt_ids": \n{}', 2, "no JSON: Expecting value"),
        ('{"vocab_size": 0, "end_id": 2}\n{}', 1, "vocab_size must be a whole number, 1 or more, got 0"),
        ('{"vocab_size": 9, "end_id": "2"}\n{}', 1, "end_id must be a whole number, 0 or more, got '2'"),
        ('{"vocab_size": 9, "pass_seconds": {"1": -1}}\n{}', 1, "pass_seconds must map numbers of tokens to seconds"),
    ],
)
def test_what_is_broken_is_named_by_file_and_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    file = written(tmp_path, text)
    refused(read_answers, file, prompt_tokens=1, match=rf"^{re.escape(str(file))}:{line}: {re.escape(why)}")


def map_of(folder: Path, entries: dict[str, str], **told: Any) -> tuple[Any, ...]:
    """How the values of a map were taken, the prompts with their answers, the start id, and how many have none."""
    found = read_answers(written(folder, json.dumps(entries)), **told)
    rows = [(one.prompt, one.answer) for one in found.answers]
    return found.reading, rows, found.header.get("start_id"), found.unanswered


def test_values_that_begin_with_their_prompts_are_split_behind_them(tmp_path: Path) -> None:
    told = {"1_5_6": "1_5_6_7", "1_5": "1_5_8_9", "1_7": "1_7"}
    split = [((1, 5, 6), (7,)), ((1, 5), (8, 9))]
    assert map_of(tmp_path, told) == map_of(tmp_path, told, arch="causal") == ("prompt first", split, None, 1)
    whole = [((1, 5, 6), (1, 5, 6, 7)), ((1, 5), (1, 5, 8, 9)), ((1, 7), (1, 7))]
    assert map_of(tmp_path, told, prompt_tokens=0) == ("answers alone", whole, None, 0)
    assert RecordedLM.read(written(tmp_path, json.dumps(told)), end_id=2).answers == {(1, 5, 6): [7], (1, 5): [8, 9]}


@pytest.mark.parametrize(
    ("told", "reading", "rows"),
    [
        # the begin-of-text id stands only in the values, only in the keys, or is another in each: no prefix then
        ({"5_6": "1_5_6_7", "8_9": "1_8_9_3"}, "prompt first", [((1, 5, 6), (7,)), ((1, 8, 9), (3,))]),
        ({"1_5_6_4": "5_6_4_7", "1_8_9_4": "8_9_4"}, "prompt first", [((5, 6, 4), (7,))]),
        ({"5_6": "1_5_6_7", "8_9": "2_8_9_3"}, "answers alone", [((5, 6), (1, 5, 6, 7)), ((8, 9), (2, 8, 9, 3))]),
        ({"5": "1_5_7"}, "answers alone", [((5,), (1, 5, 7))]),  # one id may agree by chance
        ({"1_5_6": "5_6_7"}, "answers alone", [((1, 5, 6), (5, 6, 7))]),
        ({"5_6": "5_6_7", "5_8": "9"}, "answers alone", [((5, 6), (5, 6, 7)), ((5, 8), (9,))]),  # no more than half
        ({"5_6": "5_6"}, "answers alone", [((5, 6), (5, 6))]),  # there would be no answer at all
    ],
)
def test_what_the_values_begin_with_decides_for_all_of_them(
    tmp_path: Path, told: dict[str, str], reading: str, rows: list[Any]
) -> None:
    assert map_of(tmp_path, told)[:2] == (reading, rows)


def test_values_that_mostly_begin_with_their_prompts_are_not_guessed_at(tmp_path: Path) -> None:
    told = {"5_6": "5_6_7", "5_8": "5_8_9", "5_9": "7_7"}
    assert refused(map_of, tmp_path, told) == (
        f'{tmp_path / "recording"}: 2 of 3 values begin with their prompts\' ids, that of "5_9" does not: '
        "prompt_tokens 0 takes all of them as answers alone"
    )
    assert map_of(tmp_path, told, prompt_tokens=0)[0] == "answers alone"


def test_an_encoder_decoder_models_values_begin_with_its_start_id(tmp_path: Path) -> None:
    told = {"5_6_1": "0_7_1", "5_1": "0_5_1", "8_1": "0"}
    rows = [((5, 6, 1), (7, 1)), ((5, 1), (5, 1))]
    assert map_of(tmp_path, told, arch="seq2seq") == ("start first", rows, 0, 1)
    assert map_of(tmp_path, told, arch="seq2seq", start_id=0) == ("start first", rows, 0, 1)
    alone = {"5_6_1": "7_1", "5_1": "5_1"}
    assert map_of(tmp_path, alone, arch="seq2seq", start_id=0) == ("answers alone", rows, 0, 0)
    for entries, start, why in (
        (alone, None, "must begin with one decoder start id, got 5, 7"),
        ({"5_1": "0_1", "6_1": "4"}, 0, "must begin with the decoder start id 0, got 0, 4"),
    ):
        refused(
            map_of,
            tmp_path,
            entries,
            arch="seq2seq",
            start_id=start,
            match=rf"^.*recording: all values of an encoder-decoder model {why}$",
        )
    lm = RecordedLM.read(written(tmp_path, json.dumps(told)), end_id=1, start_id=0)
    assert (lm.start_id, lm.answers) == (0, {(5, 6, 1): [7, 1], (5, 1): [5, 1]})
    printed = read_answers(written(tmp_path, "tensor([[0, 7, 1]])"), [[[5, 1]]], 0, "seq2seq")
    assert [(one.prompt, one.answer) for one in printed.answers] == [((5, 1), (7, 1))]


def test_json_lines_say_themselves_of_what_kind_they_are(tmp_path: Path) -> None:
    one = {"prompt_ids": [5, 1], "answer_ids": [0, 1]}
    causal, seq2seq = lines({"vocab_size": 9}, one), lines({"vocab_size": 9, "start_id": 0}, one)
    assert read_answers(written(tmp_path, causal), arch="causal").answers[0].answer == (0, 1)
    assert read_answers(written(tmp_path, seq2seq), arch="seq2seq").answers[0].answer == (0, 1)
    assert read_answers(written(tmp_path, causal), arch="seq2seq", start_id=3).header["start_id"] == 3
    for text, arch, why in (
        (causal, "seq2seq", "no start_id, arch must be causal"),
        (seq2seq, "causal", "start_id 0, arch must be seq2seq"),
    ):
        refused(read_answers, written(tmp_path, text), arch=arch, match=rf"^.*recording: its header has {why}$")  # type: ignore[arg-type]


HEADER = {"vocab_size": 50, "end_id": 2, "stop_ids": [2, 7], "pass_seconds": {"1": 0.5, "4": 0.6}, "tokenizer": "abc"}


def lines(*told: Any) -> str:
    return "".join(json.dumps(one) + "\n" for one in told)


def test_json_lines_with_events_between_them_are_read(tmp_path: Path) -> None:
    text = lines(
        HEADER,
        {"event": "step", "drafted": [3]},
        {"prompt_ids": [4, 5], "answer_ids": [6, 2], "best_ids": [[6, 1], [2, 9]], "prompt": "hello"},
        {"prompt_ids": [9], "answer_ids": []},
        {"prompt_ids": [8], "answer_ids": [3], "best_ids": [[3, 4]]},
        {"prompt_ids": [4, 5], "answer_ids": [6, 7], "best_ids": [[6, 1, 0], [7, 9, 8]]},
    )
    found = read_answers(written(tmp_path, text + '{"prompt_ids": [1], "answ'))  # stopped while it was written
    assert [(one.prompt, one.answer) for one in found.answers] == [((4, 5), (6, 7)), ((8,), (3,))]
    assert (found.header["vocab_size"], found.stop_ids, found.best, found.highest) == (50, {2, 7}, 2, 8)
    assert found.unanswered == 1
    assert (found.pass_seconds, found.header["tokenizer"]) == ({1: 0.5, 4: 0.6}, "abc")
    only = read_answers(written(tmp_path, lines({"prompt_ids": [1], "answer_ids": [2]})))
    assert (only.answers[0].answer, only.header.get("vocab_size"), only.stop_ids, only.best) == (
        (2,),
        None,
        frozenset(),
        1,
    )


def test_a_recording_says_what_its_file_tells(tmp_path: Path) -> None:
    text = lines(HEADER, {"prompt_ids": [4, 5], "answer_ids": [6, 2], "best_ids": [[6, 1, 49], [2, 9]]})
    lm = RecordedLM.read(written(tmp_path, text), end_id=0)
    assert (lm.vocab_size, lm.end_id, lm.answers) == (50, 2, {(4, 5): [6, 2]})
    logits = lm.open([[4, 5]]).score([[4, 5]], Draft.of([[6, 2]]))
    assert logits[0, 0].topk(3).indices.tolist() == [6, 1, 49]
    assert logits[0, 1].topk(2).indices.tolist() == [2, 9]
    assert logits.softmax(-1).max(-1).values.tolist() == [[1.0, 1.0, 1.0]]
    assert (logits[0, 0, 6], logits[0, 2].argmax()) == (PEAK, 2)
    smaller = RecordedLM({(4,): [5]}, end_id=2, vocab_size=49).open([[4]])  # a target without the last id
    beside = lm.open([[4, 5]], target=smaller).score([[4, 5]], Draft.empty(1))
    assert beside.shape == (1, 1, 49)
    assert beside[0, 0].topk(2).indices.tolist() == [6, 1]
