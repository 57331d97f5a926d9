"""`--drafter FILE.gguf`, the same in models.yaml and `/drafter FILE.gguf`: a draft head as llama.cpp writes it, for
targets in folders and in GGUF files; `check FILE.gguf` says what it is.
"""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from app.command_line.main import main
from app.lanes.lane import PairEngine
from tests.support import blocks, mtp
from tests.support.architectures import save
from tests.support.blocks import BlockCase
from tests.support.gguf_files import random_model, write_gguf
from tests.support.gguf_heads import write_assistant, write_head, write_layer
from tests.support.refusals import refused
from tests.support.scripted import run_lines
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

SETTINGS = {"chat": False, "max_new_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of eight layers and a DFlash head for it, both in 8 bits."""
    folder = tmp_path_factory.mktemp("files")
    model = random_model("qwen3", num_hidden_layers=8)
    target = write_gguf(folder / "target.gguf", "qwen3", model, kind="Q8_0")
    case, size = BlockCase("dflash", "z-lab"), model.config.vocab_size
    config, tensors = blocks.published(case, size, model.config.hidden_size)
    return target, write_head(folder / "head.gguf", config, tensors, blocks.ENTERS, "Q8_0")


def catalogue(folder: Path, target: Path, drafter: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(f"default: own\npairs:\n  own:\n    target: {target}\n    drafter: {drafter}\n", encoding="utf-8")
    return file


def test_a_head_of_the_catalogue_drafts_for_a_target_in_a_file(files: tuple[Path, Path], tmp_path: Path) -> None:
    target, head = files
    ran = run_lines(
        catalogue(tmp_path, target, str(head)), "/compare ar,dflash,tables+dflash", "abab", settings=SETTINGS
    )
    assert not ran.errors
    assert "identical" in ran.text
    ran = run_lines(catalogue(tmp_path, target, "ngram"), f"/drafter {head}", "abab", settings=SETTINGS)
    assert not ran.errors
    assert "target ← dflash drafter" in ran.text


def test_a_head_in_a_file_is_a_student_of_the_catalogue(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Its lane and its word are a folder's; of a file that does not fit the user's name is said."""
    target, head = files
    file = catalogue(
        tmp_path, target, f"ngram\n    students: {{dflash: {head}, eagle: {head}, dspark: {tmp_path}/none.gguf}}"
    )
    lines = "/compare ar,dflash", "abab", "/compare ar,eagle", "abab", "/compare ar,dspark", "abab"
    ran = run_lines(file, *lines, "/drafter tables+dflash", settings=SETTINGS, width=300)
    assert "identical" in ran.text
    assert "target ← n-gram tables and dflash drafter" in ran.text
    assert ran.errors[0].startswith(f"error: the drafter {head} is a dflash drafter, not a eagle")
    assert ran.errors[1].startswith("error: no dspark drafter: pair 'own' names")
    assert len(ran.errors) == 2


def test_a_file_that_is_not_what_was_asked_for_is_one_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A head of another target, a head as the target, and the target's whole model as a drafter."""
    target, head = files
    other = tmp_path / "head.gguf"
    write_head(other, *blocks.published(BlockCase("dflash", "z-lab")), blocks.ENTERS)
    pair = PairSpec(name="own", target=ModelSpec(gguf=str(target)), drafter=ModelSpec(gguf=str(other)))
    options = LoadOptions(device="cpu", quantization="auto")
    told = refused(lambda: PairEngine(load_pair(pair, options)))
    assert told.startswith(f"the drafter {other} is for a target of hidden size 24, this one has 128")
    told = refused(load_pair, PairSpec(name="own", target=ModelSpec(gguf=str(head))), options)
    assert told == f"head is a dflash head, no model: --target MODEL --drafter {head} drafts with it"
    folder = mtp.folder_of("qwen3_5_text")
    told = refused(
        load_pair,
        PairSpec(name="own", target=ModelSpec(path=str(folder)), drafter=ModelSpec(path=str(folder))),
        options,
    )
    assert told.endswith(f"no head of a model: --target {folder} --drafter mtp drafts with that layer")


@pytest.mark.exhaustive
def test_a_layer_in_a_file_drafts_for_a_target_in_a_folder(tmp_path: Path) -> None:
    folder, name = mtp.folder_of("qwen3_5_text"), "qwen3_5_text"
    file = write_layer(tmp_path / "mtp-small.gguf", mtp.shipped(name)[0].config, mtp.tensors(name))
    ran = run_lines(catalogue(tmp_path, folder, str(file)), "/compare ar,mtp", "abcab", settings=SETTINGS)
    assert not ran.errors
    assert "← mtp drafter" in ran.text
    assert "same output" in ran.text


@pytest.mark.exhaustive
def test_an_assistant_in_a_file_drafts_for_a_target_in_a_folder(tmp_path: Path) -> None:
    target, folder = save(mtp.gemma(), tmp_path / "target"), mtp.assistant_folder(tmp_path / "assistant")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    file = write_assistant(tmp_path / "small-assistant.gguf", config, tensors)
    ran = run_lines(catalogue(tmp_path, target, str(file)), "abcab", settings=SETTINGS)
    assert not ran.errors
    assert "target ← small-assistant" in ran.text
    assert "same output" in ran.text


def test_check_says_what_a_file_holds(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, head = files
    assert main(["check", str(head)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "head.gguf: DFlash head (dflash, mostly Q8_0)",
        "for a target of hidden size 128 and 261 ids; it reads what enters layers 2, 4, 7",
        f"with its target: infer.py --target MODEL --drafter {head}",
    ]
