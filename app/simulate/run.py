"""`record`: a target's answers to many prompts, as a file that can stand in for it; `simulate`: drafters tried against
such a file: tokens a round, and the speed to expect.

A target is recorded by its lane `ar` under the given settings. Beside the ids the file has the target's likeliest ids
at each token, which n-gram drafters need. It has a header, with --costs a line with the seconds of target passes, and a
line for each answer, written when that is complete; a stopped run is resumed in the same file. Knows the form that
sampling/recorded.py reads.

`simulate` runs the one decode loop greedily, with the recorded answers as its target. Drafting is timed as it runs,
unless --t-draft gives its time; the time of target passes comes from flags, from the file, or is measured if the target
was loaded. Does not know how models are loaded (app/simulate/loading.py).

Seconds of a round = drafting + a target pass over 1 + drafted tokens + the rest (sampling, the loop itself; 0 with
--t-verify). Where every round drafts gamma tokens and the rest is 0, throughput is TAR / (γ·t_draft + t_verify(γ + 1)),
as in Decoding Speculative Decoding (arXiv 2402.01528; TAR: tokens a round). Rates leave out the opening round, which
reads the prompt, as everywhere.
"""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from app.lanes.answers import Variant, order, run_lane, shown_settings
from app.lanes.lane import Lane, PairEngine
from app.lanes.warm import measure_costs
from app.prompts.questions import Question, conversation, selected, turns_of
from app.screen.output import answer_bar, fitted, load_engine, screen
from app.screen.rows import plural
from app.screen.terminal import Interrupts
from app.settings.table import SETTING_FIELDS, ModelOptions, Settings
from app.simulate.loading import RECORDING, RecordedPair, check_header, load_recorded_pair
from sampling.drafters.draft_model import NoDrafter
from sampling.events import Event, Step
from sampling.gamma.costs import pass_times
from sampling.recorded import RecordedAnswer, read_answers
from sampling.stats.summary import Stats, merge, ratio, rounded
from sampling.types import Draft, Limits, Rows, Verdict
from utils.errors import UsageError, UserError, holding
from utils.files import append, check_outputs, drop_half_line, first_difference, writable, write_result
from utils.loading.fit import fingerprint
from utils.machine import machine
from utils.objects import Json
from utils.progress import INTERRUPTED
from utils.visible import to_stderr

# -- record -----------------------------------------------------------------------------------------

_SAME = ("target", "vocab_size", "end_id", "tokenizer", "weights")
_SETTINGS = (  # the settings that plain decoding's answer depends on
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "repetition_penalty", "no_repeat_ngram"),
    *("presence_penalty", "frequency_penalty", "penalty_window", "typical_p", "logit_bias", "stop"),
    *("system", "chat", "template", "special_tokens", "grammar", "json_schema", "regex"),
)

WIDTHS = range(1, 18)  # tokens of the passes that --costs times: gamma up to 16


class Listener(NoDrafter):
    """Drafts nothing and notes the target's `count` likeliest ids at each token."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.best: list[list[int]] = []

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.best.append(verdict.logits[0, 0].topk(min(self.count, verdict.logits.shape[-1])).indices.tolist())


def run_record(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Record the answers; return the exit code."""
    questions = selected(args, settings.data_dir)
    with Interrupts() as interrupt:
        engine = load_engine(settings, options.changed(drafter="none"), interrupt)
        with closing(TargetRecorder(engine, settings, args, interrupt, _header(engine, settings, options))) as recorder:
            if args.costs and not recorder.has_costs:
                recorder.add_costs(questions)
            done = recorder.run(questions)
    to_stderr(*recorder.skipped)
    count = len(recorder.answers)
    if done and not count:
        raise UserError(f"nothing was recorded: none of the {len(questions)} prompts fits into the context")
    if not done:
        to_stderr(f"interrupted: {args.out} keeps {plural(count, 'answer')}, the same command resumes the run")
        return INTERRUPTED
    if not settings.quiet:
        to_stderr(
            f"{args.out}: {plural(count, 'answer')}, {plural(sum(map(len, recorder.answers.values())), 'token')}; "
            f"new: {recorder.new}"
        )
    return 0


def _header(engine: PairEngine, settings: Settings, options: ModelOptions) -> Json:
    """Return the facts that the answers depend on, and those that playing them needs."""
    stop, end = engine.limits(settings).stop, engine.tokenizer.eos_token_id
    return {
        "recording": RECORDING,
        "pair": engine.loaded.spec.name,
        "target": engine.loaded.target.name,
        "weights": engine.loaded.spec.target.weights(options.revision),
        "vocab_size": engine.target.vocab_size,
        "end_id": end if end is not None else min(stop, default=0),
        "stop_ids": sorted(stop),
        "start_id": engine.start_id,
        "context": engine.context,
        "tokenizer": fingerprint(engine.tokenizer),
        "settings": shown_settings(settings),
        "machine": machine(engine.loaded),
    }


def _facts(header: Json) -> Json:
    settings, machine = header.get("settings", {}), header.get("machine", {})
    return {
        **{name: header.get(name) for name in _SAME},
        **{name: SETTING_FIELDS[name].read(settings.get(name, SETTING_FIELDS[name].default)) for name in _SETTINGS},
        **{name: machine.get(name) for name in ("dtype", "quantization")},
    }


class TargetRecorder:
    """Answers prompts and writes each complete answer to the file; the caller closes it.

    The file is new or holds a stopped run's answers. UsageError, before anything is written, for a file of another run
    or program. `answers`: the ids of all answers in the file, by the ids of their prompts.
    """

    def __init__(
        self, engine: PairEngine, settings: Settings, args: Namespace, interrupt: Interrupts, header: Json
    ) -> None:
        self.engine, self.settings, self.args, self.interrupt = engine, settings, args, interrupt
        self.answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.has_costs = False
        self.skipped: list[str] = []
        self.new = 0
        new = not args.out.exists() or args.out.stat().st_size == 0
        writable(args.out)
        if not new:
            self._resume(header)
        self._file = args.out.open("ab", buffering=0)
        if new:
            self._add(header)

    def _resume(self, header: Json) -> None:
        """Read the answers of the file; an unfinished last line is removed."""
        recorded = read_answers(self.args.out)
        if "recording" not in recorded.header:
            raise UsageError(f"--out {self.args.out} holds something else: name a new file")
        check_header(self.args.out, recorded.header)
        before, now = _facts(dict(recorded.header)), _facts(header)
        if (name := first_difference(before, now)) is not None:
            raise UsageError(
                f"--out {self.args.out} holds a recording with {name} {before.get(name)}, now {now.get(name)}: "
                "give the same flags, or another file"
            )
        self.answers = {answer.prompt: answer.answer for answer in recorded.answers}
        self.has_costs = bool(recorded.pass_seconds)
        drop_half_line(self.args.out)

    def close(self) -> None:
        self._file.close()

    def _add(self, line: Json) -> None:
        """Write one whole line at once; UserError if that fails."""
        append(self._file, f"{json.dumps(line, ensure_ascii=False, allow_nan=False)}\n".encode(), self.args.out)

    def add_costs(self, questions: Sequence[Question]) -> None:
        """Write the seconds of passes over 1 … 17 tokens, measured at a context of the median prompt and half an
        answer."""
        chat = conversation(self.engine, self.settings)
        first = statistics.median(len(chat.plan(question.turns[0]).prompt) for question in questions)
        context = int(first) + self.settings.max_new_tokens // 2
        seconds = measure_costs(self.engine.target, WIDTHS, context)
        self._add({"pass_seconds": {str(n): round(each, 7) for n, each in seconds.items()}, "pass_context": context})

    def run(self, questions: Sequence[Question]) -> bool:
        """Answer every turn that was not answered before; False after an interrupt, which drops the answer begun."""
        with answer_bar(sum(len(question.turns) for question in questions), self.settings) as bar:
            for question in questions:
                for turn, plan, chat in turns_of(self.engine, self.settings, question, self.skipped):
                    prompt = tuple(plan.prompt)
                    if prompt not in self.answers and not self._answer(question, turn, prompt):
                        return False
                    bar.update()
                    ids = self.answers[prompt]
                    ended = bool(ids) and ids[-1] in self.engine.limits(self.settings).stop
                    chat.commit(plan, list(ids), "eos" if ended else "length")
        return True

    def _answer(self, question: Question, turn: int, prompt: tuple[int, ...]) -> bool:
        """Answer a turn and write the answer to the file; False if it was interrupted."""
        if self.interrupt():
            return False
        self.engine.forget()
        listener = Listener(self.args.best)
        answer = run_lane(
            replace(self.engine.lane("ar", self.settings), drafter=listener),
            list(prompt),
            conversation(self.engine, self.settings).text,
            interrupt=self.interrupt,
        )
        if answer.interrupted:
            return False
        self._add(
            {
                "question_id": question.question_id,
                "category": question.category,
                "turn": turn,
                "prompt": question.turns[turn],
                "prompt_ids": prompt,
                "answer": answer.text,
                "answer_ids": answer.ids,
                "best_ids": listener.best,
                **{name: answer.stats.to_json()[name] for name in ("stop_reason", "target_passes", "predicted_ms")},
            }
        )
        self.answers[prompt] = answer.ids
        self.new += 1
        return True


# -- simulate ---------------------------------------------------------------------------------------

WARM_UP = 16  # tokens
ROUNDS = 128  # rounds of plain decoding over which the rest of a round is measured
_PLAIN = Variant("ar")
_READ_AS = {
    "told": "",
    "prompt first": "the values begin with their prompts' ids: the answers follow them",
    "start first": "the values begin with the decoder start id {start}: the answers follow it",
    "answers alone": "the values are taken as answers alone",
}
_FROM = {"flags": "as given", "recording": "as recorded", "measured": "measured here"}


def run_simulate(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Play the recorded answers under every drafter and gamma; return the exit code."""
    check_outputs({"--out": args.out}, [args.file, args.prompts])
    with Interrupts() as interrupt:
        simulation = Simulation(load_recorded_pair(settings, options, args, interrupt), settings, args, interrupt)
        complete = simulation.run()
        rows = simulation.rows()
    if not rows:
        to_stderr("interrupted before the first answer was played")
        return INTERRUPTED
    header, loaded = simulation.recorded.header, simulation.stage.loaded
    about = {
        "recording": str(args.file),
        "target": header.get("target"),
        "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_word,
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
        to_stderr(f"{args.out} holds a finished result and is kept")
    return 0 if complete else INTERRUPTED


class Simulation:
    """Plays the answers: `run()` fills `played`, `rows()` returns the figures.

    `pass_seconds`: the seconds of a target pass over n tokens, by n. `source`: "flags", "recording" or "measured"; None
    if they are unknown.
    """

    def __init__(self, stage: RecordedPair, settings: Settings, args: Namespace, interrupt: Callable[[], bool]) -> None:
        self.stage, self.recorded, self.args, self.interrupt = stage, stage.recorded, args, interrupt
        self.settings = settings.changed(temperature=0, ngram_filler=min(settings.ngram_filler, self.recorded.best))
        self.variants = [variant for method in args.methods for variant in self._of(method)]
        self.pass_seconds, self.source = self._pass_seconds()
        self.played: list[dict[Variant, Played]] = []

    def _of(self, method: str) -> list[Variant]:
        lane = self._lane(Variant(method, self.args.gammas[0]), Limits(1))
        planned = lane.drafts and not lane.takes_gamma
        return [Variant(method)] if planned else [Variant(method, gamma) for gamma in self.args.gammas]

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
        drafter = (
            NoDrafter()
            if variant == _PLAIN
            else self.stage.drafters.make(self.stage.drafter_word(variant.method), settings)
        )
        return Lane(variant.method, self.stage.lm, drafter, settings, limits)

    def _limits(self, answer: tuple[int, ...]) -> Limits:
        """Return the limits under which the answer was recorded. If it ended by itself, they do not tell the drafter
        where: drafts may go past its end."""
        end = next((at for at, token in enumerate(answer) if token in self.stage.stop), None)
        most = (
            len(answer)
            if end is None
            else max(end + 1, self.recorded.header.get("settings", {}).get("max_new_tokens", 1 << 30))
        )
        return Limits(most, self.stage.stop, self.stage.lm.context)

    def _play(self, variant: Variant, recorded: RecordedAnswer, most: int | None = None) -> "Played | None":
        """Play the answer under a drafter; None if it was interrupted."""
        limits = self._limits(recorded.answer)
        lane = self._lane(variant, limits if most is None else replace(limits, max_new_tokens=most))
        events: list[Event] = []
        answer = run_lane(lane, list(recorded.prompt), lambda ids: "", interrupt=self.interrupt, show=events.append)
        rounds = [event for event in events if isinstance(event, Step)][1:]
        return None if answer.interrupted else Played(answer.stats, tuple(rounds))

    def run(self) -> bool:
        """Play every answer under every variant, in turns; False after an interrupt, which keeps the answers that every
        variant has played."""
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

    def rows(self) -> list[Json]:
        """Return the figures of each variant; empty before every variant has played an answer."""
        if not self.played:
            return []
        costs = self._costs()
        return [
            figures(variant.method, variant.gamma, [row[variant] for row in self.played], costs)
            for variant in self.variants
        ]

    def _costs(self) -> "RoundSeconds":
        if not self.pass_seconds:
            return RoundSeconds(draft=self.args.t_draft)
        rest = {"other": 0.0} if self.source == "flags" else {"plain_other": self._plain_other()}
        return RoundSeconds(pass_times(self.pass_seconds), self.args.t_draft, **rest)

    def _plain_other(self) -> float:
        """Return the seconds of a round of plain decoding without its pass, measured on this machine."""
        seconds: list[float] = []
        for recorded in self.recorded.answers:
            if len(seconds) >= ROUNDS or (played := self._play(_PLAIN, recorded)) is None:
                break
            seconds += [step.sample_s + step.overhead_s for step in played.rounds]
        return statistics.median(seconds or [0.0])

    def notes(self, settings: Settings) -> list[str]:
        """Return notes for a reader of the figures."""
        recorded, words, filler = self.recorded, map(self.stage.drafter_word, self.args.methods), settings.ngram_filler
        start, firsts = recorded.header.get("start_id"), {answer.answer[0] for answer in recorded.answers}
        alone = recorded.reading == "answers alone" and start is None
        return holding(
            {
                _READ_AS[recorded.reading].format(start=start): recorded.reading != "told",
                f"all values begin with id {min(firsts)}: if a decoder starts from it, give --arch seq2seq": (
                    alone and len(firsts) == 1 < len(recorded.answers)
                ),
                f"{recorded.unanswered} of the prompts have no answer: left out": recorded.unanswered,
                f"ngram counts {recorded.best} id a token: the recording has no more (ngram_filler {filler})": (
                    "ngram" in words and recorded.best < filler
                ),
                "the recording was sampled: greedy drafts are compared with it, sampled drafts would differ": (
                    recorded.header.get("settings", {}).get("temperature", 0)
                ),
            }
        )


# -- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """One answer played: its figures, and its rounds after the opening one."""

    stats: Stats
    rounds: tuple[Step, ...]


@dataclass(frozen=True)
class RoundSeconds:
    """Seconds. `verify(n)`: a target pass over n tokens; None: unknown. `draft`: a drafted token; `other`: the rest of
    a round; None for either: as measured in each round. `plain_other`: the rest of a round of plain decoding."""

    verify: Callable[[int], float] | None = None
    draft: float | None = None
    other: float | None = None
    plain_other: float = 0.0


def figures(method: str, gamma: int | str | None, played: Sequence[Played], costs: RoundSeconds) -> Json:
    """Return all figures of a drafter at a gamma, as JSON values; unknown ones are None."""
    stats = merge([answer.stats for answer in played])
    rounds = [step for answer in played for step in answer.rounds]
    drafted = sum(len(step.drafted) for step in rounds)
    drafting = costs.draft if costs.draft is not None else ratio(sum(step.draft_s for step in rounds), drafted)
    return {
        "method": method,
        "gamma": gamma,
        "tokens_per_pass": rounded(stats.tokens_per_pass),
        "acceptance_rate": rounded(stats.acceptance_rate),
        "alpha": rounded(stats.alpha),
        "alpha_per_position": [rounded(alpha) for alpha in stats.alpha_per_position],
        "predicted_n": stats.predicted_n,
        "target_passes": stats.target_passes,
        "draft_n": stats.draft_n,
        "draft_n_accepted": stats.draft_n_accepted,
        "t_draft": rounded(drafting, 7),
        **_speeds(stats, gamma, rounds, drafting or 0.0, costs),
        "prompts": [
            {
                "prompt_n": answer.stats.prompt_n,
                "predicted_n": answer.stats.predicted_n,
                "target_passes": answer.stats.target_passes,
                "tokens_per_pass": rounded(answer.stats.tokens_per_pass),
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
    tar = stats.tokens_per_pass  # the formula assumes that every round drafts gamma tokens
    formula = tar / (gamma * drafting + verify(gamma + 1)) if isinstance(gamma, int) and tar is not None else None
    speedup = None if throughput is None else throughput / plain
    speeds = (rounded(ratio(spent, len(rounds)), 7), *map(rounded, (throughput, formula, plain, speedup)))
    return dict(zip(names, speeds, strict=True))


# -- tables -----------------------------------------------------------------------------------------


def print_simulation(about: Json, rows: Sequence[Json], settings: Settings) -> None:
    """Print a row for each drafter and gamma, in at most 100 columns if standard output is no terminal."""
    console = screen(settings, sys.stdout)

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False)

    stopped = "" if about["complete"] else f" of {about['of']} (interrupted)"
    line(
        f"{about['target'] or 'a recording'}: {plural(about['answers'], 'answer')}{stopped}; rates leave prefill out",
        "italic",
    )
    console.print(_methods(rows, settings, console))
    if rows[0]["plain_throughput"] is None:
        line("no speeds: the time of target passes is unknown (--t-verify, or --pair to measure)")
    else:
        shown = {n: 1000 * seconds for n, seconds in about["pass_seconds"].items() if n in ("1", "2", "5", "9", "17")}
        passes = ", ".join(f"{n}: {milliseconds:.3g}" for n, milliseconds in shown.items())
        plain, source = f"plain decoding {rows[0]['plain_throughput']:.1f} tok/s", _FROM[about["pass_seconds_from"]]
        line(f"{plain}; ms of a pass, {source}, by tokens: {passes}")
    for note in about["notes"]:
        line(f"note: {note}")


def _methods(rows: Sequence[Json], settings: Settings, console: Console) -> Table:
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
    cells = [
        {"drafter": row["method"]}
        | {name: _cell(row[key], form, factor) for name, (key, form, factor) in columns.items()}
        for row in rows
    ]
    return fitted(console, settings, cells, ["accepted", "round ms"])


def _cell(value: float | None, form: str, factor: float = 1) -> str:
    """Return the value in this form, followed by the unit x if the form ends with it."""
    return "-" if value is None else format(value * factor, form.removesuffix("x")) + "x" * form.endswith("x")
