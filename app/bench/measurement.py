"""A benchmark: many prompts under several methods and gammas, timed fairly.

Every answer starts without a cache and without n-grams of an earlier one; the order of the methods rotates and reverses
from round to round; a warm-up is not counted. An interrupt keeps what was measured, and with --out the same command
resumes the run (app/bench/journal.py). Later turns of a chat continue from the reference's answer, so that all methods
read the same prompts. Knows how to run lanes, not how figures are computed
(app/bench/summary.py).
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from app.bench.journal import Journal, Slot
from app.bench.report import show_tables, write_report
from app.bench.summary import Item, reference_of, summarise, variants_of
from app.lanes.answers import Answer, Variant, compared, order, parting, run_lane, shown_settings
from app.lanes.costs import terms_of
from app.prompts.questions import Question, conversation, fitting, fitting_prompts
from app.replay.log_writer import LoggedMessage, SessionLogWriter
from app.screen.output import answer_bar, screen
from app.settings.table import Settings
from utils.errors import UsageError, UserError
from utils.files import write_result
from utils.machine import machine
from utils.processes import agreed
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine


WARM_UP = 16  # tokens


class Bench:
    """A benchmark and its answers so far: :meth:`run` fills `items`, :meth:`show` prints and writes them."""

    recorder: SessionLogWriter | None = None

    def __init__(
        self,
        engine: PairEngine,
        settings: Settings,
        args: Namespace,
        questions: Sequence[Question],
        interrupt: Callable[[], bool],
        journal: Journal | None = None,
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt, self.journal = questions, interrupt, journal
        self.items: list[Item] = []
        self.skipped: list[str] = []
        self.interrupted = False
        # A variant without gamma must not inherit `auto` from the settings: it takes the first fixed gamma.
        self._fixed = next((gamma for gamma in args.gammas if gamma != "auto"), None)
        self.variants = variants_of(engine, settings, args)
        self.reference = reference_of(self.variants)
        self.decode = conversation(engine, settings).text

    @property
    def measured(self) -> int:
        """The number of answers."""
        return sum(len(row) for item in self.items for row in item.answers)

    def lane(self, variant: Variant, **changes: Any) -> Lane:
        """Return a lane that remembers nothing of earlier answers."""
        self.engine.forget()
        gamma = self._fixed if variant.gamma is None else variant.gamma
        if gamma is not None:
            changes["gamma"] = gamma
        return self.engine.lane(variant.method, self.settings.changed(**changes))

    def turns(self, number: int) -> Iterator[Item]:
        """Yield the prompts of a question; the next one is planned when the last has been answered."""
        chat, question = conversation(self.engine, self.settings), self.questions[number]
        for turn, text in enumerate(question.turns):
            plan = chat.plan(text)
            try:
                fitting(plan.prompt, self.engine.context)
            except UsageError as error:
                self.skipped.append(f"prompt {question.line or question.question_id}, turn {turn + 1} skipped: {error}")
                return
            item = Item(number, question, turn, plan.prompt)
            yield item
            answer = item.answers[0][self.reference]
            chat.commit(plan, list(answer.ids), answer.stats.stop_reason or "length")

    def answer(self, variant: Variant, prompt: list[int], text: str | None = None, **changes: Any) -> Answer:
        """Decode one answer of a lane, without a cache; it is recorded if the prompt's text is `text`."""
        lane = self.lane(variant, **changes)
        answer_log = None
        if text is not None and self.recorder is not None:
            message = LoggedMessage(text, prompt)
            answer_log = self.recorder.open_answer(self.engine, [lane], message, lane.settings, self.decode)
        show = None if answer_log is None else partial(answer_log.feed, 0)
        terms = terms_of(lane, self.engine)
        answer = run_lane(lane, prompt, self.decode, interrupt=self.interrupt, show=show, terms=terms)
        if answer_log is not None and (problem := answer_log.end()):
            sys.stderr.write(f"{problem}\n")
        return answer

    # -- measuring ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer every prompt with every variant, `repeat` times, except the answers that the journal already holds."""
        if self.journal is not None:
            self.journal.begin(machine(self.engine.loaded))
            self.journal.drop_broken_rounds(self.variants)
        known = agreed(0 if self.journal is None else len(self.journal.known))
        each = self.args.repeat * len(self.variants)
        total = sum(len(question.turns) for question in self.questions) * each
        with answer_bar(total, self.settings, known) as bar:
            if known < total:
                self._warm_up(bar)
            for number, question in enumerate(self.questions):
                left = len(question.turns)
                for item in self.turns(number):
                    left -= 1
                    self.items.append(item)
                    if not self._measure(item, bar):
                        self.interrupted = True
                        return
                    # Every method has answered it: earlier answers may be looked up now.
                    self.engine.drafters.answers.add(item.ids, item.answers[-1][self.reference].ids)
                bar.total = (bar.total or 0) - left * each

    def _warm_up(self, bar: Any) -> None:
        """Decode one short answer of each variant, which is not counted."""
        bar.set_description("warming up", refresh=False)
        for prompt in islice(fitting_prompts(self.engine, self.questions, self.settings), 1):
            for variant in self.variants:
                self.answer(variant, prompt, max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
        bar.unpause()  # the time so far belongs to no answer

    def _measure(self, item: Item, bar: Any) -> bool:
        """Run all repeats of one prompt; False after an interrupt, whose unfinished answer is dropped."""
        for repeat in range(self.args.repeat):
            item.answers.append({})
            rounds = sum(len(item.answers) for item in self.items)
            for variant in order(self.variants, rounds - 1):
                answer = self._answer(variant, item, repeat, bar)
                if answer.interrupted:
                    return False
                item.answers[-1][variant] = answer
        if self.journal is not None:
            self.journal.sync()
        return True

    def _answer(self, variant: Variant, item: Item, repeat: int, bar: Any) -> Answer:
        """Return the journal's answer, or else decode it and enter it there."""
        slot = Slot(item.number, item.turn, repeat, variant)
        known = agreed(None if self.journal is None else self.journal.answer(slot, len(item.ids)))
        if known is not None:
            return known
        bar.set_description(variant.label, refresh=False)
        answer = self.answer(variant, item.ids, item.prompt)
        if not answer.interrupted:
            bar.update()
            if self.journal is not None:
                self.journal.add(slot, answer)
        return answer

    # -- results ------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return what was measured, on which machine, when."""
        loaded, args = self.engine.loaded, self.args
        return {
            "pair": loaded.spec.name,
            "target": loaded.target.name,
            "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_kind,
            "machine": machine(loaded),
            "settings": shown_settings(self.settings),
            "prompts_file": None if args.prompts is None else str(args.prompts),
            "methods": list(dict.fromkeys(variant.method for variant in self.variants)),
            "gammas": list(args.gammas),
            "repeat": args.repeat,
            "limit": args.limit,
            "ids_file": None if args.ids is None else str(args.ids),
            "turns": args.turns,
            "complete": not self.interrupted,
            "skipped": self.skipped,
            "resumed": 0 if self.journal is None else len(self.journal.machines) - 1,
        }

    def show(self) -> int:
        """Print the table and write the file; return the exit code."""
        summary = summarise(self.items, self.variants)
        for line in self.skipped:
            sys.stderr.write(f"{line}\n")
        if not self.measured and not self.interrupted:
            if self.journal is not None:
                self.journal.close(done=True)
            raise UserError(f"nothing was measured: none of the {len(self.questions)} prompts fits into the context")
        if self.interrupted:
            more = "" if self.journal is None else ": the same command resumes the run"
            sys.stderr.write(f"interrupted after {self.measured} answers{more}\n")
        try:
            self._write(summary)
        finally:
            if self.measured:
                show_tables(summary, self.settings, screen(self.settings, sys.stdout))
        return INTERRUPTED if self.interrupted else 0

    def _write(self, summary: list[dict[str, Any]]) -> None:
        """Write the whole file of --out and remove the journal when all is in it; then write the page of --report."""
        if self.args.out is None and self.args.report is None:
            return
        prompts = [self._prompt(item) for item in self.items if any(item.answers)]
        data = {**self.facts(), "summary": summary, "prompts": prompts}
        page = self.args.report
        if self.args.out is not None and not write_result(self.args.out, data):
            sys.stderr.write(f"{self.args.out} holds a finished result and is kept\n")
            page = None
        if self.journal is not None and not self.interrupted:
            self.journal.close(done=True)
        if page is not None:
            write_report(data, page)

    def _prompt(self, item: Item) -> dict[str, Any]:
        """Return all answers to a prompt as `run --json` has them, with gamma and repeat."""
        return {
            "question_id": item.question.question_id,
            "category": item.question.category,
            "turn": item.turn,
            "pair": self.engine.loaded.spec.name,
            "prompt": item.prompt,
            "settings": shown_settings(self.settings),
            "results": [
                self._result(variant, repeat, row)
                for repeat, row in enumerate(item.answers)
                for variant in self.variants
                if variant in row
            ],
        }

    def _result(self, variant: Variant, repeat: int, row: dict[Variant, Answer]) -> dict[str, Any]:
        answer = replace(row[variant], method=variant.method)
        plain = row.get(self.reference) if self.reference.method == "ar" else None
        alone = plain is None or variant == self.reference
        parted = None if plain is None or alone else parting(plain, row[variant])
        return {
            **answer.to_json(),
            "gamma": variant.gamma,
            "repeat": repeat,
            "parting": None if parted is None else parted.to_json(),
            **compared([answer] if plain is None or alone else [plain, answer]),
        }
