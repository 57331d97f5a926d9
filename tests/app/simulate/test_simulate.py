"""`record` and `simulate`: a recording does what its target does, and what it predicts is exact."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import app.simulate.run
from app.bench.run import run_bench
from app.command_line.main import main
from app.lanes.answers import run_lane
from app.settings.table import Settings
from tests.support.bench import bench_with
from tests.support.tiny import TinyPair, write_prompts

SHAPE = {"stop": True, "context": 300, "noise": 0.05, "layers": 1, "seed": 1}

# Max-gram at gamma 2, by hand. The opening round says 5. Then the longest earlier match of what was said, what is
# copied behind it, and what the round gains: [5] → 6 7, both right, own 8: 3. [5 6 7 8] → 5 6, wrong, own 9: 1.
# [9] stood nowhere, own 5: 1. [5] → 6 7, own 8: 3. [5 6 7 8] → 5 6, wrong, own 9: 1. [… 9] → 5 6, wrong, own 2: 1.
PROMPT, ANSWER = [5, 6, 7, 8], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 2]
TAR = 10 / 6
BY_HAND = {
    "map": json.dumps({"_".join(map(str, PROMPT)): "_".join(map(str, ANSWER))}),
    "lines": json.dumps({"vocab_size": 10, "end_id": 2})
    + "\n"
    + json.dumps({"prompt_ids": PROMPT, "answer_ids": ANSWER})
    + "\n",
    "printed": "tensor([[5, 6, 7, 8, 5, 6,\n         7, 8, 9, 5, 6, 7, 8, 9, 2]])\n",
}


def simulated(folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "figures.json"
    assert main(["simulate", *arguments, "--out", str(out), "--quiet"]) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.mark.parametrize("form", BY_HAND)
def test_the_figures_of_a_recording_made_by_hand_are_exact(form: str, tmp_path: Path) -> None:
    file = tmp_path / "by-hand"
    file.write_text(BY_HAND[form])
    words = [str(file), "--drafter", "maxgram", "--gammas", "2", "--t-draft", "0.01", "--end-id", "2"]
    # The map's only answer begins as its prompt does: to be read as an answer it has to be called one.
    words += {"printed": ["--prompt-tokens", "4"], "map": ["--prompt-tokens", "0"]}.get(form, [])
    (row,) = simulated(tmp_path, *words, "--t-verify", "0.1")["rows"]
    assert (row["tokens_per_pass"], row["target_passes"], row["predicted_n"]) == (round(TAR, 4), 6, 11)
    assert (row["draft_n"], row["draft_n_accepted"], row["prompts"][0]["tokens_per_pass"]) == (10, 4, round(TAR, 4))
    # six passes of 100 ms and ten drafts of 10 ms for ten tokens
    assert (row["throughput"], row["plain_throughput"], row["speedup"]) == (round(10 / 0.7, 4), 10.0, round(1 / 0.7, 4))
    assert row["throughput_formula"] == round(TAR / (2 * 0.01 + 0.1), 4)
    # five passes over three tokens, one over one
    (row,) = simulated(tmp_path, *words, "--t-verify", "0.1,0.15,0.2")["rows"]
    assert row["throughput"] == round(10 / (5 * 0.2 + 0.1 + 10 * 0.01), 4)
    assert row["speedup"] == round(10 / 1.2 * 0.1, 4)


# -- the caches of Cascade Speculative Drafting -------------------------------------------------------

MADE = random.Random(5)


def phrases(count: int) -> list[int]:
    """Ids in which the same few phrases come again and again."""
    known = [[10 * n + at for at in range(2, 2 + n)] for n in range(3, 8)]
    return [token for _ in range(count) for token in MADE.choice(known)]


# LLaMA's prompts begin with 1 and its answers end with 2, T5's prompts and answers end with 1.
CACHED = [(phrases(MADE.randrange(1, 4)), phrases(12)) for _ in range(6)]
CAUSAL = [([1, *prompt], [*answer, 2]) for prompt, answer in CACHED]


def cached(folder: Path, name: str, rows: list[tuple[list[int], list[int]]]) -> str:
    """The file as the paper's program writes it: all that the decoder's row held, under the prompt's ids."""
    told = {"_".join(map(str, prompt)): "_".join(map(str, row)) for prompt, row in rows}
    (folder / name).write_text(json.dumps(told))
    return str(folder / name)


def naive_max_gram(text: list[int], said: int, most: int) -> list[int]:
    """What followed the longest of the last `said` ids of a text where they stood first, and once more behind that."""
    found: list[int] = []
    for _ in range(2):
        row = text + found
        ends = [
            (n, at)
            for n in range(said + len(found), 0, -1)
            for at in range(n, len(row))
            if row[at - n : at] == row[-n:]
        ]
        found += row[ends[0][1] :][: most - len(found)] if ends else []
    return found


def naive_tar(rows: list[tuple[list[int], list[int]]], gamma: int, before: list[int]) -> float:
    """Tokens a round behind the opening one, counted round by round. `before` stands between prompt and answer."""
    gained = rounds = 0
    for prompt, answer in rows:
        at = 1
        while at < len(answer):
            drafts = naive_max_gram([*prompt, *before, *answer[:at]], at, gamma)
            right = next(
                (n for n, pair in enumerate(zip(drafts, answer[at:], strict=False)) if len(set(pair)) > 1), None
            )
            matches = min(len(drafts), len(answer) - at) if right is None else right
            step = min(matches + 1, len(answer) - at)
            at, gained, rounds = at + step, gained + step, rounds + 1
    return round(gained / rounds, 4)


def tar(folder: Path, file: str, *words: str) -> tuple[float, str, list[str]]:
    """Tokens a round at gamma 4, what the values were taken for, and what is said of that."""
    told = simulated(folder, file, "--drafter", "maxgram", "--gammas", "4", *words)
    return told["rows"][0]["tokens_per_pass"], told["reading"], told["notes"]


def test_a_decoder_only_cache_is_read_behind_its_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = [(prompt, prompt + answer) for prompt, answer in CAUSAL]
    file = cached(tmp_path, "LLAMA_7B_cache.json", whole)
    right, wrong = naive_tar(CAUSAL, 4, []), naive_tar(whole, 4, [])
    assert right != wrong
    notes = ["the values begin with their prompts' ids: the answers follow them"]
    assert tar(tmp_path, file, "--end-id", "2") == (right, "prompt first", notes)
    assert f"note: {notes[0]}" in " ".join(capsys.readouterr().out.split())
    assert tar(tmp_path, file, "--end-id", "2", "--arch", "causal")[0] == right
    # as it was read before: the prompts count as answers
    assert tar(tmp_path, file, "--end-id", "2", "--prompt-tokens", "0")[:2] == (wrong, "answers alone")
    alone = cached(tmp_path, "alone.json", CAUSAL)
    assert tar(tmp_path, alone, "--end-id", "2") == (right, "answers alone", ["the values are taken as answers alone"])


def test_the_screen_fits_and_says_what_it_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "by-hand"
    file.write_text(BY_HAND["lines"])
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["simulate", str(file), "--methods", "ngram,maxgram,match", "--gammas", "1,2", "--quiet"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        assert "no speeds: the time of target passes is unknown" in " ".join(text.split())
        assert "ngram counts 1 id a token: the recording has no more" in " ".join(text.split())
        assert [line.split() for line in text.splitlines() if line.startswith("maxgram")][1][1:3] == ["2", "1.667"]
    assert main(["simulate", str(file), "--methods", "maxgram", "--t-verify", "0.1", "--t-draft", "0", "--quiet"]) == 0
    assert "as given, by tokens: 1: 100" in " ".join(capsys.readouterr().out.split())


# -- recorded here ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(
        tmp_path_factory.mktemp("prompts") / "p.jsonl",
        [{"prompt": "one two one two", "category": "a"}, {"turns": ["abc abc", "and then"], "category": "b"}],
    )


@pytest.fixture(scope="module")
def record(pair: TinyPair, prompts: Path) -> Callable[..., int]:
    def run(out: Path, *more: str) -> int:
        words = ["--target", str(pair.target), "--device", "cpu", "--prompts", str(prompts)]
        return main(["record", *words, "--out", str(out), "--max-new-tokens", "32", "--quiet", *more])

    return run


@pytest.fixture(scope="module")
def recording(record: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recording") / "r.jsonl"
    assert record(out, "--costs") == 0
    return out


def test_a_recording_predicts_the_rounds_of_its_target_exactly(
    pair: TinyPair, prompts: Path, recording: Path, tmp_path: Path
) -> None:
    methods, gammas = ("spec", "ngram", "maxgram", "cascade"), (1, 4)
    drafting = {"cascade": "model,maxgram", "k_matrix": "[[2,3],[0,3]]"}
    settings = Settings(max_new_tokens=32, quiet=True, **drafting)
    options = pair.options()
    out = tmp_path / "bench.json"
    assert run_bench(settings, options, bench_with(prompts, methods=methods, gammas=gammas, repeat=1, out=out)) == 0
    names = ("predicted_n", "target_passes", "tokens_per_pass")
    real = {
        (result["method"], result["gamma"]): []  # type: ignore[var-annotated]
        for result in json.loads(out.read_text())["prompts"][0]["results"]
    }
    for prompt in json.loads(out.read_text())["prompts"]:
        for result in prompt["results"]:
            real[result["method"], result["gamma"]].append([result[name] for name in names] + [result["draft_n"]])
    words = ["--methods", ",".join(methods), "--gammas", "1,4", "--cascade", "model,maxgram"]
    told = simulated(tmp_path, str(recording), "--drafter", str(pair.drafter), *words, "--k-matrix", "[[2,3],[0,3]]")
    assert (told["pass_seconds_from"], sorted(map(int, told["pass_seconds"]))) == ("recording", list(range(1, 18)))
    assert len(told["rows"]) == len(real) == 7
    for row in told["rows"]:
        wanted = real[row["method"], row["gamma"]]
        assert [[one[name] for name in names] for one in row["prompts"]] == [one[:3] for one in wanted]
        assert row["draft_n"] == sum(one[3] for one in wanted)
        assert row["tokens_per_pass"] == round(sum(n - 1 for n, *_ in wanted) / sum(one[1] for one in wanted), 4)
        assert row["throughput"] > 0
    for method in methods:  # something was accepted of each
        assert max(row["tokens_per_pass"] for row in told["rows"] if row["method"] == method) > 1


def test_a_stopped_recording_goes_on(record: Callable[..., int], recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    whole = [json.loads(line) for line in recording.read_text().splitlines()]
    answers = [(one["prompt_ids"], one["answer_ids"], one["best_ids"]) for one in whole if "prompt_ids" in one]
    assert len(answers) == 3
    assert record(out, "--limit", "1") == 0
    first = out.read_text()
    out.write_text(first + '{"prompt_ids": [1, 2], "answ')  # killed while it wrote
    assert record(out) == 0
    assert out.read_text().startswith(first)
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["prompt_ids"], one["answer_ids"], one["best_ids"]) for one in again[1:]] == answers
    assert record(out) == 0
    assert len(out.read_text().splitlines()) == 4  # nothing is answered twice


def test_an_interrupt_keeps_whole_answers(
    record: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, real, calls = tmp_path / "r.jsonl", run_lane, []

    def second_is_stopped(*given: Any, **more: Any) -> Any:
        calls.append(1)
        answer = real(*given, **more)
        stats = replace(answer.stats, stop_reason="interrupted") if len(calls) == 2 else answer.stats
        return replace(answer, stats=stats)

    monkeypatch.setattr(app.simulate.run, "run_lane", second_is_stopped)
    assert record(out) == 130
    assert f"interrupted: {out} keeps 1 answer, the same command resumes the run" in capsys.readouterr().err
    assert record(out) == 0
    assert len(out.read_text().splitlines()) == 4


def test_another_recording_is_not_gone_on_with(
    record: Callable[..., int], recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recording.read_text()
    for flags, written, changed, code, why in (
        (["--temperature", "0.5"], "", "", 2, "holds a recording with temperature 0.0, now 0.5: give the same flags"),
        (
            [],
            '"quantization": "none"',
            '"quantization": "Q4_1"',
            2,
            "holds a recording with quantization Q4_1, now none: give the same flags",
        ),
        ([], '"recording": 1', '"recording": 7', 1, f"{recording}:1: it was written in format 7, this program reads 1"),
    ):
        recording.write_text(before.replace(written, changed, 1))
        assert (recording.read_text() != before, record(recording, *flags)) == (bool(written), code)
        assert why in capsys.readouterr().err
    recording.write_text(before)
    other = tmp_path / "notes.json"
    other.write_text('{"1": "2"}\n')
    assert record(other) == 2
    assert "holds something else: name a new file" in capsys.readouterr().err
    assert record(tmp_path / "none" / "r.jsonl") == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_nothing_recorded_is_no_success(
    record: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "long.jsonl", [{"prompt": "x" * 4000}])
    assert record(tmp_path / "r.jsonl", "--prompts", str(prompts)) == 1
    assert "error: nothing was recorded: none of the 1 prompts fits into the context\n" in capsys.readouterr().err


# -- what cannot draft for a recording --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "why", "fact"),
    [
        (["--pair", "smollm2", "--methods", "glide"], 2, "drafter glide reads its target's keys and values", ""),
        (["--pair", "smollm2", "--drafter", "feature"], 2, "drafter feature reads its target's hidden states", ""),
        (
            ["--pair", "smollm2", "--methods", "tables+feature"],
            2,
            "drafter tables+feature reads its target's hidden",
            "",
        ),
        (["--pair", "smollm2", "--methods", "match+glide"], 2, "drafter match+glide reads its target's keys", ""),
        (["--pair", "smollm2", "--methods", "cascade"], 2, "drafter glide reads its target's keys and values", ""),
        (["--drafter", "plain"], 2, "a plain drafter shares its target's embeddings", ""),
        (["--methods", "plain"], 2, "a plain drafter shares its target's embeddings", ""),
        (["--drafter", "no/such/folder"], 2, "is no model: expected a folder", ""),
        (["--t-verify", "0"], 2, "--t-verify must be a comma list of numbers above 0", ""),
        (["--prompts", "p.jsonl"], 2, "no prompt file p.jsonl", ""),
        (["--drafter", "maxgram"], 1, ":1: it was written in format 7, this program reads 1", ', "recording": 7'),
        (["--drafter", "maxgram"], 1, ":1: settings must be an object, got 'x'", ', "settings": "x"'),
        (["--drafter", "TINY"], 1, "was made with another tokenizer (abc", ""),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    words: list[str], code: int, why: str, fact: str, pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(BY_HAND["lines"].replace('"end_id": 2', f'"end_id": 2, "tokenizer": "abc"{fact}'))
    words = [str(pair.drafter) if word == "TINY" else word for word in words]
    assert main(["simulate", str(file), *words, "--quiet"]) == code
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_the_target_is_measured_where_nothing_tells_its_seconds(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"40_41_42": "43_44_45_46"}))
    words = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--device", "cpu", "--gammas", "2"]
    told = simulated(tmp_path, str(file), *words)
    assert (told["pass_seconds_from"], len(told["pass_seconds"])) == ("measured", 17)
    assert told["rows"][0]["speedup"] > 0


def test_the_answers_that_lie_here_are_played_without_their_target(tmp_path: Path) -> None:
    """docs/examples: 24 prompts, under 300 kB with the sessions beside them; the page and its log have as much each."""
    folder = Path(__file__).parents[3] / "docs" / "examples"
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(size for name, size in sizes.items() if not name.startswith("win-and-loss")) < 300_000
    assert all(size < 400_000 for size in sizes.values())
    told = simulated(tmp_path, str(folder / "answers.jsonl"), "--methods", "ngram,maxgram", "--gammas", "2")
    assert [(row["method"], len(row["prompts"])) for row in told["rows"]] == [("ngram", 24), ("maxgram", 24)]
    assert all(row["tokens_per_pass"] > 1 for row in told["rows"])
    assert all(row["speedup"] > 0 for row in told["rows"])  # with the seconds that its passes took
