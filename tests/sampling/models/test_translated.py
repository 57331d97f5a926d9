"""Drafters with another vocabulary: their context spells the target's text, which keeps the target's distribution.

The tokenizers are trained here, on different text: byte-level BPE and unigram.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import sampling.models.translated as translated
from app.lanes.lane import PairEngine
from app.settings.table import Settings
from sampling.drafters.cascade import cascade_of
from sampling.drafters.draft_model import ModelDrafter, Respelled
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.proposal import Proposer
from sampling.models.causal import CausalLM
from sampling.models.translated import Spelling, TranslatedLM, Translation
from sampling.types import Drafter, Rule
from tests.sampling.drafters.test_vocabularies import Table, TableTarget
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import emitted, enumeration_error
from tests.support.students import PrefixLM
from tests.support.tiny import tiny_model
from utils.catalogue.specs import PairSpec, spec_from_argument
from utils.loading.fit import SAMPLE, TokenBytes
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

STORY = "the cat sat on the mat and the hat sat on the cat, that is that: the end of the tale of a cat in a hat. "
RECIPE = "take the salt and the oats, heat the oats in a pan; that is the meal at an inn, then eat. naïve café 12 24 "
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


@cache
def byte_level(size: int = 300) -> PreTrainedTokenizerFast:
    """Of `size` ids, all bytes among them; id 0 ends a text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|im_end|>", "<|im_start|>"], show_progress=False
    )
    inner.train_from_iterator([STORY] * 4, train)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", chat_template=CHAT)


@cache
def unigram(size: int = 60, prefix: str = "always") -> PreTrainedTokenizerFast:
    """About `size` pieces and a token for every byte; texts begin with <s> and with a space."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    special = ["<unk>", "<s>", "</s>"]
    train = trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([RECIPE] * 4, train)
    pieces = [(token, inner.id_to_token(token)) for token in range(inner.get_vocab_size())]
    scored = [(piece, -float(token) / 10) for token, piece in pieces] + [(f"<0x{b:02X}>", -50.0) for b in range(256)]
    whole = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    whole.add_special_tokens(special)
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


EXACT, FAIL_BELOW = 1e-9, 1e-6
BYTES = {"bytes": TokenBytes(byte_level()), "pieces": TokenBytes(unigram()), "bare": TokenBytes(unigram(60, "never"))}


def between(target: str, drafter: str, sample: bytes = SAMPLE) -> Translation:
    sizes = len(byte_level()) + 10, len(unigram()) + 10
    return Translation.of(BYTES[target], BYTES[drafter], (max(sizes), max(sizes)), sample)


def text_of(by: Translation, row: list[int]) -> bytes:
    """What the drafter's ids of a row must spell: special tokens that both have are the drafter's own."""
    bos = row[:1] and (by.mates.get(row[0]),) == by.drafter.begin
    begin = b"".join(map(by.drafter.spelled, by.drafter.begin)) + by.drafter.lead
    said = [by.drafter.spelled(by.mates[one]) if one in by.mates else by.target.spelled(one) for one in row]
    return begin + b"".join(said[1:] if bos else said)


Edit = tuple[int, str | bytes | list[int]]  # how much of the row is taken back, and what comes instead


@pytest.mark.parametrize("way", [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "bare"), ("bare", "pieces")])
@settings(max_examples=40, deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.one_of(st.text(max_size=40), st.binary(max_size=12), st.lists(st.integers(0, 286), max_size=12)),
        ),
        max_size=6,
    )
)
@example(edits=[(0, "that is the cat in the hat, naïve café ☕ and <|im_end|> </s> as text " * 4), (3, b"\xe2\x98")])
@example(edits=[(0, "x" * 300 + "é" * 200), (1, " y"), (40, "é"), (0, [0, 1, 2, 0])])
@example(edits=[(0, "a b" * 20), (30, " "), (0, "\n\n  z")])
def test_the_drafters_context_always_spells_the_targets_text(way: tuple[str, str], edits: list[Edit]) -> None:
    by = between(*way, sample=b"")
    spelling, row = Spelling(by), list[int]()
    for back, more in edits:
        row = row[: max(0, len(row) - back)]
        if isinstance(more, list):
            row += more
        else:
            row += by.target.ids(more.encode() if isinstance(more, str) else more)
        own = spelling.of(row)
        if b"".join(map(by.target.spelled, row)) or by.drafter.begin:
            assert b"".join(map(by.drafter.spelled, own)) == text_of(by, row)
        assert own == Spelling(by).of(row), "the ids hang on the row alone"
        assert spelling.covered(len(own)) <= len(row)
        assert spelling.covered(0) == 0 or not own


@pytest.mark.parametrize("name", BYTES)
@given(text=st.one_of(st.text(), st.binary()))
@settings(max_examples=60, deadline=None)
def test_ids_spell_any_bytes(name: str, text: str | bytes) -> None:
    told = text.encode() if isinstance(text, str) else text
    ids = BYTES[name].ids(told)
    assert b"".join(map(BYTES[name].spelled, ids)) == told
    assert not {*ids} & {*BYTES[name].special.values()}, "text names no special token"


def test_a_text_is_cut_as_its_own_tokenizer_cuts_it() -> None:
    for name, tokenizer in (("bytes", byte_level()), ("pieces", unigram())):
        text = "take the salt and the oats, heat the cat in a hat; that is the end of the tale. " * 3
        by = Translation.of(BYTES["bytes"], BYTES[name], (1000, 1000))
        assert Spelling(by).of(BYTES["bytes"].ids(text.encode())) == tokenizer(text).input_ids


def test_special_tokens_map_by_name_or_role() -> None:
    assert Translation.of(BYTES["bytes"], BYTES["bytes"], (1000, 1000)).mates == {0: 0, 1: 1}
    assert between("bytes", "pieces").mates == {0: 2}  # what ends a text ends it in either
    assert between("pieces", "bytes").mates == {2: 0}
    told = Spelling(between("bytes", "pieces")).of([1, *BYTES["bytes"].ids(b"cat"), 0])
    assert told[0] == 1
    assert told[-1] == 2
    assert b"".join(map(BYTES["pieces"].spelled, told[1:-1])) == b" <|im_start|>cat"


# -- the target's distribution --------------------------------------------------------------------

SIZE = len(byte_level())
PROMPT = BYTES["bytes"].ids(b"the cat in")


def drafter_of(kind: str) -> Drafter:
    """One that thinks much as the target does, in other tokens."""
    network, by = Table(len(unigram()), 2), between("bytes", "pieces")
    network.rows[by.theirs[:, None], by.theirs] += 2 * Table(SIZE, 1).rows[by.ours[:, None], by.ours]
    lm = TranslatedLM(CausalLM(network, "drafter"), by, SIZE)
    if kind == "text":
        return Proposer([Respelled(lm)], least=0.0)
    if kind == "cascade":
        return cascade_of([ModelDrafter(CausalLM(Table(SIZE, 3), "small")), ModelDrafter(lm)], [[1, 1], [0, 1]])
    return ModelDrafter(lm, rule=Rule.BLOCK if kind == "block" else Rule.DRAWN)


@pytest.mark.parametrize("kind", ["tokens", "block", "text", "cascade"])
def test_two_tokens_have_the_targets_law(kind: str) -> None:
    """Every branch of an opening token and three behind it, two of them drafted; of each law the two likeliest."""
    options: dict[str, Any] = {"prompt": PROMPT, "length": 4, "gamma": 2, "law": NaiveLaw(top_k=2), "together": 128}
    assert enumeration_error(TableTarget(Table(SIZE, 1)), lambda: drafter_of(kind), **options) < EXACT


def test_a_draft_that_names_another_distribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any distribution will do, whatever a translation loses; but it must be the one that was drawn from."""
    target, whole = TableTarget(Table(SIZE, 1)), translated.TranslatedSession.score_reduced

    def tilted(self: Any, rows: Any, draft: Any) -> Any:
        return whole(self, rows, draft).roll(1, dims=-1)

    options: dict[str, Any] = {"prompt": PROMPT, "length": 3, "gamma": 1, "law": NaiveLaw(top_k=3), "together": 128}
    monkeypatch.setattr(translated.TranslatedSession, "score_reduced", tilted)
    assert enumeration_error(target, lambda: drafter_of("tokens"), **options) < EXACT
    monkeypatch.undo()
    propose = ModelDrafter.propose

    def misnamed(*given: Any) -> Any:
        draft = propose(*given)
        return draft if draft.probs is None else translated.replace(draft, probs=0.5 * draft.probs + 0.5 / SIZE)

    monkeypatch.setattr(ModelDrafter, "propose", misnamed)
    assert enumeration_error(target, lambda: drafter_of("tokens"), **options) > 0.001


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of byte-level tokens and a drafter of pieces with half its context, which resembles it."""
    folder, by, weights = tmp_path_factory.mktemp("pair"), between("bytes", "pieces"), dict[str, Any]()
    for name, tokenizer, stop, context in (("target", byte_level(), 0, 512), ("drafter", unigram(), 2, 256)):
        made = tiny_model(0, vocab_size=len(tokenizer), context=context, eos_token_id=stop, bos_token_id=None)
        made.lm_head.weight.data[stop] = 0.0
        made.generation_config.eos_token_id = stop
        for part, weight in made.named_parameters():
            if name == "drafter" and part in ("model.embed_tokens.weight", "lm_head.weight"):
                weight.data[by.theirs] = weights[part][by.ours]
            elif name == "drafter":
                weight.data[:] = weights[part]
            weights[part] = weight.data
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def engine(pair: Path) -> PairEngine:
    specs = (spec_from_argument(str(pair / name)) for name in ("target", "drafter"))
    loaded = load_pair(PairSpec(name="x", target=next(specs), drafter=next(specs)), LoadOptions(device="cpu"))
    assert loaded.context == 512
    return PairEngine(loaded)


def choose(engine: PairEngine, by_text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pair draft in one of the two ways."""
    monkeypatch.setattr(translated, "LEAST", 2.0 if by_text else 0.0)
    engine.forget()


@pytest.mark.parametrize("by_text", [False, True])
def test_the_lane_keeps_the_law(engine: PairEngine, by_text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(engine, by_text, monkeypatch)
    found, accepted = Counter[tuple[int, ...]](), 0
    for seed in range(2):
        chosen = Settings(temperature=1.0, top_k=3, max_new_tokens=4, gamma=3, seed=seed)
        events = list(engine.lane("spec", chosen).run_rows([PROMPT] * 500))
        accepted += sum(len(getattr(event, "path", ())) for event in events)
        found.update(tuple(row[1:3]) for row in emitted(events, 500) if len(row) > 2)
    assert accepted > 300
    drafter: Any = engine.lane("spec", chosen).drafter
    assert isinstance(drafter.model, Respelled) == by_text
    law = exact_law(PrefixLM(engine.loaded.target.model), PROMPT, NaiveLaw(top_k=3), 3)
    behind: Counter[tuple[int, ...]] = Counter()
    for said, prob in law.items():
        if len(said) > 2:
            behind[said[1:3]] += prob  # type: ignore[assignment]
    whole = sum(behind.values())
    assert chi_square_p(found, {said: prob / whole for said, prob in behind.items()}) > FAIL_BELOW


@pytest.mark.parametrize("by_text", [False, True])
def test_greedy_drafts_say_what_plain_decoding_says(
    engine: PairEngine, by_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150 rows of noise of their own, prompts of different length."""
    choose(engine, by_text, monkeypatch)
    prompts = [PROMPT[: 1 + place % len(PROMPT)] for place in range(150)]
    chosen = Settings(temperature=0.7, draft_sampling="greedy", max_new_tokens=10, gamma=3)
    events = list(engine.lane("spec", chosen).run_rows(prompts))
    assert sum(len(getattr(event, "drafted", ())) for event in events) > 1_000
    assert emitted(events, 150) == emitted(engine.lane("ar", chosen).run_rows(prompts), 150)


def test_a_text_longer_than_the_drafters_context_goes_on(engine: PairEngine) -> None:
    chosen = Settings(temperature=0.7, coupling="gumbel", max_new_tokens=40, gamma=3)
    row = BYTES["bytes"].ids(SAMPLE[:600])[:440]
    said = list(engine.lane("spec", chosen).run(row))
    assert any(getattr(event, "drafted", ()) for event in said)
    assert emitted(said) == emitted(engine.lane("ar", chosen).run(row))
    assert emitted(engine.lane("draft", chosen).run(row))[0]


def test_a_model_of_other_tokens_reviews_nothing() -> None:
    lm = TranslatedLM(CausalLM(Table(len(unigram()), 2), "drafter"), between("bytes", "pieces"), SIZE)
    for member in (ModelDrafter(lm), lm):
        refused(cascade_of, [member, MaxGramDrafter()], [[1, 1], [0, 1]], match="drafter cannot review drafts")


# -- what a user sees -----------------------------------------------------------------------------


def test_nothing_shared_is_refused(pair: Path, tmp_path: Path) -> None:
    strange = Tokenizer(models.WordLevel({f"☃{place}" * 9: place for place in range(287)}, unk_token="☃0" * 9))
    tiny_model(0, vocab_size=287).save_pretrained(tmp_path / "strange")
    PreTrainedTokenizerFast(tokenizer_object=strange).save_pretrained(tmp_path / "strange")
    specs = [spec_from_argument(str(folder)) for folder in (pair / "target", tmp_path / "strange")]
    refused(
        load_pair,
        PairSpec(name="x", target=specs[0], drafter=specs[1]),
        LoadOptions(device="cpu"),
        match="strange cannot draft for target: the vocabularies of target and strange diff",
    )


def test_the_share_decides_how_it_drafts() -> None:
    by = between("bytes", "pieces")
    assert by.own >= translated.LEAST
    assert not by.by_text
    assert translated.replace(by, own=0.5).by_text
    assert torch.equal(by.ours, by.ours.sort().values)
