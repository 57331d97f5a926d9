"""The session of a GLIDE drafter: what it keeps and what it computes again; a published drafter in the engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sampling import Engine
from sampling.drafters.draft_heads.glide import GlideLM, GlideSession
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.sampling.drafters.draft_heads.test_checkpoint import WEIGHTS, published
from tests.support.refusals import refused
from tests.support.runs import decode, sampler, steps
from tests.support.students import fed, make_drafter, make_student, make_target, spread_logits, text, watched
from tests.support.tiny import tiny_model, tiny_tokenizer

NOTHING = Draft.empty(1)


@pytest.mark.parametrize("layers", [1, 2])
def test_every_round_starts_from_fully_informed_states(layers: int) -> None:
    """Several layers feed accepted drafts again, and once only; one layer never does."""
    target = make_target(8, seed=10)
    lm, prompt = CausalLM(target), text(1, 12, 8)
    student = make_student("glide", target, num_hidden_layers=layers, seed=2)

    def whole(ids: list[int]) -> Tensor:
        held = fed(target, [ids], [len(ids)])
        kv = [held.kv(layer)[:2] for layer in student.target_layers(3)]
        return spread_logits(student, student.states(torch.tensor([ids]), kv=kv, lag=0)[0])[0, -1]

    drafter = make_drafter(student)
    rounds = watched(drafter, whole)
    run = steps(decode(lm, [prompt], drafter, sampler(0.9, seed=3), length=60, gamma=3))[1:]
    deep = [len(step.path) for step in run if len(step.drafted) == 3]
    assert {0, 1, 3} <= set(deep), "the run met too few kinds of rounds"
    before: int | None = None
    for step, widths in zip(run, rounds, strict=False):
        if before is not None:
            kept = before - 1 if layers == 1 and before == 3 else before  # the last draft of all was never fed
            assert widths == [1 + (kept if layers > 1 else before - kept), 1, 1][: len(widths)]
        before = len(step.path) if len(step.drafted) == 3 else None


def test_a_session_beside_another_target_is_not_taken_over() -> None:
    target, other = make_target(), make_target(seed=1)
    lm, ids = GlideLM(make_student("glide", target), 3), text(8, 6)
    session = lm.open([ids], target=fed(target, [ids], [5]))
    session.score([ids], NOTHING)
    assert isinstance(session, GlideSession)
    assert lm.open([ids], previous=session, target=fed(other, [ids], [5])) is not session
    assert lm.open([ids, ids], previous=session, target=fed(target, [ids, ids], [5, 5])) is not session
    again = CausalLM(session.target.network).open([ids])  # the same target in another session
    again.score([ids[:-1]], NOTHING)
    assert lm.open([ids], previous=session, target=again) is session
    assert session.target is again
    assert session.rollback([ids]) == [6]


# -- a published drafter in the engine ---------------------------------------------------------------

MODEL = tiny_model(3)


class Loaded(nn.Module):
    """A GLIDE drafter as another program has it in memory: weights by the published names, a configuration."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: config)
        for name, value in tensors.items():
            place: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(last, nn.Parameter(value))


def test_a_loaded_module_a_folder_and_a_hub_id_draft_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = published(tmp_path, MODEL, WEIGHTS)
    config = json.loads((tmp_path / "config.json").read_text())
    asked: list[str] = []

    def hub(name: str, *more: Any) -> Path:
        asked.append(name)
        return tmp_path

    monkeypatch.setattr("utils.loading.fetch.hub_folder", hub)
    for left_out in ([], ["large_hidden_size", "large_num_attention_heads", "vocab_size"]):
        kept = {name: value for name, value in config.items() if name not in left_out}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        figures = []
        for drafter in (Loaded(tensors, kept), tmp_path, str(tmp_path), "cxdu/glide-vicuna7b"):
            engine = Engine(MODEL, tiny_tokenizer(chat=False))
            plain = engine.generate(["the end", "one two"], {"max_new_tokens": 12})
            engine.enable_spec_dec(drafter, use_glide_drafter=True)
            assert engine.generate(["the end", "one two"], {"max_new_tokens": 12}) == plain
            figures.append(engine.last)
        assert figures == figures[:1] * 4
        assert figures[0].drafted > 0
    assert asked == ["cxdu/glide-vicuna7b"] * 2


def test_a_module_that_is_no_glide_drafter_is_named() -> None:
    refused(
        Engine(MODEL, tiny_tokenizer()).enable_spec_dec,
        MODEL,
        use_glide_drafter=True,
        match=r"^LlamaForCausalLM is no GLIDE drafter: it has no model\.layers\.0\.cross_attn",
    )


@pytest.mark.parametrize("published_offset", [False, True])
def test_the_positions_of_a_glide_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published_offset: bool
) -> None:
    """Draft j of a round stands at length + j; ColossalAI's engine adds the number of drafted tokens to each pass that
    drafts, in all its attentions, and none to those of its prompt.
    """
    gamma, seen = 3, []
    run = StudentNetwork.run

    def noted(self: Any, x: Any, positions: Any, mask: Any, cache: Any, sight: Any, turned: Any) -> Any:
        seen.append((positions if turned is None else turned)[0].tolist())
        return run(self, x, positions, mask, cache, sight, turned)

    monkeypatch.setattr(StudentNetwork, "run", noted)
    published(tmp_path, MODEL, WEIGHTS)
    engine = Engine(MODEL, tiny_tokenizer(chat=False))
    engine.glide_offset = gamma if published_offset else 0
    engine.enable_spec_dec(tmp_path, gamma, use_glide_drafter=True)
    engine.generate([[5, 6, 7, 5, 6]], {"max_new_tokens": 1 + gamma + 1})
    length = 5  # the target's own first token is fed behind it
    ours, theirs = [5, 6, 7], [8, 9, 10]
    read = [place for run in seen for place in run if place < length]
    drafting = [run[-1] for run in seen if run[-1] >= length][:gamma]
    assert read == [0, 1, 2, 3, 4]
    assert drafting == (theirs if published_offset else ours)
    assert ours == [length + j for j in range(gamma)]
    assert theirs == [length + j + gamma for j in range(gamma)]
