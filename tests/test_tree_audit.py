"""Trees in the caches of target and drafter: after every round, and in the next turns of a chat, what is cached is what
one pass over the same ids makes, and so are the next logits (ALGORITHMS 8.5).

The target is a random Llama, through the hand-written pass and through transformers' own; float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from sampling.causal import CausalLM, CausalSession
from sampling.drafters import FeatureDrafter, GlideLM, ModelDrafter
from sampling.drafters.expand import Expansion
from sampling.drafters.feature import FeatureLM
from sampling.drafters.feature_tree import FeatureTreeDrafter
from sampling.events import Step
from sampling.llama import LlamaNetwork
from sampling.loop import generate
from sampling.network import TransformersNetwork
from sampling.sampler import KeyedSampler
from sampling.student_network import StudentNetwork
from sampling.types import Draft, FixedPace, Limits
from tests.students import fed, make_student, make_target
from utils.logits_processors import make_processor

CLOSE = 1e-4  # of the largest value; a wrong cache is off by 0.1
NOTHING = Draft.empty(1)
NETWORKS: dict[str, Callable[[Any], Any]] = {"hand-written": LlamaNetwork, "transformers": TransformersNetwork}
TURNS, LENGTH, NODES = 3, 12, 12


def drafter_of(kind: str, target: Any, layers: int) -> ModelDrafter:
    """A drafter of trees: CaPE around a student's chains, or dynamic ones."""
    name = kind.removesuffix(", dynamic")
    student = make_student(name, target, [0, 2, 3, 4, 5, 6, 7], seed=2, num_hidden_layers=layers)
    if kind == "feature, dynamic":
        return FeatureTreeDrafter(FeatureLM(student, "feature"), expansion=Expansion(NODES))
    made = {
        "plain": lambda: ModelDrafter(CausalLM(StudentNetwork(student), "plain")),
        "glide": lambda: ModelDrafter(GlideLM(student, 3)),
        "feature": lambda: FeatureDrafter(student),
    }[name]()
    made.expansion = Expansion(NODES)
    return made


def near(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert torch.equal(found.isinf(), wanted.isinf())
    apart = (found - wanted).masked_fill(wanted.isinf(), 0.0).abs().max()
    assert float(apart) < CLOSE * max(1.0, float(wanted[~wanted.isinf()].abs().max()))


@torch.inference_mode()
def audit_target(session: Any, model: Any, row: list[int]) -> None:
    """All of the row but its last token is cached, as transformers itself would cache it."""
    twin, past = session.fork(), transformers.DynamicCache()
    out = model(input_ids=torch.tensor([row]), past_key_values=past, use_cache=True, output_hidden_states=True)
    held = twin.sync([row])[0]
    assert held == len(row) - 1, "something accepted is missing, or something refused was kept"
    for layer in range(len(past.layers)):
        key, value, valid = twin.kv(layer)
        assert valid.tolist() == [held]
        near(key[:, :, :held], past.layers[layer].keys[:, :, :held])
        near(value[:, :, :held], past.layers[layer].values[:, :, :held])
    near(twin.hidden(), out.hidden_states[-1][:, :held])
    near(twin.score([row], NOTHING)[0, 0], out.logits[0, -1])


@torch.inference_mode()
def audit_drafter(drafter: ModelDrafter, model: Any, row: list[int], least: int) -> None:
    """What is still cached, at least `least` tokens, is what a new session beside a new target's makes of the row."""
    (session,) = drafter.sessions
    assert isinstance(session, CausalSession)
    twin = session.fork()
    fresh: Any = drafter.lm.open([row], target=fed(model, [row], [len(row) - 1], hidden=True))
    logits = fresh.score([row], NOTHING)
    held = twin.sync([row])[0]
    assert held >= least, "the drafter's cache was thrown away"
    for layer in range(twin.network.layers):
        for part, wanted in zip(twin.kv(layer)[:2], fresh.kv(layer)[:2], strict=True):
            near(part[:, :, :held], wanted[:, :, :held])
    near(twin.score([row], NOTHING)[0, 0], logits[0, 0])


@pytest.mark.parametrize(("layers", "temperature"), [(1, 0.8), (2, 0.0)])
@pytest.mark.parametrize("kind", ["plain", "glide", "feature", "feature, dynamic"])
@pytest.mark.parametrize("network", NETWORKS)
def test_after_every_round_and_in_the_next_turns_caches_hold_what_a_new_pass_would(
    network: str, kind: str, layers: int, temperature: float
) -> None:
    model = make_target(8, seed=10)
    lm, drafter = CausalLM(NETWORKS[network](model)), drafter_of(kind, model, layers)
    session, row, beside = None, [1, 2, 3, 4], 0
    for turn in range(TURNS):
        begun = least = len(row) - 3
        session = lm.open([row], previous=session, hidden=True)
        assert session.held()[0] >= begun or not turn, "the cache of the turn before was thrown away"
        sampler = KeyedSampler(make_processor(temperature), seed=turn)
        limits = Limits(LENGTH)
        for event in generate(lm, [list(row)], drafter, sampler, limits, pace=FixedPace(3), session=session):
            if not isinstance(event, Step):
                continue
            least = len(row) if event.drafted else least  # what it read to draft
            row += event.emitted
            audit_target(session, model, row)
            audit_drafter(drafter, model, row, least)
            beside += any(event.parents[node] != node - 1 for node in event.path)
        row += [5, turn]
    assert beside, "no sibling was ever accepted: the test shows nothing"
