"""Times kernels of an earlier revision and of the working tree, in turns: tiles by type of weights, and whole passes.

    python benchmarks/kernels.py REVISION [--types Q4_K,Q8_0] [--rows 1,8] [--file FILE.gguf] [--repeat 20]

SPEC_KERNELS chooses the instruction set (utils/kernels/build.py). Ratios are of minimums. A tile is 16 columns of a
product 1,536 wide, its time that of one group of 32 codes. Passes are those of the GGUF file, after 200 tokens.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import ctypes
import importlib.util
import subprocess
import tarfile
import tempfile
import time
from io import BytesIO
from types import ModuleType

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from app.lanes.lane import PairEngine
from sampling.types import Draft
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.kernels import bindings, build
from utils.kernels.header import FUNCTIONS
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

ROOT, GROUPS, CALLS = Path(__file__).resolve().parents[1], 48, 200
TIMER = """
#include <stdint.h>
#include <time.h>
typedef void (*Tile)(const uint8_t *, const void *, float *, int64_t, int64_t, int);
double nanoseconds(Tile tile, const uint8_t *w, const void *x, float *y, int64_t groups, int rows, int calls) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int call = 0; call < calls; call++) tile(w, x, y, groups, 16, rows);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / calls / groups;
}
"""


def loaded_build(folder: Path) -> ModuleType:
    """Return the module utils/kernels/build.py of a source tree."""
    spec = importlib.util.spec_from_file_location(f"build_{folder.name}", folder / "utils/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled(folder: Path, scratch: Path) -> ctypes.CDLL:
    """Return the kernels of a source tree, compiled for this processor."""
    row = build.instruction_set()
    assert row is not None, build.why_not()
    out = scratch / f"kernels-{folder.name}" / "kernels.so"
    out.parent.mkdir()
    return ctypes.CDLL(str(loaded_build(folder).compile_library(out, row.cpu)))


def compiled_timer(scratch: Path) -> ctypes.CDLL:
    (scratch / "timer.c").write_text(TIMER)
    command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", "-o", str(scratch / "timer.so")]
    subprocess.run([*command, str(scratch / "timer.c")], check=True)
    timer = ctypes.CDLL(str(scratch / "timer.so"))
    timer.nanoseconds.restype = ctypes.c_double
    return timer


def tile_table(both: list[ctypes.CDLL], timer: ctypes.CDLL, kinds: list[str], rows: list[int], repeat: int) -> Table:
    """Nanoseconds of a group of 16 columns and 32 codes, by type, width of activations and rows."""
    chance = np.random.default_rng(0)
    row = build.instruction_set()
    table = Table("type", "bits", *(f"{count} rows" for count in rows), title=row.name if row else "")
    x = chance.integers(0, 256, GROUPS * bindings.TILE * bindings.CODES, dtype=np.uint8)
    x.reshape(-1, bindings.CODES)[:, 64:76].view(np.float32)[:] = 0.01
    y, address = np.empty((bindings.TILE, 16), np.float32), ctypes.c_void_p
    for kind in kinds:
        number = bindings.TYPES.index(kind)
        both[1].packed_size.restype = ctypes.c_int64
        size = both[1].packed_size(*map(ctypes.c_int64, (number, 16, 32 * GROUPS)))
        data = chance.integers(0, 60, size + 32768, dtype=np.uint8)  # 32768 more, which are prefetched and never used
        for bits, name in ((16, "TILES"), (8, "NARROW_TILES")):
            tiles = [(address * len(bindings.TYPES)).in_dll(library, name)[number] for library in both]
            cells = []
            for count in rows:
                least = [float("inf")] * 2
                arguments = (address(data.ctypes.data), address(x.ctypes.data), address(y.ctypes.data))
                for turn in range(2 * repeat):
                    numbers = (ctypes.c_int64(GROUPS), count, CALLS)
                    spent = timer.nanoseconds(address(tiles[turn % 2]), *arguments, *numbers)
                    least[turn % 2] = min(least[turn % 2], spent)
                cells.append(f"{least[0]:.1f} → {least[1]:.1f}  {least[1] / least[0]:.2f}")
            table.add_row(kind, str(bits), *cells)
    return table


def pass_table(both: list[ctypes.CDLL], file: str, rows: list[int], repeat: int) -> Table:
    """Milliseconds of whole passes of a model, by width of activations and rows."""
    table = Table("passes", *(f"{count} rows" for count in rows))
    for library in both:
        for name, (result, arguments) in FUNCTIONS.items():
            if hasattr(library, name):  # a pass needs few of them, which earlier revisions have too
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
    for activations in ("q16", "q8"):
        target = ModelSpec(gguf=file)
        options = LoadOptions(device="cpu", quantization="auto", activations=activations)
        lm = PairEngine(load_pair(PairSpec(name="passes", target=target, drafter="none"), options)).target
        row = [37 * at % 900 + 100 for at in range(200)]
        session = lm.open([row])
        session.score([row], Draft.empty(1))
        cells = []
        for count in rows:
            least = [float("inf")] * 2
            draft = Draft.of([list(range(300, 299 + count))])
            for turn in range(2 * repeat):
                vars(bindings)["kernels"] = lambda library=both[turn % 2]: library
                row.append(200 + turn % 50)
                begin = time.perf_counter()
                session.score([row], draft)
                least[turn % 2] = min(least[turn % 2], 1000 * (time.perf_counter() - begin))
                session.commit([[]])
            cells.append(f"{least[0]:.2f} → {least[1]:.2f}  {least[1] / least[0]:.2f}")
        table.add_row(activations, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of a revision and of the working tree, in turns")
    parser.add_argument("revision")
    parser.add_argument("--types", default="Q4_1,Q4_K,Q5_K,Q6_K,Q8_0")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--file", help="a GGUF file whose passes are timed")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    rows = [int(count) for count in args.rows.split(",")]
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # Windows deletes no loaded library
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", args.revision, "utils"], check=True, capture_output=True
        ).stdout
        old = Path(scratch, "old")
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(old, filter="data")
        both = [compiled(old, Path(scratch)), compiled(ROOT, Path(scratch))]
        console = Console()
        if args.types:
            every = [kind for kind in bindings.TYPES if kind not in bindings.FLOATS]
            kinds = every if args.types == "all" else args.types.split(",")
            console.print(tile_table(both, compiled_timer(Path(scratch)), kinds, rows, args.repeat))
        if args.file:
            console.print(pass_table(both, args.file, rows, args.repeat))


if __name__ == "__main__":
    main()
