"""The flags of `bench` beside the settings. No torch, no models, no plots."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from app.prompts.questions import PROMPT_FIELDS
from app.settings.table import Field, arguments
from app.settings.types import LaneNames, Switch, Text, Whole, WholeList
from utils.errors import UsageError
from utils.files import separate

_PATH = Text(metavar="FILE", allowed="a file", optional=True)
BENCH_FIELDS = {
    **{name: PROMPT_FIELDS[name] for name in ("prompts", "ids", "turns")},
    "methods": Field("methods", LaneNames(), (), "lanes to time (default: those of --compare)", "bench"),
    "gammas": Field("gammas", WholeList(1, 64, "auto"), (1, 2, 4, 8), "gammas to time; auto is one", "bench"),
    "repeat": Field("repeat", Whole(1, 1000), 3, "times each prompt is answered", "bench"),
    "limit": PROMPT_FIELDS["limit"],
    "out": Field("out", _PATH, None, "write every figure to this JSON file; resumes a stopped run", "bench"),
    "report": Field("report", _PATH, None, "write tables and plots to this HTML file", "bench"),
    "from": Field("from", _PATH, None, "measure nothing: make the page of this file of --out", "bench"),
    "check_identity": Field(
        "check_identity", Switch(), False, "compare every output with plain decoding and transformers", "bench"
    ),
}


def bench_args(given: Mapping[str, Any], words: Sequence[str] = ()) -> Namespace:
    """Return the values or defaults; UsageError in one line. `source` is that of --from; no `methods`: of --compare."""
    args = arguments(BENCH_FIELDS, given)
    args.source = vars(args).pop("from")
    if args.source is not None:
        if args.report is None:
            raise UsageError("--from needs --report: the page to write")
        separate({"--report": args.report}, [args.source])
    return args
