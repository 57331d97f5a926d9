"""The documents: links lead somewhere, commands are understood, every page is found from the README, which stays short.

No network: of an address outside of the project only its form is looked at.
"""

import re
import shlex
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.command_line import reference
from app.command_line.arguments import COMMANDS, read_request

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "weights").rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^]\[]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"^(?:.* )?(?:python|torchrun .*) infer\.py(.*?)(?:   .*)?$", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCE.sub("", TEXTS[page])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", bare.strip().lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def broken(page: Path, link: str) -> bool:
    """Whether a link leads nowhere: to no file of the project, or to no heading of a page."""
    if link.startswith("https://"):
        return False
    file, _, anchor = link.partition("#")
    place = (page.parent / file).resolve() if file else page
    if not place.is_relative_to(ROOT) or not place.exists():
        return True
    return bool(anchor) and (place not in TEXTS or anchor not in anchors(place))


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= 10_000


def test_every_link_leads_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(prose(page))]
    assert len(links) > 60
    assert [(name_of(page), link) for page, link in links if broken(page, link)] == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    good = ("docs/bench.md#prompts", "#start", "docs", "https://example.org/none")
    bad = ("docs/none.md", "docs/bench.md#none", "#none", "../elsewhere.md", "infer.py#start")
    assert [broken(README, link) for link in (*good, *bad)] == [False] * len(good) + [True] * len(bad)


def test_every_page_is_found_from_the_readme() -> None:
    found, ahead = {README}, [README]
    while ahead:
        page = ahead.pop()
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(page))}
        new = {target for target in targets if target in TEXTS} - found
        found |= new
        ahead += new
    assert [name_of(page) for page in PAGES if page not in found and page.parts[-3] != "weights"] == []


def test_every_generated_table_stands_on_one_page() -> None:
    marks = Counter(mark for text in TEXTS.values() for mark in re.findall(r"<!-- table:(\w+) -->", text))
    assert marks == dict.fromkeys(reference.TABLES, 1)
    assert reference.main(["--check", str(ROOT / "docs" / "reference.md")]) == 0


def commands(page: Path) -> list[str]:
    """What stands behind infer.py in the page's fenced code and in `code`, which may go over several lines.

    Not the reference's patterns, `run [PROMPT|-] …`; the change log tells what once was.
    """
    if page.name == "CHANGELOG.md":
        return []
    text = re.sub(r"<!-- table:subcommands -->.*?<!-- end:subcommands -->", "", TEXTS[page], flags=re.DOTALL)
    inline = [" ".join(code.split()) for code in CODE.findall(FENCE.sub("", text))]
    lines = [line for _, code in FENCE.findall(text) for line in code.splitlines()]
    return [words for line in (*inline, *lines) for words in COMMAND.findall(line) if "…" not in words]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_line_is_understood(page: Path) -> None:
    """A sub-command alone is a name in a sentence."""
    assert [
        words
        for words in map(shlex.split, commands(page))
        if words not in [[name] for name in COMMANDS] and not read_request(words, {}).command
    ] == []


def test_the_commands_of_the_readme_are_among_them() -> None:
    found = commands(README)
    assert {"", ' run "What is a river?"', " check smollm2 --speed --quantization none"} <= set(found)
    assert len(found) >= 15


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_slash_command_is_one(page: Path) -> None:
    lines = [line for _, code in FENCE.findall(TEXTS[page]) for line in code.splitlines() if line.startswith("/")]
    assert [line for line in lines if f"`{line.split()[0]}" not in reference.TABLES["commands"]] == []


def test_every_note_is_in_the_index_and_so_is_every_one_that_is_named() -> None:
    """`docs/notes.md, "Title"`, as the change log, the cards and comments name one."""
    files = [
        *PAGES,
        *(file for room in ("app", "sampling", "training", "utils") for file in (ROOT / room).rglob("*.py")),
    ]
    named = {
        (name_of(file), " ".join(title.split()))
        for file in files
        for title in re.findall(r'docs/notes\.md,\s+"([^"]+)"', file.read_text(encoding="utf-8"))
    }
    index = TEXTS[ROOT / "docs" / "notes.md"]
    assert len(named) > 5
    assert sorted((file, title) for file, title in named if f"[{title}]" not in index) == []
    notes = [TEXTS[page] for page in PAGES if page.parent.name == "notes"]
    headings = [title for text in notes for title in re.findall(r"^## (.+)$", text, re.MULTILINE)]
    assert [title for title in headings if f"[{title}]" not in index] == []


def test_every_module_that_a_page_names_is_there() -> None:
    """`python -m tests.support.precision`, `sampling.recorded.read_answers` …: as far as modules go."""
    named = {(name_of(page), name) for page in PAGES for name in re.findall(r"python -m ([\w.]+)", TEXTS[page])}
    assert len(named) > 2
    assert sorted((page, name) for page, name in named if find_spec(name) is None) == []
