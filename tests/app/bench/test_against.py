"""`bench --against transformers`: the same texts, which drafters it can take, interrupts, rivals in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.bench.against import ASSISTED, LOOKUP, PLAIN, make_rivals, sampling_of, without_defaults
from app.bench.options import BenchArgs
from app.bench.rivals import Rival
from app.bench.run import run_bench
from app.lanes.answers import run_lane
from app.lanes.lane import PairEngine
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.drafters.draft_heads.checkpoint import save_student
from sampling.drafters.draft_heads.config import DraftHeadConfig
from sampling.drafters.draft_heads.modules import DraftHead
from tests.support.tiny import TinyPair, tiny_model, tiny_pair, tiny_tokenizer, write_prompts
from utils.catalogue.specs import HeadFolders
from utils.errors import UsageError, UserError
from utils.kernels.packed_linear import PackedLinear
from utils.logits_processors import make_processor
from utils.progress import never

SETTINGS = Settings(max_new_tokens=12, quiet=True)
PROMPT = [1, 70, 71, 72, 70, 71, 72, 70, 71]


def packed(model: Any) -> int:
    return sum(isinstance(module, PackedLinear) for module in model.modules())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("against"), stop=False, context=300, noise=0.05)


@pytest.fixture
def options(pair: TinyPair) -> ModelOptions:
    return pair.options()


@pytest.fixture
def engine(options: ModelOptions) -> PairEngine:
    return load_engine(SETTINGS, options, never)


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def answers(
    engine: PairEngine, options: ModelOptions, settings: Settings, against: str = "transformers"
) -> dict[str, Any]:
    rivals, _ = make_rivals(engine, options, against)
    return {name: rival.answer(PROMPT, settings, decode, never) for name, rival in rivals.items()}


# -- texts --------------------------------------------------------------------------------------


def test_greedy_texts_are_those_of_plain_decoding(engine: PairEngine, options: ModelOptions) -> None:
    settings = SETTINGS.changed(max_new_tokens=40)
    ours = run_lane(engine.lane("ar", settings), PROMPT, decode, interrupt=never)
    found = answers(engine, options, settings)
    assert list(found) == [PLAIN, LOOKUP, ASSISTED]
    for name, answer in found.items():
        assert answer.ids == ours.ids
        assert (answer.method, answer.stats.predicted_n, answer.stats.stop_reason) == (name, 40, "length")
        assert (answer.stats.prompt_n, answer.may_differ) == (len(PROMPT), False)
    assert found[PLAIN].stats.tokens_per_pass == 1
    assert found[ASSISTED].stats.tokens_per_pass > 1.2  # its drafts are looked at


def test_the_rivals_run_on_a_plain_copy_and_ours_stays_as_it_is(engine: PairEngine, options: ModelOptions) -> None:
    target, drafter = engine.loaded.target.model, engine.loaded.drafter.model
    before, kept = packed(target), target.generation_config.to_dict()
    assert before > 0
    rivals, notes = make_rivals(engine, options, "transformers")
    assert notes == []
    assert packed(rivals[PLAIN].model) == packed(rivals[ASSISTED].more["assistant_model"]) == 0
    assert packed(target) == packed(drafter) == before
    assert target.generation_config.to_dict() == kept
    mine, theirs = (model.get_input_embeddings().weight for model in (target, rivals[PLAIN].model))
    assert mine.data_ptr() == theirs.data_ptr()


def test_a_models_own_preferences_do_not_count() -> None:
    model = tiny_model()
    model.generation_config.repetition_penalty = 1.5
    twin = without_defaults(model, frozenset({7, 3}))
    assert twin.generation_config.repetition_penalty in (None, 1.0)
    assert (twin.generation_config.eos_token_id, model.generation_config.repetition_penalty) == ([3, 7], 1.5)
    assert twin.lm_head is model.lm_head


def test_a_stop_token_ends_the_answer(engine: PairEngine, options: ModelOptions) -> None:
    whole = answers(engine, options, SETTINGS)[PLAIN].ids
    place = next(index for index, token in enumerate(whole) if index > 2 and token not in whole[:index])
    engine.stop_ids = frozenset({whole[place]})
    for answer in answers(engine, options, SETTINGS).values():
        assert answer.ids == whole[: place + 1]
        assert answer.stats.stop_reason == "eos"


def test_the_context_limits_the_answer(engine: PairEngine, options: ModelOptions) -> None:
    rivals, _ = make_rivals(engine, options, "transformers")
    rival = replace(rivals[PLAIN], context=len(PROMPT) + 5)
    assert len(rival.answer(PROMPT, SETTINGS, decode, never).ids) == 5


def test_rows_of_the_head_that_are_no_tokens_are_never_chosen(engine: PairEngine, options: ModelOptions) -> None:
    rivals, _ = make_rivals(engine, options, "transformers")
    whole = rivals[PLAIN].answer(PROMPT, SETTINGS, decode, never).ids
    limit = max(whole)
    for name in (PLAIN, LOOKUP):
        fewer = replace(rivals[name], vocab_size=limit).answer(PROMPT, SETTINGS, decode, never).ids
        assert fewer != whole
        assert max(fewer) < limit


# -- sampling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"repetition_penalty": 1.7, "no_repeat_ngram": 2, "top_p": 0.9},
    ],
)
def test_the_law_is_ours(changes: dict[str, Any]) -> None:
    settings = SETTINGS.changed(temperature=0.7, **changes)
    model: Any = without_defaults(tiny_model(), frozenset({2}))
    ids = torch.tensor([PROMPT])
    told = model.generate(
        ids,
        max_new_tokens=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **sampling_of(settings),
    )
    rules = {"repetition_penalty": settings.repetition_penalty, "no_repeat_ngram": settings.no_repeat_ngram}
    ours = make_processor(0.7, settings.top_k, settings.top_p, settings.min_p, **rules)(told.logits[0], [PROMPT])
    torch.testing.assert_close(told.scores[0].softmax(-1), ours, rtol=1e-4, atol=1e-6)


def test_sampled_answers_repeat_with_the_seed(
    engine: PairEngine, options: ModelOptions, untouched_global_noise: None
) -> None:
    settings = SETTINGS.changed(temperature=1.5, seed=5)
    first, again = answers(engine, options, settings), answers(engine, options, settings)
    other = answers(engine, options, settings.changed(seed=6))
    for name in (PLAIN, LOOKUP, ASSISTED):
        assert first[name].ids == again[name].ids != other[name].ids
        assert first[name].may_differ


# -- interrupts ---------------------------------------------------------------------------------


def after(calls: int) -> Callable[[], bool]:
    left = iter([False] * calls)
    return lambda: next(left, True)


def test_an_interrupt_ends_it_between_two_passes(engine: PairEngine, options: ModelOptions) -> None:
    rivals, _ = make_rivals(engine, options, "transformers")
    for rival in rivals.values():
        whole = rival.answer(PROMPT, SETTINGS, decode, never)
        answer = rival.answer(PROMPT, SETTINGS, decode, after(2))
        assert answer.interrupted
        assert 3 <= len(answer.ids) <= len(whole.ids)
        assert answer.ids == whole.ids[: len(answer.ids)]
        assert answer.stats.target_passes == 2
        assert rival.answer(PROMPT, SETTINGS, decode, never).ids == whole.ids  # nothing is left over


# -- drafters -----------------------------------------------------------------------------------


def copied(engine: PairEngine, short_list: list[int], **changes: Any) -> DraftHead:
    """A student that is the target itself, but for what its short list leaves out."""
    large = engine.loaded.target.model.config
    shape = {
        name: getattr(large, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    config = DraftHeadConfig(
        kind="plain",
        **shape,
        num_key_value_heads=large.num_key_value_heads,
        head_dim=large.head_dim,
        max_position_embeddings=300,
        rms_norm_eps=large.rms_norm_eps,
        short_list=len(short_list),
        **{"project": True, "shared_embedding": True, **changes},
    )
    student = DraftHead(config, torch.tensor(short_list, dtype=torch.long))
    tensors = dict(engine.loaded.target.model.state_dict())
    if short_list:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][short_list]
    with torch.no_grad():
        student.load_state_dict(tensors, strict=False)
        student.model.project.weight.copy_(torch.eye(large.hidden_size))
    return student


@pytest.mark.parametrize("short", [False, True])
def test_a_plain_student_assists(engine: PairEngine, options: ModelOptions, tmp_path: Path, short: bool) -> None:
    settings = SETTINGS.changed(max_new_tokens=40)
    plain = answers(engine, options, settings)[PLAIN]
    save_student(tmp_path, copied(engine, sorted({*plain.ids, 5, 6}) if short else []))
    found = answers(engine, options, settings, f"transformers:{tmp_path}")[ASSISTED]
    assert found.ids == plain.ids
    assert found.stats.tokens_per_pass > 1.9  # its drafts, at least one a pass, are the target's own choice
    sampled = answers(engine, options, settings.changed(temperature=0.7), f"transformers:{tmp_path}")[ASSISTED]
    assert len(sampled.ids) == 40


def test_a_pair_with_another_drafter_has_its_plain_student_assist(
    engine: PairEngine, options: ModelOptions, tmp_path: Path
) -> None:
    save_student(tmp_path, copied(engine, []))
    spec = engine.loaded.spec.model_copy(update={"students": HeadFolders(plain=str(tmp_path))})
    for kind in ("tables", "glide", "plain"):
        folder = tmp_path if kind == "plain" else None
        engine.loaded = replace(engine.loaded, spec=spec, drafter=None, drafter_kind=kind, draft_head=folder)
        assert answers(engine, options, SETTINGS)[ASSISTED].stats.tokens_per_pass > 1.9
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(UserError, match="are damaged"):
        make_rivals(engine, options, "transformers")


def test_a_short_list_that_lacks_the_answer_assists_nobody(
    engine: PairEngine, options: ModelOptions, tmp_path: Path
) -> None:
    plain = answers(engine, options, SETTINGS)[PLAIN]
    save_student(tmp_path, copied(engine, sorted({*range(300)} - {*plain.ids})))
    found = answers(engine, options, SETTINGS, f"transformers:{tmp_path}")[ASSISTED]
    assert (found.ids, found.stats.tokens_per_pass) == (plain.ids, 1)


def test_a_pair_without_such_a_drafter_goes_without(pair: TinyPair) -> None:
    options = pair.options("ngram")
    rivals, notes = make_rivals(load_engine(SETTINGS, options, never), options, "transformers")
    assert list(rivals) == [PLAIN, LOOKUP]
    [note] = notes
    assert note.startswith("hf-assisted is left out: transformers has no ngram drafter")
    assert "\n" not in note


def test_a_drafter_with_other_logits_goes_without(engine: PairEngine, options: ModelOptions) -> None:
    assert engine.loaded.drafter is not None
    engine.loaded = replace(engine.loaded, drafter=replace(engine.loaded.drafter, vocab_size=320))
    rivals, notes = make_rivals(engine, options, "transformers")
    assert ASSISTED not in rivals
    assert notes == [
        "hf-assisted is left out: transformers takes no drafter with another number of logits (320, the target's 300)"
    ]


def test_a_named_drafter_that_cannot_assist_is_an_error(
    engine: PairEngine, options: ModelOptions, tmp_path: Path
) -> None:
    for drafter in ("ngram", "none"):
        with pytest.raises(UsageError, match=f"transformers has no {drafter} drafter, name a model or a plain one"):
            make_rivals(engine, options, f"transformers:{drafter}")
    with pytest.raises(UserError):
        make_rivals(engine, options, f"transformers:{tmp_path / 'no'}")


def test_a_named_model_assists(engine: PairEngine, pair: TinyPair) -> None:
    options = pair.options("ngram")
    rivals, notes = make_rivals(engine, options, f"transformers:{pair.target}")
    assert notes == []
    assert rivals[ASSISTED].answer(PROMPT, SETTINGS, decode, never).stats.tokens_per_pass > 1.9


# -- the whole benchmark ------------------------------------------------------------------------


def test_rivals_take_part_in_the_same_run(
    options: ModelOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    whole = Rival.answer

    def watched(self: Rival, *given: Any) -> Any:
        order.append(self.name)
        return whole(self, *given)

    monkeypatch.setattr(Rival, "answer", watched)
    rows = [
        {"turns": ["one", "two"], "category": "a", "question_id": 1},
        {"prompt": "left out", "category": "a", "question_id": 2},
        {"prompt": "three", "category": "b", "question_id": 3},
    ]
    prompts = write_prompts(tmp_path / "p.jsonl", rows)
    (tmp_path / "ids.txt").write_text("3\n1\n")
    out = tmp_path / "out.json"
    args = BenchArgs(prompts, methods=("ar", "spec"), gammas=(2,), repeat=2, out=out)
    args = replace(args, ids=tmp_path / "ids.txt", turns=1, against="transformers")
    assert run_bench(SETTINGS, options, args) == 0
    data = json.loads(out.read_text())
    assert [row["method"] for row in data["summary"]] == ["ar", "spec", PLAIN, LOOKUP, ASSISTED]
    assert [row["differs"] for row in data["summary"]] == [None, 0, 0, 0, 0]
    assert [(entry["question_id"], entry["turn"]) for entry in data["prompts"]] == [(3, 0), (1, 0)]
    assert (data["against"], data["turns"], data["notes"]) == ("transformers", 1, [])
    assert data["loops"]["prompts"] == 2
    assert all(result["same_output"] in (None, True) for entry in data["prompts"] for result in entry["results"])
    assert {result["looping"] for entry in data["prompts"] for result in entry["results"]} <= {0.0}
    assert data["summary"][1]["over_rivals"]["rival"] in (PLAIN, LOOKUP, ASSISTED)
    assert order[:3] == [PLAIN, LOOKUP, ASSISTED]  # the warm-up
    assert len(order) == 3 * (1 + 2 * 2)
    assert order[3:6] != order[6:9] or order[6:9] != order[9:12]  # their order changes as ours does
    assert "over hf-" in capsys.readouterr().out


def test_the_identity_check_takes_no_rivals(options: ModelOptions) -> None:
    with pytest.raises(UsageError, match="leave --against out"):
        run_bench(SETTINGS, options, BenchArgs(check_identity=True, against="transformers"))


def test_what_is_left_out_is_told(pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = pair.options("ngram")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x"}])
    out = tmp_path / "out.json"
    args = BenchArgs(prompts, methods=("ar",), repeat=1, out=out, against="transformers")
    assert run_bench(SETTINGS.changed(quiet=False), options, args) == 0
    assert "hf-assisted is left out" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["notes"]) == 1


def test_the_tokenizer_knows_every_id_of_the_tiny_target() -> None:
    assert len(tiny_tokenizer()) == tiny_model().config.vocab_size  # else rows of the head would be left out above
