"""Text that is not ours is shown, not obeyed, in every way in which the program prints or saves some."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.command_line.main import main
from app.console.slash_commands import completions
from app.screen.terminal import Screen
from tests.support.scripted import run_lines
from tests.support.scripted_server import Reply, ScriptedServer, said
from tests.support.tiny import TinyPair, write_prompts
from utils.visible import visible

SHAPE = {"context": 300}
ROOT = Path(__file__).resolve().parents[2]
EVIL = "evil\x1b[2J\x1b]52;c;eA==\x9b31m\u202ex\u2066\u200f"
SHOWN = "evil␛[2J␛]52;c;eA==\\x9b31m\\u202ex\\u2066\\u200f"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """The text, of which a terminal obeys nothing, with all of the hostile one to be seen."""
    assert not OBEYED.findall(text), ascii(text)
    assert SHOWN in re.sub(r"\n *", "", text), text
    return text


def test_the_escape_shows_all_that_a_terminal_obeys_and_passes_the_joiners() -> None:
    everything = "".join(map(chr, [*range(0x300), *range(0x2000, 0x2100)]))
    assert not OBEYED.search(visible(everything))
    assert not OBEYED.search(visible(everything, ascii_only=True))
    assert visible("a\u200db\u200cc\td\ne é 日本") == "a\u200db\u200cc\td\ne é 日本"
    assert visible(visible(EVIL)) == visible(EVIL) == SHOWN


def test_no_module_prints_past_the_escape() -> None:
    """Standard error and consoles go through it; each other writing to standard output stands here with its reason."""
    answers_and_json = {"command_line/run.py", "measure/plan.py"}
    own_text = {"command_line/arguments.py", "screen/terminal.py"}  # help; the modes of pastes
    escaped = {"bench/run.py", "distill/distill.py"}
    found = {
        pattern: {
            str(file.relative_to(ROOT / "app"))
            for file in (ROOT / "app").rglob("*.py")
            if re.search(pattern, file.read_text())
        }
        for pattern in (r"stderr\.write", r"stdout\)?\.write", r"\bConsole\(")
    }
    assert found[r"stderr\.write"] == set()
    assert found[r"stdout\)?\.write"] == answers_and_json | own_text | escaped
    assert found[r"\bConsole\("] == {"screen/rows.py"}  # rich's wrapping asks for one; nothing is printed on it


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    def reply(reply: Reply, body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] == "refuse":
            reply.json({"error": {"message": EVIL}}, 400)
        elif body["messages"][-1]["content"] == "end":
            reply.events(said("w1", finish=EVIL))
        else:
            reply.events(said(f"w1 {EVIL}", " w2"))

    with ScriptedServer(reply, models=[EVIL]) as server:
        yield server


class ATerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_run_on_a_terminal(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {name: ATerminal() for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    assert main(["run", "hi", "--target", server.url, "--color", "never", "--quiet"]) == 0
    inert(streams["stdout"].getvalue())
    assert main(["run", "end", "--target", server.url, "--quiet"]) == 1
    inert(streams["stderr"].getvalue().replace("\r\x1b[K", ""))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "refuse"], 1),
        (["run", "end"], 1),
        (["run", "end", "--json"], 1),
        (["run", "hi", "--pair", EVIL], 2),
        (["run", "hi", "--template", EVIL], 2),
        (["run", "hi", "--tokenizer", f"./{EVIL}"], 1),
        ([f"--{EVIL}"], 2),
        (["replay", f"{EVIL}.jsonl"], 1),
        (["bench", "--prompts", f"{EVIL}.jsonl"], 2),
        (["bench", "--from", f"{EVIL}.json", "--report", "x.html"], 2),
    ],
)
def test_error_lines_of_commands(
    server: ScriptedServer, words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *(["--target", server.url] if words[0] == "run" else [])]) == code
    err = capsys.readouterr().err
    assert not OBEYED.findall(err), ascii(err)
    assert "evil" in err


def test_a_pipe_and_json_get_the_answer_as_it_is(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "hi", "--target", server.url, "--quiet"]) == 0
    assert capsys.readouterr().out == f"w1 {EVIL} w2\n"
    assert main(["run", "hi", "--target", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["text"] == f"w1 {EVIL} w2"


@pytest.fixture(scope="module")
def catalogue(server: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "models.yaml"
    target = {"target": {"url": server.url, "model": EVIL}, "notes": EVIL}
    file.write_text(json.dumps({"default": "a", "pairs": {"a": target}}), encoding="utf-8")
    return file


def test_a_console_shows_questions_answers_errors_and_names(catalogue: Path, tmp_path: Path) -> None:
    lines = [
        "hi",
        "refuse",
        "end",
        f"say {EVIL}",
        "/history",
        "/info",
        "/stats",
        "/trace",
        "/set",
        f"/load {EVIL}.json",
    ]
    lines += [f"/{EVIL}", f"/pair {EVIL}", f"/set {EVIL}=1", f"/set template={EVIL}", f"/system {EVIL}", "/system"]
    ran = run_lines(catalogue, *lines, settings={"compare": ("server",)})
    for line in ("hi", "/history", "/info", "/system"):
        inert(ran.after(line))
    assert not OBEYED.findall(ran.text), ascii(ran.text)
    assert len(ran.errors) == 6, ran.errors


@pytest.mark.parametrize("ending", ["txt", "html", "svg"])
def test_saved_texts_and_pages(catalogue: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"chat.{ending}"
    assert not run_lines(
        catalogue, f"say {EVIL}", f"/save {file}", settings={"compare": ("server",), "system": EVIL}
    ).errors
    text = file.read_text(encoding="utf-8")
    assert not OBEYED.findall(text), ascii(text)
    assert "evil" in text


def test_a_saved_json_and_a_log_keep_the_text(catalogue: Path, tmp_path: Path) -> None:
    file, log = tmp_path / "chat.json", tmp_path / "log.jsonl"
    run_lines(catalogue, "hi", f"/save {file}", settings={"compare": ("server",), "record": str(log)})
    assert json.loads(file.read_text(encoding="utf-8"))["turns"][0]["text"] == f"w1 {EVIL} w2"
    assert EVIL in "".join(json.dumps(json.loads(line), ensure_ascii=False) for line in log.open()).replace(
        "\\u001b", "\x1b"
    )


def test_a_replayed_log(catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    run_lines(catalogue, f"say {EVIL}", settings={"compare": ("server",), "record": str(log)})
    assert main(["replay", str(log)]) == 0
    inert(capsys.readouterr().out)


def test_the_table_of_pairs(catalogue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", "--models", str(catalogue)]) == 0
    inert(capsys.readouterr().out)


@pytest.fixture(scope="module")
def hostile_pair(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """The pair in folders with a hostile name."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "drafter"):
        (folder / f"{name} {EVIL.replace('/', '')}").symlink_to(getattr(pair, name))
    return TinyPair(*(folder / f"{name} {EVIL}" for name in ("target", "drafter")))


@pytest.mark.parametrize("words", [[], ["--for", "vllm"], ["--for", "llama.cpp"], ["--for", "transformers"]])
def test_check_and_its_programs(hostile_pair: TinyPair, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(hostile_pair.target), str(hostile_pair.drafter), "--quiet", *words]) == 0
    inert(capsys.readouterr().out)


def test_loading_and_the_tables_of_bench(
    hostile_pair: TinyPair, server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "w1 w2", "category": EVIL}, {"prompt": "w1 " * 400}])
    report, out = tmp_path / "r.html", tmp_path / "o.json"
    words = [
        "--methods",
        f"ar,{server.url}#{EVIL}",
        "--prompts",
        str(prompts),
        "--repeat",
        "1",
        "--max-new-tokens",
        "4",
        "--report",
        str(report),
    ]
    assert main(["bench", *words, "--out", str(out), *hostile_pair.flags()]) == 0
    said = capsys.readouterr()
    inert(said.out)
    assert not OBEYED.findall(said.err.replace("\r", "")), ascii(said.err)
    assert not OBEYED.findall(report.read_text(encoding="utf-8"))


def test_what_tab_offers(catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{EVIL}.json").write_text("{}")
    (offered,) = completions("/load ev", run_lines(catalogue, settings={"compare": ("server",)}).state)
    assert (offered.text, offered.display_text) == (f"{EVIL}.json", f"{SHOWN}.json")


def test_progress_and_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.screen.output import load_progress

    for stream in (io.StringIO(), ATerminal()):
        with load_progress(stream, quiet=False) as progress:
            for fraction in (None, 0.5, None, 0.6):
                progress(f"reading {EVIL}", fraction)
        inert(stream.getvalue().replace("\r\x1b[K", ""))
        assert isinstance(stream, ATerminal) or stream.getvalue() == f"reading {SHOWN}\n"


@pytest.mark.parametrize("draw", [str, lambda text: __import__("rich.text").text.Text(text)])
def test_a_console_escapes_whatever_is_printed_on_it(draw: Callable[[str], Any]) -> None:
    from rich.table import Table

    stream = io.StringIO()
    console, table = Screen(file=stream, width=200), Table(EVIL, title=EVIL)
    table.add_row(draw(EVIL))
    console.print(draw(EVIL), table)
    assert stream.getvalue().count(SHOWN) == 4
    inert(stream.getvalue())
