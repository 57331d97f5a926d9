"""The lane `beam`: on the screen, in the console, in race mode, in JSON and in the benchmark."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.command_line.run import run_once
from app.lanes.answers import may_differ, run_lane
from app.lanes.costs import event_of
from app.lanes.lane import PairEngine
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.screen.spans import BeamReader, Span
from app.settings.table import ModelOptions, Settings
from sampling.beam import BeamPlan
from sampling.events import Beam, BeamStep, BeamTree, Call, Finished, Prefill
from sampling.stats.metrics import Meter
from sampling.stats.summary import merge
from tests.app.screen.test_trace import decode
from tests.support.scripted import run_lines
from utils.progress import never


def beam_step(*beams: tuple[int, int, float, float, str], num_beams: int = 2, seconds: float = 0.01) -> BeamStep:
    return BeamStep(
        0,
        num_beams,
        tuple(Beam(*beam) for beam in beams),  # type: ignore[arg-type]
        (Call("target", 1, seconds),),
        seconds,
        0.001,
        0.0005,
    )


# "A river is" against "A sea" (finished) and "A down toward"; decode of tests/app/screen/test_trace.py.
STEPS = [
    beam_step((0, 1, -0.1, -0.1, "kept"), (0, 4, -2.0, -2.0, "kept"), (0, 6, -3.0, -3.0, "dropped")),
    beam_step((0, 2, -0.5, -0.4, "kept"), (0, 0, -0.6, -0.5, "finished"), (0, 7, -0.7, -0.6, "merged")),
    beam_step((0, 3, -0.9, -0.6, "kept"), (0, 8, -1.4, -0.9, "kept"), (0, 7, -4.0, -2.0, "dropped")),
]


# ---------------------------------------------------------------- text


def test_the_best_beam_is_the_answer_so_far_and_may_change() -> None:
    reader = BeamReader(decode)
    assert reader.spans == []
    for step, text in zip(STEPS[:2], ("A", "A river"), strict=True):
        reader.feed(step)
        assert reader.spans == [Span(text, "plain")]
    reader.feed(STEPS[2])
    assert reader.spans == [Span("A", "plain")]  # the finished one leads again
    reader.feed(Finished(0, "eos"))
    assert reader.spans == [Span("A", "plain")]


def test_an_interrupted_search_keeps_its_running_beams() -> None:
    reader = BeamReader(decode)
    for event in (*STEPS, Finished(0, "interrupted")):
        reader.feed(event)
    assert reader.spans == [Span("A", "plain")]
    reader = BeamReader(decode)
    reader.feed(Finished(0, "interrupted"))
    assert reader.spans == []


def test_a_continued_answer_shows_what_it_adds() -> None:
    reader = BeamReader(decode, context=[1, 2])
    reader.feed(beam_step((0, 3, -0.1, -0.1, "kept"), (0, 4, -2.0, -2.0, "kept")))
    assert reader.spans == [Span(" is", "plain")]


# ---------------------------------------------------------------- figures


def test_the_figures_count_the_tokens_of_the_answer_and_every_pass() -> None:
    events = [Prefill(4, 4, 0.5), *STEPS]
    meter = Meter(3)
    for event in events:
        meter.add(event)
    assert meter.ids == [1, 0]  # the best so far: the finished one
    meter.add(Finished(0, "eos"))
    stats = meter.stats
    assert (stats.predicted_n, stats.target_passes, stats.beams, stats.draft_n) == (2, 2, 2, 0)
    assert stats.predicted_ms == pytest.approx(2 * 11.5)
    assert stats.ttft_ms == pytest.approx(511.5)
    assert stats.predicted_per_second == pytest.approx(1000 / 23)
    assert (stats.calls, stats.acceptance_histogram, stats.alpha) == ({"target": 2}, (), None)
    assert stats.to_json()["beams"] == 2
    assert merge([stats, stats]).beams == 2
    assert merge([]).beams == 0


# ---------------------------------------------------------------- lanes


def test_the_lane_searches_as_the_settings_say(engine: PairEngine) -> None:
    settings = Settings(num_beams=3, beam_top_k=2, min_length=5, length_penalty=0.5)
    lane = engine.lane("beam", settings)
    assert lane.beams == BeamPlan(3, 2, 5, 0.5)
    assert engine.lane("beam", Settings()).beams == BeamPlan()
    assert may_differ(lane)
    assert (lane.drafts, lane.takes_gamma, lane.pace, lane.shares_target) == (False, False, None, True)
    assert engine.lane("ar", settings).beams is None


# ---------------------------------------------------------------- console, run, bench


def test_the_conversation_goes_on_from_the_searched_answer(catalogue: Path) -> None:
    fed: list[int] = []

    def look(actions: Any) -> None:
        fed.append(actions.session.rollback([actions.chat.ids])[0] - len(actions.chat.ids))

    ran = run_lines(catalogue, "/compare ar,beam", "one", "/trace", "/stats", look, "two", "/continue", "/exit")
    assert ran.code == 0
    first, second = ran.state.chat.turns
    assert second.prompt[: len(first.prompt) + 12] == (*first.prompt, *first.answer)
    assert first.answer == tuple(ran.state.answers[0].tracks[1].meter.ids)
    assert len(second.answer) == 24
    assert "4 beams  11 passes" in ran.after("one")
    assert "differs" not in ran.text
    assert ran.after("/trace").startswith("error: a beam search has no rounds")
    assert "4 beams" in ran.after("/stats")
    assert fed[0] > -12  # all of the prompt is cached, and what the beams shared


def test_a_saved_search_can_be_read_again(catalogue: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    ran = run_lines(catalogue, "/compare beam", "one", f"/save {file}")
    (lane,) = json.loads(file.read_text())["turns"][0]["decodings"][0]["lanes"]
    events = [event_of(event) for event in lane["events"]]
    tree = BeamTree()
    for event in events:
        if isinstance(event, BeamStep):
            tree.add(event)
    tree.close()
    assert list(tree.best.tokens) == lane["ids"] == list(ran.state.chat.turns[0].answer)


def test_run_prints_the_answer_once_it_is_known(options: ModelOptions, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(max_new_tokens=9, compare=("beam",))
    assert run_once(settings, options, "What is this?", as_json=False) == 0
    out, err = capsys.readouterr()
    engine = load_engine(Settings(quiet=True), options, never)
    prompt = prompt_ids(engine, "What is this?", settings)
    answer = run_lane(engine.lane("beam", settings), prompt, lambda ids: engine.tokenizer.decode(ids), interrupt=never)
    assert out.encode("utf-8", "replace").decode() == answer.text + "\n" * (not answer.text.endswith("\n"))
    assert "| 4 beams  8 passes" in err
