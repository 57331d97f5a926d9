"""The benchmark's report: its figures are the summary's, every plot is drawn or says why not, texts are inert."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.bench.plots import COLOURS, colours, svg
from app.bench.report import MEANINGS, Run, page
from app.bench.summary import shown
from app.command_line.main import main
from tests.support.refusals import refused
from tests.support.tiny import tiny_pair, write_prompts
from utils.machine import cpu_name

HOSTILE = "</td></svg>--></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)> $\\frac{ \x1b[31m &amp;"


class Parsed(HTMLParser):
    """What a browser would see: tags with attributes, texts, and of every table (by class) its rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[list[tuple[str, str | None, str | None]]]]] = {}
        self._rows: list[Any] = []
        self._data: dict[str, str] = {}
        self._cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.tags.append((tag, told))
        if tag == "table":
            self._rows = []
            self.tables.setdefault(told.get("class", ""), []).append(self._rows)
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append(("", None, None))
            self._cell = True
        elif tag == "data":
            self._data = dict(told)

    def handle_endtag(self, tag: str) -> None:
        if tag == "data":
            self._data = {}
        elif tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._cell:
            text = self._rows[-1][-1][0] + data
            self._rows[-1][-1] = (text, self._data.get("value"), self._data.get("class"))

    def methods(self, table: int = 0) -> dict[str, dict[str | None, tuple[str, str | None]]]:
        """Of each row of a table of methods the figures by their key: (text, value)."""
        rows = self.tables["methods"][table][1:]
        return {row[0][0]: {key: (text, value) for text, value, key in row[1:] if key} for row in rows}

    def plotted(self, title: str) -> dict[str, list[float | None]]:
        """The figures of a plot by their row's name."""
        place = [text for text in self.texts if text in TITLES].index(title)
        table = self.tables["plotted"][len([text for text in self.texts if text in TITLES][: place + 1]) - 1]
        return {row[0][0]: [None if value is None else float(value) for _, value, _ in row[1:]] for row in table[1:]}


TITLES = (
    "Speed-up by category",
    "Acceptance by draft position",
    "Gamma: measured and expected speed-up",
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a real run wrote: b.json and b.html."""
    folder = tmp_path_factory.mktemp("bench")
    pair = tiny_pair(folder / "pair", stop=False)
    prompts = write_prompts(
        folder / "p.jsonl", [{"prompt": "one", "category": "qa"}, {"prompt": "two", "category": "rag"}]
    )
    flags = ["--prompts", str(prompts), "--methods", "ar,spec,ngram", "--gammas", "1,3,auto", "--repeat", "2"]
    files = ["--out", str(folder / "b.json"), "--report", str(folder / "b.html")]
    with pytest.MonkeyPatch.context() as patch:  # passes of so small a model are shorter than what disturbs them
        patch.setattr("app.bench.summary.disturbed", lambda plain, other: False)
        assert main(["bench", *pair.flags(), *flags, *files, "--max-new-tokens", "16", "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def data(bench: Path) -> dict[str, Any]:
    return json.loads((bench / "b.json").read_text())


@pytest.fixture(scope="module")
def parsed(bench: Path) -> Parsed:
    return Parsed((bench / "b.html").read_text())


def named(row: dict[str, Any]) -> str:
    gamma = f"auto({row['mean_gamma']:.1f})" if row["gamma"] == "auto" else row["gamma"]
    return row["method"] if gamma is None else f"{row['method']} {gamma}"


KEYS = ("speedup", "expected_speedup", "tokens_per_pass", "acceptance_rate", "alpha", "c", "v", "ttft_ms", "differs")


def test_the_table_holds_exactly_the_figures_of_the_summary(data: dict[str, Any], parsed: Parsed) -> None:
    found = parsed.methods()
    assert list(found) == [named(row) for row in data["summary"]]
    for row in data["summary"]:
        told = found[named(row)]
        values = {key: row[key] for key in KEYS} | {"rate": row["predicted_per_second"]["mean"]}
        for key, value in values.items():
            assert value is None if key not in told else float(told[key][1] or "") == value, key
        if row["speedup_per_repeat"]:
            assert list(map(float, (told["speedup_per_repeat"][1] or "").split())) == row["speedup_per_repeat"]
            assert told["speedup"][0] == f"{row['speedup']:.2f}x"
            assert told["differs"][0] == f"0/{row['compared']}"


def test_the_plots_hold_exactly_the_figures_of_the_file(data: dict[str, Any], parsed: Parsed) -> None:
    speedups, alphas, sweep = map(parsed.plotted, TITLES)
    fixed = [row for row in data["summary"] if isinstance(row["gamma"], int)]
    assert list(sweep) == [named(row) for row in fixed]
    for row in data["summary"][1:]:
        name, each = named(row), row["speedup_per_repeat"]
        assert speedups[name] == [row["speedup"], *(row["categories"][one]["speedup"] for one in ("qa", "rag"))]
        known = row["alpha_per_position"]
        assert alphas.get(name, [None] * len(known))[: len(known)] == known
        if row in fixed:
            assert sweep[name] == [row["speedup"], min(each), max(each), row["expected_speedup"]]


def outside(parsed: Parsed) -> Iterator[str]:
    """Everything in a page that runs, or asks for something beyond the page."""
    for tag, told in parsed.tags:
        if tag in ("script", "img", "link", "iframe", "object", "embed", "base", "form", "foreignobject"):
            yield tag
        yield from (f"{tag} {name}" for name in told if name.startswith("on") or name in ("src", "srcset", "action"))
        yield from (value for name, value in told.items() if "href" in name and not value.startswith("#"))
        yield from (value for value in told.values() if re.search(r"url\((?!#)|javascript:", value))


def test_nothing_comes_from_elsewhere(parsed: Parsed, bench: Path) -> None:
    assert list(outside(parsed)) == []
    text = (bench / "b.html").read_text()
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "default-src 'none'" in text
    ids = [told["id"] for _, told in parsed.tags if "id" in told]
    assert len(ids) == len(set(ids))


def spoilt(value: Any) -> Any:
    """The data with hostile text in place of, and behind, every text that is free."""
    if isinstance(value, dict):
        return {f"{key}{HOSTILE}" if key in ("qa", "rag", "dtype") else key: spoilt(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spoilt(one) for one in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and value != "auto" else value


def test_hostile_texts_are_inert(data: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    file.write_text(json.dumps({**spoilt(data), "skipped": [HOSTILE], HOSTILE: 1}))
    assert main(["bench", "--from", str(file), "--report", str(file.with_suffix(".html")), "--quiet"]) == 0
    parsed = Parsed((tmp_path / "h.html").read_text())
    assert list(outside(parsed)) == []
    assert sum(tag == "svg" for tag, _ in parsed.tags) == len(TITLES)
    text = "".join(parsed.texts)
    assert "smollm2" not in text
    assert text.count("<script>alert(1)</script>\"'><img src=x onerror=alert(1)> $\\frac{ ␛[31m &amp;") > 20
    assert "\x1b" not in text


def test_a_report_of_the_file_is_the_report_of_the_run(bench: Path, tmp_path: Path) -> None:
    out = tmp_path / "other.html"
    assert main(["bench", "--from", str(bench / "b.json"), "--report", str(out), "--quiet"]) == 0
    assert out.read_text().replace("; made from b.json", "") == (bench / "b.html").read_text()


def test_what_was_not_measured_says_what_run_would_fill_it(tmp_path: Path) -> None:
    parsed = Parsed(page(Run.model_validate({"summary": [{"method": "ar"}]}), ""))
    missing = [text for text in parsed.texts if "bench --" in text]
    wanted = (
        "--methods ar,spec measures one",
        "--methods ar,spec drafts",
        "--gammas 1,2,4,8",
        "cascade",
    )
    assert len(missing) == len(wanted)
    assert all(line in told for told, line in zip(missing, wanted, strict=True))
    assert not any(tag == "svg" for tag, _ in parsed.tags)


def test_the_first_screen_says_the_result_in_a_sentence(data: dict[str, Any], bench: Path) -> None:
    best = max(data["summary"], key=lambda row: row["predicted_per_second"]["mean"])
    times = "" if best["speedup"] is None else f", {best['speedup']:.2f}x plain decoding"
    count, rate = len(data["summary"]), best["predicted_per_second"]["mean"]
    name = best["method"] if best["gamma"] is None else f"{best['method']} at gamma {best['gamma']}"
    name = "plain decoding (ar)" if name == "ar" else name
    told = f"{name} is the fastest of {count} methods: {rate:.1f} tokens a second{times}."
    text = (bench / "b.html").read_text()
    first_screen = re.findall(r'<p class="result">(.*?)</p>', text)
    assert [line.partition(";")[0].rstrip(".") + "." for line in first_screen] == [told]
    told = told.rstrip(".")
    assert text.index(told) < text.index("<h2>")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "Invalid JSON: EOF while parsing"),
        ("[]", "Input should be an object, got []"),
        ('{"results": []}', "summary: Field required"),
        ('{"summary": []}', "summary: List should have at least 1 item"),
        ('{"summary": [{"method": 3}]}', "summary.0.method: Input should be a valid string, got 3"),
        ('{"summary": [{"method": "ar", "alpha": NaN}]}', "summary.0.alpha: Input should be a finite number, got nan"),
        ('{"summary": [{"method": "ar", "gamma": "x"}]}', "summary.0.gamma"),
        ('{"summary": [{"method": "ar", "temperature": 0.7}]}', "summary.0.temperature: Input should be null, got 0.7"),
        ("[" * 100_000, "Invalid JSON"),
        ("\x00\xff", "Invalid JSON"),
    ],
)
def test_a_file_that_is_no_bench_file_is_one_line(
    content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.json"
    file.write_text(content, encoding="latin-1")
    assert main(["bench", "--from", str(file), "--report", str(tmp_path / "r.html")]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: {file} is no file of bench --out: ")
    assert told in line
    assert (line.count("\n"), list(tmp_path.iterdir())) == (1, [file])


def test_without_matplotlib_a_plot_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    refused(svg, lambda figure: None, 1, match="pip install -r requirements")


def test_a_legend_explains_every_column_and_the_page_names_the_processor(parsed: Parsed) -> None:
    heads = {cell[0] for cell in parsed.tables["methods"][0][0]} - {"method"}
    explained = {row[0][0]: row[1][0] for table in parsed.tables["words"] for row in table if len(row) == 2}
    assert {"c", "v", "differs"} <= heads <= explained.keys()
    assert "SWI" in explained
    assert {*shown("report")} == {*MEANINGS}
    assert all(len(explained[head]) > 10 for head in heads)
    assert explained["cpu"] == cpu_name()


def test_every_series_has_a_colour_of_its_own() -> None:
    for count in (1, 7, 8, 20, 60):
        assert len(set(colours(count))) == count
    assert set(colours(7)) == set(COLOURS)


def test_a_simulated_lane_is_called_so_and_is_never_the_fastest(data: dict[str, Any]) -> None:
    rows = json.loads(json.dumps(data["summary"]))
    for row in rows:
        row["method"] = row["method"].replace("ngram", "oracle:.9")
    text = page(Run.model_validate({**data, "summary": rows, "results": []}), "b.json")
    assert "oracle:.9 3 (simulated)" in text
    assert "oracle" not in "".join(re.findall(r'<p class="result">(.*?)</p>', text))
