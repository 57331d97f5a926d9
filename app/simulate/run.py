"""`simulate`: drafters tried against a recorded target: tokens a round, and the speed to expect.

The one decode loop runs with the recording as its target, greedily. Drafting is timed as it happens; target passes
come from flags, from the recording, or are measured if the target was loaded. Knows no loading
(app/simulate/loading.py), no arithmetic of speeds (app/simulate/figures.py) and no tables of the screen.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.lanes.answers import run_lane
from app.lanes.comparison import Variant, order
from app.lanes.costs import ignores_gamma
from app.lanes.lane import Lane
from app.screen.terminal import Interrupts
from app.simulate.figures import Costs, Played, figures
from app.simulate.loading import StandIn, stand_in
from app.simulate.record_target import WIDTHS
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Step
from sampling.gamma.costs import pass_times
from sampling.recorded.answers import Recorded, Recording
from sampling.types import Limits
from utils.files import writable, write_json
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.settings.layers import ModelOptions, Settings
    from app.simulate.options import SimulateArgs


WARM_UP = 16  # tokens
ROUNDS = 128  # plain rounds that are looked at for the rest of a round
_PLAIN = Variant("ar")


@dataclass(frozen=True)
class Seconds:
    """Of target passes by tokens, and where that is known from: "flags", "recording", "measured"; None: nowhere."""

    by_width: Mapping[int, float]
    source: str | None


def run_simulate(settings: Settings, options: ModelOptions, args: SimulateArgs) -> int:
    """Play the recording under every drafter and gamma; the exit code."""
    if args.out is not None:
        writable(args.out)
    with Interrupts() as interrupt:
        stage = stand_in(settings, options, args, interrupt)
        player = Player(stage, settings, args, interrupt)
        player.run()
        rows = player.rows()
    if not rows:
        sys.stderr.write("interrupted before the first answer was played\n")
        return INTERRUPTED
    from app.simulate.table import print_simulation

    told = player.told()
    print_simulation(told, rows, settings, sys.stdout)
    if args.out is not None:
        write_json(args.out, {**told, "rows": rows})
    return 0 if player.complete else INTERRUPTED


class Player:
    """Plays the answers: `run()` fills `played`, `rows()` and `told()` say what came of it."""

    def __init__(self, stage: StandIn, settings: Settings, args: SimulateArgs, interrupt: Callable[[], bool]) -> None:
        self.stage, self.args, self.interrupt = stage, args, interrupt
        known = stage.recording.best
        self.settings = settings.changed(temperature=0, ngram_filler=min(settings.ngram_filler, known))
        self.notes = self._notes(settings, known)
        self.variants = [variant for method in args.methods for variant in self._of(method)]
        self.seconds = self._seconds()
        self.played: list[dict[Variant, Played]] = []
        self.complete = False

    def _notes(self, settings: Settings, known: int) -> list[str]:
        notes = _reading(self.stage.recording)
        if "ngram" in map(self.stage.kind, self.args.methods) and known < settings.ngram_filler:
            notes.append(
                f"ngram counts {known} id a token: the recording has no more (ngram_filler {settings.ngram_filler})"
            )
        if self.stage.recording.header.get("settings", {}).get("temperature", 0):
            notes.append(
                "the recording was sampled: greedy drafts are compared with it, sampled drafts would do otherwise"
            )
        return notes

    def _of(self, method: str) -> list[Variant]:
        lane = self._lane(Variant(method, self.args.gammas[0]), Limits(1))
        return [Variant(method)] if ignores_gamma(lane) else [Variant(method, gamma) for gamma in self.args.gammas]

    def _seconds(self) -> Seconds:
        """What target passes take."""
        if self.args.t_verify:
            return Seconds(dict(self.args.t_verify), "flags")
        if told := self.stage.recording.pass_seconds:
            return Seconds(told, "recording")
        if self.stage.network is None:
            return Seconds({}, None)
        from app.lanes.pass_times import measure_costs

        context = int(statistics.median(len(one.prompt) + len(one.answer) // 2 for one in self.stage.recording.answers))
        return Seconds(measure_costs(self.stage.network, WIDTHS, context), "measured")

    def _lane(self, variant: Variant, limits: Limits) -> Lane:
        """A lane that remembers nothing of earlier answers."""
        settings = self.settings.changed(gamma=variant.gamma or 1)
        if variant == _PLAIN:
            return Lane("ar", self.stage.lm, NoDrafter(), settings, limits)
        drafter = self.stage.drafters.make(self.stage.kind(variant.method), settings)
        return Lane(variant.method, self.stage.lm, drafter, settings, limits)

    def _limits(self, one: Recorded) -> Limits:
        """As the answer was made: an ending is found, not known, so drafts may pass it."""
        answer, stop = one.answer, self.stage.stop
        end = next((at for at, token in enumerate(answer) if token in stop), None)
        if end is None:
            return Limits(len(answer), stop, self.stage.lm.context)
        most = self.stage.recording.header.get("settings", {}).get("max_new_tokens", 1 << 30)
        return Limits(max(most, end + 1), stop, self.stage.lm.context)

    def _play(self, variant: Variant, one: Recorded, most: int | None = None) -> Played | None:
        """The answer under a drafter; None if it was interrupted."""
        limits = self._limits(one)
        lane = self._lane(variant, limits if most is None else replace(limits, max_new_tokens=most))
        steps: list[Step] = []

        def note(event: Any) -> None:
            if isinstance(event, Step):
                steps.append(event)

        answer = run_lane(lane, list(one.prompt), lambda ids: "", interrupt=self.interrupt, show=note)
        return None if answer.interrupted else Played(answer.stats, tuple(steps[1:]))

    def run(self) -> None:
        """Play every answer under every variant, in turns; an interrupt keeps the answers that all have played."""
        from tqdm import tqdm

        answers = self.stage.recording.answers
        for variant in self.variants:
            self._play(variant, answers[0], WARM_UP)
        with tqdm(
            total=len(answers) * len(self.variants),
            unit="answer",
            disable=None if not self.settings.quiet else True,
            file=sys.stderr,
            leave=False,
        ) as bar:
            for turn, one in enumerate(answers):
                row: dict[Variant, Played] = {}
                for variant in order(self.variants, turn):
                    played = self._play(variant, one)
                    if played is None:
                        return
                    row[variant] = played
                    bar.update()
                self.played.append(row)
        self.complete = True

    # -- telling ------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each variant; empty before any answer was played by all."""
        if not self.played:
            return []
        costs = self._costs()
        return [
            figures(variant.method, variant.gamma, [row[variant] for row in self.played], costs)
            for variant in self.variants
        ]

    def _costs(self) -> Costs:
        if not self.seconds.by_width:
            return Costs(draft=self.args.t_draft)
        given = self.args.t_other
        other = 0.0 if given is None and self.seconds.source == "flags" else given
        plain = self._plain_other() if other is None else other
        return Costs(pass_times(self.seconds.by_width), self.args.t_draft, other, plain)

    def _plain_other(self) -> float:
        """Seconds of a plain round beside its pass, as it is here."""
        found: list[float] = []
        for one in self.stage.recording.answers:
            if len(found) >= ROUNDS or (played := self._play(_PLAIN, one)) is None:
                break
            found += [step.sample_s + step.overhead_s for step in played.rounds]
        return statistics.median(found) if found else 0.0

    def told(self) -> dict[str, Any]:
        """What was played, and what the figures rest on."""
        header = self.stage.recording.header
        return {
            "recording": str(self.args.file),
            "target": header.get("target"),
            "drafter": self._drafter(),
            "answers": len(self.played),
            "of": len(self.stage.recording.answers),
            "pass_seconds": {str(n): seconds for n, seconds in sorted(self.seconds.by_width.items())},
            "pass_seconds_from": self.seconds.source,
            "reading": self.stage.recording.reading,
            "notes": self.notes,
            "complete": self.complete,
        }

    def _drafter(self) -> str:
        loaded = self.stage.loaded
        return loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind


def _reading(recording: Recording) -> list[str]:
    """What the values of a file were taken for, where it does not say so itself, and what was left out."""
    start = recording.header.get("start_id")
    firsts = {one.answer[0] for one in recording.answers}
    notes = {
        "told": [],
        "prompt first": ["the values begin with their prompts' ids: the answers are what follows them"],
        "start first": [f"the values begin with the decoder start id {start}: the answers are what follows it"],
        "answers alone": ["the values are taken as answers alone"],
    }[recording.reading]
    if recording.reading == "answers alone" and start is None and len(firsts) == 1 < len(recording.answers):
        notes.append(f"all values begin with id {firsts.pop()}: if a decoder starts from it, give --arch seq2seq")
    if recording.unanswered:
        notes.append(f"{recording.unanswered} of the prompts have no answer: left out")
    return notes
