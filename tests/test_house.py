"""The house as docs/architecture.md draws it: every room is on the page, every place that a page names is there, and no
folder or file grows or shrinks into what a reader is lost in. Which way imports run is import-linter's affair.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = ("app", "training", "sampling", "utils")
MOST = 13  # chapters of a room
LEAST = 40  # lines of a chapter
SHORT = {  # what stands for itself all the same
    *("sampling/causal.py", "sampling/student_file.py", "utils/templates.py"),  # addresses that docs/library.md showed
    *("utils/progress.py", "utils/timing.py", "utils/distributed/world.py"),
}

CHAPTERS = [file for floor in FLOORS for file in (ROOT / floor).rglob("*.py") if file.name != "__init__.py"]
PICTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
FILE = re.compile(r"\b(?:app|sampling|training|utils|tests|docs)/[\w/.-]+\.(?:py|md|svg)\b")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_room_shows_more_than_a_dozen_names() -> None:
    shown = Counter(file.parent.relative_to(ROOT).as_posix() for file in CHAPTERS)
    assert len(shown) > 25
    assert {room: count for room, count in shown.items() if count > MOST} == {}


def test_no_chapter_is_a_fragment_but_those_that_stand_for_themselves() -> None:
    short = {file.relative_to(ROOT).as_posix() for file in CHAPTERS if len(file.read_text().splitlines()) < LEAST}
    assert {
        file for file in short if not file.startswith("sampling/drafters/")
    } == SHORT  # a drafter may be a small one


def test_every_room_is_in_the_picture_and_every_room_of_the_picture_is_there() -> None:
    drawn: set[str] = set()
    above: dict[int, str] = {}
    for indent, name in re.findall(r"^( *)([a-z_]+)/(?:\s|$)", PICTURE, re.MULTILINE):
        path = f"{above[len(indent) - 2]}/{name}" if indent else name
        above[len(indent)] = path
        drawn.add(path)
    rooms = {file.parent.relative_to(ROOT).as_posix() for file in CHAPTERS}
    assert drawn == rooms | set(FLOORS)


def test_every_file_that_a_page_names_is_there() -> None:
    named = [(page.name, path) for page in PAGES for path in FILE.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 50
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []
