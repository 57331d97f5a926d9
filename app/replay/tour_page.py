"""The demo as one HTML page that plays by itself: the frames that a terminal of 100 columns, or on a narrow
screen of 60, would show.

The page loads nothing; its one script is named to the browser by its hash, so that no other runs. Every text, the
models' too, stands in the page as JSON without "<" and comes onto it as `textContent`. Knows no models and no keys.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME

from app.chat.export import drawing
from app.lanes.race import timed
from app.replay.steps import STEPS, Step
from app.replay.tour import Played, parts, side_by_side
from app.screen.live import FRAMES_A_SECOND, frame, look_of, panes
from app.screen.view import heading, question

_PAGE = Path(__file__).with_name("tour.html")
_SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
Line = list[Any]  # style and text, by turns
WIDTHS = (100, 60)  # columns; tour.html takes the second where the window is narrow


class _Frames:
    """What is drawn, as (milliseconds, changed lines, height) for each width; styles are numbered."""

    def __init__(self) -> None:
        self.screens = [drawing(width) for width in WIDTHS]
        self.styles: dict[str, int] = {}

    def scene(self, one: Played) -> list[list[Any]]:
        """An answer from its first event to its comparison."""
        settings = one.settings

        def shown(console: Console, *, over: bool = False) -> list[Any]:
            look = look_of(console, settings).sized(height=None)
            now = panes(one.tracks, console, settings, notes=False) if over else frame(one.tracks, look, settings)
            return [heading(one.models, settings, look), question(one.question, look), now]

        slow = settings.slow * 1000
        drawn, at, last = [(0.0, self._drawn(shown))], 0.0, 0.0
        for at, index, event in timed(one.events):
            one.tracks[index].feed(event)
            if (at - last) * slow >= 1000 / FRAMES_A_SECOND:
                drawn.append((at * slow, self._drawn(shown)))
                last = at
        return self._each([*drawn, (at * slow, self._drawn(partial(shown, over=True)))])

    def rounds(self, one: Played) -> list[list[Any]]:
        """The rounds of an answer that is over, one a second."""
        whole = len(list(parts(one.tracks, self.screens[0], one.settings)))

        def begun(number: int, console: Console) -> Iterator[Any]:
            return islice(parts(one.tracks, console, one.settings), number)

        return self._each([(1000.0 * end, self._drawn(partial(begun, end + 1))) for end in range(whole)])

    def table(self, step: Step, answers: Sequence[Played]) -> list[list[Any]]:
        """What the answers of a step come to beside each other."""
        tracks, settings = [one.tracks for one in answers], answers[-1].settings
        return self._each([(0.0, self._drawn(lambda console: [side_by_side(step, tracks, console, settings)]))])

    def _drawn(self, things: Callable[[Console], Iterable[Any]]) -> list[list[Line]]:
        """The lines on each screen."""
        return [self._lines(console, things(console)) for console in self.screens]

    def _each(self, drawn: Sequence[tuple[float, list[list[Line]]]]) -> list[list[Any]]:
        """The frames of each screen."""
        return [list(_changes([(at, lines[place]) for at, lines in drawn])) for place in range(len(self.screens))]

    def _lines(self, console: Console, things: Iterable[Any]) -> list[Line]:
        found: list[Line] = []
        for thing in things:
            for segments in console.render_lines(thing, pad=False):
                line: Line = []
                for text, style, _ in segments:
                    number = self._number(style)
                    if line and line[-2] == number:
                        line[-1] += text
                    else:
                        line += [number, text]
                found.append(line)
        return found

    def _number(self, style: Style | None) -> int:
        css = style.get_html_style(SVG_EXPORT_THEME) if style else ""
        return self.styles.setdefault(css, len(self.styles))


def _changes(drawn: Sequence[tuple[float, list[Line]]]) -> Iterator[list[Any]]:
    """Of each frame only the lines that differ from the frame before."""
    before: list[Line] = []
    for at, lines in drawn:
        changed = [
            [row, line]
            for row, (old, line) in enumerate(zip_longest(before, lines))
            if line is not None and line != old
        ]
        yield [round(at), len(lines), changed]
        before = lines


def page(steps: Iterable[tuple[Step, Sequence[Played]]]) -> str:
    """The page of a tour: of every step its answers."""
    frames = _Frames()
    told = []
    for step, answers in steps:
        scenes = [frames.scene(one) for one in answers]
        if step.traced and answers:
            scenes.append(frames.rounds(answers[-1]))
        if step.varied and len(answers) > 1:
            scenes.append(frames.table(step, answers))
        title = f"{STEPS.index(step) + 1}/{len(STEPS)} {step.title}"
        told.append({"title": title, "look": step.look, "screens": list(zip(*scenes, strict=True))})
    data = json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
    styles = "\n".join(f".s{number} {{ {css} }}" for css, number in frames.styles.items())
    text = _PAGE.read_text(encoding="utf-8")
    script = _SCRIPT.findall(text)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return text.replace("@HASH@", digest).replace("@STYLES@", styles).replace("@DATA@", data)
