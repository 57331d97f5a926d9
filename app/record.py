"""`record`: what a pair's target answers to many prompts, as a file that can stand in for it (app/simulate.py).

The target decodes alone (lane `ar`) under the settings as given. Beside the ids goes what n-gram drafters ask of a
target: its likeliest ids at each token. A stopped run goes on where it was. Knows no file's form (app/record_file.py).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.answer_bar import answer_bar
from app.answers import Answer, run_lane, shown_settings
from app.bench_file import machine
from app.datasets import questions_of
from app.oneshot import load_engine
from app.prompts import Question, chosen, conversation, cut, fitting, stratified
from app.record_file import RecordFile
from app.terminal import Interrupts
from sampling.drafters import NoDrafter
from utils.errors import UsageError
from utils.fit import fingerprint
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes import Engine
    from app.record_fields import RecordArgs
    from app.settings import ModelOptions, Settings
    from sampling.types import Draft, Rows, Verdict

WIDTHS = range(1, 18)  # tokens of the passes that --costs times: gamma up to 16


class Listener(NoDrafter):
    """Drafts nothing and notes the target's `count` likeliest ids at each token."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.best: list[list[int]] = []

    def observe(self, rows: Rows, draft: Draft, verdict: Verdict) -> None:
        self.best.append(verdict.logits[0, 0].topk(min(self.count, verdict.logits.shape[-1])).indices.tolist())


def run_record(settings: Settings, options: ModelOptions, args: RecordArgs) -> int:
    """Record the answers; the exit code."""
    known = questions_of(args.prompts, settings.data_dir, offline=options.offline)
    questions = cut(stratified(known if args.ids is None else chosen(known, args.ids), args.limit), args.turns)
    with Interrupts() as interrupt:
        engine = load_engine(settings, options.changed(drafter="none"), interrupt)
        header = _header(engine, settings)
        with RecordFile(args.out, header) as file:
            recorder = Recorder(engine, settings, args, file, interrupt)
            if args.costs and not file.has_costs:
                file.add(recorder.costs(questions))
            done = recorder.run(questions)
    for line in recorder.skipped:
        sys.stderr.write(f"{line}\n")
    count = len(recorder.lengths)
    if not done:
        sys.stderr.write(f"interrupted: {args.out} keeps {count} answers, the same command goes on from there\n")
        return INTERRUPTED
    if not settings.quiet:
        tokens = sum(len(one) for one in recorder.lengths.values())
        sys.stderr.write(f"{args.out}: {count} answers, {tokens:,} tokens, of which {recorder.made} answers are new\n")
    return 0


def _header(engine: Engine, settings: Settings) -> dict[str, Any]:
    """What the answers depend on, and what whoever plays them needs to know."""
    stop, end = engine.limits(settings).stop, engine.tokenizer.eos_token_id
    return {
        "recording": 1,
        "pair": engine.loaded.spec.name,
        "target": engine.loaded.target.name,
        "vocab_size": engine.target.vocab_size,
        "end_id": end if end is not None else min(stop, default=0),
        "stop_ids": sorted(stop),
        "start_id": engine.start_id,
        "context": engine.context,
        "tokenizer": fingerprint(engine.tokenizer),
        "settings": shown_settings(settings),
        "machine": machine(engine.loaded),
    }


class Recorder:
    """Answers prompts and writes each answer as it is whole; `run` says whether it came to the end."""

    def __init__(
        self, engine: Engine, settings: Settings, args: RecordArgs, file: RecordFile, interrupt: Interrupts
    ) -> None:
        self.engine, self.settings, self.args, self.file, self.interrupt = engine, settings, args, file, interrupt
        self.lengths = {one.prompt: one.answer for one in file.known.values()}
        self.skipped: list[str] = []
        self.made = 0
        self._decode = conversation(engine, settings).text

    def costs(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Seconds of passes over 1 … 17 tokens, half an answer behind the usual prompt."""
        from app.speed import measure_costs

        first = [len(conversation(self.engine, self.settings).plan(one.turns[0]).prompt) for one in questions]
        context = int(statistics.median(first)) + self.settings.max_new_tokens // 2
        seconds = measure_costs(self.engine.target, WIDTHS, context)
        return {"pass_seconds": {str(n): round(one, 7) for n, one in seconds.items()}, "pass_context": context}

    def run(self, questions: Sequence[Question]) -> bool:
        with answer_bar(sum(len(question.turns) for question in questions), self.settings) as bar:
            for question in questions:
                for told in self._answers(question):
                    if told is None:
                        return False
                    bar.update()
        return True

    def _answers(self, question: Question) -> Iterator[bool | None]:
        """Every turn of a question, answered now or before; None after an interrupt, whose answer is dropped."""
        chat = conversation(self.engine, self.settings)
        for turn, text in enumerate(question.turns):
            plan = chat.plan(text)
            try:
                prompt = fitting(plan.prompt, self.engine.context)
            except UsageError as error:
                self.skipped.append(f"prompt {question.line or question.question_id}, turn {turn + 1} skipped: {error}")
                return
            ids = self.lengths.get(tuple(prompt))
            if ids is None:
                answer = self._answer(question, turn, text, prompt)
                if answer is None:
                    yield None
                    return
                ids = answer.ids
            yield True
            ended = bool(ids) and ids[-1] in self.engine.limits(self.settings).stop
            chat.commit(plan, list(ids), "eos" if ended else "length")

    def _answer(self, question: Question, turn: int, text: str, prompt: list[int]) -> Answer | None:
        if self.interrupt():
            return None
        self.engine.forget()
        listener = Listener(self.args.best)
        lane = replace(self.engine.lane("ar", self.settings), drafter=listener)
        answer = run_lane(lane, prompt, self._decode, interrupt=self.interrupt)
        if answer.interrupted:
            return None
        self.file.add(
            {
                "question_id": question.question_id,
                "category": question.category,
                "turn": turn,
                "prompt": text,
                "prompt_ids": prompt,
                "answer": answer.text,
                "answer_ids": list(answer.ids),
                "best_ids": listener.best,
                **{name: answer.stats.to_json()[name] for name in ("stop_reason", "target_passes", "predicted_ms")},
            }
        )
        self.lengths[tuple(prompt)] = answer.ids
        self.made += 1
        return answer
