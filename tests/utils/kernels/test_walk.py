"""The walk over a position's logits, which finds the few ids that may win the draw: it draws, judges and reports what
the sampler and whole distributions do, or leaves the draw to them."""

import math

import numpy as np
import pytest
import torch

from sampling import sampler as drawing
from sampling.drafters.tables.lookup import likeliest_tokens
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Rule, Verdict
from sampling.verify import distributions
from sampling.verify.round_metrics import facts_on
from sampling.verify.rules import verify
from tests.support.quantized import keep_code, needs_kernels
from utils.logits_processors import LogitsProcessor

pytestmark = needs_kernels

keep_code()


@pytest.mark.parametrize("shape", ["peaked", "flat", "certain", "two"])
def test_the_compiled_walk_draws_what_the_whole_race_draws(shape: str) -> None:
    size, source = 5000, torch.Generator().manual_seed(2)
    scale = {"peaked": 4.0, "flat": 0.1, "certain": 0.0, "two": 0.0}[shape]
    probs = (scale * torch.randn(40, size, generator=source)).softmax(dim=-1)
    if shape in ("certain", "two"):
        probs = torch.zeros(40, size)
        probs[:, 7], probs[:, 4999] = (1.0, 0.0) if shape == "certain" else (0.5, 0.5)
    sampler, keys = KeyedSampler(LogitsProcessor(0.7), seed=5), torch.tensor([[0, place] for place in range(40)])
    found = sampler.draw(probs, keys)
    noise = drawing.uniforms([drawing.stream_key(5, 1, *key) for key in keys.tolist()], size, probs.device).float()
    assert torch.equal(found, (probs / -torch.log1p(-noise)).argmax(dim=-1))
    assert len(set(found.tolist())) > {"certain": 0, "two": 1}.get(shape, 10)


def test_two_that_are_too_near_each_other_are_left_to_the_sampler() -> None:
    from utils.kernels import bindings as walks

    logits = torch.full((4112,), -50.0)
    noise = -torch.log1p(-drawing.uniforms([drawing.stream_key(5, 1, 0, 0)], 4112, torch.device("cpu"))[0])
    for off, decided in ((1e-3, True), (1e-6, False)):
        logits[7], logits[9] = 0.0, float((noise[9] / noise[7]).log()) + off  # p / E of both alike but for this
        drawn = walks.walk(logits.data_ptr(), len(logits), 2, drawing.stream_key(5, 1, 0, 0), 1.0).drawn
        assert drawn == (9 if decided else -1)


def test_the_walk_and_the_sampler_agree_on_a_uniform_number_next_to_one() -> None:
    sampler, logits = KeyedSampler(LogitsProcessor(1.0), seed=5), torch.full((1, 4112), -50.0)
    u = drawing.uniforms([drawing.stream_key(5, 1, 0, 5007)], 4112, torch.device("cpu"))[0]
    assert 1 - 2**-24 < u[603] < 1, "this place was looked for"
    # Its E is 24 ln 2 in 32 bits, which gives this id less than the other has; 23 ln 2 would give it more.
    logits[0, 603], logits[0, 7] = 0.0, float((-torch.log1p(-u[7]) / (23.5 * math.log(2))).log())
    walked = verify(logits[None], Draft.empty(1), [[1]], [(0, 5007)], sampler, Rule.POINT).token
    assert walked == sampler.draw(sampler.probs(logits, []), torch.tensor([[0, 5007]])).tolist() == [7]


FILTERS: list[dict[str, float]] = [
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("numbers", [{"temperature": 0.0}, {"temperature": 0.7}, *FILTERS], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_walk_judges_and_tells_is_what_whole_distributions_do(
    rows: int, numbers: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 4 * torch.randn(rows, 6, 4112, generator=torch.Generator().manual_seed(4))
    sampler = KeyedSampler(LogitsProcessor(**numbers), seed=3)  # type: ignore[arg-type]
    keys = [(row, 7) for row in range(rows)]
    drawn = [int(sampler.draw(sampler.probs(logits[row, :1], []), torch.tensor([[row, 7]]))) for row in range(rows)]
    draft = Draft.of([[drawn[row], 11, 12, 13, drawn[0]] for row in range(rows)], parents=[-1, -1, 0, 0, 1])

    gaps: dict[int, list[list[float]]] = {}

    def judged() -> tuple[Verdict, list[list[float]]]:
        """The verdict, and of each row the probabilities of its drafts where it stood; its gaps go to `gaps`."""
        found, told = verify(logits, draft, [[1]] * rows, keys, sampler, Rule.POINT), list[list[float]]()
        for row, tokens in enumerate(draft.tokens):
            facts = facts_on(found, row, [-1, *found.path[row]])
            told.append([p for each in facts for p in map(each.p, tokens)])
            gaps.setdefault(row, []).append([each.gap for each in facts])
        return found, told

    (quick, told), nodes = judged(), [-1, 0]
    assert quick.distributions.facts(0, -1) is not None, "without a walk facts are not cheap"
    near = likeliest_tokens(quick, [-1, 0])
    monkeypatch.setattr(distributions, "at_hand", lambda: False)
    (whole, said) = judged()
    assert whole.distributions.facts(0, -1) is None
    assert (quick.path, quick.token) == (whole.path, whole.token)
    assert any(map(len, quick.path))
    for row in range(rows):
        assert told[row] == pytest.approx(said[row], rel=1e-4)
        assert gaps[row][0] == pytest.approx(gaps[row][1], rel=1e-5)
    likely = whole.distributions.at([0, 0], nodes).topk(4)
    for found, ids, chances in zip(near, likely.indices.tolist(), likely.values.tolist(), strict=True):
        count = len(found) if not sampler.greedy else 1
        assert [one for one, _ in found] == ids[:count]
        assert [p for _, p in found] == pytest.approx(chances[:count], rel=1e-4)


@pytest.mark.parametrize(
    "numbers", [*FILTERS, {"top_p": 0.5}, {"top_p": 1e-300}, {"top_k": 4500, "top_p": 0.3}], ids=str
)
@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "two"])
def test_a_walk_draws_what_filters_leave(shape: str, numbers: dict[str, float]) -> None:
    sampler = KeyedSampler(LogitsProcessor(0.8, **numbers), seed=5)  # type: ignore[arg-type]
    logits = {"flat": 0.5, "two": 0.0}.get(shape, 4.0) * torch.randn(
        60, 1, 5008, generator=torch.Generator().manual_seed(6)
    )
    logits = logits.round() if shape == "tied" else logits
    if shape == "two":  # of which rounding leaves one or both
        logits[:, :, [7, 4999]] = 30.0
    known = 0
    for position, each in enumerate(logits):
        found = verify(each[None], Draft.empty(1), [[1]], [(0, position)], sampler, Rule.POINT)
        probs = sampler.probs(each, [])
        assert found.token == sampler.draw(probs, torch.tensor([[0, position]])).tolist()
        facts = found.distributions.facts(0, -1)
        assert facts is not None
        known += bool(facts.likeliest)
        for token, p in facts.likeliest:
            assert p == pytest.approx(float(probs[0, token]), rel=1e-4)
    if shape == "peaked" and numbers.get("top_k", 0) < 4096 and numbers.get("top_p", 1) > 0.1:
        assert known == len(logits), "left to the sampler"


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_walk_over_what_is_no_number_has_no_mass(broken: float) -> None:
    from utils.kernels.bindings import walk

    logits = torch.randn(4096)
    logits[17] = broken
    assert np.isnan(walk(logits.data_ptr(), 4096, 4).mass)
    nothing = torch.full((4096,), -torch.inf)
    assert np.isnan(walk(nothing.data_ptr(), 4096, 4, 3, 0.7).mass)
    nothing[9] = 1.0
    assert walk(nothing.data_ptr(), 4096, 4, 3, 0.7).drawn == 9


def test_the_walk_divides_by_the_samplers_own_stream() -> None:
    from utils.kernels.bindings import over_noise

    probs = torch.rand(5000, generator=torch.Generator().manual_seed(3))
    for state in (5, -5, (1 << 63) - 1):
        noise = drawing.uniforms([state], len(probs), probs.device)[0].float()
        assert np.array_equal(over_noise(state, probs), (probs / noise).numpy())
