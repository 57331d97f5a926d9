"""A target shared by several processes: the same output as one process, refusals in one line, clean ends.

The processes are real; tests/support/ranks.py starts them in torchrun's place, the tests marked `device` by torchrun.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from app.command_line.main import main
from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.models.causal import CausalLM
from sampling.models.network import TransformersNetwork, network_of
from sampling.types import Draft
from tests.support.ranks import Ranks, infer
from tests.support.refusals import refused
from tests.support.students import close, make_student, make_target
from tests.support.tiny import VOCAB, tiny_tokenizer, write_prompts
from utils.errors import UsageError
from utils.loading.build import sharing
from utils.processes import Process

ROOT = Path(__file__).parents[2]


def whole_target() -> Any:
    return make_target(VOCAB, hidden_size=36, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target has 9 heads over 3 key/value heads, with a drafter model and two draft heads."""
    folder = tmp_path_factory.mktemp("shared")
    target = whole_target()
    drafter = make_target(VOCAB, num_attention_heads=4, num_key_value_heads=2)
    for model, name in ((target, "target"), (drafter, "drafter")):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    for kind, more in (("glide", {}), ("feature", {"shared_embedding": True, "shared_head": True, "hidden_size": 36})):
        save_student(folder / kind, make_student(kind, target, **more))
    text = f"pairs:\n  tiny:\n    target: {{path: {folder}/target}}\n    drafter: {{path: {folder}/drafter}}\n"
    heads = f"    students: {{glide: {folder}/glide, feature: {folder}/feature}}\n"
    (folder / "models.yaml").write_text(f"default: tiny\n{text}{heads}")
    write_prompts(folder / "prompts.jsonl", [{"prompt": word} for word in ("one", "two", "three")])
    return folder / "models.yaml"


def words(catalogue: Path, *more: str, tokens: int = 12) -> list[str]:
    return ["run", "tell me", "--models", str(catalogue), "--device", "cpu", "--max-new-tokens", str(tokens), *more]


def test_three_processes_answer_as_one_does(
    catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(catalogue, "--compare", "ar,spec,ngram,feature,beam", "--gamma", "3", "--json")
    with Ranks(tmp_path, 3, infer, given) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
        assert [ranks.out(rank) + "".join(ranks.errors(rank)) for rank in (1, 2)] == ["", ""]
        shared = json.loads(ranks.out(0))
    assert main(given) == 0
    for ours, theirs in zip(shared["results"], json.loads(capsys.readouterr().out)["results"], strict=True):
        assert ours["ids"] == theirs["ids"]
        assert ours["draft_n_accepted"] == theirs["draft_n_accepted"]
    assert len({tuple(result["ids"]) for result in shared["results"][:-1]}) == 1


@pytest.mark.exhaustive  # some seconds
def test_processes_share_a_form(catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(catalogue, "--compare", "ar,spec,ngram,feature", "--json", "--regex", '"[a-z]{3,6}": (the|and)')
    with Ranks(tmp_path, 3, infer, [*given, "--temperature", "1", "--coupling", "gumbel"]) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
        shared = json.loads(ranks.out(0))
    assert main([*given, "--temperature", "1", "--coupling", "gumbel"]) == 0
    assert [result["ids"] for result in shared["results"]] == [
        result["ids"] for result in json.loads(capsys.readouterr().out)["results"]
    ]
    assert len({tuple(result["ids"]) for result in shared["results"]}) == 1


def test_sampled_drafts_under_gamma_auto_keep_the_processes_in_step(
    catalogue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = ["--compare", "ar,spec", "--gamma", "auto", "--temperature", "0.8", "--coupling", "gumbel", "--json"]
    with Ranks(tmp_path, 3, infer, words(catalogue, *drawn, tokens=24)) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
        shared = [result["ids"] for result in json.loads(ranks.out(0))["results"]]
    assert main(words(catalogue, *drawn, tokens=24)) == 0
    assert [result["ids"] for result in json.loads(capsys.readouterr().out)["results"]] == shared


def steps(lm: Any) -> list[Tensor]:
    """What a session says while it does all that a session can do: ragged rows, a tree, copies."""
    session = lm.open([[3, 4, 5, 6], [7, 8]], hidden=True)
    found = [session.score([[3, 4, 5, 6], [7, 8]], Draft.of([[9, 10], [11, 12]]))]
    session.commit([[0, 1], [0]])
    found.append(session.hidden()[0, :6].clone())
    rows = [[3, 4, 5, 6, 9, 10, 13], [7, 8, 11, 14]]
    found.append(session.score(rows, Draft.of([[20, 21, 22], [23, 24, 25]], parents=[-1, -1, 0])))
    session.commit([[0, 2], [1]])
    twin = session.fork()
    session.select(torch.tensor([1, 1, 0]))
    return [*found, twin.score([rows[0][:3], rows[1]], Draft.empty(2))]


def shared_steps(target: str, out: str) -> int:
    """A rank's whole run without the program around it: the target by the library, then `steps`."""
    from utils.catalogue.specs import spec_from_argument
    from utils.loading.build import load_model
    from utils.loading.loaded import LoadOptions
    from utils.processes import is_first_process, join

    options = LoadOptions(device=join("cpu"), tp_size=3)
    loaded = load_model(spec_from_argument(target), Path(target), options, options.device, "none")
    found = steps(CausalLM(network_of(loaded.model)))
    if is_first_process():
        torch.save(found, out)
    return 0


def test_a_shared_session_does_what_one_of_a_whole_model_does(catalogue: Path, tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, shared_steps, str(catalogue.parent / "target"), str(tmp_path / "found.pt")) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
    shared, whole = torch.load(tmp_path / "found.pt"), steps(CausalLM(TransformersNetwork(whole_target())))
    for got, wanted in zip(shared, whole, strict=True):
        close(got, wanted, 1e-4)


@pytest.mark.parametrize(
    ("given", "count", "why"),
    [
        (
            [],
            2,
            "2 processes cannot share target: its 9 attention heads and 3 key/value heads do not divide by 2 (3 can)",
        ),
        pytest.param(
            ["--compare", "ar,glide"],
            3,
            "drafter glide reads all keys and values of its target: it goes with one process",
            marks=pytest.mark.exhaustive,
        ),
        (["--quantization", "q8"], 3, "3 processes cannot share target: quantization q8 goes with one process"),
        pytest.param(
            ["--device", "mps"],
            3,
            "device must be auto, cpu or cuda where processes share a target, got 'mps'",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name_and_said_once(
    catalogue: Path, tmp_path: Path, given: list[str], count: int, why: str
) -> None:
    with Ranks(tmp_path, count, infer, [*words(catalogue), *given]) as ranks:
        until = time.monotonic() + 120
        while not (said := ranks.errors(0)) and time.monotonic() < until:
            time.sleep(0.02)
        assert said == [f"error: {why}"]
        assert [ranks.errors(rank) for rank in range(1, count)] == [[]] * (count - 1)  # they wait to be ended


@pytest.mark.parametrize("words", [["chat"], ["distill", "--out", "x"]])
def test_other_sub_commands_are_refused_by_name(words: list[str]) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    line = [sys.executable, str(ROOT / "infer.py"), *words]
    done = subprocess.run(line, env=os.environ | told, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {words[0]} runs in one process, torchrun started 3 (run and bench share a target)\n"


def test_encoder_decoders_and_models_without_a_plan_are_refused() -> None:
    def config(**facts: Any) -> Any:
        text = SimpleNamespace(num_attention_heads=4, model_type="odd", **facts)
        return SimpleNamespace(get_text_config=lambda: text, is_encoder_decoder=facts.get("encodes", False))

    for facts, why in (({"encodes": True}, "encoder-decoder model"), ({}, "no tensor-parallel plan for odd")):
        refused(
            *(sharing, "m", config(**facts), "none", 2),
            match=f"2 processes cannot share m: .*{why}",
            kind=UsageError,
        )
    assert sharing("m", config(), "none", 1) == {}


def test_incomplete_torchrun_variables_mean_one_process() -> None:
    told = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    assert Process.of(told) == Process(1, 3, 1, 1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert Process.of({key: value for key, value in told.items() if key != name}) == Process()
    assert Process.of({**told, "RANK": "x"}) == Process()


def test_ctrl_c_stops_the_answer_everywhere_and_a_bench_goes_on_with_what_its_journal_holds(
    catalogue: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b.json"
    how = ["--models", str(catalogue), "--device", "cpu", "--max-new-tokens", "12", "--quiet", "--out", str(out)]
    line = ["bench", "--prompts", str(catalogue.parent / "prompts.jsonl"), "--methods", "ar,ngram", "--gammas", "3"]
    line += ["--repeat", "1", *how]
    journal = tmp_path / "b.json.partial"
    (tmp_path / "one").mkdir()
    with Ranks(tmp_path / "one", 3, infer, line) as ranks:
        until = time.monotonic() + 120
        while not journal.exists() or journal.read_text().count("\n") < 3:
            assert time.monotonic() < until, ranks.errors(0)
            time.sleep(0.01)
        ranks.signal(signal.SIGINT)
        assert ranks.codes(60) == [130, 130, 130]
    kept = journal.read_bytes()
    (tmp_path / "two").mkdir()
    with Ranks(tmp_path / "two", 3, infer, line) as ranks:
        assert ranks.codes() == [0, 0, 0], [ranks.errors(rank) for rank in range(3)]
    data = json.loads(out.read_text())
    assert (data["complete"], data["resumed"], kept.count(b"\n") >= 3) == (True, 1, True)
    assert sum(len(row["results"]) for row in data["prompts"]) == 6
    assert {row["differs"] for row in data["summary"] if row["method"] == "ngram"} == {0}


# -- torchrun itself --------------------------------------------------------------------------------


def torchrun(count: int, *line: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{count}", *line]


@pytest.mark.device
@pytest.mark.exhaustive  # by default processes without torchrun show the same
def test_two_processes_say_what_one_does(
    catalogue: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    device = request.config.getoption("--device")
    if device != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip(f"takes two GPUs, --device {device} has {torch.cuda.device_count()} here")
    line = ["run", "tell me", "--target", str(catalogue.parent / "drafter"), "--compare", "ar,spec", "--gamma", "4"]
    line += ["--device", device, "--dtype", "float32", "--max-new-tokens", "24", "--json", "--quiet"]
    done = subprocess.run(
        torchrun(2, str(ROOT / "infer.py"), *line), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert main(line) == 0
    shared, alone = (json.loads(text)["results"] for text in (done.stdout, capsys.readouterr().out))
    assert [result["ids"] for result in shared] == [result["ids"] for result in alone]


@pytest.mark.device
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dies", "count", "model"), [("0", 3, "target"), ("1", 2, "drafter")])  # their heads divide so
def test_the_death_of_a_process_ends_the_others_within_a_minute(
    catalogue: Path, dies: str, count: int, model: str
) -> None:
    target = str(catalogue.parent / model)
    line = [str(ROOT / "infer.py"), "bench", "--target", target, "--device", "cpu", "--max-new-tokens", "200"]
    line += ["--prompts", str(catalogue.parent / "prompts.jsonl"), "--methods", "ar", "--repeat", "1000"]
    run = subprocess.Popen(torchrun(count, *line), stderr=subprocess.PIPE, text=True)
    ranks: list[psutil.Process] = []
    try:
        assert run.stderr is not None
        next(text for text in run.stderr if "answer" in text)  # the bar of rank 0
        ranks = psutil.Process(run.pid).children()
        next(process for process in ranks if process.environ()["RANK"] == dies).kill()
        _, error = run.communicate(timeout=60)
        assert run.returncode not in (0, None), error
        assert not any(process.is_running() and process.status() != "zombie" for process in ranks)
    finally:
        run.kill()
        for process in ranks:
            if process.is_running():
                process.kill()
