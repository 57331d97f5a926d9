"""The screen as exact text: every width, with and without colour, within its height, whatever the model says."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings, strategies as st
from rich.cells import cell_len
from syrupy.assertion import SnapshotAssertion

from app.lanes.answers import Comparison
from app.screen.live import play
from app.screen.palette import PALETTES, Look
from app.screen.panes import Pane, PaneData, SideBySide, note, pieces_of, positions, stats_lines
from app.screen.rows import Drawn, Lines, Row, flow
from app.screen.spans import Span
from app.screen.view import Frame, heading, meanings, toolbar
from app.settings.table import Settings
from sampling.events import Step
from sampling.stats.summary import Stats
from tests.support.pacing import make_step
from tests.support.panes import pane_of, printed
from utils.growing_text import NO_TEXT

WIDTHS = [60, 79, 80, 100, 140]

AR = Stats(stop_reason="eos", ttft_ms=88, predicted_n=33, predicted_ms=1670, target_passes=32, openings=1)
SPEC = Stats(
    stop_reason="eos",
    ttft_ms=101,
    predicted_n=33,
    predicted_ms=790,
    draft_n=30,
    draft_n_accepted=22,
    draft_n_rejected=4,
    target_passes=10,
    openings=1,
    accepted_at=(10, 6, 4, 2),
    examined_at=(11, 7, 5, 3),
)
SPANS = [
    Span("A", "target"),
    Span(" river is a natural", "accepted"),
    Span(" stream", "target"),
    Span(" of water that flows", "accepted"),
    Span(" down", "rejected"),
    Span(" to", "discarded"),
    Span(" toward", "target"),
    Span(" the sea", "accepted"),
    Span("\n", "rejected"),
    Span(",", "target"),
    Span(" a lake or\n\n    另一条河流 😀", "accepted"),
    Span(".", "target"),
]
TEXT = "A river is a natural stream of water that flows toward the sea, a lake or\n\n    另一条河流 😀."
FASTER = Comparison("2.11x faster, same output", "good")


def shown(drawn: Drawn, color: bool = False) -> str:
    """What a terminal of the look's width receives."""
    return printed(drawn, drawn.look.width, "truecolor" if color else None)


class Screen(Drawn):
    """The line over everything and, in the rows that it leaves, the lanes."""

    def __init__(self, top: Drawn, frame: Frame) -> None:
        self.look, self.top, self.frame = frame.look, top, frame

    def rows(self) -> list[Row]:
        return self.top.rows() + self.frame.rows()


def top(look: Look, target: str, drafter: str, where: str = "", last: int | None = None, **changes: object) -> Lines:
    return heading({"target": target, "drafter": drafter, "where": where}, Settings(**changes), look, last)


def lanes(look: Look, **more: object) -> Screen:
    panes = [
        pane_of("ar", [Span(TEXT[:60], "plain")], AR, "running", limit=64),
        pane_of("spec", SPANS, SPEC, "done", limit=64),
    ]
    first = top(look, "SmolLM2-135M-Instruct", "n-gram drafter", "float32 cpu")
    return Screen(first, Frame(panes, look, comparisons=[FASTER], **more))  # type: ignore[arg-type]


def columns(text: str) -> int:
    return max((cell_len(line) for line in text.split("\n")), default=0)


# ---------------------------------------------------------------- whole screens


@pytest.mark.parametrize("width", WIDTHS)
def test_whole_screen_without_colour(width: int, snapshot: SnapshotAssertion) -> None:
    assert shown(lanes(Look(width, None, color=False))) == snapshot


@pytest.mark.parametrize("width", [60, 100])
def test_whole_screen_in_colour(width: int, snapshot: SnapshotAssertion) -> None:
    assert shown(lanes(Look(width)), color=True) == snapshot


def test_whole_screen_for_colour_blind_eyes(snapshot: SnapshotAssertion) -> None:
    assert shown(lanes(Look(80, palette="cb"), show_discarded=True), color=True) == snapshot


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("color", [False, True])
def test_ascii_draws_only_ascii(width: int, color: bool) -> None:
    plain = [
        Span(span.text.encode("ascii", "ignore").decode(), span.kind) for span in [*SPANS, Span(NO_TEXT, "rejected")]
    ]
    plain[-1] = Span(NO_TEXT, "rejected")
    look = Look(width, 20, color, ascii=True)
    panes = [pane_of("ar", plain, AR, "running", limit=64), pane_of("spec", plain * 12, SPEC, "done", limit=64)]
    frame = Frame(panes, look, comparisons=[FASTER], show_discarded=True)
    text = shown(Screen(top(look, "target", "drafter"), frame), color)
    assert text.isascii()
    assert "lines above" in text


# ---------------------------------------------------------------- figures


def test_stats_lines_are_those_of_the_design() -> None:
    panes = [pane_of("ar", SPANS, AR, "done"), pane_of("spec", SPANS, SPEC, "done")]
    assert shown(Frame(panes, Look(120, None, color=False), comparisons=[FASTER])).split("\n")[-5:] == [
        "AR    33 tok  1.67 s  19.2 tok/s  TTFT  88 ms",
        "spec  33 tok  0.79 s  40.5 tok/s  TTFT 101 ms | accepted 22/30 (73%)  alpha .85  3.20 tok/pass  10 passes",
        "2.11x faster, same output | text accepted  [-x-] rejected  {+x+} from target",
        "seconds and rates leave prefill out",
        "",
    ]


@pytest.mark.parametrize("width", [20, 40, *WIDTHS])
@pytest.mark.parametrize("color", [False, True])
def test_no_figure_is_ever_cut(width: int, color: bool) -> None:
    words = re.sub(r"[━─\s|]+", " ", shown(lanes(Look(width, None, color)), color=False))
    assert [
        figure
        for figure in [
            "33 tok",
            "1.67 s",
            "19.2 tok/s",
            "40.5 tok/s",
            "TTFT 88 ms",
            "TTFT 101 ms",
            "22/30 (73%)",
            ".85",
            "3.20",
        ]
        if figure not in words
    ] == []


def test_undefined_figures_are_not_shown() -> None:
    first = Stats(ttft_ms=90, predicted_n=1, openings=1)
    assert shown(stats_lines([pane_of("spec", (), first, "running")], Look(80, color=False))) == (
        "spec  1 tok  0.00 s  - tok/s  TTFT 90 ms\n"
    )
    waiting = pane_of("spec", (), None, "prefill", "reading prompt 256 of 3000")
    assert shown(stats_lines([waiting], Look(80, color=False))) == "spec  reading prompt 256 of 3000\n"
    assert positions(first, Look(80)) == []


def test_all_drafts_discarded_has_no_alpha() -> None:
    stats = Stats(
        ttft_ms=90, predicted_n=2, predicted_ms=100, openings=1, target_passes=1, draft_n=2, draft_n_discarded=2
    )
    assert shown(stats_lines([pane_of("spec", (), stats, "done")], Look(100, color=False))) == (
        "spec  2 tok  0.10 s  10.0 tok/s  TTFT 90 ms | accepted 0/2 (0%)  1.00 tok/pass  1 pass\n"
    )


@pytest.mark.parametrize(
    ("reason", "tokens", "limit", "state", "words"),
    [
        ("length", 128, 128, "done", "cut at 128 tokens, /continue"),
        ("length", 57, 128, "done", "cut at 57 tokens, the context is full"),
        ("interrupted", 1, 128, "stopped", "stopped at 1 token"),
        ("eos", 25, 128, "done", ""),
        (None, 25, 128, "running", ""),
    ],
)
def test_an_answer_that_is_not_whole_says_why(reason: str, tokens: int, limit: int, state: str, words: str) -> None:
    stats = Stats(stop_reason=reason, predicted_n=tokens, predicted_ms=500, openings=1)  # type: ignore[arg-type]
    pane = pane_of("spec", SPANS, stats, state, limit=limit)  # type: ignore[arg-type]
    assert note(pane) == words
    assert (f"\n{words}\n" in shown(Frame([pane_of("ar", (), AR, "done"), pane], Look(80, color=False)))) == bool(words)


def test_header_names_what_runs() -> None:
    look = Look(100, color=False)
    changes = {"gamma": "auto", "top_p": 0.9, "top_k": 40, "temperature": 0.7}
    text = shown(top(look, "SmolLM2", "tiny", "float32 cpu", 4, **changes))
    assert text == "SmolLM2 ← tiny   float32 cpu   gamma auto(4.0)   T 0.7   top-p 0.9   top-k 40   seed 42\n"
    assert shown(top(Look(80), "SmolLM2", "no drafter")) == "SmolLM2 ← no drafter   γ 4   T 0   top-p 1   seed 42\n"
    assert shown(top(Look(80), "SmolLM2", "")) == "SmolLM2   T 0   top-p 1   seed 42\n"  # a server


def legend(look: Look) -> Lines:
    return Lines(flow(meanings(look), look), look)


def test_legend_shows_each_kind_in_its_own_manner() -> None:
    assert shown(legend(Look(80, color=False))) == "text accepted  [-x-] rejected  {+x+} from target\n"
    colored = shown(legend(Look(80)), color=True)
    assert "\x1b[32maccepted" in colored
    assert "\x1b[9;31mrejected" in colored
    assert "\x1b[1;94mfrom the target" in colored


@pytest.mark.parametrize("palette", PALETTES)
def test_no_meaning_rests_on_colour_alone(palette: str) -> None:
    look = Look(palette=palette)
    rejected, target, accepted = (look.style(role) for role in ("rejected", "target", "accepted"))
    assert rejected is not None
    assert target is not None
    assert accepted is not None
    assert rejected.strike
    assert target.bold
    assert not accepted.strike
    assert not accepted.bold


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([Span(" stream", "target")], " {+stream+}"),
        ([Span(" down", "rejected"), Span(" up", "target")], " [-down-] {+up+}"),
        ([Span(".\nThe", "target")], "{+.+}\n{+The+}"),
        ([Span("\n\n", "target")], "{+↵↵+}\n\n"),
        ([Span(" ", "target")], " "),
        ([Span("\n  x", "rejected")], "[-↵  x-]"),
        ([Span("x", "discarded")], ""),
    ],
)
def test_marks_without_colour(spans: list[Span], text: str) -> None:
    assert "".join(part for part, _ in pieces_of(spans, Look(color=False))) == text


def test_discarded_drafts_are_shown_on_request() -> None:
    pieces = pieces_of([Span(" x", "discarded")], Look(color=False), show_discarded=True)
    assert "".join(part for part, _ in pieces) == " [~x~]"
    assert pieces_of([Span(" x", "discarded")], Look(), show_discarded=True) == [(" ", "plain"), ("x", "discarded")]


HOSTILE = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\r\x9b31m\u202eevil\u2028\x00\udc80\x7f\U000e0041\u200b"


@pytest.mark.parametrize("kind", ["accepted", "rejected", "target", "plain"])
@pytest.mark.parametrize("color", [False, True])
def test_hostile_text_is_inert(kind: str, color: bool) -> None:
    text = shown(Pane(pane_of("[red]ar", [Span(HOSTILE, kind)], None, "done"), Look(100, color=color)))  # type: ignore[arg-type]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\u200b\ud800-\udfff\U000e0041]", text)
    assert "␛[2J␛]0;title␇[bold]x[/bold]␍\\x9b31m\\u202eevil ␀\ufffd␡" in text
    assert "[red]ar" in text


# ---------------------------------------------------------------- size

span_texts = st.text(
    st.sampled_from("abc xyz.,\n\t日本😀👍🏽é́\u200d\ufe0f❤[]{}+-\x1b\r") | st.characters(codec="utf-8"), max_size=30
)
kinds = st.sampled_from(["accepted", "rejected", "discarded", "target", "plain"])
some_spans = st.lists(st.builds(Span, span_texts, kinds), max_size=12)
looks = st.builds(
    Look,
    st.integers(20, 130),
    st.none() | st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(PALETTES)),
)
figures = st.none() | st.sampled_from([AR, SPEC])


@settings(max_examples=250, deadline=None)
@given(
    st.lists(
        st.builds(
            pane_of, kinds, some_spans, figures, st.sampled_from(["waiting", "prefill", "running", "done", "stopped"])
        ),
        max_size=5,
    ),
    looks,
    st.sampled_from(["auto", "side", "stack"]),
    st.booleans(),
)
@example([pane_of("ar", [Span("日" * 9, "plain")], AR, "running")] * 3, Look(20, 1), "side", True)
def test_no_line_is_wider_than_the_screen_and_no_frame_higher(
    panes: list[PaneData], look: Look, layout: str, debug: bool
) -> None:
    frame = Frame(panes, look, layout=layout, comparisons=[FASTER], show_discarded=debug)  # type: ignore[arg-type]
    rows = frame.rows()
    assert all(sum(segment.cell_length for segment in row) <= look.width for row in rows)
    assert look.height is None or len(rows) <= look.height
    assert columns(shown(frame)) <= look.width
    assert columns(shown(top(look, "a target of a long name", "a drafter"))) <= look.width
    assert shown(frame).count("\n") == len(rows)


def test_a_long_text_shows_its_end_and_how_much_is_above() -> None:
    spans = [Span("\n".join(f"line {n}" for n in range(20)), "plain")]
    text = shown(Pane(pane_of("ar", spans, None, "done"), Look(40, color=False), height=6))
    assert text.split("\n")[1:-2] == [
        f"│ {words:<36} │" for words in ("… 17 lines above", "line 17", "line 18", "line 19")
    ]


@pytest.mark.parametrize(
    ("width", "layout", "tops"), [(80, "auto", 1), (79, "auto", 2), (80, "stack", 2), (40, "side", 1)]
)
def test_panes_stand_side_by_side_from_80_columns_or_on_request(width: int, layout: str, tops: int) -> None:
    panes = [pane_of("ar", SPANS, AR, "done"), pane_of("spec", SPANS, SPEC, "done")]
    assert sum("┌" in line for line in shown(SideBySide(panes, Look(width, color=False), layout)).split("\n")) == tops


# ---------------------------------------------------------------- cost


def test_stats_lines_align_over_lanes() -> None:
    slow = Stats(ttft_ms=1088, predicted_n=128, predicted_ms=12_000, openings=1)
    assert shown(
        stats_lines([pane_of("ar", (), slow, "done"), pane_of("ngram", (), AR, "done")], Look(80, color=False))
    ) == ("AR     128 tok  12.00 s  10.6 tok/s  TTFT 1088 ms\nngram   33 tok   1.67 s  19.2 tok/s  TTFT   88 ms\n")


@pytest.mark.parametrize(("frame_s", "most"), [(0.0001, 13), (0.02, 3)])
def test_frames_are_dropped_where_drawing_takes_long_and_tokens_never(frame_s: float, most: int) -> None:
    """A second of 400 rounds: at most 12 frames and the first, and no more than 4% of the time."""
    now, drawn, fed = [0.0], list[float](), list[Step]()

    class Reader:
        def feed(self, event: Step) -> None:
            fed.append(event)

    steps = [make_step(0, 0, 0, verify_s=1 / 400, row=number) for number in range(400)]

    def race() -> Iterator[tuple[int, Step]]:
        for step in steps:
            now[0] += 1 / 400
            yield 0, step

    def draw() -> None:
        drawn.append(now[0])
        now[0] += frame_s

    play(race(), [Reader()], draw, lambda: now[0])  # type: ignore[list-item]
    assert fed == steps
    assert 1 < len(drawn) <= most
    assert frame_s * (len(drawn) - 1) <= 0.045 * now[0]


def test_the_status_line_has_every_setting_that_shapes_what_is_drawn() -> None:
    assert toolbar("p", Settings(temperature=0.5), "", 0, 0) == "p  gamma 4  T 0.5  ar,spec  seed 42"
    shaped = Settings(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, no_repeat_ngram=3, seed=1
    )
    filters = "top-p 0.9  top-k 40  min-p 0.05  penalty 1.1  no 3-gram twice"
    assert toolbar("p", shaped, "", 0, 0) == f"p  gamma 4  T 0.5  {filters}  ar,spec  seed 1"
    line = shown(heading({"target": "M", "drafter": "D"}, shaped, Look(140))).strip()
    assert line == "M ← D   γ 4   T 0.5   " + filters.replace("  ", "   ") + "   seed 1"


@pytest.mark.parametrize(("count", "words"), [(1, "1 piece"), (2, "2 pieces")])
def test_pieces_are_counted_in_words_that_agree(count: int, words: str) -> None:
    pane = pane_of("server", (), Stats(predicted_n=count, predicted_ms=10, ttft_ms=5, pieces=count), "done")
    assert pane.status == f"done, {words}"
    assert shown(stats_lines([pane], Look(80))).startswith(f"server  {words}  ")


def test_a_forced_token_has_a_style_a_mark_and_a_word_of_its_own() -> None:
    pane = pane_of("spec", [Span(" a", "forced"), Span(" b", "accepted")], Stats(predicted_n=1, draft_n=1), "done")
    plain = shown(Frame([pane], Look(100, color=False)))
    assert "{!a!} b" in plain
    assert "{!x!} forced" in plain
    assert ("forced", "forced") in [item.pieces[0] for item in meanings(Look(100), [pane])]
    assert not any("forced" in text for item in meanings(Look(100), [pane_of("spec")]) for text, _ in item.pieces)
