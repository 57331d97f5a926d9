"""Times the Python of a drafted and of a plain round of the default pair, without their compiled passes: by the lane's
own clock, from which the screen's figures come, and in all.

    python benchmarks/rounds.py [--repeat 5] [--tokens 128] [--temperature 0.7] [--steps] [--other FOLDER]

Decodes after prompts of 256 tokens, in each repeat another one, under `gamma auto`, both lanes in turns. From the
seconds of a Step, and from the time between two Steps, it subtracts those of the compiled passes (the target's and the
draft head's). `--steps` also prints where the time goes, by part of a round and by function, each with its callees left
out. `--other`: another checkout, whose figures are taken in turns with these.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path.cwd()))


console = Console(highlight=False)
# Parts of a round: draft_s and verify_s of its Step without their passes, sample_s, overhead_s, and the time until the
# next round that no clock counts.
PARTS = "drafting", "around the pass", "verifying", "books", "after the clock"


class Passes:
    """The compiled library with a clock around its passes."""

    def __init__(self, library: Any) -> None:
        self._library, self.seconds, self.last = library, 0.0, 0.0

    def run(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self._library.run(*arguments)
        self.last = time.perf_counter() - began
        self.seconds += self.last
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def profile_of(act: Any, count: int) -> None:
    """Print the functions that take most time, each without its callees, in microseconds a round."""
    profiler = cProfile.Profile()
    profiler.runcall(act)
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:40]
    for (file, line, name), (_, calls, own, _, _) in rows:
        console.print(f"{1e6 * own / count:8.1f} us {calls / count:7.2f} calls  {Path(file).name}:{line} {name}")


def measured(tokens: int, temperature: float, repeat: int, steps: bool) -> dict[str, list[float]]:
    """Return milliseconds of each round beside its passes, by kind (" in all": with the work after the clock stops),
    after a first run that is not counted. Rounds that run the head take longer; measured times decide which do."""
    from app.command_line.arguments import read_request
    from app.command_line.main import layers_of
    from app.lanes.lane import PairEngine
    from app.lanes.warm import Measured
    from app.prompts.questions import BUILT_IN
    from app.screen.output import load_engine
    from sampling.events import Step
    from utils.kernels import bindings

    request = read_request(["check", "smollm2"], os.environ)
    settings = layers_of(request).settings.changed(gamma="auto", temperature=temperature, max_new_tokens=tokens)
    engine = load_engine(settings, request.options, lambda: False)
    assert isinstance(engine, PairEngine)
    engine.measured = Measured({n: 0.002 * (1 + 0.12 * (n - 1)) for n in range(1, 17)}, 0.0005)
    passes = Passes(bindings.kernels())
    vars(bindings)["kernels"] = lambda: passes
    questions = [question.turns[0] for question in BUILT_IN]
    kinds = "plain", "drafted", "drafted, look-ups alone", "drafted, the head too", "plain in all", "drafted in all"
    rounds: dict[str, list[float]] = {kind: [] for kind in kinds}
    parts, plain_parts = list[list[float]](), list[list[float]]()

    def once(name: str, kept: str | None, first: int = 0) -> int:
        prompt = engine.tokenizer("\n".join([*questions[first:], *questions[:first]]))["input_ids"][:256]
        lane, count, began, spent = engine.lane(name, settings), 0, time.perf_counter(), passes.seconds
        lane.limits = replace(lane.limits, stop=frozenset())
        for event in lane.run(prompt):
            now, then = time.perf_counter(), passes.seconds
            count += 1
            if kept is not None and isinstance(event, Step) and bool(event.drafted) == (kept == "drafted"):
                target, own = passes.last, then - spent - passes.last
                named = (event.draft_s - own, event.verify_s - target, event.sample_s, event.overhead_s)
                clocked, whole = sum(named), now - began - (then - spent)
                rounds[kept].append(1000 * clocked)
                rounds[f"{kept} in all"].append(1000 * whole)
                if kept == "drafted":
                    with_head = "drafted, the head too" if own > 1e-6 else "drafted, look-ups alone"
                    rounds[with_head].append(1000 * clocked)
                (parts if kept == "drafted" else plain_parts).append([*named, whole - clocked])
            began, spent = time.perf_counter(), passes.seconds
        return count

    for turn in range(repeat + 1):
        for name, kind in (("ar", "plain"), ("spec", "drafted")):
            once(name, kind if turn else None, turn % len(questions))
    if steps:
        for kind, rows in (("drafted", parts), ("plain", plain_parts)):
            each = [1000 * statistics.median(column) for column in zip(*rows, strict=True)]
            console.print(f"{kind}:", ", ".join(f"{name} {ms:.3f}" for name, ms in zip(PARTS, each, strict=True)))
        profile_of(lambda: once("spec", None), once("spec", None))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description="Python of a round beside its compiled passes")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--other", help="another checkout, measured in turns with this one")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.other is None:
        rounds = measured(args.tokens, args.temperature, args.repeat, args.steps)
        medians = {kind: statistics.median(times) for kind, times in rounds.items() if times}
        counts = {kind: len(times) for kind, times in rounds.items()}
        console.print(json.dumps(medians) if args.json else f"{medians} of {counts} rounds", soft_wrap=True)
        return
    flags = ["--repeat", str(args.repeat), "--tokens", str(args.tokens), "--temperature", str(args.temperature)]
    runs_of: dict[str, list[dict[str, float]]] = {"here": [], "other": []}
    for _ in range(args.turns):
        for name, folder in (("other", args.other), ("here", str(Path.cwd()))):
            command = [sys.executable, __file__, "--json", *flags]
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
            runs_of[name].append(json.loads(ran.stdout.splitlines()[-1]))
    for kind in (kind for kind in runs_of["here"][0] if all(kind in run for runs in runs_of.values() for run in runs)):
        here, other = ([run[kind] for run in runs_of[name]] for name in ("here", "other"))
        ours, theirs = statistics.median(here), statistics.median(other)
        console.print(f"{kind}: {ours:.3f} ms here, {theirs:.3f} there, ratio {ours / theirs:.2f}; all {here} {other}")


if __name__ == "__main__":
    main()
