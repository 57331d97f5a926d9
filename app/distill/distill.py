"""`distill`: makes a drafter for a pair's target: text, what the target computes on it, training, report, card.

Every part goes on where it was stopped: in its folder a run of the same settings goes on, another one is named. Says
how far it is on standard error and what came of it on standard output. Knows neither sampling nor learning (training/).
Importing it is cheap: no torch.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.distill.draft_head import check_target, student_for
from app.distill.options import DATA_NAMES, TRAINING_NAMES, DistillArgs
from app.distill.progress import Progress, cpu_name, described, licence_of, measured, told
from app.distill.texts import Given, Source, split_texts, texts_for
from utils.errors import UsageError, UserError
from utils.files import hash_of, writable_folder, write_json
from utils.machine import machine
from utils.progress import INTERRUPTED

if TYPE_CHECKING:
    from app.lanes.lane import Engine
    from app.settings.layers import ModelOptions, Settings
    from sampling.drafters.draft_heads.modules import Student
    from training.draft_heads.features import Example
    from training.draft_heads.train import Job, Result


RUN, CHECKPOINT, WORK, WRITTEN = "run.json", "checkpoint.pt", "work", "written.jsonl"
_IN_WORDS = {"files": "other files to read", "tokenizer": "a target of another tokenizer"}

HELD = 48  # sequences held out


def check_folder(out: Path) -> None:
    """UsageError if `out` cannot be written to, or holds what no run of distill has put there."""
    writable_folder(out)
    if out.is_dir() and not (out / RUN).is_file() and any(out.iterdir()):
        raise UsageError(f"--out {out} holds other files and no run of distill: name a new or empty folder")


def keep(out: Path, now: Mapping[str, str]) -> None:
    """Note the settings of this run in its folder.

    Those that the kept parts were made with must be the same: of the data always, of the training once there is a
    checkpoint. UsageError names the first that is not.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / RUN
    if file.is_file():
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise UserError(f"{file} is damaged: remove {out}, or choose another --out") from None
        trained = (out / CHECKPOINT).is_file()
        for name, value in now.items():
            if before.get(name) != value and (trained or name not in TRAINING_NAMES):
                flag = f"--{name.replace('_', '-')} {before.get(name)}, now {value}"
                what = _IN_WORDS.get(name, flag)
                raise UsageError(f"{out} holds a run with {what}: give the same flags, or another --out")
    write_json(file, dict(now))


def distill(settings: Settings, options: ModelOptions, args: DistillArgs) -> int:
    """Make the drafter; the exit code. Raises UserError for what cannot be read, loaded, learned or written."""
    from app.screen.terminal import Interrupts

    assert args.out is not None
    with Interrupts() as interrupt:
        run = _Distillation(settings, options, args, args.out, interrupt)
        try:
            return run.run()
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            name = error.filename or args.out
            raise UserError(
                f"cannot write {name}: {error.strerror}; what was kept in {args.out} is intact, "
                "the same command goes on from there"
            ) from error
        finally:
            run.progress.close()


class _Distillation:
    def __init__(
        self, settings: Settings, options: ModelOptions, args: DistillArgs, out: Path, interrupt: Callable[[], bool]
    ) -> None:
        self.settings, self.options, self.args, self.out, self.interrupt = settings, options, args, out, interrupt
        self.progress = Progress(sys.stderr, quiet=settings.quiet)
        self.given = Given(settings, args, self.progress, interrupt)

    def run(self) -> int:
        """Part after part; each leaves what it has made in the folder."""
        from app.screen.output import load_engine
        from training.text.dialogues import Talk

        check_folder(self.out)
        for flag, folder in (("--features", self.args.features), ("--export", self.args.export)):
            if folder is not None:
                writable_folder(folder, flag)
        engine = load_engine(self.settings, self.options.changed(drafter="none"), self.interrupt)
        check_target(engine, self.args)
        if self.args.writes and self.args.prompts is None:
            Talk(engine.tokenizer).opening()  # refused now rather than after loading more
        self._keep_settings(engine)
        source = texts_for(engine, self.given, self._written)
        if source is None:
            return self._stopped(f"{self._written} is kept")
        found = self._features(engine, source)
        if found is None:
            return self._stopped(f"what the target made of the texts so far is kept in {self._kept_features}")
        student, learned, held = found
        result = self._train(engine, student, learned, held)
        if not result.finished:
            return self._stopped(f"the checkpoint of step {result.steps:,} is kept in {self.out}")
        self._finish(engine, source, result, len(learned), len(held))
        return 0

    @property
    def _kept_features(self) -> Path:
        return self.args.features or self.out / WORK / "features"

    @property
    def _written(self) -> Path:
        return self.out / WORK / WRITTEN

    def _stopped(self, kept: str) -> int:
        self.progress.close()
        sys.stderr.write(f"interrupted: {kept}, the same command goes on from there\n")
        return INTERRUPTED

    def _keep_settings(self, engine: Engine) -> None:
        from utils.loading.fit import fingerprint

        read = [] if self.args.writes else list(self.args.data)
        read += [str(self.args.prompts)] if self.args.prompts else []
        now = {"target": engine.loaded.target.name, "tokenizer": fingerprint(engine.tokenizer), "files": hash_of(read)}
        keep(self.out, now | self._shown())

    def _shown(self) -> dict[str, str]:
        """Every setting that the drafter depends on, as typed."""
        names = (*DATA_NAMES, *TRAINING_NAMES)
        return {name: self.args.shown(name) for name in names} | {"seed": str(self.settings.seed)}

    # -- the parts ------------------------------------------------------------------------------

    def _features(self, engine: Engine, source: Source) -> tuple[Student, list[Example], list[Example]] | None:
        """A new student, and what it learns from and is measured on; None if interrupted."""
        from training.draft_heads.features import extract, load_shard

        learned, held = split_texts(source, HELD, self.args)
        student = student_for(engine, self.args, learned, self.settings.seed)
        layers = student.target_layers(engine.target.network.layers)
        folder = self._kept_features
        files = extract(engine.target.network, source.texts, layers, folder, self.progress, self.interrupt)
        if self.interrupt():
            return None
        examples = [example for file in files for example in load_shard(file)]
        of = {id(text): example for text, example in zip(source.texts, examples, strict=True)}
        return student, [of[id(text)] for text in learned], [of[id(text)] for text in held]

    def _job(self) -> Job:
        from training.draft_heads.train import Job

        args = self.args
        return Job(
            epochs=args.epochs,
            lr=args.lr,
            batch_tokens=args.batch_tokens,
            law=args.law,  # type: ignore[arg-type]
            hard=args.hard_weight,
            steps=args.steps if args.student == "feature" else 1,
            seed=self.settings.seed,
            minutes=args.minutes,
            patience=args.patience,
            precise=self.options.dtype == "float32",
        )

    def _train(self, engine: Engine, student: Student, learned: list[Example], held: list[Example]) -> Result:
        from training.draft_heads.train import teacher_for, train
        from utils.loading.fit import fingerprint

        teacher = teacher_for(engine.loaded.target.model, student)
        layers = student.target_layers(engine.target.network.layers)
        about = {"target": engine.loaded.target.name, "tokenizer": fingerprint(engine.tokenizer), "date": _today()}
        return train(
            student, teacher, learned, held, layers, self._job(), self.out, about, self.progress, self.interrupt
        )

    def _finish(self, engine: Engine, source: Source, result: Result, learned: int, held: int) -> None:
        """Report, card, export, and a few lines."""
        from training.draft_heads.card import write_card
        from training.draft_heads.report import expected, write_report

        report = self._report(engine, source, result, learned, held)
        self.progress("measuring what a draft costs", None)
        costs = measured(engine, self.out, self.args.student, source.texts, self.interrupt)
        if costs:
            v = {int(count): cost for count, cost in costs["v"].items()}
            report |= costs | {"expected": expected(result.best["held"]["alpha"], costs["c"], v)}
        report = json.loads(json.dumps(report))
        write_report(self.out, report)
        write_card(self.out, report)
        if self.args.export is not None:
            self._export(engine, self.args.export)
        self.progress.close()
        sys.stdout.write(told(report, self.out, self.args.export, self._flags()))

    def _report(self, engine: Engine, source: Source, result: Result, learned: int, held: int) -> dict[str, Any]:
        from utils.loading.fit import fingerprint

        return {
            "target": engine.loaded.target.name,
            "tokenizer": fingerprint(engine.tokenizer),
            "student": described(self.out),
            "data": {
                "text": source.text,
                "tokens": source.tokens,
                "sequences": learned,
                "held": held,
                "sha256": source.sha256,
            },
            "settings": {name: value for name, value in self._shown().items() if self.args.matters(name)},
            "command": self.args.command,
            "date": _today(),
            "machine": {"cpu": cpu_name(), **machine(engine.loaded)},
            "licence": licence_of(engine.loaded.target.model),
            "curve": result.curve,
            "best": result.best,
            "finished": result.finished,
            "steps": result.steps,
            "seconds": result.seconds,
        }

    def _flags(self) -> str:
        """The flags that choose the same target again."""
        given = {"--pair": self.options.pair, "--models": self.options.models, "--target": self.options.target}
        return "".join(f"{flag} {shlex.quote(value)} " for flag, value in given.items() if value)

    def _export(self, engine: Engine, folder: Path) -> None:
        from sampling.drafters.draft_heads.checkpoint import load_student
        from training.draft_heads.export import export_plain

        export_plain(load_student(self.out, engine.loaded.target.model), folder, engine.tokenizer)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
