"""Seeds: point masses and gumbel coupling repeat plain decoding's text exactly, noise is sound, and
nothing outside the sampler is touched.
"""

import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binomtest

from sampling import speculative_generate
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler, stream_key, uniforms
from sampling.types import Drafter, Rows, Rule
from tests.support.reference import NaiveLaw, chi_square_p
from tests.support.runs import answers, counted_anew, crossed, noise_asked, sampler, twice
from tests.support.tiny import noisy_copy, tiny_model
from tests.support.toys import LawDrafter, PointDrafter, TableLM, ToyLM, TreeDrafter
from utils.logits_processors import make_processor

V = 8
PROMPTS = [[1, 2, 1, 2], [3], [4, 4, 4]]
LENGTH = 12


def target() -> TableLM:
    return TableLM(V, seed=31, dtype=torch.float32)


def near_drafter() -> TableLM:
    lm = target()
    lm.table = lm.table + 0.6 * torch.randn(lm.table.shape, generator=torch.Generator().manual_seed(32))
    return lm


def sampled(seed: int, temperature: float = 0.8, **options: Any) -> KeyedSampler:
    return sampler(temperature, seed, 0.95, **options)


KEEPING: dict[str, tuple[Callable[[], Drafter], dict[str, str]]] = {  # these keep plain decoding's text
    "ngram": (lambda: NgramDrafter(V), {}),
    "ngram, random fill": (lambda: NgramDrafter(V, stop_if_unknown=False, top_k_filler=1), {}),
    "greedy drafts": (lambda: ModelDrafter(near_drafter()), {"draft_sampling": "greedy"}),
    "gumbel": (lambda: ModelDrafter(near_drafter()), {"coupling": "gumbel"}),
    "gumbel, greedy drafts": (lambda: ModelDrafter(near_drafter()), {"coupling": "gumbel", "draft_sampling": "greedy"}),
    "gumbel, naive drafter": (lambda: LawDrafter(near_drafter()), {"coupling": "gumbel"}),
    "always wrong or not": (lambda: PointDrafter(V, lambda row: 5), {}),
}


@pytest.mark.parametrize(("name", "temperature"), crossed(KEEPING, [0.8, 1.3, 0.0]))
@pytest.mark.parametrize("seed", range(6))
def test_the_text_is_plain_decodings_for_every_seed_and_gamma(name: str, temperature: float, seed: int) -> None:
    make, options = KEEPING[name]
    plain = answers(target(), PROMPTS, None, sampled(seed, temperature), length=LENGTH)
    for gamma in (2, 5) if seed else range(1, 9):
        found = answers(target(), PROMPTS, make(), sampled(seed, temperature, **options), length=LENGTH, gamma=gamma)
        assert found == plain, (seed, gamma)


@pytest.mark.parametrize("name", ["ngram", "gumbel"])
@pytest.mark.parametrize("seed", range(10))
def test_stop_tokens_do_not_shift_the_noise_of_other_rows(name: str, seed: int) -> None:
    make, options = KEEPING[name]
    plain = answers(target(), PROMPTS, None, sampled(seed), length=LENGTH, stop={2, 6})
    assert answers(target(), PROMPTS, make(), sampled(seed, **options), length=LENGTH, stop={2, 6}) == plain


def test_plain_decoding_is_one_keyed_draw_a_position() -> None:
    """The oracle: token at position i of row b is the sampler's draw with key (b, i), nothing else."""
    lm, noise = target(), sampled(9)
    expected = []
    for name, prompt in enumerate(PROMPTS):
        row = list(prompt)
        for _ in range(LENGTH):
            law = NaiveLaw(0.8, top_p=0.95)(lm.logits([row])).float()
            row.append(int(noise.draw(law, torch.tensor([[name, len(row)]]))))
        expected.append(row[len(prompt) :])
    assert answers(lm, PROMPTS, None, sampled(9), length=LENGTH) == expected


@pytest.mark.parametrize("name", ["ngram", "gumbel", "greedy drafts"])
@pytest.mark.parametrize("seed", range(5))
def test_continuing_gives_the_uncut_text(name: str, seed: int) -> None:
    make, options = KEEPING[name]
    whole = answers(target(), PROMPTS[:1], None, sampled(seed), length=LENGTH)[0]
    for cut in (1, 4, 7):
        first = answers(target(), PROMPTS[:1], make(), sampled(seed, **options), length=cut)[0]
        rest = answers(target(), [PROMPTS[0] + first], make(), sampled(seed, **options), length=LENGTH - cut)[0]
        assert first + rest == whole


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_the_same_seed_gives_the_same_answer_and_another_seed_another(coupling: str) -> None:
    def answer(seed: int) -> list[list[int]]:
        return answers(target(), PROMPTS, ModelDrafter(near_drafter()), sampled(seed, coupling=coupling), length=30)

    assert answer(7) == answer(7)
    assert len({str(answer(seed)) for seed in range(12)}) == 12


@pytest.mark.parametrize("make", [lambda: NgramDrafter(V, stop_if_unknown=False), lambda: ModelDrafter(near_drafter())])
def test_the_global_generator_is_neither_used_nor_heard(
    make: Callable[[], Drafter], untouched_global_noise: None
) -> None:
    import random

    def answer() -> list[list[int]]:
        return answers(target(), PROMPTS, make(), sampled(5), length=LENGTH)

    state, python_state = torch.get_rng_state(), random.getstate()
    first = answer()
    assert torch.equal(state, torch.get_rng_state())
    assert python_state == random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        assert answer() == first


# -- no noise comes twice -------------------------------------------------------------------------
# Each case is shown to fail with the keys of old: a counter that began anew with every sampler.

TOO_RARE = 1e-6
FLAT = 8


def flat(name: str = "flat") -> ToyLM:
    return ToyLM(FLAT, lambda prefix: [0.0] * FLAT, name, dtype=torch.float32)


def points(row: list[int]) -> int | None:
    return (row[-1] + 1) % FLAT if row[-1] else None


Answering = Callable[[list[int], int], list[int]]


def called(prompt: list[int], seed: int) -> list[int]:
    """The library call."""
    warm = make_processor(1.0)
    return speculative_generate(
        prompt, ModelDrafter(flat("drafter")), flat(), logits_processor=warm, gamma=4, max_gen_len=12, seed=seed
    )[0]


def share_repeated(answer: Answering, template: list[int], seeds: int = 24) -> tuple[float, float]:
    """How often token i of a first answer is token i of the next, over uniform laws of 8 ids; and the binomial p."""
    same = total = 0
    for seed in range(seeds):
        first = answer(PROMPTS[0], seed)
        rest = answer([*PROMPTS[0], *first, *template], seed)
        same, total = same + sum(map(int.__eq__, first, rest)), total + len(first)
    return same / total, float(binomtest(same, total, 1 / FLAT).pvalue)


@pytest.mark.parametrize("template", [[], [1, 2, 3]], ids=["a continuation", "the next turn"])
def test_what_follows_in_the_same_text_has_noise_of_its_own(
    template: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts drawn from a uniform law, the same seed for both calls: 1 in 8 tokens agree, as by chance."""
    share, chance = share_repeated(called, template)
    assert chance > TOO_RARE, share
    noise_asked(monkeypatch, counted_anew)
    share, chance = share_repeated(called, template)
    assert chance < TOO_RARE
    assert share > 0.6


def joint_counts(drafter: CausalLM, target: CausalLM, parts: list[int], samples: int) -> Counter[tuple[int, ...]]:
    """Tokens 2 and 5 of answers given in parts, each from the same seed: rows of batches of 500."""
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(samples // 500):
        rows = [[5, 6, 7] for _ in range(500)]
        for length in parts:
            way, drawing = ModelDrafter(drafter), sampler(1.5, seed)
            gained = answers(target, rows, way, drawing, length=length, gamma=4)
            rows = [row + more for row, more in zip(rows, gained, strict=True)]
        found.update((row[4], row[7]) for row in rows)
    return found


def joint_law(model: Any, temperature: float) -> dict[tuple[int, ...], float]:
    """The exact distribution of tokens 2 and 5 behind the prompt, over all 8⁵ answers."""
    texts, mass = torch.tensor([[5, 6, 7]]), torch.ones(1, dtype=torch.float64)
    for _ in range(5):
        logits = torch.cat([model(part).logits[:, -1, :FLAT] for part in texts.split(1024)])
        law = (logits.double() / temperature).softmax(dim=-1)
        texts = torch.cat([texts.repeat_interleave(FLAT, 0), torch.arange(FLAT).repeat(len(texts))[:, None]], dim=1)
        mass = (mass[:, None] * law).flatten()
    found: dict[tuple[int, ...], float] = dict.fromkeys(product(range(FLAT), repeat=2), 0.0)
    for text, chance in zip(texts.tolist(), mass.tolist(), strict=True):
        found[text[4], text[7]] += chance
    return found


@torch.inference_mode()
def test_three_tokens_and_three_more_have_the_law_of_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny Llama and a noisy copy of it that drafts, 8 ids: tokens 2 and 5 jointly, against the exact law."""
    model = tiny_model()
    target, drafter = CausalLM(model, "target", FLAT), CausalLM(noisy_copy(model, 0.3), "drafter", FLAT)
    law = joint_law(model, 1.5)
    assert chi_square_p(joint_counts(drafter, target, [6], 1_500), law) > TOO_RARE
    assert chi_square_p(joint_counts(drafter, target, [3, 3], 1_500), law) > TOO_RARE
    noise_asked(monkeypatch, counted_anew)
    assert chi_square_p(joint_counts(drafter, target, [6], 1_500), law) > TOO_RARE
    assert chi_square_p(joint_counts(drafter, target, [3, 3], 1_500), law) < TOO_RARE


def cascaded(matrix: list[list[int]], *seeds: int) -> Callable[[], Drafter]:
    return lambda: cascade_of([*map(toy, seeds), PointDrafter(FLAT, points)], matrix, 2.0)


def toy(seed: int) -> ModelDrafter:
    return ModelDrafter(TableLM(FLAT, seed, sharpness=0.7, name=f"toy {seed}", dtype=torch.float32))


DRAWING: dict[str, Callable[[], Drafter]] = {  # all that draw, or toss coins, by themselves
    "model": lambda: toy(1),
    "blocks": lambda: ModelDrafter(toy(1).lm, rule=Rule.BLOCK),
    "tree": lambda: TreeDrafter(TableLM(FLAT, 1, dtype=torch.float32), (3, 2, 1)),
    "cascade": cascaded([[4, 0], [0, 3]], 1),
    "cascade in a cascade": cascaded([[6, 0, 0], [0, 4, 0], [0, 0, 2]], 1, 2),
    "cascades one behind the other": cascaded([[4, 4, 2], [0, 3, 1], [0, 0, 2]], 1, 2),
    "cascade of models": lambda: cascade_of([toy(1), toy(2), toy(3)], [[5, 3, 2], [0, 3, 1], [0, 0, 2]], 1.5),
    "chain": lambda: chain_of([toy(1), toy(2), PointDrafter(FLAT, points)], [2, 2, 2]),
}


def continued(make: Callable[[], Drafter], seed: int) -> Rows:
    """Texts of three prompts in four calls with one seed, each with a sampler and a drafter of its own."""
    rows = [list(prompt) for prompt in PROMPTS]
    for length in (5, 9, 1, 12):
        drawing, lm = sampler(1.0, seed), TableLM(FLAT, 0, dtype=torch.float32)
        gained = answers(lm, rows, make(), drawing, length=length, gamma=12)
        rows = [row + more for row, more in zip(rows, gained, strict=True)]
    return rows


@pytest.mark.parametrize("name", DRAWING)
def test_no_key_comes_twice_in_one_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over calls, rounds, nested rounds, siblings and blocks, whoever built the sampler; and equal calls agree."""
    asked = noise_asked(monkeypatch)
    texts = continued(DRAWING[name], 3)
    assert twice(asked) == []
    assert {stream for _, stream, _ in asked} == {1, 2, 3}, "nothing was drawn: the test shows nothing"
    once = sorted(asked)
    asked.clear()
    assert continued(DRAWING[name], 3) == texts
    assert sorted(asked) == once
    asked = noise_asked(monkeypatch, counted_anew)
    continued(DRAWING[name], 3)
    assert twice(asked)


def test_the_targets_own_noise_is_what_it_always_was() -> None:
    """Plain decoding's text, and that of point masses, stays for every seed: its keys as they were first made."""
    made = [stream_key(42, 1, row, position) for row, position in ((0, 0), (0, 17), (3, 5))]
    assert made == [3638679739349067744, 4399968894425427741, 10200168334956244109]
    assert ids_of([[0, i] for i in range(12)], 42).tolist() == [10, 15, 1, 11, 0, 13, 8, 3, 0, 3, 6, 7]
    assert ids_of([[i, 3] for i in range(40)], 42).tolist()[:12] == [11, 2, 5, 13, 0, 7, 11, 4, 6, 2, 5, 11]


def test_keys_of_another_length_are_other_noise() -> None:
    states = {stream_key(0, 3, *parts) for size in range(2, 6) for parts in product(range(4), repeat=size)}
    assert len(states) == sum(4**size for size in range(2, 6))


# -- the noise itself -----------------------------------------------------------------------------

MANY = 10_000
FAIL_BELOW = 1e-6


def ids_of(keys: list[list[int]], seed: int = 0) -> torch.Tensor:
    """What a uniform law over 16 ids draws with each key: the noise, seen through the public door."""
    return sampler(1.0, seed).draw(torch.full((len(keys), 16), 1 / 16, dtype=torch.float64), torch.tensor(keys))


def uniform_p(ids: torch.Tensor, size: int = 16) -> float:
    counts = torch.bincount(ids, minlength=size)
    return chi_square_p({i: int(n) for i, n in enumerate(counts)}, dict.fromkeys(range(size), 1 / size))


def pair_p(left: torch.Tensor, right: torch.Tensor) -> float:
    return uniform_p(left * 16 + right, 256)


KEYS = {
    "positions": lambda i: [0, i],
    "rows": lambda i: [i, 7],
    "both": lambda i: [i, i],
    "far apart": lambda i: [i * 65_536, i * 1_000_003],
}


@pytest.mark.parametrize("name", KEYS)
def test_draws_are_uniform_along_every_key(name: str) -> None:
    assert uniform_p(ids_of([KEYS[name](i) for i in range(MANY)])) > FAIL_BELOW


def test_draws_are_uniform_over_seeds() -> None:
    ids = torch.cat([ids_of([[0, 5]], seed) for seed in range(3000)])
    assert uniform_p(ids) > FAIL_BELOW
    assert pair_p(ids[:-1], ids[1:]) > FAIL_BELOW


@pytest.mark.parametrize("name", KEYS)
def test_neighbours_are_independent(name: str) -> None:
    here = ids_of([KEYS[name](i) for i in range(MANY)])
    assert pair_p(here[:-1], here[1:]) > FAIL_BELOW
    row_after = ids_of([[a + 1, b] for a, b in map(KEYS[name], range(MANY))])
    position_after = ids_of([[a, b + 1] for a, b in map(KEYS[name], range(MANY))])
    seed_after = ids_of([KEYS[name](i) for i in range(MANY)], seed=1)
    swapped = ids_of([[b, a] for a, b in (KEYS[name](i + 50_000) for i in range(MANY))])
    for other in (row_after, position_after, seed_after, swapped):
        assert pair_p(here, other) > FAIL_BELOW


def test_a_draw_depends_on_its_key_alone() -> None:
    keys = [[row, position] for row in range(10) for position in range(10)]
    whole = ids_of(keys)
    assert torch.equal(whole, torch.cat([ids_of([key]) for key in keys]))
    assert torch.equal(whole.flip(0), ids_of(keys[::-1]))


def test_drafts_and_draws_and_coins_are_independent_streams() -> None:
    noise = sampler(1.0, seed=4)
    law = torch.full((MANY, 16), 1 / 16, dtype=torch.float64)
    keys = torch.tensor([[0, i] for i in range(MANY)])
    drafted_in = [noise.drafting([[0, begun]]).draw(law, keys) for begun in (3, 4)]
    drawn, drafted = noise.draw(law, keys), drafted_in[0]
    assert uniform_p(drafted) > FAIL_BELOW
    assert pair_p(drawn, drafted) > FAIL_BELOW
    heads = noise.coin(torch.full((MANY,), 0.5), F.pad(keys, (0, 2), value=3)).long()
    assert uniform_p(heads, 2) > FAIL_BELOW
    assert uniform_p(drawn * 2 + heads, 32) > FAIL_BELOW
    assert pair_p(*drafted_in) > FAIL_BELOW  # another round, other noise at the same positions
    inner = noise.drafting([[0, 3]]).drafting([[0, 4]])
    assert pair_p(drafted, inner.draw(law, keys)) > FAIL_BELOW  # and so in a round within a round
    sibling = torch.tensor([1]).expand(MANY, 1)
    assert pair_p(drafted, noise.drafting([[0, 3]]).draw(law, torch.cat([keys, sibling], dim=1))) > FAIL_BELOW


@pytest.mark.parametrize("prob", [1e-4, 0.03, 0.5, 0.97])
def test_coins_fall_as_often_as_they_should(prob: float) -> None:
    noise = sampler(1.0, seed=6)
    heads = 0
    for row in range(60):
        keys = torch.tensor([[row, position, 7, 0] for position in range(1000)])
        heads += int(noise.coin(torch.full((1000,), prob), keys).sum())
    assert abs(heads - 60_000 * prob) < 5 * math.sqrt(60_000 * prob * (1 - prob))


def test_uniform_numbers_follow_the_uniform_law() -> None:
    """Kolmogorov-Smirnov on the numbers themselves, and none is 0 or 1."""
    keys = [stream_key(3, 1, row, position) for row in range(40) for position in range(50)]
    numbers = uniforms(keys, 50, torch.device("cpu")).flatten().sort().values
    size = len(numbers)
    steps = torch.arange(1, size + 1, dtype=torch.float64) / size
    distance = float(torch.maximum((steps - numbers).abs().max(), (numbers - steps + 1 / size).abs().max()))
    assert distance * math.sqrt(size) < 2.7  # p ≈ 1e-6
    assert float(numbers[0]) > 0
    assert uniforms([0x31628AF67B2131AB], 1, torch.device("cpu")).item() < 1, "of the largest word of 64 bits"


def test_improbable_tokens_are_drawn_as_often_as_they_should() -> None:
    """Float32 laws with a token of 1e-3: the race has no floor."""
    law = torch.tensor([0.6, 0.399, 0.001], dtype=torch.float32)
    ids = sampler(1.0, seed=8).draw(law.expand(50_000, 3), torch.tensor([[i, 0] for i in range(50_000)]))
    counts = torch.bincount(ids, minlength=3)
    assert chi_square_p({i: int(n) for i, n in enumerate(counts)}, {0: 0.6, 1: 0.399, 2: 0.001}) > FAIL_BELOW


def test_a_token_without_mass_is_never_drawn() -> None:
    law = torch.zeros(20_000, 6)
    law[:, 2], law[:, 5] = 0.999_999, 1e-6
    assert set(sampler(1.0, seed=1).draw(law, torch.tensor([[i, 1] for i in range(20_000)])).tolist()) <= {2, 5}
