"""A target whose layers lie on several devices: the text of one device, for every kind of drafter.

There is one device here. Layers lie in memory and on the disk (accelerate's offload), so that passes go through
accelerate's hooks; that what draft heads read is moved to them is shown with tensors that mix with no others.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import utils.loading.build
from app.lanes.lane import PairEngine
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.models.cache import SlotCache, joined
from sampling.models.causal import CausalLM
from sampling.models.network import TransformersNetwork
from tests.app.lanes.test_draft_heads import KINDS, catalogue, write_student
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, emitted, sampler
from tests.support.students import make_drafter, make_student, make_target
from tests.support.tiny import TinyPair, tiny_model
from utils.device_map import main_device
from utils.progress import never

SHAPE = {"layers": 4, "hidden": 32}
PROMPT = [5, 9, 7, 30, 31, 5, 9]
HEAD_PROMPT = [0, 1, 0]


@pytest.fixture(scope="module")
def engines(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairEngine]:
    """The pair on the CPU, and with half of its layers on the disk; the drafter model is not spread."""
    folder, target = tmp_path_factory.mktemp("weights"), tiny_model(**SHAPE)  # type: ignore[arg-type]
    target.lm_head.weight.data[2] = 0.0
    for kind in set(KINDS) - {"plain"}:  # which reads nothing of its target
        write_student(folder / kind, kind, target)
    found = {}
    for device, drafter in (("cpu", str(pair.drafter)), ("auto", str(pair.drafter))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(utils.loading.build, "room_of", lambda place: little(target))
            file = catalogue(tmp_path_factory.mktemp("catalogue"), pair, folder, drafter)
            options = ModelOptions(models=str(file), device=device, drafter_device="cpu")
            found[device] = load_engine(Settings(quiet=True), options, never)
    return found


def little(model: Any) -> dict[Any, int]:
    """Room in memory for the ends and half of the layers."""
    layers = sum(part.numel() for part in model.model.layers.parameters()) * 4
    return {"cpu": sum(part.numel() for part in model.parameters()) * 4 - layers // 3, "disk": 1 << 40}


def test_the_layers_are_spread_and_the_ends_are_not(engines: dict[str, PairEngine]) -> None:
    model = engines["auto"].loaded.target.model
    assert {str(place) for place in model.hf_device_map.values()} == {"cpu", "disk"}
    assert model.model.layers[3].mlp.up_proj.weight.is_meta
    assert not model.get_input_embeddings().weight.is_meta
    assert not model.get_output_embeddings().weight.is_meta
    assert main_device(model) == torch.device("cpu")
    assert isinstance(engines["auto"].target.network, TransformersNetwork)
    assert main_device(engines["cpu"].loaded.target.model) is None
    assert engines["auto"].loaded.target.bytes == pytest.approx(engines["cpu"].loaded.target.bytes, rel=0.01)


def test_a_line_says_what_lies_where(engines: dict[str, PairEngine]) -> None:
    (line,) = [note for note in engines["auto"].notes if "spread" in note]
    assert line.startswith("target is spread: ")
    assert "GB on cpu" in line
    assert "every pass copies" in line
    assert not any("spread" in note for note in engines["cpu"].notes)


@pytest.mark.parametrize(
    ("lane", "temperature"),
    crossed(["ar", "spec", "ngram", "match", "glide", "feature", "eagle", "match+eagle"], [0.0, 0.8]),
)
def test_the_text_is_that_of_one_device(engines: dict[str, PairEngine], lane: str, temperature: float) -> None:
    texts = []
    for engine in engines.values():
        engine.forget()
        chosen = Settings(temperature=temperature, coupling="gumbel", max_new_tokens=30, gamma=4)
        events = list(engine.lane(lane, chosen).run(PROMPT))
        assert lane == "ar" or any(getattr(event, "drafted", ()) for event in events)
        texts.append(emitted(events)[0])
    assert texts[0] == texts[1]


def test_rows_beside_each_other_too(engines: dict[str, PairEngine]) -> None:
    chosen = Settings(max_new_tokens=12, gamma=3)
    rows = [PROMPT, PROMPT[:3], [8, 9]]
    texts = [emitted(engine.lane("spec", chosen).run_rows(rows), 3) for engine in engines.values()]
    assert texts[0] == texts[1]


# -- what heads read is moved ---------------------------------------------------------------------


class Elsewhere(Tensor):
    """A tensor of another device: nothing mixes with it before it is moved."""

    moves = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and cls.moves:
            return args[0].as_subclass(Tensor)
        if func not in (Tensor.as_subclass, Tensor.to) and any(type(one) is Tensor and one.dim() for one in args):
            raise RuntimeError("two devices")
        return super().__torch_function__(func, types, args, kwargs or {})


def elsewhere(target: Any, monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    """The target as an LM, whose keys, values and hidden states lie where no drafter runs."""
    lm = CausalLM(target)
    layer, forward = SlotCache.layer, lm.network.forward

    def far(self: SlotCache, index: int) -> Any:
        return tuple(part.as_subclass(Elsewhere) for part in layer(self, index))

    def ran(*given: Any) -> Any:
        logits, hidden = forward(*given)
        return logits, None if hidden is None else hidden.as_subclass(Elsewhere)

    monkeypatch.setattr(SlotCache, "layer", far)
    monkeypatch.setattr(lm.network, "forward", ran)
    return lm


@pytest.mark.parametrize("kind", ["glide", "feature"])
def test_draft_heads_get_what_lies_on_other_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(8, seed=10)
    make = functools.partial(make_drafter, make_student(kind, target, seed=2))
    plain = answers(CausalLM(target), [HEAD_PROMPT], make(), sampler(0.0), length=20)
    assert answers(elsewhere(target, monkeypatch), [HEAD_PROMPT], make(), sampler(0.0), length=20) == plain


def test_states_of_several_layers_meet_where_the_first_lies() -> None:
    one, other = torch.ones(1, 2, 3), torch.zeros(1, 2, 3).as_subclass(Elsewhere)
    assert type(joined([one, other])) is Tensor
    refused(torch.add, one, other, kind=RuntimeError, match="two devices")


@pytest.mark.parametrize("kind", ["glide", "feature"])
def test_what_is_not_moved_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(8, seed=10)
    made = make_drafter(make_student(kind, target, seed=2))
    far = elsewhere(target, monkeypatch)
    monkeypatch.setattr(Elsewhere, "moves", False)
    refused(answers, far, [HEAD_PROMPT], made, sampler(0.0), length=20, kind=RuntimeError, match="two devices")
