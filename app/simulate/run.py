"""`simulate`: drafters tried against a recorded target: tokens a round, and the speed to expect.

The one decode loop runs with the recorded answers as its target, greedily. Drafting is timed as it happens; target
passes come from flags, from the file, or are measured if the target was loaded. Knows no loading
(app/simulate/loading.py), no arithmetic of speeds and no tables (app/simulate/figures.py).
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from app.lanes.answers import run_lane
from app.lanes.comparison import Variant, order
from app.lanes.costs import ignores_gamma
from app.lanes.lane import Lane
from app.lanes.pass_times import measure_costs
from app.screen.output import answer_bar
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from app.simulate.figures import Played, RoundSeconds, figures, print_simulation
from app.simulate.loading import RecordedPair, load_recorded_pair
from app.simulate.record_target import WIDTHS
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Event, Step
from sampling.gamma.costs import pass_times
from sampling.recorded.answers import RecordedAnswer, RecordedAnswers
from sampling.types import Limits
from utils.files import separate, writable, write_result
from utils.progress import INTERRUPTED

WARM_UP = 16  # tokens
ROUNDS = 128  # plain rounds that are looked at for the rest of a round
_PLAIN = Variant("ar")
_READ_AS = {
    "told": "",
    "prompt first": "the values begin with their prompts' ids: the answers are what follows them",
    "start first": "the values begin with the decoder start id {start}: the answers are what follows it",
    "answers alone": "the values are taken as answers alone",
}


def run_simulate(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Play the recorded answers under every drafter and gamma; the exit code."""
    if args.out is not None:
        writable(args.out)
    separate({"--out": args.out}, [args.file, args.prompts])
    with Interrupts() as interrupt:
        simulation = Simulation(load_recorded_pair(settings, options, args, interrupt), settings, args, interrupt)
        complete = simulation.run()
        rows = simulation.rows()
    if not rows:
        sys.stderr.write("interrupted before the first answer was played\n")
        return INTERRUPTED
    header, loaded = simulation.recorded.header, simulation.stage.loaded
    about = {
        "recording": str(args.file),
        "target": header.get("target"),
        "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind,
        "answers": len(simulation.played),
        "of": len(simulation.recorded.answers),
        "pass_seconds": {str(n): seconds for n, seconds in sorted(simulation.pass_seconds.items())},
        "pass_seconds_from": simulation.source,
        "reading": simulation.recorded.reading,
        "notes": simulation.notes(settings),
        "complete": complete,
    }
    print_simulation(about, rows, settings)
    if args.out is not None and not write_result(args.out, {**about, "rows": rows}):
        sys.stderr.write(f"{args.out} holds a finished result: it stays\n")
    return 0 if complete else INTERRUPTED


class Simulation:
    """Plays the answers: `run()` fills `played`, `rows()` says what came of it.

    `pass_seconds` are those of target passes by tokens, `source` is where they are from: "flags", "recording",
    "measured"; None: nowhere.
    """

    def __init__(self, stage: RecordedPair, settings: Settings, args: Namespace, interrupt: Callable[[], bool]) -> None:
        self.stage, self.recorded, self.args, self.interrupt = stage, stage.recorded, args, interrupt
        self.settings = settings.changed(temperature=0, ngram_filler=min(settings.ngram_filler, self.recorded.best))
        self.variants = [variant for method in args.methods for variant in self._of(method)]
        self.pass_seconds, self.source = self._pass_seconds()
        self.played: list[dict[Variant, Played]] = []

    def _of(self, method: str) -> list[Variant]:
        lane = self._lane(Variant(method, self.args.gammas[0]), Limits(1))
        return [Variant(method)] if ignores_gamma(lane) else [Variant(method, gamma) for gamma in self.args.gammas]

    def _pass_seconds(self) -> tuple[Mapping[int, float], str | None]:
        if self.args.t_verify:
            return dict(self.args.t_verify), "flags"
        if self.recorded.pass_seconds:
            return self.recorded.pass_seconds, "recording"
        if self.stage.network is None:
            return {}, None
        context = int(statistics.median(len(one.prompt) + len(one.answer) // 2 for one in self.recorded.answers))
        return measure_costs(self.stage.network, WIDTHS, context), "measured"

    def _lane(self, variant: Variant, limits: Limits) -> Lane:
        """A lane that remembers nothing of earlier answers."""
        settings = self.settings.changed(gamma=variant.gamma or 1)
        plain = variant == _PLAIN
        drafter = NoDrafter() if plain else self.stage.drafters.make(self.stage.kind(variant.method), settings)
        return Lane(variant.method, self.stage.lm, drafter, settings, limits)

    def _limits(self, answer: tuple[int, ...]) -> Limits:
        """As the answer was made: an ending is found, not known, so drafts may pass it."""
        most, end = len(answer), next((at for at, token in enumerate(answer) if token in self.stage.stop), None)
        if end is not None:
            known = self.recorded.header.get("settings", {}).get("max_new_tokens", 1 << 30)
            most = max(known, end + 1)
        return Limits(most, self.stage.stop, self.stage.lm.context)

    def _play(self, variant: Variant, one: RecordedAnswer, most: int | None = None) -> Played | None:
        """The answer under a drafter; None if it was interrupted."""
        limits = self._limits(one.answer)
        lane = self._lane(variant, limits if most is None else replace(limits, max_new_tokens=most))
        events: list[Event] = []
        answer = run_lane(lane, list(one.prompt), lambda ids: "", interrupt=self.interrupt, show=events.append)
        rounds = [event for event in events if isinstance(event, Step)][1:]
        return None if answer.interrupted else Played(answer.stats, tuple(rounds))

    def run(self) -> bool:
        """Play every answer under every variant, in turns; False after an interrupt, which keeps the answers that all
        have played."""
        answers = self.recorded.answers
        for variant in self.variants:
            self._play(variant, answers[0], WARM_UP)
        with answer_bar(len(answers) * len(self.variants), self.settings) as bar:
            for turn, one in enumerate(answers):
                row: dict[Variant, Played] = {}
                for variant in order(self.variants, turn):
                    if (played := self._play(variant, one)) is None:
                        return False
                    row[variant] = played
                    bar.update()
                self.played.append(row)
                self.stage.drafters.answers.add(one.prompt, one.answer)
        return True

    # -- what came of it ----------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """The figures of each variant; empty before any answer was played by all."""
        if not self.played:
            return []
        costs = self._costs()
        return [
            figures(variant.method, variant.gamma, [row[variant] for row in self.played], costs)
            for variant in self.variants
        ]

    def _costs(self) -> RoundSeconds:
        if not self.pass_seconds:
            return RoundSeconds(draft=self.args.t_draft)
        other = self.args.t_other
        if other is None and self.source == "flags":
            other = 0.0
        plain = self._plain_other() if other is None else other
        return RoundSeconds(pass_times(self.pass_seconds), self.args.t_draft, other, plain)

    def _plain_other(self) -> float:
        """Seconds of a plain round beside its pass, as it is here."""
        found = [0.0]
        for one in self.recorded.answers:
            if len(found) > ROUNDS or (played := self._play(_PLAIN, one)) is None:
                break
            found += [step.sample_s + step.overhead_s for step in played.rounds]
        return statistics.median(found[1:] or found)

    def notes(self, settings: Settings) -> list[str]:
        """What a reader of the figures has to know."""
        notes, known = _reading(self.recorded), self.recorded.best
        if "ngram" in map(self.stage.kind, self.args.methods) and known < settings.ngram_filler:
            notes.append(
                f"ngram counts {known} id a token: the recording has no more (ngram_filler {settings.ngram_filler})"
            )
        if self.recorded.header.get("settings", {}).get("temperature", 0):
            notes.append(
                "the recording was sampled: greedy drafts are compared with it, sampled drafts would do otherwise"
            )
        return notes


def _reading(recorded: RecordedAnswers) -> list[str]:
    """What the values of a file were taken for, where it does not say so itself, and what was left out."""
    start, firsts = recorded.header.get("start_id"), {one.answer[0] for one in recorded.answers}
    notes = [_READ_AS[recorded.reading].format(start=start)]
    if recorded.reading == "answers alone" and start is None and len(firsts) == 1 < len(recorded.answers):
        notes.append(f"all values begin with id {firsts.pop()}: if a decoder starts from it, give --arch seq2seq")
    if recorded.unanswered:
        notes.append(f"{recorded.unanswered} of the prompts have no answer: left out")
    return list(filter(None, notes))
