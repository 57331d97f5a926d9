"""A target and a drafter of different size: the text has the target's whole law, and nothing of the caller's changes.

By taking every branch, by counting, and by identity with plain decoding, for every kind of drafter that has a model.
The sessions are the real ones; most networks are tables, so that many runs are cheap.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sampling.api
import sampling.models.cache
from app.lanes.lane import PairEngine as Lanes
from app.settings.table import Settings
from sampling import autoregressive_generate, cascade_generate, speculative_generate
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_heads.eagle import FeatureDrafter
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.cache import SlotCache
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import EncDecLM
from sampling.recorded import RecordedLM
from sampling.types import Drafter, KVCache, Rule
from tests.sampling.drafters.tables.test_lookup import tables_of
from tests.sampling.models.test_encoder_decoder import t5
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.runs import (
    answers,
    crossed,
    decode,
    emitted,
    enumeration_error,
    greedy,
    sample_counts,
    sampler,
    steps,
    tiers,
)
from tests.support.students import PrefixLM, make_student, make_target
from tests.support.tiny import tiny_model, tiny_tokenizer
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair
from utils.logits_processors import MultinomialProcessor

V = 8
SIZES = (6, 10)
PROMPT = [3, 7]  # ends with an id that the smaller drafter does not have
EXACT, FAIL_BELOW = 1e-9, 1e-6


class Table:
    """A :class:`sampling.types.Network` whose logits depend on the last token alone."""

    context, layers, takes_trees, ragged, reduced_ids = 1 << 20, 1, True, None, None
    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self.rows = 1.5 * torch.randn(
            (vocab_size, vocab_size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )

    def new_cache(self, rows: int) -> SlotCache:
        return SlotCache(self.layers)

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache, keep: int, hidden: bool = False
    ) -> tuple[Tensor, None]:
        assert isinstance(cache, SlotCache)
        nothing = torch.zeros(*ids.shape, 1)[:, None]
        cache.append(0, nothing, nothing)
        return self.rows[ids[:, ids.shape[1] - keep :]], None


class TableTarget(CausalLM):
    """A target as the proofs ask for it: a function of the prefix, too."""

    network: Table

    def logits(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        return self.network.rows[torch.tensor([context[-1] for context in contexts])]


def target(sure: bool = False) -> TableTarget:
    """Of 8 ids. `sure`: the first token is certain, so that forks are spent on rounds with drafts."""
    network = Table(V, 1)
    if sure:
        network.rows[PROMPT[-1]] = torch.where(torch.arange(V) == 6, 0.0, -torch.inf)
    return TableTarget(network)


def model(size: int, seed: int = 2) -> CausalLM:
    return CausalLM(Table(size, seed), f"of {size}")


def cascaded(size: int, lenience: float) -> Drafter:
    """One of the two models is smaller than the target, one larger."""
    return cascade_of([ModelDrafter(model(size)), ModelDrafter(model(16 - size, 3))], [[1, 1], [0, 1]], lenience)


TABLED: dict[str, Callable[[int], Drafter]] = {
    "model": lambda size: ModelDrafter(model(size)),
    "cascade": lambda size: cascaded(size, 1.0),
    "lenient cascade": lambda size: cascaded(size, 2.0),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize(("name", "size"), crossed(TABLED, SIZES))
@pytest.mark.parametrize(("length", "most"), [(3, 0), (4, 3)])
def test_the_target_keeps_its_law(name: str, size: int, drafts: str, length: int, most: int) -> None:
    shape = {"prompt": PROMPT, "gamma": 2, "drafts": drafts, "together": 128}
    assert (
        enumeration_error(target(True), lambda: TABLED[name](size), length=length, law=NaiveLaw(top_k=most), **shape)
        < EXACT
    )


@pytest.mark.parametrize("size", SIZES)
def test_blocks_too(size: int) -> None:
    shape = {"prompt": PROMPT, "gamma": 2, "length": 4, "law": NaiveLaw(top_k=3), "together": 128}
    assert enumeration_error(target(True), lambda: ModelDrafter(model(size), rule=Rule.BLOCK), **shape) < EXACT


class Cut(TableTarget):
    """The wrong code: only ids that the drafter has may be said."""

    def open(self, *given: Any, **more: Any) -> Any:
        session = super().open(*given, **more)
        session.cover(6, 6)
        return session


def test_a_cut_law_is_found() -> None:
    assert enumeration_error(Cut(Table(V, 1)), lambda: TABLED["model"](6), prompt=[3, 5], gamma=2, length=2) > 0.01


# -- the library's calls ----------------------------------------------------------------------------


def counted(size: int, samples: int) -> Counter[tuple[int, ...]]:
    small, large = Table(size, 2), Table(V, 1)
    warm = {"logits_processor": MultinomialProcessor(1.0), "max_gen_len": 3, "end_tokens_id": [], "gamma": 2}
    said = (speculative_generate(PROMPT, small, large, seed=seed, **warm)[0] for seed in range(samples))
    return Counter(tuple(ids[:2]) for ids in said)


@pytest.mark.parametrize("samples", tiers(300, 1_000))
@pytest.mark.parametrize("size", SIZES)
def test_the_call_has_the_targets_law(size: int, samples: int) -> None:
    assert chi_square_p(counted(size, samples), exact_law(target(), PROMPT, NaiveLaw(), 2)) > FAIL_BELOW


def test_counting_finds_a_call_that_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(lm: Any, drafters: Any, tokenizer: Any = None) -> None:
        lm.vocab_size = min(lm.vocab_size, drafters[0].lm.vocab_size)

    monkeypatch.setattr(sampling.api, "check_drafters", cut)
    monkeypatch.setattr(CausalLM, "check", lambda *given: None)
    assert chi_square_p(counted(6, 300), exact_law(target(), PROMPT, NaiveLaw(), 2)) < FAIL_BELOW


@pytest.mark.parametrize("size", SIZES)
def test_nothing_of_the_callers_is_changed(size: int) -> None:
    """Models as LMs, which keep their state from call to call; a second target with the same drafter."""
    lm, small, bigrams = target(), model(size), MaxGramDrafter(tables_of([1, 2, 3, 40]))
    warm: dict[str, Any] = {"logits_processor": MultinomialProcessor(1.5), "max_gen_len": 40, "end_tokens_id": []}
    before = autoregressive_generate(PROMPT, lm, **warm)
    alone = autoregressive_generate([3, 5], small, **warm)
    assert max(before) == V - 1
    drafter = ModelDrafter(small)
    for coupling in ("rejection", "gumbel"):
        coupled = speculative_generate(PROMPT, drafter, lm, coupling=coupling, **warm)[0]
        cascade = cascade_generate(PROMPT, [drafter, bigrams], lm, [[2, 2], [0, 2]], coupling=coupling, **warm)[0]
        assert max(coupled) == max(cascade) == V - 1
        if coupling == "gumbel":
            assert coupled == cascade == before
    other = TableTarget(Table(9, 4))
    assert speculative_generate(PROMPT, drafter, other, coupling="gumbel", **warm)[0] == autoregressive_generate(
        PROMPT, other, **warm
    )
    assert (lm.vocab_size, small.vocab_size) == (V, size)
    assert autoregressive_generate(PROMPT, lm, **warm) == before
    assert autoregressive_generate([3, 5], small, **warm) == alone


# -- every kind of drafter ----------------------------------------------------------------------------


LARGE = make_target(V, seed=10)


def drafting(kind: str, size: int, **more: Any) -> ModelDrafter:
    student = make_student(kind, LARGE, vocab_size=size, **more)
    if kind == "feature":
        return FeatureDrafter(student)
    return ModelDrafter(GlideLM(student, 3) if kind == "glide" else CausalLM(StudentNetwork(student), kind))


KINDS: dict[str, Callable[[int], Drafter]] = {
    "model": lambda size: ModelDrafter(CausalLM(make_target(size, seed=11), "drafter")),
    "plain": lambda size: drafting("plain", size),
    "glide": lambda size: drafting("glide", size),
    "feature": lambda size: drafting("feature", size),
    "feature, short list": lambda size: drafting("feature", size, short=[0, 2, 3, 5]),
    "feature tree": lambda size: Proposer([ModelSource(drafting("feature", size).lm)], tree=True, nodes=6),
    "joint tree": lambda size: LookupDrafter(model=ModelSource(drafting("glide", size).lm), tree=True),
    "glide reviews": lambda size: cascade_of([drafting("glide", size), drafting("plain", 16 - size)], [[1, 2], [0, 2]]),
}


@pytest.mark.parametrize(("kind", "size"), crossed(KINDS, SIZES))
def test_every_kind_says_what_plain_decoding_says(kind: str, size: int) -> None:
    """Greedy and with shared noise, one row and several; ids that one of the two lacks are never drafted."""
    lm, drafter = CausalLM(LARGE), KINDS[kind](size)
    prompts = [[1, 7, 3], [6, 7]]
    for drawing in (greedy(), sampler(1.5, 3, coupling="gumbel")):
        for rows in (prompts[:1], prompts):
            events = decode(lm, rows, drafter, drawing, length=20)
            assert emitted(events, len(rows)) == answers(lm, rows, NoDrafter(), drawing, length=20)
            drafted = {token for row in range(len(rows)) for step in steps(events, row) for token in step.drafted}
            assert drafted
            assert max(drafted) < (V if kind in ("joint tree", "glide reviews") else min(size, V))


@pytest.mark.parametrize(("kind", "size"), crossed(["glide", "feature", "glide reviews"], SIZES))
def test_every_kind_keeps_the_law(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.models.cache, "GROW", 8)
    counts = sample_counts(
        CausalLM(LARGE),  # type: ignore[arg-type]
        lambda: KINDS[kind](size),
        lambda seed: sampler(1.0, seed=500 + seed),
        prompt=PROMPT,
        samples=5_000,
        batch=2_500,
        length=4,
        gamma=3,
    )
    assert chi_square_p(counts, exact_law(PrefixLM(LARGE), PROMPT, NaiveLaw(), 3)) > FAIL_BELOW


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("drawing", [greedy(), sampler(1.5, 3, coupling="gumbel")])
def test_encoders_read_what_only_the_target_knows(size: int, drawing: Any) -> None:
    lm, drafter = EncDecLM(t5(1, V)), ModelDrafter(EncDecLM(t5(2, size), "drafter"))
    prompts = [[1, 7, 3, 6], [6, 7]]
    assert answers(lm, prompts, drafter, drawing, length=20) == answers(lm, prompts, None, drawing, length=20)


def test_drafters_without_a_model_know_the_targets_ids_too() -> None:
    """Tables and random fills of a larger vocabulary, alone, in a tree and before drafts that have laws."""
    lm, wide = target(), tables_of(*[[token, 9, 10] for token in range(V)])
    ways: list[Drafter] = [
        LookupDrafter(wide),
        LookupDrafter(wide, tree=True),
        NgramDrafter(500, stop_if_unknown=False),
        chain_of([MaxGramDrafter(wide), ModelDrafter(model(6))], [2, 2]),
    ]
    for drafter in ways:
        assert len(answers(lm, [PROMPT], drafter, sampler(1.2, seed=4), length=30)[0]) == 30


def test_a_recording_has_ids_that_its_drafter_lacks() -> None:
    recorded = RecordedLM({tuple(PROMPT): [6, 2, 7, 1]}, end_id=0)
    assert speculative_generate(PROMPT, Table(6, 2), recorded)[0] == [6, 2, 7, 1, 0]
    small = RecordedLM({tuple(PROMPT): [6, 2, 11, 1]}, end_id=0)  # in the drafter's place: what it says is drafted
    large = RecordedLM({tuple(PROMPT): [6, 2, 7, 1]}, end_id=0)
    assert speculative_generate(PROMPT, small, large, max_gen_len=4)[0] == [6, 2, 7, 1]


# -- padded vocabularies of one tokenizer -------------------------------------------------------------


def test_ids_without_a_token_are_never_said_with_or_without_a_drafter(tmp_path: Path) -> None:
    """300 tokens, a target of 304 ids that likes its padding best, drafters of 310 and of 290."""
    names = {"target": 304, "large": 310, "small": 290}
    for seed, (name, size) in enumerate(names.items()):
        made = tiny_model(seed)
        made.resize_token_embeddings(size, mean_resizing=False)
        made.lm_head.weight.data[300:] = 5 * made.lm_head.weight.data[7]
        made.generation_config.eos_token_id = None
        made.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    spec = {name: spec_from_argument(str(tmp_path / name)) for name in names}
    said = {}
    for drafter in ("none", spec["large"], spec["small"]):
        pair = load_pair(PairSpec(name="x", target=spec["target"], drafter=drafter), LoadOptions(device="cpu"))
        assert pair.vocab_size == 300
        engine = Lanes(pair)
        for temperature in (0.0, 2.0):
            chosen = Settings(temperature=temperature, coupling="gumbel", max_new_tokens=60)
            for lane in ("ar", "spec"):
                ids = emitted(engine.lane(lane, chosen).run([5, 299, 7]))[0]
                assert said.setdefault(temperature, ids) == ids
    assert all(0 <= token < 300 for ids in said.values() for token in ids)
    bare = autoregressive_generate([5, 299, 7], pair.target.model, max_gen_len=60, end_tokens_id=[])
    assert max(bare) >= 300, "the library masks nothing that it was not asked to"
