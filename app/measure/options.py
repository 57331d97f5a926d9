"""The flags of `check` beside those of the models. No torch, no models."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from app.measure.elsewhere import PROGRAMS
from app.settings.table import Field, arguments
from app.settings.types import METHODS, Choice, Names, Number, NumberList, WholeList
from utils.errors import UsageError

_PLAN, _CHECK = "plan", "check"
_HUGE = Number(0, 1e30, without_low=True)
_SIZES = NumberList(0, 1e15, without_low=True)
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

PLAN_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("methods", Names(METHODS), ("spec",), "drafters of the pair to measure, as the lanes of bench", _PLAN),
        Field(
            "c", NumberList(0, 1000), (), "costs of a drafted token instead, in one-token passes of the target", _PLAN
        ),
        Field("target_params", _HUGE, None, "describe the target instead: its parameters", _PLAN),
        Field("target_bytes", _HUGE, 2.0, "bytes of one of them", _PLAN),
        Field("drafter_params", _SIZES, (), "parameters of the drafters to it", _PLAN),
        Field("bandwidth", _HUGE, None, "bytes that the described machine reads a second", _PLAN),
        Field("flops", _HUGE, None, "operations it does a second (default: no limit)", _PLAN),
        Field("gammas", WholeList(1, 64), GAMMAS, "rows of the plan", _PLAN),
        Field("alphas", NumberList(0, 1), ALPHAS, "columns of the plan", _PLAN),
    )
}
CHECK_FIELDS: Mapping[str, Field] = {
    "for": Field(
        "for", Choice(tuple(PROGRAMS)), None, "also predict, and print the command for another program", _CHECK
    ),
    **PLAN_FIELDS,
}


def _check_plan(args: Namespace, given: Mapping[str, Any]) -> None:
    """UsageError in one line for flags of --plan that exclude each other, or without --plan."""
    if not args.plan:
        flags = [PLAN_FIELDS[name].flag for name in PLAN_FIELDS if name in given]
        if flags or given.get("json"):
            raise UsageError(f"{(*flags, '--json')[0]} belongs to --plan: give that too")
        return
    if args.program or given.get("speed"):
        raise UsageError("--plan is a table by itself: leave --for and --speed out")
    if args.target_params is None:
        for name in ("drafter_params", "target_bytes", "bandwidth", "flops"):
            if name in given:
                raise UsageError(
                    f"{PLAN_FIELDS[name].flag} describes hardware or drafters of --target-params: give that too"
                )
        return
    if args.bandwidth is None:
        raise UsageError("--target-params needs --bandwidth: bytes that the machine reads a second, such as 3.35e12")
    if not (args.drafter_params or args.c):
        raise UsageError("--target-params needs --drafter-params or --c: what the drafters are")
    if args.c and args.drafter_params:
        raise UsageError("--c and --drafter-params contradict each other: give one")


def check_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """Return the values. `program`: whose command is wanted, or None; `forecast`: whether to predict the pair's speed.

    `plan`: whether to print the speed-up over gamma and alpha; `c` outranks every other source of drafting costs.
    """
    switches = {"plan": given.get("plan"), "speed": given.get("speed"), "as_json": given.get("json")}
    args = arguments(CHECK_FIELDS, given, **{name: bool(value) for name, value in switches.items()})
    args.program = vars(args).pop("for")
    args.forecast = args.program is not None or len(given.get("name") or ()) == 2
    _check_plan(args, given)
    return args
