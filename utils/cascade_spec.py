"""Whether a pair's `cascade`, `k_matrix` and `lenience` go together. Knows no files and no lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from utils.errors import UserError
from utils.k_matrix import check_lenience, check_shape
from utils.specs import CASCADES, MEMBERS, OWN_METHODS, REVIEWERS, STUDENTS, PairSpec, trained_kind


class Problem(NamedTuple):
    """What is wrong, and under which key of the pair."""

    key: tuple[str | int, ...]
    text: str


def cascade_problem(pair: PairSpec) -> Problem | None:
    """The first thing that is wrong with how the pair's drafters go together; None if nothing is."""
    members = pair.cascade or []
    if pair.method in OWN_METHODS and pair.drafter != pair.method:
        return Problem(("drafter",), f"method {pair.method} is its own drafter: leave drafter out")
    method = next((word for word in CASCADES if word in (pair.method, pair.drafter)), None)
    if pair.cascade is not None and not members:
        return Problem(("cascade",), "cascade must name a drafter or more, large to small")
    if method is not None and not members:
        return Problem(("method",), f"method {method} needs its drafters, as cascade: [DRAFTER, …]")
    if method is not None and pair.k_matrix is None:
        return Problem(("method",), f"method {method} needs a k_matrix with a row for each drafter of its cascade")
    return next(filter(None, (*_members(pair, method), _matrix(pair), _lenience(pair))), None)


def _members(pair: PairSpec, method: str | None) -> list[Problem | None]:
    names = pair.cascade_names
    return [_member(pair, names, place, method) for place in range(len(names))]


def _member(pair: PairSpec, names: Sequence[str], place: int, method: str | None) -> Problem | None:
    key, name = ("cascade", place), names[place]
    told = None
    if name in names[:place]:
        told = f"cascade names {name} twice"
    elif not isinstance((pair.cascade or [])[place], str):
        if "," in name or name in (*MEMBERS, "target"):  # figures tell models by their names
            told = f"cascade: the model {name} needs another name (name: …)"
    elif name == "model" and (isinstance(pair.drafter, str) and trained_kind(pair.drafter) != "plain"):
        told = f"cascade: model is the pair's drafter model, and the drafter is {pair.drafter_name}"
    elif name in STUDENTS and getattr(pair.students, name) is None:
        told = f"cascade: {name} needs its folder in students, as {name}: DIR"
    elif method == "cascade" and place < len(names) - 1 and name not in REVIEWERS:
        told = f"cascade: {name} cannot review, so it must come last"
    return None if told is None else Problem(key, told)


def _matrix(pair: PairSpec) -> Problem | None:
    if pair.k_matrix is None:
        return None
    if pair.cascade is None:
        return Problem(("k_matrix",), "k_matrix needs a cascade: [DRAFTER, …] beside it")
    try:
        check_shape(pair.k_matrix)
    except UserError as error:
        return Problem(("k_matrix",), str(error))
    if len(pair.k_matrix) == len(pair.cascade):
        return None
    names = ",".join(pair.cascade_names)
    told = f"k_matrix must have {len(pair.cascade)} rows for the cascade {names}, got {len(pair.k_matrix)}"
    return Problem(("k_matrix",), told)


def _lenience(pair: PairSpec) -> Problem | None:
    try:
        check_lenience(1 if pair.lenience is None else pair.lenience)
    except UserError as error:
        return Problem(("lenience",), str(error))
    return None


def presets(pair: PairSpec) -> dict[str, Any]:
    """The settings that the pair presets by its keys of the same names."""
    found = {"cascade": ",".join(pair.cascade_names), "k_matrix": pair.k_matrix, "lenience": pair.lenience}
    found |= {"template": pair.template}
    return {name: value for name, value in found.items() if value}


def unknown_member(text: str) -> str | None:
    """The word that a member of a cascade nearly is, if it is no word, no path and looks like no model's name."""
    if text in MEMBERS or not re.fullmatch(r"[A-Za-z_+]+", text):
        return None
    return next(iter(difflib.get_close_matches(text.lower(), MEMBERS, n=1)), None)
