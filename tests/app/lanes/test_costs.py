"""What the console says of the models of an answer: calls, reviews, who proposed what, improvement, expectation."""

import io
from dataclasses import replace
from typing import Any, cast

from rich.console import Console

from app.chat.saved import Answered
from app.console.chat_commands import last_stats
from app.lanes.answers import Answer
from app.lanes.costs import Terms, cost_lines
from app.screen.panes import PaneData
from app.screen.view import look_of
from app.settings.table import Settings
from sampling.stats.swi import SwiModel
from tests.sampling.stats.test_metrics import cascade_round, opening, step
from tests.support.panes import pane_of, printed
from tests.support.runs import measure

MODELS = {
    "target": SwiModel("google/flan-t5-xxl"),
    "base": SwiModel("google/flan-t5-base"),
    "small": SwiModel("google/flan-t5-small"),
}
CASCADE = Terms(True, None, MODELS, ("base", "small", "maxgram"))
PLAIN = Answer("ar", (1, 2), "", measure([opening(), *[step(0, 0, verify_s=0.1)] * 4]), terms=Terms(models=MODELS))
ROUNDS = measure([opening(), cascade_round(), cascade_round()])


def test_every_model_review_and_source_has_its_figures() -> None:
    # 16 tokens; calls: 2 of 100 ms, 4 of 4, 6 of 4. By time 16 · 100 / (200 + 16 + 24), by parameters
    # 16 · 11300 / (2 · 11300 + 4 · 220 + 6 · 60), by earlier work 16 / (2 + 4 · .04 + 6 · .02).
    assert cost_lines(ROUNDS, CASCADE) == [
        "calls: base 4 of 4.0 ms, small 6 of 4.0 ms, target 2 of 100.0 ms",
        "base passed 4 of 6 drafts",
        "small passed 4 of 10 drafts",
        "accepted of each source's drafts: base 4/4, small 4/4, maxgram 6/10",
        "walltime improvement (SWI) 6.67x by time, 7.58x by parameters, 7.02x by previous work",
        "(SWI takes a pass over many tokens to cost as much as one over a single token)",
    ]


# -- /stats ---------------------------------------------------------------------------------------


class Played:
    """A lane's track as far as figures go."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def answer(self) -> Answer:
        return self._answer

    def pane(self) -> PaneData:
        return pane_of(self._answer.method, (), self._answer.stats, "done")


def test_stats_last_shows_costs_below_the_times() -> None:
    cascade = Answer("cascade", (1, 2), "", replace(ROUNDS, reviews={"base": (4, 6)}), terms=CASCADE)
    look = look_of(Console(file=io.StringIO(), width=100), Settings(color="never", ascii=True)).sized()
    played: Any = [Played(PLAIN), Played(cascade)]
    answered = Answered(Settings(), cast(Any, type("Turn", (), {"user": "hi"})()), played)
    assert [line.rstrip() for line in printed(last_stats(answered, look)).splitlines()][-7:] == [
        "AR: draft 0 ms, verify 400 ms, sample 0 ms, other 0 ms; 0 drafted, 0 of them discarded",
        "cascade: draft 60 ms, verify 200 ms, sample 0 ms, other 0 ms; 18 drafted, 2 of them discarded",
        "         calls: base 4 of 4.0 ms, small 6 of 4.0 ms, target 2 of 100.0 ms",
        "         base passed 4 of 6 drafts",
        "         accepted of each source's drafts: base 4/4, small 4/4, maxgram 6/10",
        "         walltime improvement (SWI) 6.67x by time, 7.58x by parameters, 7.02x by previous work",
        "         (SWI takes a pass over many tokens to cost as much as one over a single token)",
    ]
