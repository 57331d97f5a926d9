"""What was said before in the console: which answers are looked at, by whom, and when they are forgotten."""

from pathlib import Path

import pytest

from app.bench.run import Bench
from app.lanes.lane import PairEngine
from app.settings.table import Settings
from tests.support.bench import bench_with
from tests.support.scripted import Ran, catalogue_of, run_lines
from tests.support.tiny import tiny_pair

LONG = {"max_new_tokens": 40, "gamma": 8, "temperature": 1.0}  # a random model loops when it is greedy


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    return catalogue_of(
        folder, {"tiny": tiny_pair(folder / "tiny", stop=False), "tiny-other": tiny_pair(folder / "other", stop=False)}
    )


def passes(ran: Ran) -> list[int]:
    """Passes of the target in the last lane of each answer."""
    assert not ran.errors
    assert "differs" not in ran.text
    return [answered.tracks[-1].meter.stats.target_passes for answered in ran.state.answers]


@pytest.mark.parametrize("word", ["suffix", "tables"])
def test_what_is_asked_again_is_drafted_from_the_answer_before(catalogue: Path, word: str) -> None:
    """All at once there would be 5 passes: 39 tokens behind the first, 9 a pass."""
    lines = (f"/drafter {word}", "what was it", "/clear", "what was it", "/clear all", "what was it")
    first, again, forgotten = passes(run_lines(catalogue, *lines, settings=LONG))
    assert again < first / 2
    assert forgotten == first


def test_undone_answers_count_too(catalogue: Path) -> None:
    first, again = passes(run_lines(catalogue, "/drafter suffix", "what was it", "/undo", "what was it", settings=LONG))
    assert again < first / 2


def test_it_can_be_turned_off(catalogue: Path) -> None:
    lines = ("/drafter tables", "/set suffix=off", "what was it", "/clear", "what was it", "/set suffix=auto", "/clear")
    first, again, looked = passes(run_lines(catalogue, *lines, "what was it", settings=LONG))
    assert again == first
    assert looked < first / 2


def test_a_loaded_chat_was_said_before(catalogue: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    (first,) = passes(run_lines(catalogue, "/drafter suffix", "what was it", f"/save {file}", settings=LONG))
    ran = run_lines(catalogue, "/drafter suffix", f"/load {file}", "/clear", "what was it", settings=LONG)
    assert passes(ran)[-1] < first / 2


def test_no_lane_reads_what_another_lane_of_the_same_turn_said(catalogue: Path) -> None:
    beside = passes(run_lines(catalogue, "one", settings={"compare": ("ar", "match", "suffix"), **LONG}))
    assert beside == passes(run_lines(catalogue, "one", settings={"compare": ("suffix",), **LONG}))


def test_bench_does_not_look_unless_asked(catalogue: Path) -> None:
    """The console's /bench, whose session knows the answers; then what was asked for: the setting, and the lane."""
    from app.prompts.questions import Question

    ran = run_lines(catalogue, "/drafter tables", "what was it", settings=LONG)
    first = passes(ran)[0]
    engine = ran.state.engine()
    questions = [Question(("what was it",), "first", 1), Question(("what was it",), "again", 2)]

    def told(methods: tuple[str, ...], **changes: str) -> list[list[int]]:
        made = Settings(**LONG, **changes)
        args = bench_with(methods=methods, gammas=(8,), repeat=2)
        bench = Bench(PairEngine(engine.loaded), made, args, questions, lambda: False)
        bench.run()
        return [[answer.stats.target_passes for row in item.answers for answer in row.values()] for item in bench.items]

    assert told(("tables",)) == [[first] * 2] * 2
    for once, again in (told(("tables",), suffix="on"), told(("suffix",))):
        assert once == [first] * 2, "a repeat of a prompt is not told by its first"
        assert max(again) < first / 2
