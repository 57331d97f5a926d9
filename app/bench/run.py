"""`bench`: run the benchmark (app/bench/measurement.py), make the page of an earlier run, or `--check-identity`: is the
output really unchanged?

Every lane's ids are compared with plain decoding's and, at temperature 0, with those of transformers' own `generate`
over the same weights, loaded a second time and left as they are. The rule: equal, or first different where the
target's two best logits lie closer than 0.001 (float32 cannot tell them apart), at most 1 prompt in 50. Over packed
weights: equal to plain decoding without exception, and where transformers computes with the same weights in float32
different only below 0.01, at most 3 prompts in 50.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from app.bench.journal import open_journal
from app.bench.measurement import Bench
from app.bench.report import report_of
from app.lanes.answers import NEAR_TIE, PACKED_TIE, Answer, Variant, difference, gap_between, may_differ, run_lane
from app.prompts.questions import conversation, fitting, selected
from app.replay.log_writer import log_writer_of
from app.screen.output import load_engine
from app.screen.terminal import Interrupts
from app.settings.table import ModelOptions, Settings
from utils.errors import UsageError, UserError
from utils.files import separate, writable, write_result
from utils.progress import INTERRUPTED, never, silent

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


def run_bench(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Run the benchmark (or the identity check), or make the page of an earlier one; return the exit code."""
    if args.source is not None:
        return report_of(args.source, settings, args)
    _check_flags(settings, args)
    questions = selected(args, settings.data_dir)
    written = {"--out": args.out, "--report": args.report}
    for flag, path in written.items():
        if path is not None:
            writable(path, flag)
    prompts = args.prompts if isinstance(args.prompts, Path) else None  # else the name of a data set
    separate({**written, "--log": settings.record}, [prompts, args.ids])
    journal = open_journal(settings, options, args, questions)
    try:
        with Interrupts() as interrupt, log_writer_of(settings) or nullcontext() as recorder:
            engine = load_engine(settings, options, interrupt)
            bench = Bench(engine, settings, args, questions, interrupt, journal)
            bench.recorder = recorder
            if args.check_identity:
                return check_identity(bench, options)
            bench.run()
        return bench.show()
    finally:
        if journal is not None:
            journal.close()


def _check_flags(settings: Settings, args: Namespace) -> None:
    """UsageError, before any work, for flags that exclude each other."""
    for flag, given in {"report": args.report, "log": settings.record}.items():
        if args.check_identity and given:
            raise UsageError(f"--check-identity writes no page and no log: leave --{flag} out")


TRANSFORMERS = "transformers"
Reference = Callable[[list[int], Settings, Callable[[], bool]], tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer differs from the one it must equal. `gap`: of the target's two best logits
    there; below `tie` the two may change places."""

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
        where = f"at token {self.position + 1}, top-2 gap {gap}{' (near tie)' if self.near_tie else ''}"
        return f"prompt {self.prompt}: {self.label} differs from {self.against} {where}"


@dataclass
class Report:
    """All differences so far. `lanes` counts methods × gammas, plain decoding included if it was compared;
    `tolerated` prompts in 50 may meet a near tie."""

    lanes: int
    tokens: int
    tolerated: int = 1
    prompts: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all differences are near ties, in few prompts of 50 (as many, where there are fewer)."""
        prompts = {difference.prompt for difference in self.differences}
        allowed = max(1, self.prompts // 50) * self.tolerated
        return all(difference.near_tie for difference in self.differences) and len(prompts) <= allowed

    def __str__(self) -> str:
        count, ties = len(self.differences), sum(difference.near_tie for difference in self.differences)
        differing = f"{count} differ" + (f", {ties} of them at a near tie" if count else "")
        return f"identity: {self.prompts} prompts × {self.tokens} tokens × {self.lanes} lanes: {differing}"


def check_identity(bench: Bench, options: ModelOptions) -> int:
    """Compare the first turn of every question; print each difference and a summary; return 1 if the rule is broken.

    Raises UsageError where the rule cannot hold: other number formats than float32, or nothing to compare.
    """
    greedy, settings = bench.settings.temperature == 0, bench.settings
    variants = comparable(bench, greedy)
    reference = transformers_reference(bench.engine, options) if greedy else None
    lanes, tolerated = len(variants) + (reference is not None), 3 if bench.engine.invariant else 1
    report = Report(lanes, settings.max_new_tokens, tolerated)
    with tqdm(bench.questions, unit="prompt", disable=settings.quiet, file=sys.stderr, leave=False) as bar:
        for number, question in enumerate(bar, start=1):
            chat = conversation(bench.engine, settings)
            try:
                prompt = fitting(chat.plan(question.turns[0]).prompt, bench.engine.context)
            except UsageError as error:
                bar.write(f"prompt {question.line or number} skipped: {error}", file=sys.stderr)
                continue
            differences = compare(bench, question.line or number, prompt, variants, reference)
            if differences is None:
                bench.interrupted = True
                break
            report.prompts += 1
            report.differences += differences
            for each in differences:
                bar.write(str(each), file=sys.stdout)
    if not report.prompts and not bench.interrupted:
        raise UserError(f"nothing was compared: none of the {len(bench.questions)} prompts fits into the context")
    sys.stdout.write(f"{report}{'' if reference else ' (transformers not compared: sampled)'}\n")
    out = bench.args.out
    differing = [vars(each) | {"near_tie": each.near_tie} for each in report.differences]
    identity = {**vars(report), "passed": report.passed, "differences": differing}
    if out is not None and not write_result(out, {**bench.facts(), "identity": identity}):
        sys.stderr.write(f"{out} holds a finished result and is kept\n")
    if bench.interrupted:
        sys.stderr.write("interrupted: the prompts after this were not compared\n")
        return INTERRUPTED
    return 0 if report.passed else 1


def comparable(bench: Bench, greedy: bool) -> list[Variant]:
    """Return the variants that must equal plain decoding, apart from itself. UsageError if there are none."""
    target = bench.engine.loaded.target
    if not bench.engine.invariant and target.precision != "float32":
        kind = f"{target.dtype_text}, {target.quantization}"
        raise UsageError(f"--check-identity needs the target in float32 or as one compiled pass, got {kind}")
    variants = [
        variant
        for variant in bench.variants
        if variant.method != "ar" and not may_differ(lane := bench.lane(variant), lane.settings)
    ]
    if not variants and not greedy:
        raise UsageError("--check-identity: no lane must equal ar when sampling (try ngram, or --coupling gumbel)")
    return variants


def compare(
    bench: Bench, number: int, prompt: list[int], variants: Sequence[Variant], reference: Reference | None
) -> list[Difference] | None:
    """Return all differences of one prompt; None when interrupted."""

    def answered(variant: Variant) -> Answer:
        return run_lane(bench.lane(variant), prompt, bench.decode, interrupt=bench.interrupt)

    plain = answered(Variant("ar"))
    answers = [(variant.label, answered(variant)) for variant in variants if not bench.interrupt()]
    if bench.interrupt() or plain.interrupted or any(answer.interrupted for _, answer in answers):
        return None
    expected = [("ar", plain.ids)]
    if reference is not None:
        theirs = reference(prompt, bench.settings, bench.interrupt)
        if bench.interrupt():
            return None
        expected.append((TRANSFORMERS, theirs))
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
    folder = model_folder(engine.loaded.spec.target, loading, silent, never)
    with quiet_warnings():
        kind: Any = AutoModelForSeq2SeqLM if engine.encodes else AutoModelForCausalLM
        model: Any = kind.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=loading.trust_remote_code, local_files_only=True
        )
    model = model.eval().to(engine.loaded.target.device)
    stop = sorted(engine.stop_ids)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=stop or None, pad_token_id=stop[0] if stop else 0, decoder_start_token_id=engine.start_id
    )
    surplus = list(range(engine.target.vocab_size, model.config.get_text_config().vocab_size))  # stand for no token

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
