"""The kernels as a C program: under the address and the undefined-behaviour sanitizer, and on an arm64 processor.

Products against the naive twin of test_quantized_linear.py, passes against the bits of the library that runs here, and
draws against the sampler's. gcc has the sanitizers' runtime, which
ziglang does not ship; an arm64 program runs under qemu. Where either is missing its test is skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from sampling.models import fused
from sampling.models.fused import FusedNetwork
from sampling.sampler import KeyedSampler, stream_key
from sampling.types import DraftTree
from tests.sampling.models.test_families import CASES, packed, random_model
from tests.support.pass_image import Image
from tests.support.quantized import SHAPES, quantized_model
from tests.utils.kernels.test_blocks import bytes_of
from tests.utils.kernels.test_quantized_linear import rounded
from utils.kernels import build
from utils.kernels.bindings import COLUMNS, FLOATS, TYPES, run
from utils.kernels.build import InstructionSet, features, instruction_set
from utils.kernels.quantized_linear import PackedWeight
from utils.logits_processors import LogitsProcessor

SOURCES = Path(build.__file__).parent
DRIVER = Path(__file__).parents[2] / "support" / "kernel_driver.c"
SANITIZED = [
    "gcc",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-Wno-psabi",
    "-march=native",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
ZIG = [sys.executable, "-m", "ziglang", "cc", "-O2"]
ARM = [*ZIG, "-target", "aarch64-linux-musl", "-static", "-mcpu=generic+dotprod"]
BUILDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "sanitized": (SANITIZED, ()),
    "sanitized, AVX2": ([*SANITIZED[:-1], *AVX2], ()),
    # in the encoding of AVX-512, which gcc takes where it may not take the other
    "sanitized, AVX-VNNI": ([*SANITIZED[:-1], *AVX2, "-mavx512vl", "-mavx512vnni", "-D__AVXVNNI__"], ()),
    "plain C": ([*ZIG, "-target", "x86_64-linux-musl", "-static", "-mcpu=x86_64"], ()),
    "arm64": (ARM, ("qemu-aarch64", "-cpu", "max")),
    "arm64 with i8mm": ([*ARM[:-1], f"{ARM[-1]}+i8mm"], ("qemu-aarch64", "-cpu", "max")),
}


pytestmark = pytest.mark.exhaustive  # compiles all kernels for every build


def built(compiler: list[str], folder: Path) -> Path:
    """The driver, compiled in two steps because one source is compiled twice."""
    flags = ["-std=c11", "-ffp-contract=off", f"-I{SOURCES}"]
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(folder / "zig"),
    }
    products = [str(folder / f"{name}.o") for name in ("wide", "narrow")]
    running = [
        subprocess.Popen(
            [*compiler, *flags, f"-DNARROW={narrow}", "-c", "-o", product, str(SOURCES / "products.c")], env=environment
        )
        for narrow, product in enumerate(products)
    ]
    assert all(process.wait(300) == 0 for process in running)
    files = [
        str(SOURCES / f"{unit}.c")
        for unit in ("linear", "blocks", "team", "attention", "pass", "mixture", "stages", "walk")
    ]
    program = folder / "driver"
    command = [*compiler, *flags, "-o", str(program), str(DRIVER), *files, *products, "-lm", "-lpthread"]
    subprocess.run(command, check=True, env=environment, timeout=300)
    return program


@pytest.mark.parametrize("system", ["linux-musl", "macos", "windows-gnu"])
@pytest.mark.parametrize("row", build.INSTRUCTION_SETS, ids=lambda row: row.name)
def test_the_kernels_compile_without_a_warning(row: InstructionSet, system: str, tmp_path: Path) -> None:
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    flags = [*build.FLAGS, "-O1", "-Werror", "-target", f"{row.machine}-{system}", f"-mcpu={row.cpu}"]
    for narrow, file in [*((0, file) for file in SOURCES.glob("*.c")), (1, SOURCES / "products.c")]:
        files = ["-c", "-o", str(tmp_path / f"{file.stem}.o"), str(file)]
        subprocess.run([*ZIG, *flags, f"-DNARROW={narrow}", *files], check=True, env=environment, timeout=300)


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the driver of a build."""
    compiler, runner = BUILDS[request.param]
    for tool in (compiler[0], *runner[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if "-mavx512vnni" in compiler and not {"avx512_vl", "avx512_vnni"} <= features():
        pytest.skip("the processor does not run it")
    return [*runner, str(built(compiler, tmp_path_factory.mktemp("driver")))]


@pytest.fixture(scope="module")
def images() -> list[tuple[bytes, bytes]]:
    """Passes of several families as the driver reads them, and the bytes of their results here: one token, a prompt,
    several rows, trees and moves, with a cache of 16 and of 32 bits."""
    found: list[tuple[bytes, bytes]] = []

    def noted(work: int, record: Any, threads: int) -> None:
        image = Image(record, threads)
        run(work, record, threads)
        after = Image(record, threads)
        found.append((image.bytes(), b"".join(after.blocks[block] for block in after.results)))

    models = [quantized_model(shape) for shape in list(SHAPES)[::3]]
    chosen = {
        family: changes for family, changes in CASES if family in ("Mistral", "SmolLM3", "Olmo2", "Gemma3", "Qwen2Moe")
    }
    models += [packed(random_model(family, changes)) for family, changes in chosen.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "run", noted)
        for number, model in enumerate(models):
            network = FusedNetwork(model, (torch.float16, torch.float32)[number % 2])
            cache, ids = network.new_cache(1), [3 + 7 * at % 190 for at in range(21)]
            network.of_one_row(ids, DraftTree.of([5, 6, 7, 8], [-1, 0, 0, 1]), cache)
            cache.shift([(0, 23, 21)], 22)
            network.of_one_row([9], DraftTree.of([]), cache)
            both, positions = torch.tensor([ids[:9], ids[9:18]]), torch.arange(9).expand(2, -1)
            network.forward(both, positions, None, network.new_cache(2), 3)
    return found


@pytest.mark.skipif(instruction_set() is None, reason="there are no kernels here to compare with")
def test_a_pass_has_the_same_bits_in_every_build(program: list[str], images: list[tuple[bytes, bytes]]) -> None:
    """Attention, mixtures and all else that a pass does, each of its memories as large as it says and no larger."""
    done = subprocess.run(program, input=b"".join(image for image, _ in images), capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    start = 0
    for number, (_, expected) in enumerate(images):
        assert done.stdout[start : start + len(expected)] == expected, number
        start += len(expected)
    assert start == len(done.stdout)


def test_a_product_is_its_naive_twin_in_every_build_and_has_the_same_bits(program: list[str]) -> None:
    chance = np.random.default_rng(3)
    given, cases = [], []
    for kind in TYPES:
        for count in (1, 2, 5, 8, 17):
            for narrow in (0, 1):
                rows, width = int(chance.integers(1, 40)), 256 * int(chance.integers(1, 3))
                data = bytes_of(kind, rows, width, seed=count)
                x = chance.normal(size=(count, width)).astype(np.float32)
                header = [TYPES.index(kind), rows, width, count, narrow, 1 + count % 2]
                given += [np.array(header, np.int64).tobytes(), data.tobytes(), x.tobytes()]
                cases.append((kind, data, x, narrow))
    run = subprocess.run(program, input=b"".join(given), capture_output=True, timeout=600)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    numbers = np.frombuffer(run.stdout, np.float32)
    for kind, data, x, narrow in cases:
        dense = quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        wide = -(-len(data) // COLUMNS) * COLUMNS
        y, numbers = numbers[: len(x) * wide].reshape(len(x), wide), numbers[len(x) * wide :]
        read, numbers = numbers[: dense.size].reshape(dense.shape), numbers[dense.size :]
        assert np.array_equal(read, dense), kind
        enters = x.astype(np.float64) if kind in FLOATS else rounded(x.astype(np.float64), bool(narrow))
        size = np.abs(enters) @ np.abs(dense.astype(np.float64)).T + 1e-30
        if instruction_set() is not None:
            here = PackedWeight.of(kind, data).product(torch.from_numpy(x), bool(narrow))
            assert np.array_equal(y[:, : len(data)], here.numpy()), (kind, len(x))
        assert (np.abs(y[:, : len(data)] - enters @ dense.astype(np.float64).T) / size).max() < 1e-6, (kind, len(x))
    assert not len(numbers)


def test_a_thread_that_falls_asleep_as_it_is_asked_wakes_up(program: list[str]) -> None:
    # In an emulator there are more runs, since a pause is shorter.
    given = np.array([-2, 1_000_000 if len(program) > 1 else 10_000, 0, 0, 0, 0], np.int64).tobytes()
    subprocess.run(program, input=given, capture_output=True, check=True, timeout=300)


def test_a_draw_is_the_samplers_in_every_build(program: list[str]) -> None:
    chance, given, expected = torch.Generator().manual_seed(8), list[bytes](), list[int]()
    for place in range(40):
        logits = (4 * torch.randn(1, 5008, generator=chance)).round(decimals=place % 4)
        for numbers in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}):
            sampler = KeyedSampler(LogitsProcessor(0.8, **numbers), seed=place)  # type: ignore[arg-type]
            header = [
                -3,
                5008,
                numbers.get("top_k", 0),
                np.uint64(stream_key(place, 1, 0, 0)).astype(np.int64),
                0,
                0,
            ]
            floats = [1 / 0.8, numbers.get("top_p", 0), numbers.get("min_p", 0), 0]
            given += [np.array(header, np.int64).tobytes(), np.array(floats, np.float32).tobytes()]
            given.append(logits.numpy().tobytes())
            expected += sampler.draw(sampler.probs(logits, []), torch.tensor([[0, 0]])).tolist()
    run = subprocess.run(program, input=b"".join(given), capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    drawn = np.frombuffer(run.stdout, np.int64)
    assert len(drawn) == len(expected)
    decided = drawn >= 0
    assert np.array_equal(drawn[decided], np.array(expected)[decided])
    assert decided.mean() > 0.98, "left to the sampler"
