"""Every option and command that writes a file, on a device, through a link, without permission, on a full disk.

What there is comes from the tables of flags, words and console commands: an option that takes a path stands here as
one that writes or as one that reads, or the first test fails.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.command_line.arguments import COMMANDS, OWN_FIELDS
from app.command_line.main import main
from app.command_line.reference import main as reference
from app.console.slash_commands import TABLE
from app.settings.table import FIELDS, Field, arguments
from tests.support.places import Device, largest_file, read_only
from tests.support.scripted import catalogue_of, run_lines
from tests.support.tiny import TinyPair, tiny_pair, write_prompts

APP = Path(__file__).resolve().parents[3] / "app"
REFERENCE = APP.parent / "docs" / "reference.md"
SESSION = REFERENCE.parent / "examples" / "session.jsonl"
PATHS = re.compile(r"FILE|DIR|GGUF|F\.json|[Ff]ile|[Ff]older|[Pp]ath")


@dataclass(frozen=True)
class Home:
    """What the commands need: a pair, prompts, a text, and files that earlier commands wrote."""

    pair: TinyPair
    folder: Path

    def file(self, name: str) -> str:
        return str(self.folder / name)

    def target(self) -> list[str]:
        return ["--target", str(self.pair.target), "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    made = Home(tiny_pair(folder, stop=False), folder)
    write_prompts(folder / "prompts.jsonl", [{"prompt": "one"}])
    (folder / "text.txt").write_text("one and one is two and two is three")
    catalogue_of(folder, {"tiny": made.pair})
    answers = ["--prompts", made.file("prompts.jsonl"), "--max-new-tokens", "2", *made.target()]
    assert main(["record", "--costs", "--out", made.file("recorded.jsonl"), *answers]) == 0
    assert main([*bench(made), "--out", made.file("bench.json")]) == 0
    return made


def bench(home: Home) -> list[str]:
    words = ["bench", "--prompts", home.file("prompts.jsonl"), "--methods", "ar", "--repeat", "1"]
    return [*words, "--max-new-tokens", "2", *home.target()]


# -- what writes ----------------------------------------------------------------------------------

Run = Callable[[Home, Path], Any]


def command(*words: str, flag: str = "--out", target: bool = True) -> Run:
    """A command line; `:name` in it is a file of the home."""

    def run(home: Home, path: Path) -> int:
        told = [home.file(word[1:]) if word.startswith(":") else word for word in words]
        own = [flag, str(path)] if flag else [str(path)]
        return main([told[0], *own, *told[1:], *(home.target() if target else [])])

    return run


def saved(home: Home, path: Path) -> str:
    """What the console said of /save, where that is no success."""
    settings = {"compare": ("ar",), "max_new_tokens": 2}
    twice = [f"/save {path}"] * 2  # a file of somebody else is replaced when that is said again
    said = run_lines(home.folder / "models.yaml", "one", *twice, width=400, settings=settings)
    text = said.text.rpartition(f"/save {path}\n")[2].strip()
    return "" if text.startswith("saved 1 turn to ") else text


def renewed(home: Home, path: Path) -> int:
    """The page's own tables, one of them spoilt."""
    if path.exists() and path.read_bytes() == OLD:
        keep = path.stat().st_mode
        path.chmod(0o644)
        path.write_bytes(REFERENCE.read_bytes().replace(b"| `--gamma", b"| `--gama", 1))
        path.chmod(stat.S_IMODE(keep))
    return reference(["--write", str(path)])


@dataclass(frozen=True)
class Output:
    """One way to have a file written: whether it goes on in a file instead of replacing it, how its name must end."""

    run: Run
    appends: bool = False
    ending: str = ""
    rereads: bool = False  # it reads what it replaces


FILES = {
    "bench --out": Output(lambda home, path: main([*bench(home), "--out", str(path)])),
    "bench --report": Output(lambda home, path: main([*bench(home), "--report", str(path)])),
    "record --out": Output(command("record", "--prompts", ":prompts.jsonl", "--max-new-tokens", "2"), appends=True),
    "simulate --out": Output(command("simulate", ":recorded.jsonl", "--drafter", "ngram", "--gammas", "2")),
    "--record": Output(command("run", "one", "--max-new-tokens", "2", flag="--record"), appends=True),
    "replay --page": Output(command("replay", str(SESSION), flag="--page", target=False)),
    "/save FILE": Output(saved, ending=".json"),
    "reference": Output(renewed, rereads=True),
}
FOLDERS = ("distill --out", "distill --features")
READ = {
    *("--models", "--target", "--drafter", "--tokenizer", "--tables", "--data-dir", "/load FILE"),
    *("--grammar", "--json-schema", "/json [FILE|TEXT]"),
    *("bench --prompts", "bench --ids", "record --prompts", "record --ids", "simulate --prompts"),
    *("bench --from", "simulate FILE", "replay FILE"),
    *("distill --data", "distill --prompts", "distill --start"),
}


def taking_paths() -> Iterator[str]:
    """Every flag, word, console command and module that takes a path, by what their tables say of it."""

    def takes(field: Field) -> bool:
        return bool(PATHS.search(field.kind.metavar) or PATHS.search(field.kind.allowed))

    def flag(field: Field) -> str:
        return f"--{field.name.replace('_', '-')}"

    yield from (flag(field) for field in FIELDS.values() if takes(field))
    for name, fields in OWN_FIELDS.items():
        yield from (f"{name} {flag(field)}" for field in fields.values() if takes(field))
    for name, one in COMMANDS.items():
        if one.word is not None and PATHS.search(one.word.metavar):
            yield f"{name} {one.word.metavar}"
    yield from (one.usage for one in TABLE if PATHS.search(one.usage))
    yield from (file.stem for file in APP.glob("**/*.py") if '__name__ == "__main__"' in file.read_text())


def test_every_option_that_takes_a_path_is_known_as_one_that_writes_or_reads() -> None:
    found = list(taking_paths())
    assert len(found) == len(set(found))
    assert set(found) == {*FILES, *FOLDERS, *READ}
    assert len(found) == len(FILES) + len(FOLDERS) + len(READ)


@pytest.mark.parametrize(
    "name", [name for name in sorted({*FILES, *FOLDERS, *READ} - {"distill --data"}) if re.match("[a-z]+ --", name)]
)
def test_a_path_behind_an_equals_sign_may_begin_with_the_home_folder(name: str) -> None:
    command, flag = name.split(" --")  # a shell leaves that tilde to the program
    assert getattr(arguments(OWN_FIELDS[command], {flag: "~/x"}), flag) == Path.home() / "x"


# -- trying them ----------------------------------------------------------------------------------

OLD = b"old"


@pytest.fixture
def tried(home: Home, capsys: pytest.CaptureFixture[str]) -> Callable[[str, Path], str]:
    """Runs an output and returns the one line of its complaint, "" where it did what it was to do."""

    def run(name: str, path: Path) -> str:
        capsys.readouterr()
        answer = FILES[name].run(home, path)
        error = capsys.readouterr().err
        told = answer if isinstance(answer, str) else error
        assert "internal" not in told
        assert "Traceback" not in told
        if isinstance(answer, str):
            return answer
        complaints = [line for line in error.splitlines() if re.match("error: |the session log stopped", line)]
        assert len(complaints) == (answer != 0) or name == "--record"
        return complaints[0] if complaints else ""

    return run


def prepared(name: str, file: Path, mode: int = 0o640) -> None:
    """A file of that mode; one that is gone on with is empty."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"" if FILES[name].appends else OLD)
    file.chmod(mode)


def content(file: Path) -> bytes:
    data = file.read_bytes()
    assert len(data) > 20
    assert not data.startswith(OLD)
    return data


def around(file: Path) -> list[str]:
    return sorted(one.name for one in file.parent.iterdir())


@pytest.mark.parametrize("name", [name for name, output in FILES.items() if not output.rereads])
def test_a_device_is_written_to_and_stays_one(name: str, tried: Callable[[str, Path], str], tmp_path: Path) -> None:
    with Device() as device:
        path = device.path
        if ending := FILES[name].ending:
            path = tmp_path / f"out{ending}"
            path.symlink_to(device.path)
        assert tried(name, path) == ""
        assert stat.S_ISCHR(path.stat().st_mode)
        assert path.is_symlink() == bool(ending)
        assert len(device.read()) > 20
    assert sorted(tmp_path.iterdir()) == ([path] if ending else [])


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_followed_and_the_mode_is_kept(name: str, tried: Callable[[str, Path], str], tmp_path: Path) -> None:
    ending = FILES[name].ending
    real, link = tmp_path / "there" / f"real{ending}", tmp_path / "here" / f"link{ending}"
    prepared(name, real)
    link.parent.mkdir()
    link.symlink_to(os.path.join("..", "there", real.name))
    assert tried(name, link) == ""
    assert link.is_symlink()
    content(real)
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert (around(link), around(real)) == ([link.name], [real.name])


@pytest.mark.parametrize("name", [name for name, output in FILES.items() if not output.rereads])
def test_a_read_only_folder_without_the_file_is_one_line(
    name: str, tried: Callable[[str, Path], str], tmp_path: Path
) -> None:
    with read_only(tmp_path):
        complaint = tried(name, path := tmp_path / f"out{FILES[name].ending}")
    assert str(tmp_path) in complaint
    assert "cannot" in complaint
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_is_one_line_and_the_old_content_stays(
    name: str, tried: Callable[[str, Path], str], tmp_path: Path
) -> None:
    path = tmp_path / f"out{FILES[name].ending}"
    prepared(name, path)
    before = path.read_bytes()
    if FILES[name].rereads:
        before = before and REFERENCE.read_bytes().replace(b"| `--gamma", b"| `--gama", 1)
        path.write_bytes(before)
    with largest_file(10):
        complaint = tried(name, path)
    assert re.search(r"cannot write \S+: File too large \(.*\)", complaint)
    assert path.read_bytes() == before
    # the journal of bench says itself that it is kept
    assert set(around(path)) - {f"{path.name}.partial"} == {path.name}
    assert name == "bench --out" or around(path) == [path.name]


# -- folders --------------------------------------------------------------------------------------


def distilled(home: Home, texts: Path, out: Path, features: Path) -> int:
    words = ["distill", "--out", str(out), "--features", str(features), "--data", str(texts)]
    words += ["--short-list", "0", "--epochs", "1", "--hidden", "32", "--heads", "4", "--intermediate", "32"]
    return main([*words, *home.target()])


@pytest.fixture(scope="module")
def texts(home: Home) -> Path:
    return write_prompts(
        home.folder / "texts.jsonl", [{"ids": [1, *range(5 + row, 30 + row)], "start": 4} for row in range(12)]
    )


def test_folders_behind_links_are_filled_and_the_links_stay(home: Home, texts: Path, tmp_path: Path) -> None:
    links = []
    for name in ("out", "features"):
        (tmp_path / "there" / name).mkdir(parents=True)
        links.append(tmp_path / name)
        links[-1].symlink_to(tmp_path / "there" / name)
    assert distilled(home, texts, *links) == 0
    assert all(link.is_symlink() for link in links)
    assert all(
        list((tmp_path / "there" / name).glob(file))
        for name, file in (("out", "model.safetensors"), ("features", "*.safetensors"))
    )
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("place", ["device", "read-only"])
def test_a_folder_that_cannot_be_filled_is_refused_before_anything_is_made(
    name: str, place: str, home: Home, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work, refused = tmp_path / "work", tmp_path / "refused"
    work.mkdir()
    refused.mkdir()
    folders = {flag: work / flag for flag in ("out", "features")}
    which = name.partition("--")[2]

    def filled(folder: Path) -> int:
        return distilled(home, texts, **{**folders, which: folder})

    if place == "device":
        with Device() as device:
            assert filled(device.path) == 2
            assert device.path.is_char_device()
    else:
        with read_only(refused):
            assert filled(refused / "new") == 2
    assert re.fullmatch(
        r"error: --\w+ \S+ cannot be written: (Not a directory|Permission denied)\n", capsys.readouterr().err
    )
    assert list(work.iterdir()) == list(refused.iterdir()) == []
