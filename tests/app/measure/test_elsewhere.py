"""`check TARGET DRAFTER` and `check --for`: forecasts by hand, every text, and transformers' call as it is printed."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.command_line.main import main
from app.measure.elsewhere import PROGRAMS, PROMPT, PUBLISHED, Recipe, written
from app.measure.plan import Forecast, Grown, Option, forecast
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.settings.table import Settings
from tests.app.lanes.test_draft_heads import write_student
from tests.app.lanes.test_encoder_decoder import TOKENS, tokenizer as numbers
from tests.sampling.models.test_encoder_decoder import t5
from tests.support.gguf_files import random_model, write_gguf
from tests.support.tiny import TinyPair, tiny_model, tiny_pair, tiny_tokenizer
from utils.progress import Cancelled, never

DRAFT = "-md D.gguf --spec-type draft-simple --spec-draft-n-max 4 --spec-draft-n-min 0 --spec-draft-p-min 0"
LOOK = "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 4"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFTS = {"model": "o/D", "num_speculative_tokens": 4}
CALLS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "model": (
        {"method": "draft_model", **DRAFTS},
        DRAFT,
        "assistant_model=assistant, ",
        "",
    ),
    "ngram": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", ""),
    "tables": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", "has no n-gram tables"),
    "suffix": (
        {"method": "suffix", "num_speculative_tokens": 4},
        LOOK,
        "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ",
        "",
    ),
    "maxgram": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", "has no n-gram tables"),
    "glide": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", "reads no glide heads"),
    "feature": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", "reads no feature heads"),
    "tables+feature": (
        NGRAM,
        LOOK,
        "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ",
        "reads no feature heads of this program",
    ),
    "cascade": (NGRAM, LOOK, "prompt_lookup_num_tokens=4, max_matching_ngram_size=3, ", "has no cascades of drafters"),
    "eagle1": ({"method": "eagle", **DRAFTS}, "", "", ""),
    "eagle3": ({"method": "eagle3", **DRAFTS}, DRAFT.replace("draft-simple", "draft-eagle3"), "", ""),
    "peagle": ({"method": "eagle3", **DRAFTS, "parallel_drafting": True}, "", "", ""),
    "dflash": ({"method": "dflash", **DRAFTS}, DRAFT.replace("draft-simple", "draft-dflash"), "", ""),
    "dspark": ({"method": "dspark", **DRAFTS}, DRAFT.replace("draft-simple", "draft-dspark"), "", ""),
    "dflash2": ({}, DRAFT.replace("draft-simple", "draft-dflash"), "", ""),
    "jetspec": ({}, "", "", ""),
    "dflare": ({}, "", "", ""),
    "domino": ({}, "", "", ""),
    "assistant": (
        {"method": "mtp", **DRAFTS},
        DRAFT.replace("draft-simple", "draft-mtp"),
        "assistant_model=assistant, ",
        "",
    ),
    "pard": ({"method": "draft_model", **DRAFTS, "parallel_drafting": True}, "", "", ""),
    "mtp": (
        {"method": "mtp", "num_speculative_tokens": 4},
        DRAFT.replace("-md D.gguf --spec-type draft-simple", "--spec-type draft-mtp"),
        "use_mtp=True, ",
        "",
    ),
    "none": ({}, "", "", ""),
}
# docs/advanced_features/speculative_decoding.md (fc6d465): its table of methods, and of the flags of EAGLE
SGLANG = {
    **{"model": "STANDALONE STEPS", "eagle1": "EAGLE STEPS", "eagle3": "EAGLE3 STEPS", "mtp": "EAGLE STEPS"},
    **{"dflash": "DFLASH", "dspark": "DSPARK", "none": ""},  # docs.sglang.io, the write-up of 2026-07-06
}


def recipe(way: str, **more: Any) -> Recipe:
    return Recipe("o/T", way, 4, "o/D" if way != "mtp" and way in ("model", *PUBLISHED) else "", **more)


def code(text: str) -> str:
    """What is no comment."""
    return "\n".join(line for line in text.split("\n") if not line.startswith("#"))


@pytest.mark.parametrize("way", CALLS)
def test_each_program_gets_the_call_of_its_documents(way: str) -> None:
    config, flags, call, lacks = CALLS[way]
    words = shlex.split(code(written("vllm", recipe(way))))
    assert words[:3] == ["vllm", "serve", "o/T"]
    assert (json.loads(words[4]) if config else {}) == config
    assert words[3:4] == ["--speculative-config"] * bool(config)
    assert code(written("llama.cpp", recipe(way))) == f"llama-server -m T.gguf {flags}".strip()
    algorithm = SGLANG.get(way, "NGRAM" if config is NGRAM or way == "suffix" else "")
    server, *flags = shlex.split(code(written("sglang", recipe(way))).removeprefix("python -m "))
    drafts = shlex.split(algorithm.replace("STEPS", "--speculative-num-steps 4 --speculative-eagle-topk 1"))
    own = ["--speculative-draft-model-path", "o/D"] if algorithm and recipe(way).drafter else []
    count = ["--speculative-num-draft-tokens", "5"] if algorithm and not algorithm.startswith("D") else []
    assert (server, flags[:2]) == ("sglang.launch_server", ["--model-path", "o/T"])
    assert flags[2:] == (["--speculative-algorithm", drafts[0], *own, *drafts[1:], *count] if drafts else [])
    text = code(written("transformers", recipe(way)))
    assert f"answer = model.generate(**inputs, {call}max_new_tokens=64, do_sample=False)" in text.split("\n")
    compile(text, "printed", "exec")
    assert all(lacks in written(program, recipe(way)) for program in PROGRAMS)


def test_another_vocabulary_files_and_encoders_have_words_of_their_own() -> None:
    other = recipe("model", translated=True)
    assert json.loads(shlex.split(code(written("vllm", other)))[4]) == {
        "method": "draft_model",
        **DRAFTS,
        "use_heterogeneous_vocab": True,
    }
    assert "tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer, " in written("transformers", other)
    file = Recipe("/a b/T.gguf", "model", 4, "D.gguf", compiled="4- to 8-bit weights")
    assert code(written("llama.cpp", file)) == f"llama-server -m '/a b/T.gguf' {DRAFT}"
    assert "convert_hf_to_gguf.py" not in written("llama.cpp", file)
    assert 'model = AutoModelForCausalLM.from_pretrained("/a b", gguf_file="T.gguf")' in written("transformers", file)
    assert "vllm-gguf-plugin" in written("vllm", file)
    assert all("pass over 4- to 8-bit weights stays here" in written(program, file) for program in PROGRAMS)
    head = written("llama.cpp", recipe("eagle3"))
    assert "# first: python convert_hf_to_gguf.py o/D --target-model-dir o/T --outfile D.gguf" in head.split("\n")
    for way in ("model", "ngram"):
        encodes = recipe(way, encodes=True)
        assert code(written("vllm", encodes)) == code(written("llama.cpp", encodes)) == ""
        assert "AutoModelForSeq2SeqLM" in written("transformers", encodes)
        assert "prompt_lookup" not in written("transformers", encodes)


def brings(alpha: float | None, c: float, slope: float, share: float = 1.0) -> Forecast:
    return Forecast(Option("spec", c, lambda n: 1 + slope * (n - 1)), alpha, share, 3, 96)


def test_a_forecast_is_the_theorys_and_its_verdict_names_what_stands_in_the_way() -> None:
    flat = brings(0.8, 0.05, 0.0)
    assert flat.speedup(5) == pytest.approx(2.9514, abs=1e-4)  # the formula by hand
    assert (flat.gamma, flat.pays) == (8, True)
    half = brings(0.8, 0.05, 0.0, share=0.5)  # one of two rounds drafts: E is halved towards 1, and so is the cost
    assert half.speedup(5) == pytest.approx((0.5 * 3.68928 + 0.5) / (0.5 * 1.25 + 0.5), abs=1e-4)
    for told, one in {
        "it pays here": flat,
        "drafted token costs 0.9 of a pass": brings(0.5, 0.9, 0.0),
        "too few drafts are accepted (alpha 0.02)": brings(0.02, 0.05, 0.0),
        "nearly as many passes": brings(0.7, 0.05, 1.0),
        "it drafts in 4% of the rounds": brings(0.15, 0.0, 0.1, share=0.04),
        "it drafted nothing": brings(None, 0.0, 0.0, share=0.0),
    }.items():
        assert told in one.lines()[-1]
        assert one.pays == (one is flat)


@pytest.mark.parametrize(
    ("alpha", "usual", "asked"), [(0.05, 0.59, True), (0.25, 0.59, False), (0.05, 0.3, True), (0.05, 0.0, False)]
)
def test_a_head_that_accepts_next_to_nothing_is_asked_about(alpha: float, usual: float, asked: bool) -> None:
    assert ("is this head this target's?" in replace(brings(alpha, 0.05, 0.0), usual=usual).lines()[-2]) == asked


def test_trees_have_a_forecast_of_their_own_and_the_better_of_both_decides() -> None:
    poor = brings(0.02, 0.05, 0.0)
    grown = Grown(tokens=2.4, nodes=4.5, drafting=0.1)
    assert grown.speedup(lambda n: 1 + 0.05 * (n - 1)) == pytest.approx(2.4 / (0.1 + 1.225))  # v(5.5) by hand
    better = replace(poor, grown=grown)
    assert not poor.pays
    assert better.pays
    assert better.lines()[-2:] == [
        "with trees and gamma auto: 2.18x (2.40 tokens a pass, 4.5 drafts a round)",
        "verdict: it pays here.",
    ]
    assert not replace(poor, grown=replace(grown, tokens=1.0)).pays


# -- with models ------------------------------------------------------------------------------------


def checked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str], str]:
    status = main(["check", *map(str, words), "--device", "cpu", "--quiet"])
    said = capsys.readouterr()
    return status, said.out.split("\n"), said.err


def strange(folder: Path) -> Path:
    """A random model with another vocabulary."""
    tokens = tiny_tokenizer()
    tokens.add_tokens(["<other>"])
    tiny_model(1, vocab_size=301).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def test_a_stopped_forecast_has_no_verdict(pair: TinyPair) -> None:
    engine = load_engine(Settings(quiet=True), pair.options(), never)
    looks = iter(range(1000))
    with pytest.raises(Cancelled, match="interrupted"):
        forecast(engine, Settings(quiet=True), lambda: next(looks) > 5)


def test_two_words_say_that_a_pair_fits_and_what_it_brings(pair: TinyPair, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = checked(capsys, pair.target, pair.drafter)
    assert status == 0
    assert "the pair fits: 300 ids mean the same in both models" in out
    told = {line.partition(":")[0]: line for line in out}
    assert float(told["agreement"].split()[2].rstrip(",")) > 0.3  # the drafter is the target with a little noise
    assert "3 prompts, 96 tokens" in told["agreement"]
    assert "x plain decoding at gamma" in told["predicted"]
    assert told["verdict"].startswith("verdict: it ")
    assert "with trees and gamma auto" not in told
    trees = checked(capsys, pair.target, "tables")[1]
    assert any(
        re.fullmatch(r"with trees and gamma auto: \d\.\d\dx \(\d\.\d\d tokens a pass, .*", line) for line in trees
    )
    assert checked(capsys, pair.target, "none")[1][-2] == "nothing drafts: the speed is plain decoding's"


def program_of(out: list[str]) -> str:
    return "\n".join(out[out.index("# transformers 5.23") :])


@pytest.mark.parametrize("way", ["model", "other", "ngram", "vicuna"])
def test_transformers_call_runs_as_printed_and_answers_as_plain_decoding(
    way: str, pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = strange(tmp_path / "other") if way == "other" else way if way in ("ngram", "tables", "none") else None
    named = {"plain template": "plain", "vicuna": "vicuna"}.get(way)
    one = {
        "target": str(pair.target),
        "drafter": str(drafter or pair.drafter),
        **({"template": named} if named else {}),
    }
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"default": "a", "pairs": {"a": one}}), encoding="utf-8")
    status, out, _ = checked(capsys, "a", "--models", file, "--for", "transformers")
    assert status == 0
    ran: dict[str, Any] = {}
    exec(program_of(out), ran)
    assert ("assistant_tokenizer" in ran) == (way == "other")
    plain = ran["model"].generate(**ran["inputs"], max_new_tokens=64, do_sample=False)
    assert ran["answer"].tolist() == plain.tolist()
    assert plain.shape[1] > ran["inputs"].input_ids.shape[1] + 32
    ours = prompt_ids(
        load_engine(Settings(quiet=True), pair.options(), never), PROMPT, Settings(template=named or "auto")
    )
    assert ran["inputs"].input_ids[0].tolist() == ours


@pytest.mark.parametrize("kind", ["gguf", "seq2seq"])
def test_transformers_text_runs_for_files_and_encoder_decoders(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "gguf":
        words = [str(write_gguf(tmp_path / "T.gguf", "llama3", random_model("llama3"))), "ngram"]
    else:
        model = t5(29, len(TOKENS), 1.0, num_layers=2)
        for name, each in {"T": model, "D": t5(7, len(TOKENS), like=model, noise=0.05, num_layers=2)}.items():
            each.float().save_pretrained(tmp_path / name)
            numbers().save_pretrained(tmp_path / name)
        words = [str(tmp_path / "T"), str(tmp_path / "D")]
    status, out, error = checked(capsys, *words, "--for", "transformers")
    assert status == 0, error
    ran: dict[str, Any] = {}
    exec(program_of(out), ran)
    assert ("chat" in ran) == (kind == "gguf")
    assert ran["answer"].tolist() == ran["model"].generate(**ran["inputs"], max_new_tokens=64, do_sample=False).tolist()


def test_a_folder_of_floats_says_which_compiled_pass_stays_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = checked(
        capsys, tiny_pair(tmp_path, num_attention_heads=1, num_key_value_heads=1).target, "none", "--for", "vllm"
    )
    assert status == 0
    assert "# the compiled pass over float32 weights stays here: c and v(n) are others in vLLM" in out


VLLM = {  # SpeculativeConfig in vllm/config/speculative.py (002e77c)
    *("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    *("parallel_drafting", "use_heterogeneous_vocab"),
}
LLAMA_CPP = {  # common/arg.cpp (0017d6f)
    *("-m", "-md", "--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"),
    *("--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m"),
}


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        "vicuna-7b",
        "llama-3.1-8b-eagle3",
        "qwen3-8b-speculator",
        "qwen2.5-coder-0.5b",
        "vicuna-7b-glide",
        "flan-t5-xxl",
        "llama-2-7b-cascade",
    ],
)
def test_a_pair_that_is_not_on_disk_gets_its_commands_and_nothing_is_fetched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("SPEC_CACHE_DIR", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", None)
    texts = {}
    for program in PROGRAMS:
        status, out, _ = checked(capsys, name, "--for", program)
        assert status == 0
        assert any("is not on disk: nothing was read or measured" in line for line in out)
        texts[program] = code("\n".join(out)).strip()
    compile(texts["transformers"], "printed", "exec")
    assert ("apply_chat_template(chat" in texts["transformers"]) == (name != "flan-t5-xxl")
    assert ("tokenizer.chat_template = " in texts["transformers"]) == name.startswith("vicuna")
    assert (texts["vllm"] == texts["llama.cpp"] == "") == (name == "flan-t5-xxl")
    if texts["vllm"]:
        *words, config = shlex.split(texts["vllm"])
        assert (words[:2], words[3:], set(json.loads(config)) - VLLM) == (
            ["vllm", "serve"],
            ["--speculative-config"],
            set(),
        )
        assert (json.loads(config)["method"] == "eagle3") == (name in ("llama-3.1-8b-eagle3", "qwen3-8b-speculator"))
        server, *flags = shlex.split(texts["llama.cpp"])
        assert (server, {flag for flag in flags if flag.startswith("-")} - LLAMA_CPP) == ("llama-server", set())


def test_two_words_that_do_not_fit_end_with_why_and_what_would(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = checked(capsys, pair.target, write_student(tmp_path / "head", "feature", tiny_model(), large=64))
    assert (status, error.count("\n")) == (1, 1)
    assert "a head made for this very target would" in error
    tiny_model(vocab_size=310).save_pretrained(tmp_path / "bare")
    status, _, error = checked(capsys, pair.target, tmp_path / "bare")
    assert (status, error.count("\n")) == (1, 1)
    assert "with its tokenizer's files beside its weights its drafts would be translated" in error
