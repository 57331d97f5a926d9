"""`bench --out` killed anywhere and taken up again: nothing lost or twice, the same figures, or one line."""

import json
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import app.bench.run
from app.bench.journal import Journal, about, difference
from app.bench.run import run_bench
from app.lanes.answers import Answer
from app.lanes.costs import Terms
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.stats.summary import Stats
from tests.support.bench import bench_with
from tests.support.refusals import refused
from tests.support.tiny import TinyPair, tiny_pair, write_prompts
from utils.errors import UsageError
from utils.progress import never

SHAPE = {"context": 300}

ROWS = [
    {"turns": ["hello there", "and now?"], "category": "chat", "question_id": 11},
    {"prompt": "x" * 400, "category": "long"},  # does not fit
    {"prompt": "what is 2 + 2", "category": "maths"},
]
SETTINGS = Settings(max_new_tokens=6, quiet=True)
ROUND = 3  # ar and ngram at two gammas
TOTAL = 3 * 2 * ROUND  # prompts, repeats


class World:
    """A benchmark whose answers are a function of method, gamma and prompt; it may be cut off."""

    def __init__(self, pair: TinyPair, folder: Path) -> None:
        self.options = pair.options()
        self.engine = load_engine(SETTINGS, self.options, never)
        self.out = folder / "out.json"
        self.journal = folder / "out.json.partial"
        self.prompts = write_prompts(folder / "prompts.jsonl", ROWS)
        self.asked: list[tuple[Any, ...]] = []
        self.left = 1 << 30
        self.kept = b""  # the journal of the last run that came to its end

    def rule(self, patch: pytest.MonkeyPatch) -> None:
        """Put its answers in the place of real ones."""
        patch.setattr(app.bench.run, "run_lane", self.run_lane)
        patch.setattr(app.bench.run, "load_engine", lambda *_: self.engine)
        patch.setattr(app.bench.run, "WARM_UP", 3)  # so that warm-ups can be told from answers

    def run_lane(self, lane: Any, prompt: list[int], decode: Any, *, terms: Terms, **_watching: Any) -> Answer:
        told = lane.settings
        call = (lane.name, told.gamma, tuple(prompt))
        if told.max_new_tokens == SETTINGS.max_new_tokens:
            self.asked.append(call)
            self.left -= 1
        draw, text = random.Random(repr(call)), random.Random(repr(prompt))
        ids = [text.randrange(40, 250) for _ in range(6)]
        ids[5] = draw.choice([ids[5], 7])  # now and then another text
        stats = Stats(
            stop_reason="interrupted" if self.left < 0 else "length",
            prompt_n=len(prompt),
            ttft_ms=draw.random(),
            predicted_n=6,
            openings=1,
            predicted_ms=draw.random() * 100,
            target_passes=draw.randrange(2, 6),
            top2_gaps=(None,) * 5 + (draw.choice([0.5, 1e-4, float("inf")]),),
        )
        return Answer(lane.name, tuple(ids), decode(ids), stats, False, terms)

    def run(self, left: int = 1 << 30, *, like: Settings = SETTINGS, **changes: Any) -> int:
        self.left, self.asked = left, []
        return run_bench(like, self.options, self.args(**changes))

    def args(self, **changes: Any) -> Namespace:
        return bench_with(
            **{
                "prompts": self.prompts,
                "methods": ("ar", "ngram"),
                "gammas": (3, 4),
                "repeat": 2,
                "out": self.out,
                **changes,
            }
        )

    def told(self) -> dict[str, Any]:
        """The final file without what may differ from part to part."""
        data: dict[str, Any] = json.loads(self.out.read_text())
        for name in ("machine", "resumed"):
            del data[name]
        return data

    def cut(self, size: int) -> None:
        self.out.unlink(missing_ok=True)
        self.journal.write_bytes(self.kept[:size])


@pytest.fixture(scope="module")
def first(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With everything of an unbroken run in `whole`, `order` and `kept`."""
    made: Any = World(pair, tmp_path_factory.mktemp("world"))
    finish = Journal.close

    def keep(journal: Journal, *, done: bool = False) -> None:
        made.kept = journal.path.read_bytes() if done else made.kept
        finish(journal, done=done)

    with pytest.MonkeyPatch.context() as once:
        made.rule(once)
        once.setattr(Journal, "close", keep)
        assert made.run() == 0
    made.whole, made.order = made.told(), made.asked
    return made


@pytest.fixture
def world(first: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same before a run of its own."""
    first.rule(monkeypatch)
    for path in (first.out, first.journal):
        path.unlink(missing_ok=True)
    return first


def test_an_unbroken_run_leaves_the_file_alone(world: Any) -> None:
    assert world.run() == 0
    assert world.told() == world.whole
    assert sorted(path.name for path in world.out.parent.iterdir()) == ["out.json", "prompts.jsonl"]
    data = json.loads(world.out.read_text())
    assert data["resumed"] == 0
    assert any(row["near_ties"] for row in data["summary"])
    assert any(row["beyond_ties"] for row in data["summary"])


def whole_rounds(journal: bytes) -> int:
    """How many answers of rounds in which no variant is missing are in these lines."""
    lines = [json.loads(line) for line in journal.split(b"\n")[:-1] if line.startswith(b'{"question"')]
    found = {(one["question"], one["turn"], one["repeat"], one["method"], one["gamma"]) for one in lines}
    rounds = Counter(place[:3] for place in found)
    return sum(count for count in rounds.values() if count == ROUND)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_cuts_at_any_byte_one_after_another_lose_only_the_torn_line(world: Any, shares: list[float]) -> None:
    world.cut(len(world.kept))
    for share in shares:
        whole = world.journal.read_bytes()[: int(share * world.journal.stat().st_size)]
        world.journal.write_bytes(whole)
        stop = (TOTAL - whole_rounds(whole)) // 2
        if stop and world.run(stop) == 130:  # Ctrl-C in the answer after these
            assert len(world.asked) == stop + 1
            assert json.loads(world.out.read_text())["complete"] is False
        else:
            break
    world.out.unlink(missing_ok=True)
    world.run()
    assert world.told() == world.whole


def test_after_ctrl_c_the_same_command_goes_on_and_says_so(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    loud = SETTINGS.changed(quiet=False)
    assert world.run(5, like=loud) == 130
    assert "interrupted after 5 answers: the same command resumes the run" in capsys.readouterr().err
    assert world.run(like=loud) == 0
    assert f"resuming: 5 answers in {world.journal}\n" in capsys.readouterr().err
    assert len(world.asked) == TOTAL - ROUND  # the round that was stopped in its midst is timed anew
    assert json.loads(world.out.read_text())["resumed"] == 1


def test_a_finished_file_is_not_gone_on_from(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.run() == 0
    assert world.run(like=SETTINGS.changed(quiet=False)) == 0
    assert len(world.asked) == TOTAL
    assert f"{world.out} exists: this run begins again and replaces it at its end" in capsys.readouterr().err


def test_ctrl_c_leaves_a_finished_file_as_it_is(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.run() == 0
    before = world.out.read_bytes()
    assert world.run(0) == 130
    assert f"{world.out} holds a finished result and is kept\n" in capsys.readouterr().err
    assert world.run(ROUND) == 130
    assert world.out.read_bytes() == before
    assert world.run() == 0  # what was measured since is in the journal
    assert (len(world.asked), json.loads(world.out.read_text())["resumed"]) == (TOTAL - ROUND, 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gammas": (3, 2)}, "gammas [3, 4] there, [3, 2] here"),
        ({"methods": ("ngram", "ar")}, "methods ['ar', 'ngram'] there, ['ngram', 'ar'] here"),
        ({"repeat": 3}, "repeat 2 there, 3 here"),
        ({"limit": 2}, "other prompts (3 there, 2 here)"),
        ({"turns": 1}, "other prompts (3 there, 3 here)"),
        ({"like": SETTINGS.changed(seed=7)}, "seed 42 there, 7 here"),
        ({"like": SETTINGS.changed(system="x")}, "system  there, x here"),
    ],
)
def test_the_journal_of_another_run_is_refused_and_kept(world: Any, changes: dict[str, Any], told: str) -> None:
    world.cut(len(world.kept))
    assert (
        refused(world.run, **changes, kind=UsageError)
        == f"{world.journal} is the journal of another run: {told} (delete it to begin again, or give another --out)"
    )
    assert world.journal.read_bytes() == world.kept
    assert world.asked == []


def test_another_model_machine_or_tokenizer_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.cut(len(world.kept))
    refused(
        run_bench,
        SETTINGS,
        world.options.changed(drafter="ngram"),
        bench_with(world.prompts, out=world.out),
        match=r"another run: drafter drafter there, ngram here",
        kind=UsageError,
    )
    lines = world.kept.splitlines(keepends=True)
    for old, new, told in (
        (b'"device": "cpu"', b'"device": "cuda:0"', "device cuda:0 there, cpu here"),
        (b'"processes": 1', b'"processes": 2', "processes 2 there, 1 here"),
        (b'"threads": ', b'"threads": 7', "threads 7[0-9]+ there, [0-9]+ here"),
        (b'"prompt_n": ', b'"prompt_n": 1', "prompt 1 has 1[0-9]+ tokens there, [0-9]+ here"),
    ):
        world.journal.write_bytes(b"".join([lines[0], *(line.replace(old, new) for line in lines[1:])]))
        refused(world.run, match=told, kind=UsageError)


def test_a_pair_is_known_by_what_its_weights_hold(world: Any, pair: TinyPair, tmp_path: Path) -> None:
    """Two folders may have the same name; the pair's heads and tables are part of the run as well."""
    other = tiny_pair(tmp_path / "other", noise=0.5, stop=False, context=300).drafter
    tables = tmp_path / "t.bin"
    tables.write_bytes(b"one")

    def told(**changes: Any) -> dict[str, Any]:
        return about(SETTINGS, world.options.changed(**changes), bench_with(), [])

    assert difference(told(), told()) is None
    assert "weights of drafter " in str(difference(told(), told(drafter=str(other))))
    before = told(tables=str(tables))
    assert difference(told(), before) is not None
    tables.write_bytes(b"two")
    assert "weights of tables " in str(difference(before, told(tables=str(tables))))
    assert "weights of glide" in about(SETTINGS, ModelOptions(pair="smollm2"), bench_with(), [])
    world.cut(len(world.kept))
    refused(
        run_bench,
        SETTINGS,
        world.options.changed(drafter=str(other)),
        world.args(),
        match=r"another run: weights of drafter [0-9a-f]{16} there, [0-9a-f]{16} here",
        kind=UsageError,
    )


@pytest.mark.parametrize(
    ("number", "line", "told"),
    [
        (1, b"{}", "no line of a journal"),
        (1, b'{"journal": 1, "run": {}}', "is a journal of another version: delete it to begin again"),
        (2, b"nothing", "Expecting value"),
        (3, b'{"question": 0}', "Field required"),
    ],
)
def test_a_broken_line_is_named(world: Any, number: int, line: bytes, told: str) -> None:
    lines = world.kept.splitlines()
    lines[number - 1] = line
    world.journal.write_bytes(b"\n".join(lines) + b"\n")
    assert str(world.journal) in refused(world.run, kind=UsageError, match=told)
