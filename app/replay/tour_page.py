"""The demo as one HTML page that plays by itself: the frames that a terminal of 100 columns would show.

The page loads nothing; its one script is named to the browser by its hash, so that no other runs. Every text, the
models' too, stands in the page as JSON without "<" and comes onto it as `textContent`. Knows no models and no keys.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
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


class _Frames:
    """What is drawn, as (milliseconds, changed lines, height); styles are numbered."""

    def __init__(self) -> None:
        self.console: Console = drawing()
        self.styles: dict[str, int] = {}

    def scene(self, one: Played) -> list[Any]:
        """An answer from its first event to its comparison."""
        look, settings = look_of(self.console, one.settings).sized(height=None), one.settings
        head = [heading(one.models, settings, look), question(one.question, look)]
        slow = settings.slow * 1000
        drawn, last = [(0.0, self._lines([*head, frame(one.tracks, look, settings)]))], 0.0
        at = 0.0
        for at, index, event in timed(one.events):
            one.tracks[index].feed(event)
            if (at - last) * slow >= 1000 / FRAMES_A_SECOND:
                drawn.append((at * slow, self._lines([*head, frame(one.tracks, look, settings)])))
                last = at
        drawn.append((at * slow, self._lines([*head, panes(one.tracks, self.console, settings, notes=False)])))
        return list(_changes(drawn))

    def rounds(self, one: Played) -> list[Any]:
        """The rounds of an answer that is over, one a second."""
        lines: list[Line] = []
        drawn = []
        for second, part in enumerate(parts(one.tracks, self.console, one.settings)):
            lines = [*lines, *self._lines([part])]
            drawn.append((1000.0 * second, lines))
        return list(_changes(drawn))

    def table(self, step: Step, answers: Sequence[Played]) -> list[Any]:
        """What the answers of a step come to beside each other."""
        told = side_by_side(step, [one.tracks for one in answers], self.console, answers[-1].settings)
        return list(_changes([(0.0, self._lines([told]))]))

    def _lines(self, things: Iterable[Any]) -> list[Line]:
        found: list[Line] = []
        for thing in things:
            for segments in self.console.render_lines(thing, pad=False):
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
        told.append({"title": title, "look": step.look, "scenes": scenes})
    data = json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
    styles = "\n".join(f".s{number} {{ {css} }}" for css, number in frames.styles.items())
    text = _PAGE.read_text(encoding="utf-8")
    script = _SCRIPT.findall(text)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return text.replace("@HASH@", digest).replace("@STYLES@", styles).replace("@DATA@", data)
