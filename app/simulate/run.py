"""`simulate`: drafters tried against a recorded target: tokens a round, and the speed to expect.

The one decode loop runs with the recorded answers as its target, greedily. Drafting is timed as it happens; the time of
target passes comes from flags, from the file, or is measured if the target was loaded. Knows no loading
(app/simulate/loading.py).

Seconds of a round = drafting + a target pass over 1 + drafted tokens + the rest (sampling, the loop itself). Where
every round drafts gamma tokens and the rest is nothing, that is TAR / (γ·t_draft + t_verify(γ + 1)) of Decoding
Speculative Decoding (arXiv 2402.01528). Rates leave the opening round out, as everywhere.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from app.lanes.answers import Variant, order, run_lane
from app.lanes.costs import ignores_gamma
from app.lanes.lane import Lane
from app.lanes.warm import measure_costs
from app.screen.output import answer_bar, screen, small_table
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from app.simulate.loading import RecordedPair, load_recorded_pair
from app.simulate.record_target import WIDTHS
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Event, Step
from sampling.gamma.costs import pass_times
from sampling.recorded import RecordedAnswer, RecordedAnswers
from sampling.stats.summary import Stats, merge, ratio
from sampling.types import Limits
from utils.files import separate, writable, write_result
from utils.progress import INTERRUPTED

WARM_UP = 16  # tokens
ROUNDS = 128  # plain rounds that the rest of a round is measured on
_PLAIN = Variant("ar")
_READ_AS = {
    "told": "",
    "prompt first": "the values begin with their prompts' ids: the answers follow them",
    "start first": "the values begin with the decoder start id {start}: the answers follow it",
    "answers alone": "the values are taken as answers alone",
}
WIDE = 76  # columns for all figures
_FROM = {"flags": "as given", "recording": "as recorded", "measured": "measured here"}
Rows = Sequence[Mapping[str, Any]]


def run_simulate(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Play the recorded answers under every drafter and gamma; return the exit code."""
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
        sys.stderr.write(f"{args.out} holds a finished result and is kept\n")
    return 0 if complete else INTERRUPTED


class Simulation:
    """Plays the answers: `run()` fills `played`, `rows()` returns the figures.

    `pass_seconds` are those of target passes by tokens, `source` is their origin: "flags", "recording", "measured";
    None: unknown.
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
            return dict(enumerate(self.args.t_verify, start=1)), "flags"
        if self.recorded.pass_seconds:
            return self.recorded.pass_seconds, "recording"
        if self.stage.network is None:
            return {}, None
        context = int(statistics.median(len(each.prompt) + len(each.answer) // 2 for each in self.recorded.answers))
        return measure_costs(self.stage.network, WIDTHS, context), "measured"

    def _lane(self, variant: Variant, limits: Limits) -> Lane:
        """Return a lane that remembers nothing of earlier answers."""
        settings = self.settings.changed(gamma=variant.gamma or 1)
        plain = variant == _PLAIN
        drafter = NoDrafter() if plain else self.stage.drafters.make(self.stage.kind(variant.method), settings)
        return Lane(variant.method, self.stage.lm, drafter, settings, limits)

    def _limits(self, answer: tuple[int, ...]) -> Limits:
        """Return the limits of the original answer: its end is reached, not known before, so drafts may pass it."""
        most, end = len(answer), next((at for at, token in enumerate(answer) if token in self.stage.stop), None)
        if end is not None:
            known = self.recorded.header.get("settings", {}).get("max_new_tokens", 1 << 30)
            most = max(known, end + 1)
        return Limits(most, self.stage.stop, self.stage.lm.context)

    def _play(self, variant: Variant, recorded: RecordedAnswer, most: int | None = None) -> Played | None:
        """Play the answer under a drafter; None if it was interrupted."""
        limits = self._limits(recorded.answer)
        lane = self._lane(variant, limits if most is None else replace(limits, max_new_tokens=most))
        events: list[Event] = []
        answer = run_lane(lane, list(recorded.prompt), lambda ids: "", interrupt=self.interrupt, show=events.append)
        rounds = [event for event in events if isinstance(event, Step)][1:]
        return None if answer.interrupted else Played(answer.stats, tuple(rounds))

    def run(self) -> bool:
        """Play every answer under every variant, in turns; False after an interrupt, which keeps the answers that all
        have played."""
        answers = self.recorded.answers
        for variant in self.variants:
            self._play(variant, answers[0], WARM_UP)
        with answer_bar(len(answers) * len(self.variants), self.settings) as bar:
            for turn, recorded in enumerate(answers):
                row: dict[Variant, Played] = {}
                for variant in order(self.variants, turn):
                    if (played := self._play(variant, recorded)) is None:
                        return False
                    row[variant] = played
                    bar.update()
                self.played.append(row)
                self.stage.drafters.answers.add(recorded.prompt, recorded.answer)
        return True

    # -- results ------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each variant; empty before any answer was played by all."""
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
        other = 0.0 if self.source == "flags" else None
        plain = self._plain_other() if other is None else other
        return RoundSeconds(pass_times(self.pass_seconds), self.args.t_draft, other, plain)

    def _plain_other(self) -> float:
        """Return the seconds of a plain round beside its pass, measured here."""
        seconds: list[float] = []
        for recorded in self.recorded.answers:
            if len(seconds) >= ROUNDS or (played := self._play(_PLAIN, recorded)) is None:
                break
            seconds += [step.sample_s + step.overhead_s for step in played.rounds]
        return statistics.median(seconds or [0.0])

    def notes(self, settings: Settings) -> list[str]:
        """Return notes for a reader of the figures."""
        notes, known = _reading(self.recorded), self.recorded.best
        if "ngram" in map(self.stage.kind, self.args.methods) and known < settings.ngram_filler:
            notes.append(
                f"ngram counts {known} id a token: the recording has no more (ngram_filler {settings.ngram_filler})"
            )
        if self.recorded.header.get("settings", {}).get("temperature", 0):
            notes.append("the recording was sampled: greedy drafts are compared with it, sampled drafts would differ")
        return notes


def _reading(recorded: RecordedAnswers) -> list[str]:
    """Return how the values of a file were read, unless the file tells, and the prompts left out."""
    start, firsts = recorded.header.get("start_id"), {answer.answer[0] for answer in recorded.answers}
    notes = [_READ_AS[recorded.reading].format(start=start)]
    if recorded.reading == "answers alone" and start is None and len(firsts) == 1 < len(recorded.answers):
        notes.append(f"all values begin with id {firsts.pop()}: if a decoder starts from it, give --arch seq2seq")
    if recorded.unanswered:
        notes.append(f"{recorded.unanswered} of the prompts have no answer: left out")
    return list(filter(None, notes))


# -- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """One answer played: its figures, and its rounds after the opening one."""

    stats: Stats
    rounds: tuple[Step, ...]


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds. `verify(n)`: a target pass over n tokens, None if unknown; `draft`: a drafted token, `other`: the rest
    of a round, None: as measured in each round; `plain_other`: the rest of a round of plain decoding."""

    verify: Callable[[int], float] | None = None
    draft: float | None = None
    other: float | None = None
    plain_other: float = 0.0


def figures(method: str, gamma: int | str | None, played: Sequence[Played], costs: RoundSeconds) -> dict[str, Any]:
    """Return all figures of a drafter at a gamma, as JSON values; unknown ones are None."""
    stats = merge([answer.stats for answer in played])
    rounds = [step for answer in played for step in answer.rounds]
    drafted = sum(len(step.drafted) for step in rounds)
    drafting = costs.draft if costs.draft is not None else ratio(sum(step.draft_s for step in rounds), drafted)
    return {
        "method": method,
        "gamma": gamma,
        "tokens_per_pass": _short(stats.tokens_per_pass),
        "acceptance_rate": _short(stats.acceptance_rate),
        "alpha": _short(stats.alpha),
        "alpha_per_position": [_short(alpha) for alpha in stats.alpha_per_position],
        "predicted_n": stats.predicted_n,
        "target_passes": stats.target_passes,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "t_draft": _short(drafting, 7),
        **_speeds(stats, gamma, rounds, drafting or 0.0, costs),
        "prompts": [
            {
                "prompt_n": answer.stats.prompt_n,
                "predicted_n": answer.stats.predicted_n,
                "target_passes": answer.stats.target_passes,
                "tokens_per_pass": _short(answer.stats.tokens_per_pass),
            }
            for answer in played
        ],
    }


def _speeds(
    stats: Stats, gamma: int | str | None, rounds: Sequence[Step], drafting: float, costs: RoundSeconds
) -> dict[str, float | None]:
    """Return the figures that depend on the seconds of target passes; all None if these are unknown."""
    verify, names = costs.verify, ("t_round", "throughput", "throughput_formula", "plain_throughput", "speedup")
    if verify is None:
        return dict.fromkeys(names)
    spent = 0.0
    for step in rounds:
        drafted = len(step.drafted)
        rest = step.sample_s + step.overhead_s if costs.other is None else costs.other
        spent += (step.draft_s if costs.draft is None else drafted * costs.draft) + verify(drafted + 1) + rest
    throughput, plain = ratio(stats.predicted_n - stats.openings, spent), 1 / (verify(1) + costs.plain_other)
    tar, formula = stats.tokens_per_pass, None
    if isinstance(gamma, int) and tar is not None:  # as printed: every round drafts gamma tokens
        formula = tar / (gamma * drafting + verify(gamma + 1))
    speedup = None if throughput is None else throughput / plain
    speeds = (_short(ratio(spent, len(rounds)), 7), *map(_short, (throughput, formula, plain, speedup)))
    return dict(zip(names, speeds, strict=True))


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


# -- tables -----------------------------------------------------------------------------------------


def print_simulation(about: Mapping[str, Any], rows: Rows, settings: Settings) -> None:
    """Print a row for each drafter and gamma; at most 100 columns where it goes to no terminal."""
    console = screen(settings, sys.stdout)

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False)

    count = f"{about['answers']} answer{'s' * (about['answers'] != 1)}"
    stopped = "" if about["complete"] else f" of {about['of']} (interrupted)"
    line(f"{about['target'] or 'a recording'}: {count}{stopped}; rates leave prefill out", "italic")
    console.print(_methods(rows, settings, console.width < WIDE))
    if rows[0]["plain_throughput"] is None:
        line("no speeds: the time of target passes is unknown (--t-verify, or --pair to measure)")
    else:
        shown = {n: 1000 * seconds for n, seconds in about["pass_seconds"].items() if n in ("1", "2", "5", "9", "17")}
        passes = ", ".join(f"{n}: {milliseconds:.3g}" for n, milliseconds in shown.items())
        plain, source = f"plain decoding {rows[0]['plain_throughput']:.1f} tok/s", _FROM[about["pass_seconds_from"]]
        line(f"{plain}; ms of a pass, {source}, by tokens: {passes}")
    for note in about["notes"]:
        line(f"note: {note}")


def _methods(rows: Rows, settings: Settings, narrow: bool) -> Table:
    columns = {
        "gamma": ("gamma", "d", 1),
        "TAR": ("tokens_per_pass", ".3f", 1),
        "accepted": ("acceptance_rate", ".0%", 1),
        "alpha": ("alpha", ".2f", 1),
        "draft ms": ("t_draft", ".3g", 1000),
        "round ms": ("t_round", ".3g", 1000),
        "tok/s": ("throughput", ".1f", 1),
        "speed-up": ("speedup", ".2fx", 1),
    }
    chosen = {name: column for name, column in columns.items() if not narrow or name not in ("accepted", "round ms")}
    table = small_table(settings)
    table.add_column("drafter", no_wrap=True)
    for name in chosen:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["method"], *(_cell(row[key], form, factor) for key, form, factor in chosen.values()))
    return table


def _cell(value: Any, form: str, factor: float = 1) -> str:
    """Return the value in this form, followed by the unit x if the form ends with it."""
    return "-" if value is None else format(value * factor, form.removesuffix("x")) + "x" * form.endswith("x")
