"""A matplotlib drawing as SVG: one look for every picture, colours that colour-blind eyes tell apart, text as text.

matplotlib is imported with the first drawing; no window and no global figure.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable
from colorsys import hsv_to_rgb
from typing import TYPE_CHECKING, Any, cast

from utils.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette (2008) without its yellow, which is lost on white."""
MARKERS = "osD^vP*X<>ph"
GREY = "#767676"

_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": ["sans-serif"],
    "font.size": 9.0,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # a name with dollar signs is no formula
}
_SILENT = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no description, so the same figures give the same text


def colours(count: int) -> list[str]:
    """Return a colour for each of `count` series, no two the same: the palette, or hues of alternating lightness."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    each = (hsv_to_rgb(index / count, 0.85, (0.85, 0.55)[index % 2]) for index in range(count))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in each]


def svg(draw: Callable[[Figure], None], width: float, height: float, name: str = "plot") -> str:
    """Return the drawing of `draw` on a white figure of `width` × `height` inches, as an <svg> element.

    Its ids begin with `name`, so that several may stand in one page. UserError where matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it writes to stderr about its font cache
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a plot needs matplotlib: pip install -r requirements.txt") from None
    written, style = io.StringIO(), cast(Any, {**_STYLE, "svg.hashsalt": name})
    with warnings.catch_warnings(), rc_context(style):
        warnings.simplefilter("ignore")  # glyphs that its own font lacks: the reader's may have them
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(written, format="svg", metadata=_SILENT)
    drawing = written.getvalue()
    return re.sub(r'\bid="|url\(#|href="#', rf"\g<0>{name}-", drawing[drawing.index("<svg") :])
