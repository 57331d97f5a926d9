"""A recorded session is shown again without any model, exactly as it was: texts, frames at every event, traces."""

import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from rich.console import Console

from app.command_line.main import main
from app.lanes.costs import event_of
from app.lanes.race import paced, timed
from app.replay.player import Player
from app.replay.session_log import LoggingDecoder, ReplayingDecoder, SessionLogWriter, opened, read_log
from app.screen.live import Track, frame
from app.screen.palette import Look
from app.screen.view import Surface
from app.settings.table import Settings
from sampling.events import Finished, Prefill, Step
from tests.support.panes import printed
from tests.support.refusals import refused
from tests.support.scripted import Ran, catalogue_of, run_lines
from tests.support.tiny import TinyPair, write_prompts
from utils.errors import UsageError, UserError

OPTIONS = {
    "compare": "ar,spec,ngram,cascade,beam",
    "cascade": "model,maxgram",
    "k_matrix": "[[3,2],[0,3]]",
    "lenience": 2,
    "num_beams": 3,
}
HOSTILE = "one [red]two[/red] <b> \x1b[31m 漢字 \U0001f600"


@pytest.fixture(scope="module")
def session(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """Three recorded answers: greedy, its continuation, and a sampled one under gamma auto."""
    folder = tmp_path_factory.mktemp("session")
    file = folder / "a session.jsonl"
    lines = (HOSTILE, "/continue", "/set temperature=0.9 gamma=auto compare=spec,ar", "three")
    return file, run_lines(
        catalogue_of(folder, {"tiny": pair}), *lines, settings={**OPTIONS, "max_new_tokens": 14, "record": str(file)}
    )


def drawn(thing: Any, look: Look) -> str:
    """What a renderable looks like, with its styles."""
    return printed(thing, look.width, "256" if look.color else None)


LOOKS = [Look(width, 30, color) for width in (30, 60, 100) for color in (True, False)]


def test_every_frame_is_the_live_one_at_every_event(session: tuple[Path, Ran]) -> None:
    file, ran = session
    recording = read_log(file)
    assert (len(recording.answers), recording.notes) == (3, [])
    for answered, answer in zip(ran.state.answers, recording.answers, strict=True):
        before = answer.opening.before
        lanes = [replace(track.lane, settings=answer.settings) for track in answered.tracks]  # a log has no looks
        live = [
            Track(lane, track.decode, track.meter.stats.prompt_n, before)
            for lane, track in zip(lanes, answered.tracks, strict=True)
        ]
        again = answer.tracks()
        assert [index for index, _ in answer.events] != sorted(index for index, _ in answer.events)  # they raced
        for number, (index, event) in enumerate(answer.events):
            for tracks in (live, again):
                tracks[index].feed(event)
            assert [track.spanner.spans for track in live] == [track.spanner.spans for track in again]
            assert [track.pane() for track in live] == [track.pane() for track in again]
            if number % 7:
                continue
            look = LOOKS[number % len(LOOKS)]
            one, other = (drawn(frame(tracks, look, Settings(debug=True)), look) for tracks in (live, again))
            assert one == other
        assert [track.events for track in again] == [  # without --log-top a log keeps no positions
            [replace(event, positions=()) if isinstance(event, Step) else event for event in track.events]
            for track in answered.tracks
        ]


def test_a_lossy_lane_says_so_live_and_when_its_log_is_replayed(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lossy.jsonl"
    settings = {"compare": "ar,lossy", "max_new_tokens": 24, "record": str(file), "log_top": 5}
    ran = run_lines(catalogue_of(tmp_path, {"tiny": pair}), "one two", settings=settings)
    plain, lossy = (track.answer() for track in ran.state.answers[0].tracks)
    assert plain.ids != lossy.ids
    capsys.readouterr()
    assert main(["replay", str(file)]) == 0
    for shown in (ran.text, capsys.readouterr().out):
        assert re.search(r"lossy: typical acceptance .*(\n.*)*\{#.+#\}(.*\n)*.*, lossy: differs from token \d+", shown)
        assert "{#x#} differs from AR" in " ".join(shown.split())
        assert "identical" not in shown
        assert "same distribution" not in shown
    assert main(["replay", str(file), "--view", "trace"]) == 0
    assert "lossy: a draft x is accepted if p(x) > min(0.09, 0.3 exp(-H))" in " ".join(capsys.readouterr().out.split())


def test_replay_needs_no_model_and_no_tokenizer(session: tuple[Path, Ran]) -> None:
    file, _ = session
    code = (
        "import sys; from app.command_line.main import main; code = main(sys.argv[1:])\n"
        "held = [name for name in ('torch', 'transformers', 'numpy', 'tokenizers') if name in sys.modules]\n"
        "sys.exit(f'imported {held}' if held else code)"
    )

    def shown(*words: str) -> str:
        arguments = [sys.executable, "-c", code, "replay", *words]
        ran = subprocess.run(
            arguments,
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    beams = shown(str(file), "--answer", "1", "--view", "trace")
    assert beams.startswith("target ← drafter")
    assert "beam search" in beams
    assert re.search(
        r"3 \" Monday\" +\.51 +1\.00 +1 +\.024 +9 +2  correction",
        shown("docs/examples/class.jsonl", "--inspect", "--answer", "2"),
    )
    here = shown("docs/examples/session.jsonl", "--speed", "0")  # the one that lies in the project
    assert here.startswith("SmolLM2-135M-Instruct ← n-gram tables and feature drafter")
    assert "Name five rivers." in here


def test_a_recording_holds_what_a_recorded_target_needs(session: tuple[Path, Ran]) -> None:
    file, ran = session
    lines = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
    assert (lines[0]["vocab_size"], lines[0]["end_id"], lines[0]["target"]) == (300, 2, "target")
    first, second, third = [line for line in lines if "prompt_ids" in line and "answer_ids" in line]
    turn = ran.state.chat.turns[0]
    assert tuple(first["prompt_ids"]) == turn.prompt
    assert tuple(first["answer_ids"] + second["answer_ids"]) == turn.answer
    assert second["prompt_ids"] == first["prompt_ids"] + first["answer_ids"]
    assert third["lanes"][-1] == {"method": "ar", "ids": third["answer_ids"], "text": third["text"]}
    assert all(isinstance(event_of(line), Step) for line in lines if line.get("event") == "step")


# -- speed ----------------------------------------------------------------------------------------


def race() -> list[tuple[int, Any]]:
    step = Step(0, 0, (), (), (), (), 5, (), (), 1.0, (), 0.0, 1.0, 0.0)
    return [(0, Prefill(3, 3, 2.0)), (1, Prefill(3, 3, 0.5)), (1, step), (0, step), (1, Finished(0, "eos"))]


def test_events_appear_when_their_lane_has_come_to_them() -> None:
    assert [(at, lane) for at, lane, _ in timed(race())] == [(0.5, 1), (1.5, 1), (1.5, 1), (2.0, 0), (3.0, 0)]
    for speed in (1.0, 2.0, 0.5):
        now, seen = [10.0], []

        def sleep(seconds: float, now: list[float] = now) -> None:
            assert 0 < seconds <= 0.05
            now[0] += seconds

        for lane, _ in paced(race(), speed, lambda: False, lambda now=now: now[0], sleep):  # type: ignore[misc]
            seen.append((round((now[0] - 10) * speed, 6), lane))
        assert seen == [(0.5, 1), (1.5, 1), (1.5, 1), (2.0, 0), (3.0, 0)]


def test_on_a_terminal_it_plays_at_its_own_speed_and_ctrl_c_stops_it(session: tuple[Path, Ran]) -> None:
    from tests.support.screen import Terminal

    terminal = Terminal("replay", str(session[0]), "--speed", "0.001", columns=100, rows=40)
    terminal.wait("reading" if "reading" in terminal.text else "autoregressive")
    assert "tok/s" not in terminal.text  # nothing is finished yet
    terminal.interrupt()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.raw
    fast = Terminal("replay", str(session[0]), "--speed", "1000", "--answer", "3", columns=60, rows=40)
    assert fast.end() == 0
    assert "\x1b[?25l" in fast.raw  # drawn in place
    assert "done, 14 tok" in fast.raw or "cut at 14 tok" in fast.raw


# -- files ----------------------------------------------------------------------------------------


def replayed(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["replay", str(file), *flags])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_recording_that_was_cut_anywhere_is_shown_as_far_as_it_goes(
    session: tuple[Path, Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = session[0].read_bytes(), tmp_path / "cut.jsonl"
    first = data.index(b"\n") + 1
    for size in [first, *range(first + 5, len(data), len(data) // 23)]:
        file.write_bytes(data[:size])
        code, out, err = replayed(file, capsys)
        assert code == 0
        assert err.count("\n") >= 1
        assert "Traceback" not in err
    assert "ends in the middle of line" in err
    assert "answer 3 has no end: shown as far as it goes" in err
    assert "autoregressive" in out


def broken(lines: list[str], number: int, **changes: Any) -> str:
    told = {**json.loads(lines[number - 1]), **changes}
    return "\n".join([*lines[: number - 1], json.dumps(told), *lines[number:]]) + "\n"


def test_what_is_wrong_with_a_file_is_one_line_with_its_place(
    session: tuple[Path, Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = session[0].read_text().splitlines()
    step = next(n for n, line in enumerate(lines, 1) if '"event":"step"' in line)
    file = tmp_path / "a.jsonl"
    lanes = json.loads(lines[1])["lanes"]
    cases = {
        "{}\n": ":1: it is no session log",
        "": ":1: it is no session log",
        "\x00\n": ":1: it is no session log",
        broken(
            lines, 1, version=2, program="other 9"
        ): ":1: it was written in format 2 by other 9, this program reads 1",
        broken(lines, 1, pair=3): ":1: pair: Input should be a valid string",
        broken(lines, 2, lanes=[]): ":2: lanes: Tuple should have at least 1 item",
        broken(lines, 2, lanes=[{**lane, "settings": 5} for lane in lanes]): ":2: ",
        broken(lines, 2, lanes=[{**lane, "settings": None} for lane in lanes]): ":2: ",
        broken(lines, 2, settings={"gamma": "x"}): ":2: gamma must be",
        broken(lines, step, lane=9): f":{step}: lane 9 is not there: the answer has 5",
        broken(lines, step, event="leap"): f":{step}: no event is called 'leap'",
        broken(lines, step, drafted="x"): f":{step}: drafted: Input should be a valid tuple",
        broken(lines, step, path=[7]): f":{step}: does not fit the lines before it",
        broken(lines, step, texts=[]): f":{step}: the text of 1 tokens is not there",
        broken(lines, step, texts=[[5, [1], 0, "x"]]): f":{step}: a text builds on text 5, which is not there",
        broken(lines, step, kind="song"): f":{step}: is no line of a session log: its kind is 'song'",
        "\n".join([lines[0], lines[step - 1], ""]): ":2: belongs to no answer: none is open",
        "\n".join([*lines[:step], "{half", *lines[step:], ""]): f":{step + 1}: is no JSON",
    }
    for text, told in cases.items():
        file.write_text(text)
        code, out, err = replayed(file, capsys)
        assert (code, out, err.count("\n")) == (1, "", 1), told
        assert err.startswith(f"error: {file}{told}"), (err, told)
    assert replayed(tmp_path / "none.jsonl", capsys)[2] == (
        f"error: cannot read {tmp_path}/none.jsonl: No such file or directory\n"
    )
    assert replayed(tmp_path, capsys)[2] == f"error: cannot read {tmp_path}: Is a directory\n"
    assert replayed(session[0], capsys, "--answer", "4")[2] == "error: there is no answer 4: the session log has 3\n"
    for words in ([], [str(session[0]), "--speed", "-1"], [str(session[0]), "--gamma", "3"]):
        assert main(["replay", *words]) == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_shown_or_refused_in_one_line(
    session: tuple[Path, Ran], tmp_path: Path, data: st.DataObject
) -> None:
    lines = session[0].read_text().splitlines()[:40]
    number = data.draw(st.integers(1, len(lines)))
    told = json.loads(lines[number - 1])
    told[data.draw(st.sampled_from(sorted(told)))] = data.draw(
        st.sampled_from([None, -1, 3, 1 << 60, 1e308, math.inf, "x", [], [3], [[0, [1], 0, ""]], {}, True])
    )
    lines[number - 1] = json.dumps(told)
    file = tmp_path / "damaged.jsonl"
    file.write_text("\n".join(lines) + "\n")
    out = Console(file=io.StringIO(), width=60)
    try:
        for answer in read_log(file).answers:
            Player(Surface(Settings(view="trace"), out), 0).play(answer)
        told = f"{file}:"
    except UserError as error:
        told = str(error)
    assert told.startswith(f"{file}:")
    assert "\n" not in told


# -- writing --------------------------------------------------------------------------------------


def flags(pair: TinyPair, file: Path | str) -> list[str]:
    return [*pair.flags(), "--max-new-tokens", "6", "--compare", "ar,spec", "--record", str(file)]


def test_run_records_too_and_goes_on_behind_a_half_line(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.jsonl"
    assert main(["run", "one", *flags(pair, file)]) == 0
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"kind":"ans')
    assert main(["run", "two", *flags(pair, file)]) == 0
    said = capsys.readouterr().out
    assert file.read_bytes().startswith(whole + b'{"kind":"recording"')
    answers = read_log(file).answers
    assert [answer.opening.prompt for answer in answers] == ["one", "two"]
    code, out, err = replayed(file, capsys, "--quiet")
    assert (code, err) == (0, "")
    assert "cut at 6 tokens" in out
    assert "".join(answer.closing.text + "\n" for answer in answers if answer.closing) == said


def test_what_is_no_recording_is_left_alone(pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, newer = tmp_path / "notes.txt", tmp_path / "newer.jsonl"
    other.write_text("dear diary\n")
    newer.write_text('{"kind":"recording","version":7,"program":"p 2"}\n')
    for log in (other, newer, tmp_path, tmp_path / "no" / "a.jsonl"):
        assert main(["run", "one", *flags(pair, log)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: cannot log to {other}: it is no session log (the file is unchanged, name another)",
        f"error: cannot log to {newer}: it was written in format 7 by p 2, this program reads 1 "
        "(the file is unchanged, name another)",
        f"error: cannot log to {tmp_path}: Is a directory",
        f"error: cannot log to {tmp_path}/no/a.jsonl: No such file or directory",
    ]
    assert other.read_text() == "dear diary\n"
    assert main(["record", "--out", str(tmp_path / "r.jsonl"), "--record", "x"]) == 2
    assert "record takes no --record (" in capsys.readouterr().err


def test_two_runs_do_not_record_to_one_file(tmp_path: Path) -> None:
    first = SessionLogWriter(tmp_path / "a.jsonl")
    refused(opened, tmp_path / "a.jsonl", kind=UsageError, match="another run is writing to it")
    first.close()
    opened(tmp_path / "a.jsonl").close()


def test_a_half_line_is_dropped_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    file, whole = tmp_path / "a.jsonl", b'{"kind":"recording","version":1}\n'
    file.write_bytes(whole + b'{"kind":"ans')
    opened(file).close()
    assert file.read_bytes() == whole


def test_a_full_disk_is_told_once_and_decoding_goes_on(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    ran = run_lines(catalogue_of(tmp_path, {"tiny": pair}), "one", "two", settings={"record": str(link)})
    assert len(ran.state.answers) == 2
    why = f"cannot write {link}: No space left on device (its content is kept)"
    assert " ".join(ran.text.split()).count(f"the session log stopped, {why}; decoding continues") == 1
    commands = ("run one", "run one --samples 2 --temperature 1", "bench --methods ar --limit 1 --repeat 1")
    assert [main([*words.split(), *flags(pair, link)]) for words in commands] == [1, 1, 1]
    assert capsys.readouterr().err.count(f"the session log stopped, {why}; decoding continues\n") == 3


def test_the_console_starts_and_ends_a_recording(catalogue: Path, tmp_path: Path) -> None:
    one, two, other = tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "other.txt"
    other.write_text("x")
    ran = run_lines(
        catalogue,
        "a",
        f"/set record={one}",
        "b",
        f"/set record={other}",
        "c",
        f"/set record={two}",
        "d",
        "/reset record",
        "e",
    )
    assert "it is no session log (the file is unchanged, name another)" in " ".join(ran.text.split())
    assert [answer.opening.prompt for answer in read_log(one).answers] == ["b", "c"]
    assert [answer.opening.prompt for answer in read_log(two).answers] == ["d"]
    opened(two).close()


# -- texts ----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=30))
def test_texts_are_said_again_as_they_were_heard(asked: list[list[int]]) -> None:
    def decode(ids: list[int]) -> str:  # what comes after changes what came before, as in no tokenizer
        return "".join(f"{one}é" for one in ids).upper() if sum(ids) % 3 else "".join(map(str, ids))

    heard, said = LoggingDecoder(decode), ReplayingDecoder()
    for ids in asked:
        assert heard(ids) == decode(ids)
        said.learn(heard.taken())
    assert [said(ids) for ids in asked] == [decode(ids) for ids in asked]
    refused(said, [9], kind=ValueError, match="is not there")


@pytest.mark.parametrize("key", ["drawn_drafts", "law_drafts"])
def test_logs_with_the_older_name_of_drawn_drafts_are_read(key: str, session: tuple[Path, Ran], tmp_path: Path) -> None:
    """Both names mean the same; the newer one is written."""
    text = session[0].read_text()
    assert '"drawn_drafts":true' in text
    assert "law_drafts" not in text
    file = tmp_path / "older.jsonl"
    file.write_text(text.replace('"drawn_drafts"', f'"{key}"'))
    read, written = (
        [lane.drawn_drafts for lane in read_log(one).answers[0].opening.lanes] for one in (file, session[0])
    )
    assert read == written


def test_a_benchmark_is_recorded_too(pair: TinyPair, tmp_path: Path) -> None:
    """Each answer by itself, warm-ups left out; the file's ids are those of the figures."""
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    file, out = tmp_path / "r.jsonl", tmp_path / "o.json"
    words = ["--methods", "ar,ngram", "--gammas", "2", "--repeat", "1", "--max-new-tokens", "9", "--quiet"]
    command = ["bench", *pair.flags(), "--prompts", str(prompts), *words, "--out", str(out), "--record", str(file)]
    assert main(command) == 0
    told = [result["ids"] for prompt in json.loads(out.read_text())["prompts"] for result in prompt["results"]]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [line for line in lines if line.get("kind") == "answered"]
    assert sorted(line["answer_ids"] for line in kept) == sorted(told)
    assert [line["prompt"] for line in lines if line.get("kind") == "answer"] == ["one", "one", "two", "two"]
    assert main(["replay", str(file), "--speed", "0", "--answer", "2", "--quiet"]) == 0
    assert main([*command[:-4], "--batch-size", "2", "--record", str(file)]) == 2
