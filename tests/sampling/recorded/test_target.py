"""A recorded target: reading its file, what it refuses, and that a cascade over it gives the recorded answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.drafters.cascade import ChainDrafter, cascade_of
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.recorded import RecordedLM
from sampling.types import Draft, Rows
from tests.support.refusals import refused
from tests.support.runs import answers, decode, emitted, greedy, reasons, steps
from tests.support.students import make_student, make_target
from tests.support.toys import TableLM
from utils.logits_processors import make_processor

V, END = 8, 7
PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 1, 2, 5, 6]]


def written(folder: Path, told: Any) -> Path:
    file = folder / "answers.json"
    file.write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")
    return file


# -- reading --------------------------------------------------------------------------------------


def test_a_map_of_joined_ids_is_read(tmp_path: Path) -> None:
    lm = RecordedLM.read(written(tmp_path, {"12_7_99": "5_6", "3": "4"}), end_id=2)
    assert lm.answers == {(12, 7, 99): [5, 6], (3,): [4]}
    assert (lm.name, lm.end_id, lm.vocab_size) == ("target", 2, 100)
    assert RecordedLM.read(written(tmp_path, {"3": "4"}), end_id=50).vocab_size == 51
    named = RecordedLM.read(written(tmp_path, {"3": "4"}), 2, 32_000, "vicuna-7b")
    assert (named.vocab_size, named.name) == (32_000, "vicuna-7b")


NEITHER = 'it must be tensor(…) lines, a JSON map of "id_id_…" to "id_id_…" or JSON lines'


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("", " holds no recording: it is empty"),
        ('{"1": "2"', ":1: no JSON: Expecting ',' delimiter: line 1 column 10 (char 9)"),
        ("[[1, 2]]", f" holds no recording: {NEITHER}"),
        ('"1_2"', f" holds no recording: {NEITHER}"),
        ({"1_2": "3__4"}, ':1: the entry "1_2" must be ids joined by "_"'),
        ({"1_2": ""}, ':1: the entry "1_2" must be ids joined by "_"'),
        ({"": "1"}, ':1: the entry "" must be ids joined by "_"'),
        ({"1_-2": "3"}, ':1: the entry "1_-2" must be ids joined by "_"'),
        ({"1_2": "3_x"}, ':1: the entry "1_2" must be ids joined by "_"'),
        ({"1_2": "3_²"}, ':1: the entry "1_2" must be ids joined by "_"'),
        ({"1 2": "3"}, ':1: the entry "1 2" must be ids joined by "_"'),
        ({"1_2": [3, 4]}, ':1: the entry "1_2" must be ids joined by "_"'),
        ({"_".join("1" * 40): None}, f':1: the entry "{"_".join("1" * 15)}…" must be ids joined by "_"'),
        ('{\n"1": "2",\n"1_2": "x"}', ':3: the entry "1_2" must be ids joined by "_"'),
    ],
)
def test_a_file_that_holds_no_recording_is_refused_in_one_line(tmp_path: Path, told: Any, why: str) -> None:
    file = written(tmp_path, told)
    assert refused(RecordedLM.read, file, end_id=2) == f"{file}{why}"


def test_nothing_recorded_and_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    refused(RecordedLM.read, written(tmp_path, {}), end_id=2, match=r"^the recording of target holds no answer$")
    for told, end in (({"1": "2_8"}, 0), ({"8": "1"}, 0), ({"1": "2"}, 8)):
        refused(
            RecordedLM.read,
            written(tmp_path, told),
            end,
            vocab_size=V,
            match=r"^the recording of target holds id 8, its vocabulary ends at 7$",
        )


# -- what it says ---------------------------------------------------------------------------------


def recorded(**options: Any) -> RecordedLM:
    return RecordedLM({(1, 2): [3, 4, 5], (6,): [0]}, END, **options)


def said(session: Any, rows: Rows, drafted: list[list[int]]) -> list[list[int]]:
    """The best token behind each row and each of its drafts."""
    logits = session.score(rows, Draft.of(drafted))
    assert logits.shape == (len(rows), len(drafted[0]) + 1, V)
    law = make_processor(1.0)(logits)
    assert bool((law.max(dim=-1).values == 1).all()), "all the mass"
    return law.argmax(dim=-1).tolist()


def test_it_says_by_position_what_was_recorded_and_then_ends() -> None:
    """Whatever the drafts are; behind the last recorded token stands the end, again and again."""
    session = recorded().open([[1, 2]])
    assert session.initial == [[1, 2]]
    assert said(session, [[1, 2]], [[]]) == [[3]]
    assert said(session, [[1, 2]], [[3, 9 % V, 5]]) == [[3, 4, 5, END]]
    assert said(session, [[1, 2, 3, 4, 5]], [[0, 0]]) == [[END] * 3]
    assert said(session, [[1]], [[]]) == [[2]]  # the prompt itself is read in pieces


def test_rows_are_chosen_and_forks_go_their_own_way() -> None:
    session = recorded().open([[1, 2], [6]])
    session.score([[1, 2], [6]], Draft.empty(2))
    twin = session.fork()
    session.select(torch.tensor([1, 0, 1]))
    assert session.initial == [[6], [1, 2], [6]]
    assert said(session, [[6], [1, 2, 3], [6, 0]], [[], [], []]) == [[0], [4], [END]]
    assert twin.rollback([[1, 2], [6]]) == [2, 1]
    assert said(twin, [[1, 2], [6]], [[0], [0]]) == [[3, 4], [0, END]]
    chosen = session.fork()
    chosen.select(torch.tensor([1]))
    assert said(chosen, [[1, 2]], [[]]) == [[3]]
    assert session.rollback([[6], [1, 2, 3], [6, 0]]) == [1, 3, 2]


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3], [2, 1]])
def test_an_unknown_prompt_is_refused(prompt: list[int]) -> None:
    assert (
        refused(recorded(name="xxl").open, [[1, 2], prompt])
        == f"the recording of xxl holds no answer to this prompt of {len(prompt)} tokens"
    )


def test_a_tree_is_scored_by_depth() -> None:
    session = recorded().open([[1, 2]])
    answer = recorded().answer([1, 2])
    tree = Draft.of([[1, 2, 3]], parents=[-1, -1, 0])
    assert session.score([[1, 2]], tree).argmax(dim=-1)[0].tolist() == [answer[0], answer[1], answer[1], answer[2]]


def test_what_a_recording_does_not_have_is_refused_by_name() -> None:
    session = recorded(name="xxl").open([[1, 2]])
    refused(session.kv, 0, match=r"^xxl is a recording: it has no keys and values for a drafter to read$")
    states = r"^xxl is a recording: it has no hidden states for a drafter to read$"
    refused(session.hidden, match=states)
    refused(recorded(name="xxl").open, [[1, 2]], hidden=True, match=states)


def test_drafters_that_read_their_target_are_refused_in_one_line() -> None:
    target = make_target(V)
    glide = ModelDrafter(GlideLM(make_student("glide", target), 3))
    feature = FeatureDrafter(make_student("feature", target))
    lines = {
        "glide reads the cache of its target's session, got RecordedSession": cascade_of(
            [glide, MaxGramDrafter()], [[1, 1], [0, 1]]
        ),
        "target is a recording: it has no hidden states for a drafter to read": feature,
    }
    for line, drafter in lines.items():
        assert refused(decode, recorded(vocab_size=V), [[1, 2]], drafter, greedy(), length=4) == line


# -- in its model's place -------------------------------------------------------------------------


def live() -> TableLM:
    return TableLM(V, 1, sharpness=2.0, name="target")


def cascade() -> ChainDrafter:
    small = TableLM(V, 1, sharpness=2.0, name="small")
    small.table = small.table + 0.5 * TableLM(V, 9, sharpness=2.0).table
    return cascade_of([ModelDrafter(small), MaxGramDrafter()], [[3, 4], [0, 4]], 2.0)


@pytest.mark.parametrize("length", [1, 2, 17, 40])
def test_a_cascade_over_a_recording_does_what_it_does_over_the_model(length: int, tmp_path: Path) -> None:
    """The recorded answers, in the same rounds with the same calls; also of rows together that end by themselves."""
    stop = {END}
    told = answers(live(), PROMPTS, None, greedy(), length=length, stop=stop)
    file = {"_".join(map(str, row)): "_".join(map(str, own)) for row, own in zip(PROMPTS, told, strict=True)}
    lm = RecordedLM.read(written(tmp_path, file), END, V)
    for rows in ([PROMPTS[0]], [PROMPTS[1]], PROMPTS):
        options = {"length": length, "stop": stop, "gamma": cascade().traits.most}
        real, replayed = (decode(one, rows, cascade(), greedy(), **options) for one in (live(), lm))
        assert emitted(replayed, len(rows)) == [told[PROMPTS.index(row)] for row in rows]
        assert reasons(replayed) == reasons(real)
        assert [rounds(replayed, row) for row in range(len(rows))] == [rounds(real, row) for row in range(len(rows))]


def rounds(run: list[Any], row: int) -> list[Any]:
    return [
        (step.drafted, step.source, step.path, step.token, [call[:2] for call in step.calls])
        for step in steps(run, row)
    ]


def test_the_recording_of_a_cut_answer_ends_there() -> None:
    """Two tokens were recorded; the third is the end. Without stop ids the end comes again and again."""
    lm = RecordedLM({(1, 2): [3, 4]}, END, V)
    assert answers(lm, [[1, 2]], cascade(), greedy(), length=6, gamma=20, stop={END}) == [[3, 4, END]]
    assert answers(lm, [[1, 2]], cascade(), greedy(), length=6, gamma=20) == [[3, 4, END, END, END, END]]
