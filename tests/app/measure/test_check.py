"""`pairs` and `check` as a user runs them: what stdout says, what stderr says, how they end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.command_line.main import main
from app.lanes.pairing import catalogue_in
from tests.support.architectures import architecture, save
from tests.support.tiny import tiny_model, tiny_pair
from tests.support.warm import run

ROOT = Path(__file__).parents[3]


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has loaded torch and transformers already."""
    code = main([*arguments])
    said = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, said.out, said.err)


def infer(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("SPEC_") or name == "SPEC_CACHE_DIR"
    }
    env.pop("COLUMNS", None)  # what is piped has its full width
    return run([sys.executable, str(ROOT / "infer.py"), *arguments], env=env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("tiny"), context=256)


def test_pairs_lists_the_catalogue_with_what_each_pair_needs():
    done = infer("pairs")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows["smollm2"].split()[:3] == ["smollm2", "(default)", "SmolLM2-135M-Instruct"]
    assert re.search(r"glide +to be fetched", rows["vicuna-7b-glide"])
    assert re.search(r"cascade +to be fetched", rows["flan-t5-xxl"])
    assert "flan-t5-base < flan-t5-small < maxgram" in rows["flan-t5-xxl"]
    assert re.search(r"llama-160m < maxgram +cascade +to be fetched", rows["llama-2-7b-cascade"])
    assert set(catalogue_in(ROOT / "models.yaml").pairs) < set(rows)


def test_pairs_imports_no_torch():
    code = "import sys; from app.command_line.main import main; main(['pairs']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_check_shows_both_models_and_that_they_fit(tiny, capsys):
    done = here(capsys, "check", *tiny.flags())
    assert done.returncode == 0, done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    parameters = sum(p.numel() for p in tiny_model().parameters())
    assert [
        line
        for line in (
            "target target drafter",
            "model target drafter",
            f"parameters {parameters:,} {parameters:,}",
            "stored as float32 float32",
            "converted packed packed",
            "dtype float32 float32",
            "device cpu cpu",
            "context 256 tokens 256 tokens",
            "vocabulary 300 ids 300 ids",
            "stops at: <|im_end|> (2)",
            "tokenizer: 300 tokens, chat template: yes",
            "the pair fits: 300 ids mean the same in both models",
        )
        if line not in said
    ] == []
    assert re.fullmatch(r"memory \d+ MB \d+ MB", next(line for line in said if line.startswith("memory")))


def test_check_ends_with_the_reason_when_a_pair_does_not_fit(tiny, tmp_path, capsys):
    tiny_model(vocab_size=310).save_pretrained(tmp_path / "strange")
    done = here(capsys, "check", "--target", str(tiny.target), "--drafter", str(tmp_path / "strange"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "error: strange cannot draft for target: strange has no tokenizer files and the vocabularies differ in size "
        "(target 300, strange 310)\n"
    )


def test_check_of_the_default_pair_states_its_figures():
    done = infer("check", "smollm2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "parameters 134,515,008" in said
    assert {"context 8,192 tokens", "stored as GGUF", "converted no"} <= {*said}
    assert "stops at: <|endoftext|> (0), <|im_end|> (2)" in said
    assert "drafter: tables+feature" in said


def test_check_with_an_unknown_pair_is_one_line():
    done = infer("check", "smolm2")
    assert done.returncode == 2
    assert "no pair 'smolm2' (did you mean smollm2?)" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jamba", "recurrent layers read one token at a time: a pass over drafts costs as many, so they cannot pay"),
        ("lfm2", "recurrent layers read twice in a pass with drafts: v(n) is higher than of attention alone"),
        (
            "qwen3_moe",
            "a mixture of 16 experts: more tokens in a pass read more of them, so v(n), measured with different "
            "tokens, grows",
        ),
    ],
)
def test_check_says_what_makes_wide_passes_dear(name, said, tmp_path, capsys):
    folder = save(architecture(name), tmp_path / name)
    done = here(capsys, "check", "--target", str(folder), "--drafter", "ngram", "--device", "cpu")
    assert said in done.stdout.splitlines()
    assert done.returncode == 0
