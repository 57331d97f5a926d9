"""A training curve as an SVG picture: loss and held-out acceptance against tokens seen. Knows only the curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_WIDTH, _HEIGHT, _LEFT, _TOP, _SPACE = 360, 260, 52, 34, 60  # of one panel, in pixels

Line = tuple[str, list[tuple[float, float]]]


def curve_svg(curve: Sequence[dict[str, Any]]) -> str:
    """The picture of :class:`training.train.Result`'s curve; two panels side by side."""
    seen = [mark["tokens"] for mark in curve]
    held = [mark["held"] for mark in curve]
    losses: list[Line] = [
        ("training", list(zip(seen, [mark["loss"] for mark in curve], strict=True))),
        ("held out", list(zip(seen, [one["loss"] for one in held], strict=True))),
    ]
    depth = len(held[0]["alpha"]) if held else 0
    accepted: list[Line] = [
        (f"draft {place + 1}", list(zip(seen, [one["alpha"][place] for one in held], strict=True)))
        for place in range(depth)
    ]
    accepted.append(("sampled, draft 1", list(zip(seen, [one["overlap"] for one in held], strict=True))))
    width = 2 * (_LEFT + _WIDTH) + _SPACE
    body = _panel(0, "loss (nats)", losses, None) + _panel(
        _LEFT + _WIDTH + _SPACE, "held-out acceptance", accepted, (0.0, 1.0)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 20}" height="{_TOP + _HEIGHT + 50}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}</svg>\n'
    )


def _panel(offset: int, title: str, lines: Sequence[Line], limits: tuple[float, float] | None) -> str:
    points = [point for _, line in lines for point in line]
    most = max((x for x, _ in points), default=1.0) or 1.0
    low, high = limits or _limits([y for _, y in points])
    left, bottom = offset + _LEFT, _TOP + _HEIGHT

    def at(x: float, y: float) -> str:
        return f"{left + _WIDTH * x / most:.1f},{bottom - _HEIGHT * (y - low) / (high - low):.1f}"

    parts = [f'<text x="{left}" y="{_TOP - 14}" font-size="13">{escape(title)}</text>']
    for y in _ticks(low, high):
        place = at(0, y).split(",")[1]
        parts.append(f'<line x1="{left}" y1="{place}" x2="{left + _WIDTH}" y2="{place}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{place}" text-anchor="end" dominant-baseline="middle">{y:g}</text>')
    for x in _ticks(0.0, most):
        place = at(x, low).split(",")[0]
        parts.append(f'<text x="{place}" y="{bottom + 16}" text-anchor="middle">{_short(x)}</text>')
    parts.append(f'<text x="{left + _WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">tokens seen</text>')
    for index, (name, line) in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(at(x, min(max(y, low), high)) for x, y in line)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2" fill="{colour}"/>' for p in path.split()
        ]
        # Losses fall, acceptance rises: the names stand where the curves are not.
        height = _TOP + 12 + 14 * index if limits is None else bottom - 8 - 14 * (len(lines) - 1 - index)
        parts.append(
            f'<text x="{left + _WIDTH - 4}" y="{height}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join(parts) + "\n"


def _limits(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between low and high."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= about)
    return [
        round(index * step, 10) for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _short(count: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{letter}"
    return f"{count:g}"
