"""`record`: a target's answers to many prompts, as a file that can stand in for it (app/simulate/run.py).

The target decodes alone (lane `ar`) under the given settings. Beside the ids the file has the facts that n-gram
drafters need of a target: its likeliest ids at each token. It has a header, then a line an answer as it is made; a
stopped run is resumed in it. Knows the form that sampling/recorded.py reads.
"""

import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from app.lanes.answers import run_lane, shown_settings
from app.lanes.lane import PairEngine
from app.lanes.warm import measure_costs
from app.prompts.questions import Question, conversation, fitting, selected
from app.screen.output import answer_bar, load_engine
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_model import NoDrafter
from sampling.recorded import read_answers
from sampling.types import Draft, Rows, Verdict
from utils.errors import UsageError, UserError
from utils.files import append, drop_half_line, first_difference, writable
from utils.loading.fit import fingerprint
from utils.machine import machine
from utils.progress import INTERRUPTED

_SAME = ("target", "vocab_size", "end_id", "tokenizer", "weights")
_SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "repetition_penalty", "no_repeat_ngram"),
    *("system", "chat", "template"),
)
"""The settings that an answer of the target alone depends on."""

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
        header = _header(engine, settings, options)
        with closing(TargetRecorder(engine, settings, args, interrupt, header)) as recorder:
            if args.costs and not recorder.has_costs:
                recorder.add_costs(questions)
            done = recorder.run(questions)
    for line in recorder.skipped:
        sys.stderr.write(f"{line}\n")
    count = len(recorder.answers)
    if done and not count:
        raise UserError(f"nothing was recorded: none of the {len(questions)} prompts fits into the context")
    if not done:
        sys.stderr.write(f"interrupted: {args.out} keeps {count} answers, the same command resumes the run\n")
        return INTERRUPTED
    if not settings.quiet:
        tokens = sum(map(len, recorder.answers.values()))
        sys.stderr.write(f"{args.out}: {count} answers, {tokens:,} tokens; {recorder.new} answers are new\n")
    return 0


def _header(engine: PairEngine, settings: Settings, options: ModelOptions) -> dict[str, Any]:
    """Return the facts that the answers depend on, and those that playing them needs."""
    stop, end = engine.limits(settings).stop, engine.tokenizer.eos_token_id
    return {
        "recording": 1,
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


def _facts(header: Mapping[str, Any]) -> dict[str, Any]:
    settings, machine = header.get("settings", {}), header.get("machine", {})
    facts = {name: header.get(name) for name in _SAME} | {name: settings.get(name) for name in _SETTINGS}
    return facts | {name: machine.get(name) for name in ("dtype", "quantization")}


class TargetRecorder:
    """Answers prompts and writes each whole answer; to be closed.

    The file is new or holds a stopped run's answers. UsageError, before anything is written, for a file of another run
    or program. `answers` are all answers of the file, by prompt, as ids.
    """

    def __init__(
        self, engine: PairEngine, settings: Settings, args: Namespace, interrupt: Interrupts, header: Mapping[str, Any]
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

    def _resume(self, header: Mapping[str, Any]) -> None:
        """Take the answers of the file; an unfinished last line is removed."""
        recorded = read_answers(self.args.out)
        if "recording" not in recorded.header:
            raise UsageError(f"--out {self.args.out} holds something else: name a new file")
        before, now = _facts(recorded.header), _facts(header)
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

    def _add(self, line: Mapping[str, Any]) -> None:
        """Write one line, now and whole; UserError where that fails."""
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        append(self._file, text.encode("utf-8"), self.args.out)

    def add_costs(self, questions: Sequence[Question]) -> None:
        """Write the seconds of passes over 1 … 17 tokens, half an answer after the median prompt."""
        chat = conversation(self.engine, self.settings)
        first = [len(chat.plan(question.turns[0]).prompt) for question in questions]
        context = int(statistics.median(first)) + self.settings.max_new_tokens // 2
        seconds = measure_costs(self.engine.target, WIDTHS, context)
        self._add({"pass_seconds": {str(n): round(each, 7) for n, each in seconds.items()}, "pass_context": context})

    def run(self, questions: Sequence[Question]) -> bool:
        """Answer every turn that was not answered before; an interrupted answer is dropped."""
        with answer_bar(sum(len(question.turns) for question in questions), self.settings) as bar:
            for question in questions:
                chat = conversation(self.engine, self.settings)
                for turn, text in enumerate(question.turns):
                    plan = chat.plan(text)
                    try:
                        prompt = tuple(fitting(plan.prompt, self.engine.context))
                    except UsageError as error:
                        name = question.line or question.question_id
                        self.skipped.append(f"prompt {name}, turn {turn + 1} skipped: {error}")
                        break
                    if prompt not in self.answers and not self._answer(question, turn, prompt):
                        return False
                    bar.update()
                    ids = self.answers[prompt]
                    ended = bool(ids) and ids[-1] in self.engine.limits(self.settings).stop
                    chat.commit(plan, list(ids), "eos" if ended else "length")
        return True

    def _answer(self, question: Question, turn: int, prompt: tuple[int, ...]) -> bool:
        """Answer a turn and write that down; False if it was interrupted."""
        if self.interrupt():
            return False
        self.engine.forget()
        listener = Listener(self.args.best)
        lane = replace(self.engine.lane("ar", self.settings), drafter=listener)
        decode = conversation(self.engine, self.settings).text
        answer = run_lane(lane, list(prompt), decode, interrupt=self.interrupt)
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
