"""Times passes of one GGUF file here and in llama.cpp, in turns: over one and eight tokens, and over a prompt of 256.

    python benchmarks/passes.py FILE.gguf [--repeat 30] [--activations q8]

Requirements, beside requirements.txt: pip install llama-cpp-python. Both compute with two threads. Passes over one and
eight tokens follow the same 64 tokens and give the logits of every position, a pass over the prompt those of its last
one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from llama_cpp import Llama
from rich.console import Console
from rich.table import Table

from app.lanes.lane import PairEngine
from sampling.types import Draft
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

PROMPT, FEW = 256, 8


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that `act` takes."""
    begin = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="Passes here and in llama.cpp")
    parser.add_argument("file")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--activations", default="q16")
    args = parser.parse_args()
    torch.set_num_threads(2)
    spec = PairSpec(name="passes", target=ModelSpec(gguf=args.file), drafter="none")
    options = LoadOptions(device="cpu", quantization="auto", activations=args.activations)
    lm = PairEngine(load_pair(spec, options)).target
    how = {"n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    theirs, reader = Llama(args.file, logits_all=True, **how), Llama(args.file, logits_all=False, **how)
    prompt = [37 * at % 900 + 100 for at in range(PROMPT + 1)]
    row = prompt[:64]
    session = lm.open([row])
    session.score([row], Draft.empty(1))
    theirs.eval(row)
    rest = list(range(300, 300 + FEW - 1))
    times: dict[tuple[str, str], list[float]] = {}

    def llama(drafted: list[int]) -> None:
        theirs.eval([row[-1], *drafted])
        theirs.n_tokens -= len(drafted)

    for turn in range(args.repeat):
        for count in (1, FEW):
            row.append(200 + turn % 50)
            drafted = rest[: count - 1]
            draft = Draft.of([drafted])
            laps = times.setdefault((f"{count} tokens", "here"), [])
            laps.append(timed(partial(session.score, [row], draft)))
            session.commit([[]])
            times.setdefault((f"{count} tokens", "llama.cpp"), []).append(timed(partial(llama, drafted)))
    for _ in range(max(2, args.repeat // 6)):
        new = lm.open([prompt])
        laps = times.setdefault((f"prompt of {PROMPT}", "here"), [])
        laps.append(timed(partial(new.score, [prompt[:PROMPT]], Draft.empty(1))))
        reader.reset()
        times.setdefault((f"prompt of {PROMPT}", "llama.cpp"), []).append(timed(partial(reader.eval, prompt[:PROMPT])))
    table = Table("pass", "here, ms", "llama.cpp, ms", "ratio")
    for name in dict.fromkeys(name for name, _ in times):
        ours, other = (statistics.median(times[name, program]) for program in ("here", "llama.cpp"))
        table.add_row(name, f"{ours:.2f}", f"{other:.2f}", f"{ours / other:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
