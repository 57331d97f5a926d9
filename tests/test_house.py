"""docs/architecture.md and the folders agree: every room is on the page, and every file that a page names exists. Tests
read nothing private; docstrings name errors."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import sampling.loop
from sampling.verify.rules import examine_drawn

ROOT = Path(__file__).parent.parent
FLOORS = ("app", "training", "sampling", "utils")

CHAPTERS = [file for floor in FLOORS for file in (ROOT / floor).rglob("*.py") if file.name != "__init__.py"]
PICTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
FILE = re.compile(r"\b(?:app|sampling|training|utils|tests|docs)/[\w/.-]+\.(?:py|md|svg)\b")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_room_is_in_the_picture_and_every_room_of_the_picture_is_there() -> None:
    drawn: set[str] = set()
    above: dict[int, str] = {}
    for indent, name in re.findall(r"^( *)([a-z_]+)/(?:\s|$)", PICTURE, re.MULTILINE):
        path = f"{above[len(indent) - 2]}/{name}" if indent else name
        above[len(indent)] = path
        drawn.add(path)
    assert drawn == {file.parent.relative_to(ROOT).as_posix() for file in CHAPTERS} | set(FLOORS)


def test_every_file_that_a_page_names_is_there() -> None:
    named = [(page.name, path) for page in PAGES for path in FILE.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 50
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_a_servers_name_is_read_in_three_places_only() -> None:
    """Where names are checked, lanes made and records read; whatever differs for a server asks them."""
    readers = [file.name for file in CHAPTERS if "is_server(" in file.read_text(encoding="utf-8")]
    assert sorted(readers) == ["costs.py", "lane.py", "server.py", "types.py"]


def test_the_round_on_the_page_is_the_code() -> None:
    """Line by line, of the functions that it says; on one screen."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## A round")[2].partition("\n## ")[0], re.DOTALL)
    for block, source in zip(blocks, map(inspect.getsource, (sampling.loop, examine_drawn)), strict=True):
        assert textwrap.indent(block, "    ") in source
    assert sum(len(block.splitlines()) for block in blocks) <= 60


def test_no_name_of_a_type_stands_for_two_things() -> None:
    """A class or an alias of a type, in capitals and small letters, is defined in one file."""
    defined = re.compile(r"^(?:class ([A-Z]\w*[a-z]\w*)\b|([A-Z]\w*[a-z]\w*) = )", re.MULTILINE)
    homes: dict[str, set[str]] = {}
    for file in CHAPTERS:
        for names in defined.findall(file.read_text(encoding="utf-8")):
            homes.setdefault("".join(names), set()).add(file.relative_to(ROOT).as_posix())
    assert len(homes) > 300
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_every_name_that_a_page_finds_in_a_file_is_there() -> None:
    """As `file.py: name`, `name` in `file.py` or `name` (`file.py`); a file without its folder is any of that name."""
    code = [file for room in ("app", "sampling", "training", "utils", "tests") for file in (ROOT / room).rglob("*.*")]
    texts = {file.as_posix(): file.read_text("utf-8") for file in code if file.suffix in (".py", ".c", ".h", ".html")}
    found, missing = 0, list[tuple[str, str, str]]()
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        named = [(name, file) for file, name in re.findall(r"`([\w/]+\.(?:py|c|h)): (?:\w+\.)?(\w+)`", text)]
        named += re.findall(r"`(\w+)` (?:in |of |\()`([\w/]+\.(?:py|c|h|html))`", text)
        for name, file in named:
            holds = [text for path, text in texts.items() if path.endswith(f"/{file}")]
            found += 1
            if not any(re.search(rf"\b{name}\b", text) for text in holds):
                missing.append((page.name, name, file))
    assert found > 40
    assert missing == []


def test_tests_read_nothing_that_is_private() -> None:
    """No underscore name of ours: as an attribute of anything but `self`, imported, patched, or in a program's text."""
    name = r"(_[A-Za-z]\w*)"
    defined = re.compile(rf"(?:\bdef |\bclass |\bself\.|^ *){name}", re.MULTILINE)
    reading = re.compile(rf'(?<!\bself)\.{name}|\bimport .*\b{name}|^ +{name},$|setattr\(.*"{name}"', re.MULTILINE)
    own = {each for file in CHAPTERS for each in defined.findall(file.read_text(encoding="utf-8"))} - {"_replace"}
    tests = [(file.name, file.read_text(encoding="utf-8")) for file in (ROOT / "tests").rglob("*.py")]
    read = {(file, each) for file, text in tests for names in reading.findall(text) for each in names}
    assert len(own) > 1000
    assert {(file, each) for file, each in read if each in own} == set()


def test_docstrings_of_public_functions_name_the_errors_that_they_raise() -> None:
    """Of functions, methods and classes (for their constructors) below `app`."""
    errors, found, missing = {"UserError", "UsageError", "ValueError", "KeyError"}, 0, list[tuple[str, str, str]]()
    for file in (file for file in CHAPTERS if file.relative_to(ROOT).parts[0] != "app"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
        for scope, node in [(each, node) for each in scopes for node in each.body]:
            if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
                words = f"{ast.get_docstring(node)} {ast.get_docstring(scope) if node.name == '__init__' else ''}"
                raised = [each.exc for each in ast.walk(node) if isinstance(each, ast.Raise)]
                names = errors & {ast.unparse(each.func) for each in raised if isinstance(each, ast.Call)}
                found += len(names)
                missing += [(file.name, node.name, name) for name in names if name not in words]
    assert found > 100
    assert missing == []
