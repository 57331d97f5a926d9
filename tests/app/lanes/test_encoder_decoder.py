"""A random T5 pair through everything a user runs: loading from a catalogue, lanes, the console, `run`, beams."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from app.command_line.run import run_once
from app.lanes.lane import PairEngine, make_sampler
from app.lanes.pairing import catalogue_in, with_drafter
from app.settings.table import ModelOptions, Settings
from sampling import beam_search_generate
from sampling.drafters.draft_model import ModelDrafter
from tests.sampling.models.test_encoder_decoder import END, Oracle, t5
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import emitted, sample_counts
from tests.support.scripted import Ran, run_lines
from tests.support.students import close
from tests.support.tiny import tiny_model
from utils.errors import UsageError
from utils.kernels.quantized_linear import PackedWeight, pack, unpacked_copy
from utils.loading.build import hide_weights
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_drafter, load_pair

CPU = LoadOptions(device="cpu")
ASKED = [7, 40, 412, 999, *range(23, 1000, 122)]


TOKENS = ["<pad>", "</s>", "<unk>", *"0123456789", *"abcdefghijklmnopq"]


class SavedPair(NamedTuple):
    """Two models and the catalogue of their pairs: `numbers`, with a drafter model, and `cascaded`."""

    target: Any
    drafter: Any
    catalogue: Path


def tokenizer() -> PreTrainedTokenizerFast:
    """Digits one by one, words whole; the end is put behind every prompt, as T5's does."""
    inner = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")


def question(number: int) -> list[int]:
    """The encoder's ids: digits, then the end."""
    return [*map(TOKENS.index, str(number)), END]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> SavedPair:
    folder, target = tmp_path_factory.mktemp("numbers"), t5(29, len(TOKENS), 1.0, num_layers=2)
    made = SavedPair(target, t5(7, len(TOKENS), like=target, noise=0.05, num_layers=2), folder / "models.yaml")
    for name, model in (("target", made.target), ("drafter", made.drafter)):
        model.float().save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    made.catalogue.write_text(
        "default: numbers\npairs:\n"
        "  numbers: {target: ./target, drafter: ./drafter, arch: seq2seq}\n"
        "  cascaded: {target: ./target, cascade: [./drafter, maxgram], arch: seq2seq, method: cascade,\n"
        "             k_matrix: [[3, 4], [0, 3]], lenience: 2}\n"
    )
    return made


@pytest.fixture(scope="module")
def engines(pair: SavedPair) -> dict[str, PairEngine]:
    return {name: PairEngine(load_pair(spec, CPU)) for name, spec in catalogue_in(pair.catalogue).pairs.items()}


@pytest.fixture(scope="module")
def texts(pair: SavedPair) -> dict[int, list[int]]:
    """What transformers' own `generate` says of each number."""
    return {number: generated(pair.target, number) for number in ASKED}


def generated(model: Any, number: int, length: int = 12) -> list[int]:
    found: list[int] = model.generate(torch.tensor([question(number)]), do_sample=False, max_new_tokens=length)[
        0
    ].tolist()
    return found[1:]


def test_run_tells_every_figure_as_json(
    pair: SavedPair, texts: dict[int, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ModelOptions(models=str(pair.catalogue), device="cpu")
    assert run_once(Settings(max_new_tokens=12, quiet=True), options, "412", as_json=True) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["method"] for result in results] == ["ar", "spec"]
    assert all(result["ids"] == texts[412] for result in results)
    assert all(result["prompt_n"] == len(question(412)) for result in results)


def test_some_answers_end_and_the_drafter_says_something_else(pair: SavedPair, texts: dict[int, list[int]]) -> None:
    ends = [END in text for text in texts.values()]
    assert 1 < sum(ends) < len(ends)
    assert 1 < sum(generated(pair.drafter, number) == text for number, text in texts.items()) < len(ends)


@pytest.mark.parametrize("name", ["ar", "spec", "draft", "ngram", "match", "maxgram", "tables", "cascade", "chain"])
def test_every_lane_says_what_transformers_says(
    engines: dict[str, PairEngine], pair: SavedPair, texts: dict[int, list[int]], name: str
) -> None:
    engine = engines["cascaded" if name in ("cascade", "chain") else "numbers"]
    for number in ASKED if name != "draft" else ASKED[:3]:
        lane = engine.lane(name, Settings(max_new_tokens=12))
        wanted = texts[number] if name != "draft" else generated(pair.drafter, number)
        assert emitted(lane.run(question(number))) == [wanted], number


def test_sampled_answers_have_the_targets_law(engines: dict[str, PairEngine], pair: SavedPair) -> None:
    engine, law = engines["numbers"], NaiveLaw(temperature=2.5, top_k=3)
    settings = Settings(temperature=2.5, top_k=3)
    exact = exact_law(Oracle(pair.target, question(412)), [0], law, 4, [END])
    found = sample_counts(
        engine.target,  # type: ignore[arg-type]
        lambda: ModelDrafter(engine.drafters.model),
        lambda seed: make_sampler(settings.changed(seed=seed)),
        prompt=question(412),
        samples=5_000,
        batch=500,
        first=4,
        length=4,
        gamma=3,
        stop=[END],
    )
    assert len(found) > 10
    assert chi_square_p(found, exact) > 1e-6


# -- the console ----------------------------------------------------------------------------------


def console(pair: SavedPair, *lines: Any, **settings: Any) -> Ran:
    return run_lines(pair.catalogue, *lines, settings={"max_new_tokens": 12, **settings})


def test_a_conversation_of_messages_that_stand_alone(pair: SavedPair, texts: dict[int, list[int]]) -> None:
    ran = console(pair, "412", "7", "/regen", "/info", "/stats", "/trace", "/undo", "/system be kind", "/exit")
    assert ran.code == 0
    assert "error:" not in ran.text
    assert ran.text.count("it reads each message by itself, no history") == 1
    turns = ran.state.chat.turns
    assert [(turn.user, list(turn.prompt)) for turn in turns] == [("412", question(412))]
    said = {number: tokenizer().decode(texts[number], skip_special_tokens=True) for number in (412, 7)}
    assert turns[0].text == said[412]
    assert "same output" in ran.after("412")
    assert said[412] in ran.after("412")
    assert ran.after("7").startswith(said[7])
    assert "prompts  each message by itself, as it is (the encoder reads it)" in ran.after("/info")
    assert "tokens used, no fixed limit" in ran.after("/info")
    assert "round" in ran.after("/trace")


def test_an_answer_that_was_cut_goes_on(pair: SavedPair) -> None:
    ran = console(pair, "777", "/continue", "/continue", "/set compare=ar,draft", "777", "/continue", max_new_tokens=2)
    assert "error:" not in ran.text
    first, second = ran.state.chat.turns
    assert list(first.prompt) == question(777)
    assert list(first.answer) == generated(pair.target, 777, 6)
    assert list(second.prompt) == question(777)
    assert len(second.answer) == 4


def test_lanes_that_need_another_kind_of_target_say_so(engines: dict[str, PairEngine], pair: SavedPair) -> None:
    for kind in ("glide", "feature", "plain"):
        refused(
            engines["numbers"].lane,
            kind,
            Settings(),
            match=f"^lane {kind}: target is an encoder-decoder model, which has no trained dr",
            kind=UsageError,
        )
    assert "error: lane glide: target is an encoder-decoder model" in console(pair, "/compare ar,glide", "5").after("5")


# -- loading --------------------------------------------------------------------------------------


def test_models_of_two_kinds_do_not_fit(pair: SavedPair, tmp_path: Path) -> None:
    loaded = load_pair(catalogue_in(pair.catalogue).pairs["numbers"], CPU)
    tiny_model(context=64).save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    refused(
        load_drafter,
        loaded,
        with_drafter(loaded.spec, str(tmp_path / "llama")),
        CPU,
        match=r"^llama cannot draft for target: target is an encoder-decoder model, llama is none$",
    )
    file = tmp_path / "models.yaml"
    file.write_text("pairs: {odd: {target: ./llama, arch: seq2seq, drafter: none}}")
    refused(
        load_pair,
        catalogue_in(file).pairs["odd"],
        CPU,
        match=r"^pair 'odd' says arch: seq2seq, but llama is no encoder-decoder model$",
    )


def test_packing_leaves_the_numbers_and_never_unpacks(pair: SavedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = T5ForConditionalGeneration.from_pretrained(pair.catalogue.parent / "target").eval()
    packed = T5ForConditionalGeneration.from_pretrained(pair.catalogue.parent / "target").eval()
    named: dict[str, Any] = {"input_ids": torch.tensor([question(412)]), "decoder_input_ids": torch.tensor([[0, 9, 8]])}
    with torch.no_grad():
        wanted = plain(**named).logits
        if not pack(packed):
            pytest.skip("this build of torch packs nothing")
        hide_weights(packed)
        copied = unpacked_copy(packed)
        assert sorted(copied.state_dict()) == sorted(plain.state_dict())
        assert all(torch.equal(value, packed.state_dict()[name]) for name, value in plain.state_dict().items())
        close(copied(**named).logits, wanted)
        monkeypatch.setattr(PackedWeight, "dense", lambda _: pytest.fail("a packed weight was unpacked"))
        close(packed(**named).logits, wanted)
    gated = t5(5, len(TOKENS), num_layers=2, feed_forward_proj="gated-gelu").float()
    with torch.no_grad():
        wanted = gated(**named).logits
        monkeypatch.undo()
        pack(gated)
        hide_weights(gated)
        close(gated(**named).logits, wanted)


# -- the other commands ---------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("number", ASKED[:6])
def test_beams_are_those_of_transformers(
    pair: SavedPair, engines: dict[str, PairEngine], beams: int, number: int
) -> None:
    made = pair.target.generate(
        torch.tensor([question(number)]), do_sample=False, num_beams=beams, length_penalty=0.0, max_new_tokens=12
    )[0].tolist()[1:]
    wanted = made[: made.index(END) + 1] if END in made else made
    options = {"num_beams": beams, "alpha": 0.0, "penalty_offset": 0.0, "max_gen_len": 12}
    assert beam_search_generate(question(number), pair.target, **options) == wanted, number
