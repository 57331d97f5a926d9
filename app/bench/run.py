"""`bench`: many prompts under several methods and gammas, timed fairly; the page of an earlier run; or
`--check-identity`, which checks that drafting does not change the output.

Every answer starts without a cache and without n-grams of an earlier one; only `suffix`, as a method or as a setting
that is on, looks up answers to earlier prompts, each of which every method has answered by then. The order of the
methods rotates and reverses from repeat to repeat; a warm-up is not counted. An interrupt keeps the answers so far, and
with --out the same command resumes the run (app/bench/journal.py). Later turns of a chat continue from the answer of
plain decoding (without it, of the first method), so that all methods read the same prompts. Knows how to run lanes, not
how figures are computed (app/bench/summary.py).

The check of identity takes the lanes whose text must be plain decoding's. It compares their ids with plain decoding's
and, at temperature 0 under settings that transformers has too, with those of transformers' own `generate` over the same
weights, which are loaded a second time in float32. The ids must be equal; but in at most 1 prompt of 50 they may first
differ where the target's two best logits are closer than 0.001, which float32 cannot distinguish. In the compiled pass,
ids must equal plain decoding's without exception, and may differ from transformers' where these logits are closer than
0.01, in at most 3 prompts of 50; with 8-bit activations they are not compared with transformers'.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from app.bench.journal import Journal, Slot, open_journal
from app.bench.report import report_of, show_tables, write_report
from app.bench.summary import PromptItem, reference_of, summarise, variants_of
from app.chat.conversation import Plan
from app.lanes.answers import (
    NEAR_TIE,
    PACKED_TIE,
    Answer,
    Variant,
    compared,
    difference,
    gap_between,
    may_differ,
    order,
    other_processors,
    parting,
    run_lane,
    shown_settings,
)
from app.lanes.costs import record_of
from app.prompts.questions import Question, conversation, fitting_prompts, selected, turns_of
from app.replay.session_log import SessionLogWriter, log_writer_of
from app.screen.output import answer_bar, load_engine, screen
from app.screen.rows import plural
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from utils.errors import UsageError, UserError, raise_first
from utils.files import check_outputs, write_result
from utils.machine import machine
from utils.objects import HfModel, Json
from utils.processes import broadcast
from utils.progress import INTERRUPTED
from utils.remote.server import ServerMessage
from utils.visible import to_stderr, visible

if TYPE_CHECKING:
    from app.lanes.lane import Lane, PairEngine


def run_bench(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Run the benchmark (or the identity check), or make the page of an earlier one; return the exit code."""
    if args.source is not None:
        return report_of(args.source, settings, args)
    written = {"--out": args.out, "--report": args.report, "--log": settings.record}
    if args.check_identity:
        raise_first({f"--check-identity writes no file: leave {flag} out": path for flag, path in written.items()})
    questions = selected(args, settings.data_dir)
    check_outputs(written, [args.prompts if isinstance(args.prompts, Path) else None, args.ids])  # no data set's name
    journal = open_journal(settings, options, args, questions)
    with nullcontext() if journal is None else closing(journal):
        with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as recorder:
            bench = Bench(
                load_engine(settings, options, interrupt), settings, args, questions, interrupt, journal, recorder
            )
            if args.check_identity:
                return check_identity(bench, options)
            bench.run()
        return bench.show()


WARM_UP = 16  # tokens of each variant's first answer, which is not counted


class Bench:
    """A benchmark and its answers so far: :meth:`run` fills `items`, :meth:`show` prints and writes them."""

    def __init__(
        self,
        engine: PairEngine,
        settings: Settings,
        args: Namespace,
        questions: Sequence[Question],
        interrupt: Callable[[], bool],
        journal: Journal | None = None,
        recorder: SessionLogWriter | None = None,
    ) -> None:
        self.engine, self.settings, self.args = engine, settings, args
        self.questions, self.interrupt, self.journal, self.recorder = questions, interrupt, journal, recorder
        self.items: list[PromptItem] = []
        self.skipped: list[str] = []
        self.interrupted, self.problem = False, ""  # `problem`: why a server's answer broke off
        # A variant without gamma must not inherit `auto` from the settings: it takes the first fixed gamma.
        self._fixed = next((gamma for gamma in args.gammas if gamma != "auto"), None)
        self.variants = variants_of(engine, settings, args)
        self.reference = reference_of(self.variants)
        self.decode = engine.pieces.beside(conversation(engine, settings).text)

    @property
    def measured(self) -> int:
        """The number of answers."""
        return sum(len(row) for item in self.items for row in item.answers)

    def lane(self, variant: Variant, **changes: Any) -> Lane:
        """Return a lane without anything kept from earlier answers."""
        self.engine.forget()
        gamma = self._fixed if variant.gamma is None else variant.gamma
        if gamma is not None:
            changes["gamma"] = gamma
        return self.engine.lane(variant.method, self.settings.changed(**changes))

    def turns(self, number: int) -> Iterator[PromptItem]:
        """Yield the prompts of a question; the next one is planned when the last has been answered."""
        question = self.questions[number]
        for turn, plan, chat in turns_of(self.engine, self.settings, question, self.skipped):
            item = PromptItem(number, question, turn, plan.prompt, messages=plan.messages)
            yield item
            answer = item.answers[0][self.reference]
            chat.commit(plan, self.engine.own_ids(list(answer.ids)), answer.stats.stop_reason or "length")

    def answer(
        self,
        variant: Variant,
        prompt: list[int],
        messages: Sequence[ServerMessage],
        text: str | None = None,
        **changes: Any,
    ) -> Answer:
        """Decode one answer of a lane, without a cache. `text`: the prompt's text for the session log; None: not
        logged."""
        lane = self.lane(variant, **changes)
        record, answer_log = record_of(lane, self.engine), None
        if text is not None and self.recorder is not None:
            answer_log = self.recorder.open_answer(
                self.engine, [record], Plan(text, prompt, keep=0), lane.settings, self.decode
            )
        answer = run_lane(
            lane,
            prompt,
            self.decode,
            interrupt=self.interrupt,
            show=None if answer_log is None else partial(answer_log.feed, 0),
            terms=record.terms,
            messages=messages,
        )
        if answer_log is not None and (problem := answer_log.end()):
            to_stderr(problem)
        return answer

    # -- measuring ----------------------------------------------------------------------------

    def run(self) -> None:
        """Answer every prompt with every variant, `repeat` times, except the answers that the journal already holds."""
        if self.journal is not None:
            self.journal.begin(machine(self.engine.loaded))
            self.journal.drop_broken_rounds(self.variants)
        known = broadcast(0 if self.journal is None else len(self.journal.known))
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
                    # Every method has answered this prompt, so drafters may look its answer up from now on.
                    self.engine.drafters.answers.add(item.ids, item.answers[-1][self.reference].ids)
                bar.total = (bar.total or 0) - left * each

    def _warm_up(self, bar: tqdm[NoReturn]) -> None:
        """Decode one short answer of each variant, which is not counted."""
        bar.set_description("warming up", refresh=False)
        first = ({"role": "user", "content": self.questions[0].turns[0]},)
        for prompt in islice(fitting_prompts(self.engine, self.questions, self.settings), 1):
            for variant in self.variants:
                self.answer(variant, prompt, first, max_new_tokens=min(WARM_UP, self.settings.max_new_tokens))
        bar.unpause()  # the warm-up does not count for the bar's rate

    def _measure(self, item: PromptItem, bar: tqdm[NoReturn]) -> bool:
        """Run all repeats of one prompt; False after an interrupt or a server's failure, whose answer is dropped."""
        for repeat in range(self.args.repeat):
            item.answers.append({})
            for variant in order(self.variants, sum(len(item.answers) for item in self.items) - 1):
                answer = self._answer(variant, item, repeat, bar)
                if answer.exit_code:
                    self.problem = answer.problem
                    return False
                item.answers[-1][variant] = answer
        return True

    def _answer(self, variant: Variant, item: PromptItem, repeat: int, bar: tqdm[NoReturn]) -> Answer:
        """Return the journal's answer, or decode one and add it to the journal."""
        slot = Slot(item.number, item.turn, repeat, variant)
        known = broadcast(None if self.journal is None else self.journal.answer(slot, len(item.ids)))
        if known is not None:
            return known
        bar.set_description(visible(variant.label), refresh=False)
        answer = self.answer(variant, item.ids, item.messages, item.prompt)
        if not answer.exit_code:
            bar.update()
            if self.journal is not None:
                self.journal.add(slot, answer)
        return answer

    # -- results ------------------------------------------------------------------------------

    def show(self) -> int:
        """Print the table and write the file; return the exit code."""
        summary = summarise(self.items, self.variants)
        to_stderr(*self.skipped)
        if not self.measured and not self.interrupted:
            if self.journal is not None:
                self.journal.close(done=True)
            raise UserError(f"nothing was measured: none of the {len(self.questions)} prompts fits into the context")
        if self.interrupted:
            more = "" if self.journal is None else ": the same command resumes the run"
            to_stderr(f"{self.problem or 'interrupted'} after {plural(self.measured, 'answer')}{more}")
        try:
            self._write(summary)
        finally:
            if self.measured:
                show_tables(summary, self.settings, screen(self.settings, sys.stdout))
        return 1 if self.problem or (self.recorder and self.recorder.failed) else INTERRUPTED if self.interrupted else 0

    def _write(self, summary: list[Json]) -> None:
        """Write the file of --out, remove the journal if the run is complete, and write the page of --report."""
        loaded, args = self.engine.loaded, self.args
        if args.out is None and args.report is None:
            return
        data = {
            "pair": loaded.spec.name,
            "target": loaded.target.name,
            "drafter": loaded.drafter.name if loaded.drafter is not None else loaded.drafter_word,
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
            "summary": summary,
            "prompts": [self._prompt(item) for item in self.items if any(item.answers)],
        }
        if kept := args.out is not None and not write_result(args.out, data):
            to_stderr(f"{args.out} holds a finished result and is kept")
        if self.journal is not None and not self.interrupted:
            self.journal.close(done=True)
        if args.report is not None and not kept:
            write_report(data, args.report)

    def _prompt(self, item: PromptItem) -> Json:
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

    def _result(self, variant: Variant, repeat: int, row: dict[Variant, Answer]) -> Json:
        answer = replace(row[variant], method=variant.method)
        plain = row.get(self.reference) if self.reference.method == "ar" and variant != self.reference else None
        parted = None if plain is None else parting(plain, row[variant])
        return {
            **answer.to_json(),
            "gamma": variant.gamma,
            "repeat": repeat,
            "parting": None if parted is None else parted.to_json(),
            **compared([answer] if plain is None else [plain, answer]),
        }


# -- is the output unchanged? -----------------------------------------------------------------------

TRANSFORMERS = "transformers"
Reference = Callable[[list[int], Settings, Callable[[], bool]], tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """The first position (from 0) where an answer differs from the one that it must equal. `gap`: between the target's
    two best logits there; below `tie` the two may change places."""

    prompt: int
    label: str
    against: str
    position: int
    gap: float | None
    tie: float = NEAR_TIE

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < self.tie

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.2g}"
        return (
            f"prompt {self.prompt}: {self.label} differs from {self.against} at token {self.position + 1}, "
            f"top-2 gap {gap}{' (near tie)' if self.near_tie else ''}"
        )


@dataclass
class BenchReport:
    """All differences so far. `lanes`: the number of methods × gammas, plus plain decoding if it was compared with
    transformers; `tolerated`: prompts in 50 that may differ at a near tie."""

    lanes: int
    tokens: int
    tolerated: int = 1
    prompts: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all differences are near ties, in at most `tolerated` of every 50 prompts (also of fewer than 50)."""
        prompts = {difference.prompt for difference in self.differences}
        allowed = max(1, self.prompts // 50) * self.tolerated
        return all(difference.near_tie for difference in self.differences) and len(prompts) <= allowed

    def __str__(self) -> str:
        count, ties = len(self.differences), sum(difference.near_tie for difference in self.differences)
        differing = f"{count} differ" + (f", {ties} of them at a near tie" if count else "")
        return f"identity: {self.prompts} prompts × {self.tokens} tokens × {self.lanes} lanes: {differing}"


_IN_TRANSFORMERS = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram"


def check_identity(bench: Bench, options: ModelOptions) -> int:
    """Compare the first turn of every question; print each difference and a summary; return the exit code, 1 if the
    check fails.

    Raises UsageError as :func:`comparable`, UserError if no prompt fits into the context.
    """
    settings, greedy, narrow = (
        bench.settings,
        bench.settings.temperature == 0,
        bench.engine.loaded.target.activations == "q8",
    )
    variants = comparable(bench, greedy)
    compares = greedy and not narrow and not other_processors(settings, *_IN_TRANSFORMERS)
    reference = transformers_reference(bench.engine, options) if compares else None
    report = BenchReport(len(variants) + compares, settings.max_new_tokens, 3 if bench.engine.invariant else 1)
    with tqdm(bench.questions, unit="prompt", disable=settings.quiet, file=sys.stderr, leave=False) as bar:
        for number, question in enumerate(bar):
            if (item := next(bench.turns(number), None)) is None:
                bar.write(visible(bench.skipped[-1]), file=sys.stderr)
                continue
            differences = compare(bench, question.line or number + 1, item.ids, variants, reference)
            if differences is None:
                bench.interrupted = True
                break
            report.prompts += 1
            report.differences += differences
            for each in differences:
                bar.write(visible(str(each)), file=sys.stdout)
    if not report.prompts and not bench.interrupted:
        raise UserError(f"nothing was compared: none of the {len(bench.questions)} prompts fits into the context")
    lacks = "8-bit activations, --activations q16 compares it" if narrow else "settings that it lacks"
    why = "" if reference else lacks if greedy else "sampled"
    sys.stdout.write(f"{report}{why and f' (transformers not compared: {why})'}\n")
    if bench.interrupted:
        to_stderr("interrupted: the prompts after this were not compared")
        return INTERRUPTED
    return 0 if report.passed else 1


def comparable(bench: Bench, greedy: bool) -> list[Variant]:
    """Return the variants that must equal plain decoding, apart from itself.

    UsageError if equality cannot be expected (neither float32 nor the compiled pass), or if sampling leaves no variant.
    """
    target = bench.engine.loaded.target
    if not bench.engine.invariant and target.precision != "float32":
        raise UsageError(
            "--check-identity needs the target in float32 or as one compiled pass, got "
            f"{target.dtype_text}, {target.quantization}"
        )
    variants = [variant for variant in bench.variants if variant.method != "ar" and not may_differ(bench.lane(variant))]
    if not variants and not greedy:
        raise UsageError("--check-identity: no lane must equal ar when sampling (try ngram, or --coupling gumbel)")
    return variants


def compare(
    bench: Bench, number: int, prompt: list[int], variants: Sequence[Variant], reference: Reference | None
) -> list[Difference] | None:
    """Return all differences of one prompt; None after an interrupt."""

    def answered(variant: Variant) -> Answer:
        return run_lane(bench.lane(variant), prompt, bench.decode, interrupt=bench.interrupt)

    plain = answered(Variant("ar"))
    answers = [(variant.label, answered(variant)) for variant in variants if not bench.interrupt()]
    if bench.interrupt() or plain.interrupted or any(answer.interrupted for _, answer in answers):
        return None
    expected = [("ar", plain.ids)]
    if reference is not None:
        expected.append((TRANSFORMERS, reference(prompt, bench.settings, bench.interrupt)))
        if bench.interrupt():
            return None
    ties = {"ar": 0.0, TRANSFORMERS: PACKED_TIE} if bench.engine.invariant else {}
    return [
        Difference(number, label, against, at, gap_between(plain.stats, answer.stats, at), ties.get(against, NEAR_TIE))
        for against, ids in expected
        for label, answer in [("ar", plain), *answers]
        if label != against and (at := difference(ids, answer.ids)) is not None
    ]


def transformers_reference(engine: PairEngine, options: ModelOptions) -> Reference:
    """Return a function (prompt, settings, interrupt) → the greedy ids of transformers' `generate` over the target's
    weights, which are loaded a second time, in float32.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

    from app.lanes.pairing import load_options
    from utils.loading.quiet import quiet_warnings
    from utils.loading.sources import model_folder

    loading = load_options(options)
    with quiet_warnings():
        model: HfModel = (AutoModelForSeq2SeqLM if engine.encodes else AutoModelForCausalLM).from_pretrained(
            str(model_folder(engine.loaded.spec.target, loading)),
            dtype=torch.float32,
            trust_remote_code=loading.trust_remote_code,
            local_files_only=True,
        )
    model = model.eval().to(engine.loaded.target.device)
    stop = sorted(engine.stop_ids)
    model.generation_config = GenerationConfig(
        eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0, decoder_start_token_id=engine.start_id
    )
    surplus = list(range(engine.target.vocab_size, model.config.get_text_config().vocab_size))  # ids without a token

    begin: list[int] = getattr(engine.target, "begin", [])
    decoder = {"decoder_input_ids": torch.tensor([begin], device=model.device)} if engine.encodes else {}

    def generate(prompt: list[int], settings: Settings, interrupt: Callable[[], bool]) -> tuple[int, ...]:
        ids = torch.tensor([prompt], device=model.device)
        with quiet_warnings():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(settings.max_new_tokens, engine.context - len(prompt)),
                do_sample=False,
                repetition_penalty=settings.repetition_penalty if settings.repetition_penalty != 1 else None,
                no_repeat_ngram_size=settings.no_repeat_ngram or None,
                suppress_tokens=surplus or None,
                stopping_criteria=[lambda ids, scores: torch.full((1,), interrupt())],
                **decoder,
            )
        return tuple(whole[0, len(begin or prompt) :].tolist())

    return generate
