"""Trained drafters from the catalogue to the screen: lanes, run, bench, check, console, damaged files. Tiny real
models; the plain student is the target itself and always right, the others are random and nearly always wrong.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import app.lanes.drafters
from app.command_line.main import main
from app.lanes.answers import compared, may_differ, run_lane
from app.lanes.lane import PairEngine
from app.prompts.questions import prompt_ids
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from app.settings.types import LANES
from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.events import Finished, Step
from sampling.types import Rule
from tests.support import blocks
from tests.support.runs import after
from tests.support.scripted import run_lines
from tests.support.students import BLOCKS, KINDS
from tests.support.tiny import TinyPair, tiny_model, tiny_tokenizer, write_prompts
from utils.errors import UsageError
from utils.loading.fit import fingerprint
from utils.progress import never

SHORT: dict[str, Any] = {"max_new_tokens": 24, "quiet": True}
SHORT_LIST = torch.arange(0, 300, 3)


def make_student(kind: str, target: Any, *, large: int = 32) -> DraftHead:
    """A random student of the tiny target; the plain one has the target's own weights."""
    own = kind == "plain"
    config = DraftHeadConfig(
        kind=kind,  # type: ignore[arg-type]
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2 if own else 1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        large_hidden_size=0 if own else large,
        large_num_attention_heads=0 if own else 4,
        large_head_dim=0 if own else 8,
        max_position_embeddings=512,
        rms_norm_eps=target.config.rms_norm_eps,
        short_list=0 if own else len(SHORT_LIST),
        shared_embedding=not own,
        **({"reads": (0, 1, -1), "wide": True} if kind == "eagle" else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(len(kind))
        student = DraftHead(config, None if own else SHORT_LIST)
    if own:
        student.load_state_dict(target.state_dict())
    return student


def write_student(folder: Path, kind: str, target: Any, **shape: int) -> Path:
    if kind in BLOCKS:
        case = next(case for case in blocks.CASES.values() if case.kind == kind)
        return blocks.written(folder, *blocks.published(case, vocab=300, width=32, enters=(0, 1, 2), layers=2))
    save_student(
        folder,
        make_student(kind, target, **shape),
        {"tokenizer": fingerprint(tiny_tokenizer()), "target": "tiny", "date": "2025-01-02"},
    )
    return folder


@pytest.fixture(scope="module")
def students(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one student of each kind."""
    folder, target = tmp_path_factory.mktemp("weights"), tiny_model()
    target.lm_head.weight.data[2] = 0.0  # as the pair's target: its stop token is out of reach
    for kind in (*KINDS, *BLOCKS):
        write_student(folder / kind, kind, target)
    return folder


def catalogue(folder: Path, pair: TinyPair, students: Path, drafter: str, more: str = "") -> Path:
    kinds = ", ".join(f"{kind}: {students / kind}" for kind in (*KINDS, *BLOCKS))
    text = f"pairs:\n  tiny:\n    target: {{path: {pair.target}}}\n    drafter: {drafter}\n    students: {{{kinds}}}\n"
    file = folder / "models.yaml"
    file.write_text(text + more, encoding="utf-8")
    return file


def engine_of(folder: Path, pair: TinyPair, students: Path, drafter: str = "feature") -> PairEngine:
    return load_engine(
        Settings(quiet=True), ModelOptions(models=str(catalogue(folder, pair, students, drafter)), device="cpu"), never
    )


@pytest.fixture(scope="module")
def engine(pair: TinyPair, students: Path, tmp_path_factory: pytest.TempPathFactory) -> PairEngine:
    return engine_of(tmp_path_factory.mktemp("catalogue"), pair, students)


def answer(engine: PairEngine, name: str, settings: Settings, text: str = "tell me") -> Any:
    return run_lane(
        engine.lane(name, settings), prompt_ids(engine, text, settings), engine.tokenizer.decode, interrupt=never
    )


# -- lanes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*KINDS, "spec"])
def test_greedy_text_is_plain_decodings_with_every_trained_drafter(engine: PairEngine, name: str) -> None:
    settings = Settings(**SHORT)
    for _ in range(2):  # again, on the caches that were kept
        made = answer(engine, name, settings)
        assert made.ids == answer(engine, "ar", settings).ids
        assert made.stats.draft_n > 0
    assert (name == "plain") == (made.stats.acceptance_rate == 1.0)


@pytest.fixture(scope="module")
def whole(pair: TinyPair, students: Path, tmp_path_factory: pytest.TempPathFactory) -> PairEngine:
    """A pair with which every lane drafts."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "bigrams.json").write_text(json.dumps([(7 * token + 3) % 300 for token in range(300)]))
    more = f"    tables: {folder / 'bigrams.json'}\n    cascade: [plain, maxgram]\n    k_matrix: [[1, 3], [0, 3]]\n"
    return load_engine(
        Settings(quiet=True),
        ModelOptions(models=str(catalogue(folder, pair, students, "tables+feature", more)), device="cpu"),
        never,
    )


NO_ROUNDS = ("beam", "draft")


@pytest.mark.parametrize(
    ("name", "looks"),
    [(name, None) for name in LANES if name not in NO_ROUNDS and not name.endswith(("+model", "mtp"))]
    + [("ar", 4), ("plain", 4), ("feature", 4), ("cascade", 4), ("tables+feature", 4)],
)
def test_a_batch_says_what_each_prompt_is_answered_alone(whole: PairEngine, name: str, looks: int | None) -> None:
    """To the end, and to where it was interrupted."""
    settings = Settings(**SHORT, temperature=0.8)
    prompts = [prompt_ids(whole, text, settings) for text in ("one two one two", "tell me")]
    lane = whole.lane(name, settings)
    if lane.drafter.traits.one_row:
        del prompts[1:]
    asked = after(looks) if looks is not None else iter(lambda: False, True)
    events = list(lane.run_rows(prompts, interrupt=lambda: next(asked)))
    for row in range(len(prompts)):
        ids = [token for event in events if isinstance(event, Step) and event.row == row for token in event.emitted]
        assert [event.reason for event in events if isinstance(event, Finished) and event.row == row] == [
            "interrupted" if looks else "length"
        ]
        assert looks is not None or len(ids) == SHORT["max_new_tokens"]
        if row == 0:
            waited = run_lane(whole.lane(name, settings), prompts[0], whole.tokenizer.decode, interrupt=never)
            assert waited.may_differ or tuple(ids) == waited.ids[: len(ids)]
    # the plain one has the target's own weights
    assert name != "plain" or any(isinstance(event, Step) and event.path for event in events)


@pytest.mark.parametrize("name", KINDS)
def test_sampled_drafts_may_change_the_text_and_coupled_ones_do_not(engine: PairEngine, name: str) -> None:
    sampled = Settings(**SHORT, temperature=0.8)
    lane = engine.lane(name, sampled)
    assert lane.drawn_drafts
    assert may_differ(lane)
    coupled = sampled.changed(coupling="gumbel")
    assert not may_differ(engine.lane(name, coupled))
    assert answer(engine, name, coupled).ids == answer(engine, "ar", coupled).ids


@pytest.mark.parametrize("gamma", [3, "auto"])
@pytest.mark.parametrize("name", ["feature", "match+feature"])
def test_a_dynamic_tree_is_the_feature_drafters_and_never_changes_the_text(
    engine: PairEngine, gamma: int | str, name: str
) -> None:
    """Greedy drafts in every mode: a sampled text is plain decoding's with the same seed."""
    settings = Settings(**SHORT, gamma=gamma, expand="dynamic", nodes=7, temperature=0.8)
    drafter = engine.lane(name, settings).drafter
    assert drafter.traits.tree
    assert drafter.traits.rule is Rule.POINT
    assert [model.name for model in drafter.models] == ["feature"]
    assert not may_differ(engine.lane(name, settings))
    assert answer(engine, name, settings).ids == answer(engine, "ar", settings).ids


def test_the_draft_lane_is_the_plain_student_and_no_other(tmp_path: Path, pair: TinyPair, students: Path) -> None:
    settings = Settings(**SHORT)
    engine = engine_of(tmp_path, pair, students, "plain")
    assert answer(engine, "draft", settings).ids == answer(engine, "ar", settings).ids  # its weights are the target's
    for kind in ("glide", "feature"):
        with pytest.raises(UsageError, match=f"lane draft: a {kind} drafter reads the target's states"):
            engine_of(tmp_path, pair, students, kind).lane("draft", settings)


# -- the program ----------------------------------------------------------------------------------


def test_the_console_changes_drafters_and_lanes_in_the_middle_of_a_chat(
    tmp_path: Path, pair: TinyPair, students: Path
) -> None:
    seen: list[Any] = []

    def note(actions: Any) -> None:
        seen.append(actions.session)

    ran = run_lines(
        catalogue(tmp_path, pair, students, "ngram"),
        *("one", note, "/compare ar,feature", "two", note, "/compare ar,spec", "three", note),
        *("/compare ar,plain,glide,feature", "four", note, "/trace", "/drafter", "/drafter glide", "five", "/info"),
        *("/drafter feature", "six", "/drafter plain", "/compare ar,draft,spec", "seven", "/drafter ngram", "eight"),
        *("/compare ar,spec", "nine"),
    )
    assert ran.text.count("error:") == 1  # the drafter that one of the lanes cannot run with
    assert "error: lane draft needs a drafter model, got drafter ngram" in " ".join(ran.text.split())
    assert [bool(session.keeps_hidden) for session in seen] == [False, True, True, True]
    assert seen[1] is seen[2] is seen[3]  # read once with its states, it serves every lane after
    assert "drafter  glide drafter" in ran.after("/info")
    assert ran.after("/drafter") == "drafter = ngram\n"
    assert "feature" in ran.after("/trace")
    assert [compared(one.answers)["same_output"] for one in ran.state.answers] == [True] * 9
    assert len(ran.state.said().turns) == 9


def test_a_folder_with_a_student_is_known_for_one(
    tmp_path: Path, pair: TinyPair, students: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in (*KINDS, *BLOCKS):
        flags = ["--target", str(pair.target), "--drafter", str(students / kind), "--device", "cpu"]
        assert main(["run", "hi", "--json", "--max-new-tokens", "8", *flags]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["same_output"], kind in told["results"][1]["calls"]) == (True, True)
    catalogue(tmp_path, pair, students, "ngram")
    ran = run_lines(tmp_path / "models.yaml", f"/drafter {students / 'glide'}", "hello", "/info")
    assert "drafter  glide drafter" in ran.after("/info")
    assert compared(ran.state.answers[0].answers)["same_output"] is True


def test_a_pair_of_the_glide_method_runs_and_refuses_what_is_no_glide_drafter(
    tmp_path: Path,
    pair: TinyPair,
    students: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = json.loads((students / "glide" / "config.json").read_text())
    published = tmp_path / "published"  # a Llama configuration with the published keys and nothing of ours
    published.mkdir()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    theirs = {key: value for key, value in config.items() if key in kept or key.startswith(("large_", "max_", "rms_"))}
    weights = {**make_student("glide", tiny_model()).state_dict(), "lm_head.weight": torch.randn(300, 32)}
    weights |= {
        name: weights[name].repeat_interleave(2, dim=0) for name in weights if re.search(r"self.*[kv]_pro", name)
    }
    torch.save(weights, published / "pytorch_model.bin")
    (published / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 10000.0, **theirs}))
    monkeypatch.setattr("utils.loading.sources.hub_folder", lambda name, *_: published)
    for drafter, code in ((published, 0), ("org/glide", 0), (pair.drafter, 1)):
        (tmp_path / "m.yaml").write_text(
            f"pairs:\n  g:\n    target: {pair.target}\n    drafter: {drafter}\n    method: glide\n"
        )
        flags = ["--models", str(tmp_path / "m.yaml"), "--device", "cpu", "--max-new-tokens", "8"]
        assert main(["run", "hi", "--json", "--compare", "ar,glide,spec", *flags]) == code
        out = capsys.readouterr()
    assert re.search(r"error: drafter is no glide drafter: .*config\.json does not describe one\n$", out.err)
    assert main(["pairs", "--models", str(tmp_path / "m.yaml")]) == 0
    assert re.search(r"g \(default\) +target +drafter +glide +ready", capsys.readouterr().out)


# -- what cannot be used --------------------------------------------------------------------------


def cut(folder: Path, file: str = "model.safetensors") -> str:
    place = folder / file
    place.write_bytes(place.read_bytes()[:-1])
    return str(place)


def gone(folder: Path) -> str:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return str(folder)


def of_another_target(folder: Path) -> str:
    write_student(folder, "feature", tiny_model(), large=48)
    return f"{folder} is for a target of hidden size 48"


def of_another_tokenizer(folder: Path) -> str:
    save_student(folder, make_student("feature", tiny_model()), {"tokenizer": "0123456789abcdef"})
    return f"{folder} was made for another tokenizer"


def of_another_kind(folder: Path) -> str:
    write_student(folder, "glide", tiny_model())
    return f"{folder} is a glide drafter, not a feature one"


@pytest.mark.parametrize("spoil", [cut, gone, of_another_target, of_another_tokenizer, of_another_kind])
def test_a_default_drafter_that_cannot_be_used_is_named_everywhere_and_the_console_goes_on(
    tmp_path: Path, pair: TinyPair, students: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], str]
) -> None:
    for kind in ("plain", "glide"):
        (tmp_path / kind).symlink_to(students / kind)
    write_student(tmp_path / "feature", "feature", tiny_model())
    named = spoil(tmp_path / "feature")
    models = catalogue(tmp_path, pair, tmp_path, "feature")
    flags = ["--models", str(models), "--device", "cpu"]
    prompts = str(write_prompts(tmp_path / "p.jsonl", [{"prompt": "one"}]))
    for words in (["run", "hi"], ["run", "hi", "--json"], ["bench", "--prompts", prompts], ["check"]):
        assert main([*words, *flags]) == 1
        told = capsys.readouterr()
        last = told.err.splitlines()[-1]
        assert last.startswith("error: ")
        assert named in last
        assert last.endswith(" (--drafter ngram goes without)")
        assert told.out == ""
    assert main(["run", "hi", "--max-new-tokens", "4", "--drafter", "ngram", *flags]) == 0

    from app.console.state import load_engine as console_loader

    ran = run_lines(models, "hello", "/drafter", "/drafter feature", "/drafter glide", "again", loader=console_loader)
    text = " ".join(ran.text.split())
    assert f"{named}" in text
    assert ": drafting by n-gram instead" in text
    assert ran.after("/drafter") == "drafter = ngram\n"
    assert text.count("error:") == 1  # asked for by name it is an error, and the pair stays as it is
    assert "(still tiny)" in text
    assert len(ran.state.answers) == 2
    assert ran.state.engine().loaded.drafter_word == "glide"
    assert ran.state.pairs.spec is ran.state.engine().loaded.spec


@pytest.mark.parametrize("drafter", KINDS)
def test_a_drafter_the_pair_has_no_weights_for_is_one_line(
    tmp_path: Path, pair: TinyPair, capsys: pytest.CaptureFixture[str], drafter: str
) -> None:
    how = "--drafter ORG/NAME fetches one" if drafter == "eagle" else f"infer.py distill --student {drafter} makes one"
    made = f"({how})"
    (tmp_path / "m.yaml").write_text(f"pairs: {{p: {{target: {pair.target}, drafter: ngram}}}}")
    for where in (["--models", str(tmp_path / "m.yaml")], ["--target", str(pair.target)]):
        assert main(["run", "hi", "--drafter", drafter, *where]) == 2
        name = "p" if "--models" in where else "target"
        assert capsys.readouterr().err == f"error: no {drafter} drafter: pair '{name}' names none {made}\n"
    ran = run_lines(tmp_path / "m.yaml", "one", f"/drafter {drafter}", "two")
    assert f"pair 'p' names none {made} (still p)" in " ".join(ran.text.split())
    assert len(ran.state.answers) == 2


# -- as others publish them -----------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_published_head_drafts_from_its_folder(
    tmp_path: Path, pair: TinyPair, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Our EAGLE head in the names and the configuration of *speculators*."""
    tensors = {
        name.removeprefix("model."): value for name, value in make_student("eagle", tiny_model()).state_dict().items()
    }
    tensors["d2t"] = SHORT_LIST - torch.arange(len(SHORT_LIST))
    del tensors["embed_tokens.weight"]
    shape: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    shape |= {"num_hidden_layers": 40, "rms_norm_eps": 1e-6}
    told = {"speculators_model_type": "eagle3", "transformer_layer_config": shape, "draft_vocab_size": len(SHORT_LIST)}
    told["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    folder = tmp_path / "head"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(told))
    flags = ["--target", str(pair.target), "--drafter", str(folder), "--device", "cpu"]
    if command == "run":
        assert main(["run", "hi", "--json", "--max-new-tokens", "8", *flags]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["same_output"], "eagle" in said["results"][1]["calls"]) == (True, True)
    else:
        assert main(["check", *flags]) == 0
        assert "the pair fits: eagle drafts" in capsys.readouterr().out


# -- check ----------------------------------------------------------------------------------------


def test_beside_a_16_bit_target_a_student_is_16_bit_but_for_its_angles() -> None:
    target = tiny_model()
    student = app.lanes.drafters.moved(
        make_student("glide", target), torch.device("cpu"), torch.bfloat16, target.bfloat16()
    )
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in student.buffers()} == {torch.float32, torch.int64}
    assert student.model.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
