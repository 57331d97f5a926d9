"""Trees in a model: who takes them, and what they leave in the cache.

Models that take none get chains from every drafter, with plain decoding's text; a tree they refuse by name. After every
round, and in the next turns of a chat, what is cached of target and drafter is what one pass over the same ids makes,
and so are the next logits: a random Llama through the hand-written pass and through transformers' own, in float32.
`keep` commits the accepted path, whatever nodes are absent beside it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sampling.drafters.draft_heads.eagle import FeatureLM
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelSource
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.events import Step
from sampling.loop import generate
from sampling.models.causal import CausalLM, CausalSession
from sampling.models.llama import LlamaNetwork
from sampling.models.network import TransformersNetwork
from sampling.types import Draft, Drafter, FixedPace, Limits
from tests.sampling.models.test_cache_audit import V, build
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, decode, greedy, sampler, steps
from tests.support.students import fed, make_student, make_target

CLOSE = 1e-4  # of the largest value; a wrong cache is off by 0.1
NOTHING = Draft.empty(1)
NETWORKS: dict[str, Callable[[Any], Any]] = {"hand-written": LlamaNetwork, "transformers": TransformersNetwork}
TURNS, LENGTH, NODES = 3, 12, 12


def without_mask() -> Any:
    """Runs with an attention that nobody knows to take a mask."""
    transformers.AttentionInterface.register("unknown", sdpa_attention_forward)
    AttentionMaskInterface.register("unknown", sdpa_mask)
    model = build("qwen2", torch.float32)
    model.config._attn_implementation = "unknown"
    return model


def without_positions() -> Any:
    """Knows positions by the columns of its mask alone."""
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.BloomForCausalLM(config).eval()


CASES = {"Qwen2ForCausalLM": (without_mask, "4-D mask"), "BloomForCausalLM": (without_positions, "position_ids")}


@pytest.mark.parametrize("name", CASES)
def test_a_refused_tree_leaves_a_session_that_goes_on(name: str) -> None:
    session, row = CausalLM(TransformersNetwork(CASES[name][0]())).open([[3, 4, 5]]), [3, 4, 5]
    wanted = session.score([row], Draft.empty(1))
    refused(session.score, [row], Draft.of([[6, 7]], parents=[-1, -1]), match=f"^{name} .*{CASES[name][1]}[^\n]*$")
    torch.testing.assert_close(session.score([row], Draft.empty(1)), wanted)


# -- a sliding window and the like: chains, whatever grows ---------------------------------------------

NO_TREES: dict[str, Callable[[], Any]] = {
    "Qwen2ForCausalLM": without_mask,
    "BloomForCausalLM": without_positions,
    "mistral, window": lambda: build("mistral, window", torch.float32),
    "gemma2, window": lambda: build("gemma2, window", torch.float32),
}
START = [3, 4, 5, 3, 4, 6, 3, 4, 5, 7] * 2  # the text passes the window of 24 soon


def grown(kind: str, model: Any) -> Drafter:
    """What grows trees for another target."""
    helper = CausalLM(TransformersNetwork(model), "drafter")
    if kind == "model":
        return Proposer([ModelSource(helper)], tree=True, nodes=12)
    if kind == "tables":
        return LookupDrafter(tree=True, shared_noise=True, recall=True)
    if kind == "joint":
        return LookupDrafter(model=ModelSource(helper), tree=True, shared_noise=True)
    student = make_student("feature", make_target(V, hidden_size=32, head_dim=8), seed=2)
    return Proposer([ModelSource(FeatureLM(student, "feature"))], tree=True, nodes=12)


WAYS = ("model", "tables", "joint", "feature")
MODES: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (0.0, {}),
    "gumbel": (1.0, {"coupling": "gumbel"}),
    "greedy drafts": (1.0, {"draft_sampling": "greedy"}),
    "rejection": (1.0, {}),
}


@pytest.mark.parametrize(("name", "way"), crossed(NO_TREES, WAYS))
def test_every_drafter_drafts_chains(name: str, way: str) -> None:
    """Its rule stays its own: a tree's nodes are point masses in every mode, and so are those of its chain."""
    model = NO_TREES[name]()
    lm = CausalLM(TransformersNetwork(model))
    assert not lm.network.takes_trees
    drafter = grown(way, model)
    for mode, (temperature, options) in MODES.items():
        drawing = sampler(temperature, seed=5, **options)
        plain = answers(lm, [START], None, drawing, length=30)[0]
        run = steps(decode(lm, [START], drafter, drawing, length=30, gamma=5))
        said = [token for step in run for token in step.emitted]
        assert len(said) == 30
        assert said == plain, mode
        assert any(step.drafted for step in run), mode
        assert way == "feature" or "window" not in name or any(step.path for step in run), mode  # the student is random
        assert all(step.parents == tuple(range(-1, len(step.drafted) - 1)) for step in run)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_drafters_grow_trees_for_a_target_that_takes_them(way: str) -> None:
    model = build("qwen2", torch.float32)
    run = steps(decode(CausalLM(model), [START], grown(way, model), greedy(), length=30, gamma=5))
    assert any(step.parents != tuple(range(-1, len(step.drafted) - 1)) for step in run)


def test_batches_of_a_target_that_takes_no_trees_get_chains_within_the_window() -> None:
    model = build("mistral, window", torch.float32)
    lm, rows = CausalLM(model), [[3, 4, 5], [6, 7, 6, 7]]
    sampler = greedy()
    for way in WAYS:
        assert answers(lm, rows, grown(way, model), sampler, length=10) == answers(lm, rows, None, sampler, length=10)


# -- what is cached --------------------------------------------------------------------------------


def drafter_of(kind: str, target: Any, layers: int) -> Proposer:
    """A drafter of trees."""
    student = make_student(kind, target, [0, 2, 3, 4, 5, 6, 7], seed=2, num_hidden_layers=layers)
    lm = {
        "plain": lambda: CausalLM(StudentNetwork(student), "plain"),
        "glide": lambda: GlideLM(student, 3),
        "feature": lambda: FeatureLM(student, "feature"),
    }[kind]()
    return Proposer([ModelSource(lm)], tree=True, nodes=NODES)


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
    held = twin.rollback([row])[0]
    assert held == len(row) - 1, "something accepted is missing, or something refused was kept"
    for layer in range(len(past.layers)):
        key, value, valid = twin.kv(layer)
        assert valid.tolist() == [held]
        near(key[:, :, :held], past.layers[layer].keys[:, :, :held])
        near(value[:, :, :held], past.layers[layer].values[:, :, :held])
    near(twin.hidden(), out.hidden_states[-1][:, :held])
    near(twin.score([row], NOTHING)[0, 0], out.logits[0, -1])


@torch.inference_mode()
def audit_drafter(drafter: Proposer, model: Any, row: list[int], least: int) -> None:
    """What is still cached, at least `least` tokens, is what a new session beside a new target's makes of the row."""
    (session,) = drafter.sessions
    assert isinstance(session, CausalSession)
    twin = session.fork()
    fresh: Any = drafter.models[0].open([row], target=fed(model, [row], [len(row) - 1], hidden=True))
    logits = fresh.score([row], NOTHING)
    held = twin.rollback([row])[0]
    assert held >= least, "the drafter's cache was thrown away"
    for layer in range(twin.network.layers):
        for part, wanted in zip(twin.kv(layer)[:2], fresh.kv(layer)[:2], strict=True):
            near(part[:, :, :held], wanted[:, :, :held])
    near(twin.score([row], NOTHING)[0, 0], logits[0, 0])


@pytest.mark.parametrize(("layers", "temperature"), [(1, 0.8), (2, 0.0)])
@pytest.mark.parametrize(("network", "kind"), crossed(NETWORKS, ["plain", "glide", "feature"]))
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
        drawing = sampler(temperature, seed=turn)
        for event in generate(lm, [list(row)], drafter, drawing, Limits(LENGTH), pace=FixedPace(3), session=session):
            if not isinstance(event, Step):
                continue
            least = len(row) if event.drafted else least  # what it read to draft
            row += event.emitted
            audit_target(session, model, row)
            audit_drafter(drafter, model, row, least)
            beside += any(event.parents[node] != node - 1 for node in event.path)
        row += [5, turn]
    assert beside, "no sibling was ever accepted: the test shows nothing"


# -- who takes them --------------------------------------------------------------------------------
