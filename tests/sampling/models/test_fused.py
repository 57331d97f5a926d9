"""The compiled pass: against transformers over the same numbers, and its contract, row invariance, bit for bit."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sampling.models.cache import Buffer, additive, places
from sampling.models.fused import CACHE_DTYPES, FusedNetwork, supports
from sampling.models.network import TransformersNetwork
from sampling.types import DraftTree
from tests.support.quantized import SHAPES, dense_copy, keep_code, needs_kernels, quantized_model
from tests.support.refusals import refused
from tests.support.runs import crossed
from utils.kernels.build import INSTRUCTION_SETS, features, instruction_set
from utils.kernels.quantized_linear import narrow_activations

pytestmark = needs_kernels

keep_code()

VOCAB = 203
WIDTHS = (*range(1, 17), 64, 256)


@pytest.fixture(scope="module")
def model() -> Any:
    return quantized_model("llama, three queries a key")


def feed(network: Any, cache: Any, ids: list[int], keep: int | None = None, width: int | None = None) -> Tensor:
    """Logits [len(ids), V] of a chain fed in pieces of `width`."""
    found = []
    for at in range(0, len(ids), width or len(ids)):
        piece = torch.tensor([ids[at : at + (width or len(ids))]])
        positions = torch.arange(cache.length, cache.length + piece.shape[1])[None]
        found.append(network.forward(piece, positions, None, cache, keep or piece.shape[1])[0][0])
    return torch.cat(found)


def tree(network: Any, cache: Any, ids: list[int], parents: list[int], length: int) -> Tensor:
    """Logits [N, V] of the nodes of a tree behind `length` cached tokens."""
    positions, seen = places([length], [[]], [DraftTree.of(ids, parents)], length, 0, len(ids))
    logits: Tensor = network.forward(torch.tensor([ids]), positions, additive(seen, network), cache, len(ids))[0][0]
    return logits


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_transformers_computes(shape: str, tied: bool) -> None:
    model = quantized_model(shape, tied=tied)
    assert supports(model)
    network, plain = FusedNetwork(model, torch.float32), TransformersNetwork(dense_copy(model))
    ids = torch.tensor([tokens(40, 1), tokens(40, 2)])
    positions = torch.arange(40).expand(2, -1)
    cache, other = network.new_cache(2), plain.new_cache(2)
    wanted = (1, -1, 0)
    logits, states = network.forward(ids, positions, None, cache, 7, hidden=wanted)
    expected, plain_states = plain.forward(ids, positions, None, other, 7, hidden=wanted)
    bare = network.forward(ids, positions, None, network.new_cache(2), 7)
    assert torch.equal(bare[0], logits)
    assert bare[1] is None
    assert logits.shape == expected.shape
    assert divergence(expected, logits) < 1e-5
    assert states is not None
    assert plain_states is not None
    for got, exact in zip(states.chunk(3, dim=-1), plain_states.chunk(3, dim=-1), strict=True):
        assert float((got - exact).abs().max()) < 1e-3 * float(exact.abs().max())
    torch.testing.assert_close(cache.layer(1), other.layer(1), rtol=1e-5, atol=0.02)


def divergence(p: Tensor, q: Tensor) -> float:
    """Mean KL(p ‖ q) of logits."""
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def narrow() -> Any:
    """The same with 8-bit activations."""
    model = quantized_model("llama, three queries a key")
    narrow_activations(model)
    return model


def test_eight_bits_are_less_exact_and_no_less_sure_of_themselves(model: Any, narrow: Any) -> None:
    logits, rounded = (feed(net, net.new_cache(1), tokens(200)) for net in map(FusedNetwork, (model, narrow)))
    assert 1e-5 < divergence(logits, rounded) < 0.1
    network = FusedNetwork(narrow)
    begun = network.new_cache(1)
    feed(network, begun, tokens(40))
    alone = feed(network, begun.fork(), tokens(60, 2), width=1)
    for width in (2, 3, 5, 8, 13, 60):
        assert torch.equal(feed(network, begun.fork(), tokens(60, 2), width=width), alone), width
    logits = tree(network, begun.fork(), tokens(4, 2), [-1, 0, 1, 2], 40)
    assert torch.equal(logits, alone[:4])


@pytest.mark.parametrize(("cached", "dtype"), crossed([0, 5, 47, 300, 4000], CACHE_DTYPES))
def test_a_row_is_the_same_in_a_pass_of_any_width(model: Any, dtype: torch.dtype, cached: int) -> None:
    network = FusedNetwork(model, dtype)
    text = tokens(cached + 256)
    alone, begun = network.new_cache(1), network.new_cache(1)
    if cached:
        assert torch.equal(feed(network, alone, text[:cached], width=1)[-1], feed(network, begun, text[:cached])[-1])
    one_by_one = feed(network, alone, text[cached:], width=1)
    for width in WIDTHS:
        cache = begun.fork()
        assert torch.equal(feed(network, cache, text[cached:], width=width), one_by_one), width
        for layer in range(network.layers):
            torch.testing.assert_close(cache.layer(layer), alone.layer(layer), rtol=0, atol=0)


@pytest.mark.parametrize(("cached", "dtype"), crossed([1, 15, 130, 4000], CACHE_DTYPES))
def test_a_node_of_a_tree_is_the_same_as_in_its_own_text(model: Any, dtype: torch.dtype, cached: int) -> None:
    network, chance = FusedNetwork(model, dtype), random.Random(cached)
    text, ids = tokens(cached, cached), tokens(24, cached + 1)
    parents = [chance.randrange(-1, node) for node in range(len(ids))]
    cache = network.new_cache(1)
    feed(network, cache, text)
    bare = cache.fork()
    logits = tree(network, cache, ids, parents, cached)
    for node in range(len(ids)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        assert torch.equal(logits[node], feed(network, bare.fork(), [ids[one] for one in path], width=1)[-1])
    after = [(0, cached + one, cached + place) for place, one in enumerate(path)]
    cache.shift(after, cached + len(path))
    feed(network, bare, [ids[one] for one in path])
    assert torch.equal(feed(network, cache, [3]), feed(network, bare, [3]))
    for layer in range(network.layers):
        torch.testing.assert_close(cache.layer(layer), bare.layer(layer), rtol=0, atol=0)


@pytest.mark.parametrize("cached", [0, 15, 130])
@pytest.mark.parametrize("branches", ["none", "chain", "first children", "any"])
def test_a_row_and_its_draft_told_as_numbers_are_the_same_as_tensors(model: Any, cached: int, branches: str) -> None:
    network, chance = FusedNetwork(model), random.Random(cached)
    text, new, ids = tokens(cached, cached), tokens(3, 7), tokens(0 if branches == "none" else 12, cached + 1)
    shapes = {"chain": lambda node: node - 1, "first children": lambda node: -1 if node < 3 else node - 3}
    parents = [shapes.get(branches, lambda node: chance.randrange(-1, node))(node) for node in range(len(ids))]
    cache, other, wanted = network.new_cache(1), network.new_cache(1), (1, -1)
    if cached:
        feed(network, cache, text)
        feed(network, other, text)
    held = Buffer()
    logits = network.of_one_row(new, DraftTree.of(ids, parents), cache, wanted, held.allocate)
    positions, seen = places([cached], [new], [DraftTree.of(ids, parents)], cached, len(new), len(ids))
    mask = additive(seen, network)
    told = network.forward(torch.tensor([[*new, *ids]]), positions, mask, other, len(ids) + 1, wanted)
    assert torch.equal(logits, told[0])
    assert torch.equal(held.view()[:, 0], cast(Tensor, told[1]))
    for layer in range(network.layers):
        torch.testing.assert_close(cache.layer(layer), other.layer(layer), rtol=0, atol=0)


def test_ids_that_the_model_has_no_row_for_are_read_as_its_last_one(model: Any) -> None:
    network = FusedNetwork(model)
    found = [network.of_one_row([3], DraftTree.of([token]), network.new_cache(1)) for token in (VOCAB - 1, VOCAB + 40)]
    assert torch.equal(*found)


def digests() -> list[str]:
    """Of every width, for both dtypes of the cache and for 8-bit activations: the bits of a chain's logits behind 70
    tokens, and of a tree's."""
    model, found = quantized_model("llama, three queries a key"), []
    for dtype in (*CACHE_DTYPES, None):  # the last in 8 bits
        if dtype is None:
            narrow_activations(model)
        network = FusedNetwork(model, dtype)
        begun = network.new_cache(1)
        feed(network, begun, tokens(70))
        parents = [random.Random(7).randrange(-1, node) for node in range(20)]
        kinds = [feed(network, begun.fork(), tokens(256, 4), width=width) for width in WIDTHS]
        kinds.append(tree(network, begun.fork(), tokens(20, 5), parents, 70))
        found += [hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest() for logits in kinds]
    return found


def test_every_instruction_set_gives_the_same_bits() -> None:
    mine, per_dtype = digests(), len(WIDTHS) + 1
    assert len(mine) == 3 * per_dtype
    assert len(set(mine)) == 6  # a chain and a tree for each
    used = instruction_set()
    assert used is not None
    others = [row for row in INSTRUCTION_SETS if row.machine == used.machine]
    for other in others[others.index(used) + 1 :]:
        if not other.needs <= features():
            continue
        code = (
            "from utils.kernels.build import instruction_set; from tests.sampling.models import test_fused;"
            "print(instruction_set().name, *test_fused.digests())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SPEC_KERNELS": other.name},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout.split() == [other.name, *mine], done.stderr


def test_the_cache_is_in_what_was_asked_for_else_in_sixteen_bits(model: Any) -> None:
    assert FusedNetwork(model).new_cache(1).dtype == torch.float16
    assert FusedNetwork(model, torch.float32).new_cache(1).dtype == torch.float32
    asked = quantized_model("llama, three queries a key", layers=1)
    asked.kv_dtype = torch.float32
    network = FusedNetwork(asked)
    cache = network.new_cache(1)
    assert (network.cache_dtype, cache.keys.dtype) == (torch.float32, torch.float32)
    halved = FusedNetwork(asked, torch.float16)
    other = halved.new_cache(1)
    logits, rounded = feed(network, cache, tokens(200)), feed(halved, other, tokens(200))
    assert 0 < divergence(logits, rounded) < 1e-5
    for exact, read in zip(cache.layer(0), other.layer(0), strict=True):
        assert read.dtype == torch.float32
        assert torch.equal(exact.half().float(), read)


def test_the_number_of_threads_changes_nothing(model: Any) -> None:
    before, text, found = torch.get_num_threads(), tokens(90), []
    network = FusedNetwork(model)
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            found.append(feed(network, network.new_cache(1), text, width=13))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_what_cannot_be_said_to_a_kernel_is_refused(model: Any) -> None:
    network = FusedNetwork(model)
    refused(feed, network, network.new_cache(1), [VOCAB], kind=IndexError)
    refused(FusedNetwork, dense_copy(model), kind=ValueError, match="no compiled pass")
    refused(network.new_cache(1).layer, 0, kind=ValueError, match="empty")


def test_a_text_that_spoils_the_numbers_spoils_itself_alone(model: Any) -> None:
    broken = quantized_model("llama, three queries a key")
    broken.model.norm.weight[3] = float("inf")
    assert feed(FusedNetwork(broken), FusedNetwork(broken).new_cache(1), tokens(5)).isnan().all()
    good = FusedNetwork(model)
    assert feed(good, good.new_cache(1), tokens(5)).isfinite().all()


def passes_beside_trouble(passes: int) -> None:
    """Run `passes` passes beside two busy processes, by one to three threads, with Ctrl-C and a second thread that
    runs passes at the same time. AssertionError if a result differs."""
    network, text = FusedNetwork(quantized_model("llama, three queries a key", layers=1)), tokens(4)
    want = feed(network, network.new_cache(1), text)
    stop, may, main = threading.Event(), [False], threading.get_ident()

    def ask(count: int) -> None:
        cache = network.new_cache(1)
        for _ in range(count):
            cache.crop(0)
            assert torch.equal(feed(network, cache, text), want)

    def disturb() -> None:
        while not stop.is_set():
            ask(10)
            signal.pthread_kill(main, signal.SIGINT)

    def interrupt(*_: Any) -> None:
        if may[0]:
            may[0] = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    other, interrupts, done = threading.Thread(target=disturb), 0, 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        other.start()
        while done < passes or interrupts <= passes // 100:
            try:
                torch.set_num_threads(1 + done // 10 % 3)
                may[0] = True
                ask(10)
                may[0] = False
            except KeyboardInterrupt:
                interrupts += 1
            done += 10
    finally:
        stop.set()
        for process in busy:
            process.kill()
            process.wait()
    other.join()


@pytest.mark.exhaustive
def test_no_pass_hangs_whatever_happens_beside_it() -> None:
    """SPEC_TEST_PASSES=100000 tries as many; the suite a few."""
    passes = int(os.environ.get("SPEC_TEST_PASSES", "100"))
    code = f"from tests.sampling.models.test_fused import passes_beside_trouble as run; run({passes})"
    done = subprocess.run([sys.executable, "-c", code], timeout=60 + passes / 50, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
