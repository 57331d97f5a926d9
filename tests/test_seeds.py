"""Seeds: point masses and gumbel coupling repeat plain decoding's text exactly, noise is sound, and
nothing outside the sampler is touched (DESIGN section 3, "Seeds").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
import torch

from sampling.drafters import ModelDrafter, NgramDrafter
from sampling.sampler import KeyedSampler
from sampling.types import Drafter
from tests.reference import NaiveLaw, chi_square_p
from tests.runs import answers, decode, emitted
from tests.toy_drafters import LawDrafter, PointDrafter
from tests.toys import TableLM
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


def sampler(seed: int, temperature: float = 0.8, **options: Any) -> KeyedSampler:
    return KeyedSampler(make_processor(temperature, top_p=0.95), seed, **options)


KEEPING: dict[str, tuple[Callable[[], Drafter], dict[str, str]]] = {  # these keep plain decoding's text
    "ngram": (lambda: NgramDrafter(V), {}),
    "ngram, random fill": (lambda: NgramDrafter(V, stop_if_unknown=False, top_k_filler=1), {}),
    "greedy drafts": (lambda: ModelDrafter(near_drafter()), {"draft_sampling": "greedy"}),
    "gumbel": (lambda: ModelDrafter(near_drafter()), {"coupling": "gumbel"}),
    "gumbel, greedy drafts": (lambda: ModelDrafter(near_drafter()), {"coupling": "gumbel", "draft_sampling": "greedy"}),
    "gumbel, naive drafter": (lambda: LawDrafter(near_drafter()), {"coupling": "gumbel"}),
    "always wrong or not": (lambda: PointDrafter(V, lambda row: 5), {}),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
@pytest.mark.parametrize("name", KEEPING)
def test_the_text_is_plain_decodings_for_every_seed_and_gamma(name: str, temperature: float) -> None:
    make, options = KEEPING[name]
    for seed in range(6):
        plain = answers(target(), PROMPTS, None, sampler(seed, temperature), length=LENGTH)
        for gamma in (2, 5) if seed else range(1, 9):
            found = answers(
                target(), PROMPTS, make(), sampler(seed, temperature, **options), length=LENGTH, gamma=gamma
            )
            assert found == plain, (seed, gamma)


@pytest.mark.parametrize("name", ["ngram", "gumbel"])
def test_stop_tokens_do_not_shift_the_noise_of_other_rows(name: str) -> None:
    make, options = KEEPING[name]
    for seed in range(10):
        plain = answers(target(), PROMPTS, None, sampler(seed), length=LENGTH, stop={2, 6})
        assert answers(target(), PROMPTS, make(), sampler(seed, **options), length=LENGTH, stop={2, 6}) == plain


def test_plain_decoding_is_one_keyed_draw_a_position() -> None:
    """The oracle: token at position i of row b is the sampler's draw with key (b, i), nothing else."""
    lm, noise = target(), sampler(9)
    expected = []
    for name, prompt in enumerate(PROMPTS):
        row = list(prompt)
        for _ in range(LENGTH):
            law = NaiveLaw(0.8, top_p=0.95)(lm.logits([row])).float()
            row.append(int(noise.draw(law, torch.tensor([[name, len(row)]]))))
        expected.append(row[len(prompt) :])
    assert answers(lm, PROMPTS, None, sampler(9), length=LENGTH) == expected


def test_a_row_alone_is_the_first_row_of_a_batch() -> None:
    alone = answers(target(), PROMPTS[:1], None, sampler(3), length=LENGTH)
    assert alone == answers(target(), PROMPTS, None, sampler(3), length=LENGTH)[:1]


@pytest.mark.parametrize("name", ["ngram", "gumbel", "greedy drafts"])
def test_continuing_gives_the_uncut_text(name: str) -> None:
    make, options = KEEPING[name]
    for seed in range(5):
        whole = answers(target(), PROMPTS[:1], None, sampler(seed), length=LENGTH)[0]
        for cut in (1, 4, 7):
            first = answers(target(), PROMPTS[:1], make(), sampler(seed, **options), length=cut)[0]
            longer = [PROMPTS[0] + first]
            rest = answers(target(), longer, make(), sampler(seed, **options), length=LENGTH - cut)[0]
            assert first + rest == whole


@pytest.mark.parametrize("coupling", ["rejection", "gumbel"])
def test_the_same_seed_gives_the_same_answer_and_another_seed_another(coupling: str) -> None:
    def answer(seed: int) -> list[list[int]]:
        drafter = ModelDrafter(near_drafter())
        return answers(target(), PROMPTS, drafter, sampler(seed, coupling=coupling), length=30)

    assert answer(7) == answer(7)
    assert len({str(answer(seed)) for seed in range(12)}) == 12


def test_rejection_draws_another_text_of_the_same_law() -> None:
    """If it never differed from plain decoding, the drafts would not be drawn with noise of their own."""
    differ = 0
    for seed in range(10):
        plain = answers(target(), PROMPTS, None, sampler(seed), length=LENGTH)
        differ += plain != answers(target(), PROMPTS, ModelDrafter(near_drafter()), sampler(seed), length=LENGTH)
    assert differ >= 5


@pytest.mark.parametrize("make", [lambda: NgramDrafter(V, stop_if_unknown=False), lambda: ModelDrafter(near_drafter())])
def test_the_global_generator_is_neither_used_nor_heard(
    make: Callable[[], Drafter], untouched_global_noise: None
) -> None:
    import random

    def answer() -> list[list[int]]:
        return answers(target(), PROMPTS, make(), sampler(5), length=LENGTH)

    state, python_state = torch.get_rng_state(), random.getstate()
    first = answer()
    assert torch.equal(state, torch.get_rng_state())
    assert python_state == random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        assert answer() == first


def test_closing_and_resuming_elsewhere_leaves_the_seeded_text_alone() -> None:
    """Two lanes that share nothing but the seed may take turns in any order."""
    from sampling.loop import generate
    from sampling.types import Limits

    plain = answers(target(), PROMPTS, None, sampler(2), length=LENGTH)
    lanes = [
        generate(target(), PROMPTS, NgramDrafter(V), sampler(2), Limits(LENGTH)),
        generate(target(), PROMPTS, LawDrafter(near_drafter()), sampler(2, coupling="gumbel"), Limits(LENGTH)),
    ]
    seen: list[list[Any]] = [[], []]
    for turn in zip_longest(*lanes):
        for events, event in zip(seen, turn, strict=True):
            events += [event] if event is not None else []
    assert [emitted(events, len(PROMPTS)) for events in seen] == [plain, plain]


# -- the noise itself -----------------------------------------------------------------------------

MANY = 20_000
FAIL_BELOW = 1e-6


def ids_of(keys: list[list[int]], seed: int = 0) -> torch.Tensor:
    """What a uniform law over 16 ids draws with each key: the noise, seen through the public door."""
    law = torch.full((len(keys), 16), 1 / 16, dtype=torch.float64)
    return KeyedSampler(make_processor(1.0), seed).draw(law, torch.tensor(keys))


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
    noise = KeyedSampler(make_processor(1.0), seed=4)
    law = torch.full((MANY, 16), 1 / 16, dtype=torch.float64)
    keys = torch.tensor([[0, i] for i in range(MANY)])
    drawn, drafted = noise.draw(law, keys), noise.drafting().draw(law, torch.tensor([[i, 3] for i in range(MANY)]))
    assert uniform_p(drafted) > FAIL_BELOW
    assert pair_p(drawn, drafted) > FAIL_BELOW
    heads = noise.coin(torch.full((MANY,), 0.5)).long()
    assert uniform_p(heads, 2) > FAIL_BELOW
    assert uniform_p(drawn * 2 + heads, 32) > FAIL_BELOW
    again = noise.drafting().draw(law, torch.tensor([[i, 3] for i in range(MANY)]))
    assert pair_p(drafted, again) > FAIL_BELOW  # the drafter's noise never repeats


@pytest.mark.parametrize("prob", [1e-4, 0.03, 0.5, 0.97])
def test_coins_fall_as_often_as_they_should(prob: float) -> None:
    noise = KeyedSampler(make_processor(1.0), seed=6)
    heads = sum(int(noise.coin(torch.full((1000,), prob)).sum()) for _ in range(200))
    spread = math.sqrt(200_000 * prob * (1 - prob))
    assert abs(heads - 200_000 * prob) < 5 * spread


def test_uniform_numbers_follow_the_uniform_law() -> None:
    """Kolmogorov-Smirnov on the numbers themselves, and none is 0 or 1."""
    from sampling.sampler import stream_key, uniforms

    keys = [stream_key(3, 1, row, position) for row in range(40) for position in range(50)]
    numbers = uniforms(keys, 50, torch.device("cpu")).flatten().sort().values
    size = len(numbers)
    steps = torch.arange(1, size + 1, dtype=torch.float64) / size
    distance = float(torch.maximum((steps - numbers).abs().max(), (numbers - steps + 1 / size).abs().max()))
    assert distance * math.sqrt(size) < 2.7  # p ≈ 1e-6
    assert float(numbers[0]) > 0
    assert float(numbers[-1]) < 1


@pytest.mark.parametrize("seed", [0, 42, -3, (1 << 64) - 1, 1 << 90])
def test_many_keys_are_mixed_as_each_alone(seed: int) -> None:
    """On both sides of where keys are no longer mixed one by one: the noise of a row knows no batch."""
    from sampling.sampler import _MANY, stream_key, stream_states

    keys = torch.tensor([[row, position] for row in (0, 1, 7, 1 << 40) for position in (0, 5, 8191, (1 << 62) + 1)])
    keys = torch.cat([keys, keys + 1])
    wanted = [stream_key(seed, 3, row, position) for row, position in keys.tolist()]
    for count in (_MANY - 1, _MANY, len(keys)):
        found = stream_states(seed, 3, keys[:count])
        assert [word % (1 << 64) for word in found.tolist()] == wanted[:count]


def test_improbable_tokens_are_drawn_as_often_as_they_should() -> None:
    """Float32 laws with a token of 1e-3: the race has no floor."""
    law = torch.tensor([0.6, 0.399, 0.001], dtype=torch.float32)
    noise = KeyedSampler(make_processor(1.0), seed=8)
    ids = noise.draw(law.expand(100_000, 3), torch.tensor([[i, 0] for i in range(100_000)]))
    counts = torch.bincount(ids, minlength=3)
    assert chi_square_p({i: int(n) for i, n in enumerate(counts)}, {0: 0.6, 1: 0.399, 2: 0.001}) > FAIL_BELOW


def test_a_token_without_mass_is_never_drawn() -> None:
    law = torch.zeros(20_000, 6)
    law[:, 2], law[:, 5] = 0.999_999, 1e-6
    ids = KeyedSampler(make_processor(1.0), seed=1).draw(law, torch.tensor([[i, 1] for i in range(20_000)]))
    assert set(ids.tolist()) <= {2, 5}


def test_events_of_the_same_seed_are_the_same_but_for_the_clock() -> None:
    from dataclasses import replace

    from sampling.events import Step

    def trace() -> list[Any]:
        events = decode(target(), PROMPTS, ModelDrafter(near_drafter()), sampler(11), length=LENGTH)
        timeless = {"calls": (), "draft_s": 0.0, "verify_s": 0.0, "sample_s": 0.0, "overhead_s": 0.0}
        return [replace(event, **timeless) if isinstance(event, Step) else event for event in events]

    first = [event for event in trace() if type(event).__name__ != "Prefill"]
    assert first == [event for event in trace() if type(event).__name__ != "Prefill"]
