"""Heads that draft a block in one pass: each published naming gives the logits of the package *speculators*, chains and
trees of them change no text, and a tree is the likeliest paths.
"""

import heapq
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sampling.drafters import draft_model
from sampling.drafters.draft_heads.checkpoint import load_student
from sampling.drafters.draft_heads.dflash import pard_lm
from sampling.drafters.draft_model import CONFIDENT, ModelDrafter, source_of
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.models.causal import CausalLM
from sampling.types import Budget
from tests.sampling.drafters.draft_heads.test_exact import (
    EXACT,
    FAIL_BELOW,
    OffByOne,
    counted,
    enumerated,
    itself,
    same_rounds,
)
from tests.support.blocks import AFTER, CASES, V, loaded, naive, published, reference, target_of, written
from tests.support.reference import NaiveLaw
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, decode, drafting, emitted, greedy, sampler, tiers
from tests.support.students import BLOCKS, close, fed, make_drafter, make_student, make_target, text
from utils.catalogue.catalogue import head_kind


@pytest.mark.parametrize(("name", "family"), crossed(CASES, ("Llama", "Qwen3")))
def test_a_block_has_the_logits_of_the_reference(name: str, family: str, tmp_path: Path) -> None:
    target, row = target_of(family), text(1, 12, V)
    lm, network = loaded(tmp_path, name, target), CausalLM(target).network
    session: Any = None
    for length, wanted in reference(name, family).items():  # again behind more tokens, on the cache that was kept
        session = lm.open(
            [row[:length]], previous=session, target=fed(network, [row[:length]], [length - 1], hidden=lm.reads_hidden)
        )
        session.draft_block([row[:length]], lm.block)
        for depth, numbers in enumerate(wanted):
            close(session.logits_after([0], [[row[length - 1], *AFTER[:depth]]])[0][::4], numbers, 1e-4)


def test_a_causal_block_needs_no_rows_behind_its_last_draft(tmp_path: Path) -> None:
    target, row = target_of("Llama"), text(1, 9, V)
    lm = loaded(tmp_path, "JetSpec", target)
    session: Any = lm.open([row], target=fed(target, [row], [8], hidden=lm.reads_hidden))
    widths, score = [], session.score_reduced
    session.score_reduced = lambda rows, draft: widths.append(len(draft.tokens[0])) or score(rows, draft)
    drawn = []
    for drafts in (3, 1):
        session.draft_block([row], drafts)
        drawn.append(session.logits_after([0], [[row[-1]]]))
    close(drawn[1], drawn[0])
    assert widths == [3, 1]


def test_the_naive_pass_is_that_of_the_reference() -> None:
    """What kinds that the package lacks are compared with equals it for DFlash."""
    for length, wanted in reference("DFlash of z-lab", "Llama").items():
        close(naive("DFlash of z-lab", "Llama", length)[:, ::4], wanted, 1e-4)


# -- trees --------------------------------------------------------------------------------------------


def best_first(session: Any, last: int, depth: int, nodes: int) -> list[list[int]]:
    """The `nodes` likeliest paths, by a heap: a path that is taken brings its next sibling and its first child; none
    where the head expects its draft to be refused."""
    turns = count()

    def level(path: list[int]) -> list[tuple[float, int]]:
        probs = session.logits_after([0], [[last, *path]])[0].double().log_softmax(dim=-1).tolist()
        ids = range(len(probs)) if session.reduced_ids is None else session.reduced_ids.tolist()
        return sorted(zip(probs, ids, strict=True), reverse=True)

    first = level([])
    heap, taken = [(-first[0][0], next(turns), 0.0, [], first, 0)], []
    while len(taken) < nodes and heap:
        cost, _, above, path, siblings, place = heapq.heappop(heap)
        taken.append([*path, siblings[place][1]])
        if place + 1 < len(siblings):
            heapq.heappush(heap, (above - siblings[place + 1][0], next(turns), above, path, siblings, place + 1))
        chances = session.confidence([0], [[last, *taken[-1]]])
        if len(taken[-1]) < depth and (chances is None or chances[0] >= CONFIDENT):
            below = level(taken[-1])
            heapq.heappush(heap, (cost - below[0][0], next(turns), cost, taken[-1], below, 0))
    return sorted(taken)


@pytest.mark.parametrize("name", CASES)
def test_a_tree_is_the_likeliest_paths(name: str, tmp_path: Path) -> None:
    target, row = target_of("Llama"), text(2, 9, V)
    lm = loaded(tmp_path, name, target)
    held = fed(target, [row], [8], hidden=lm.reads_hidden)
    drawing = sampler(0.9, 3)  # under it as many tokens are offered as the tree has nodes
    for nodes in (1, 6, 14):
        drafter: Any = Proposer([source_of(lm)], tree=True, nodes=nodes, least=0.0)
        drafter.start([row], held, held)
        draft = drafter.propose([row], Budget([lm.block]), drafting(drawing, [row]))
        parents, paths = draft.trees[0].parents, list[list[int]]()
        for token, parent in zip(draft.tokens[0], parents, strict=True):
            paths.append([token] if parent < 0 else [*paths[parent], token])
        assert sorted(paths) == best_first(drafter.sessions[0], row[-1], lm.block, nodes)
        assert [call.passes for call in draft.calls] == [1]


def test_a_draft_ends_where_its_head_expects_it_to_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is made from what stands before the draft, and whoever asks can see it."""
    target, row = target_of("Llama"), text(2, 9, V)
    lm, lengths = loaded(tmp_path, "DSpark, a reduced vocabulary", target), set()
    held = fed(target, [row], [8], hidden=lm.reads_hidden)
    monkeypatch.setattr(draft_model, "CONFIDENT", 0.0965)
    for seed in range(12):
        drafter: Any = ModelDrafter(lm)
        drafter.start([row], held, held)
        draft = drafter.propose([row], Budget([lm.block]), drafting(sampler(1.5, seed), [row]))
        tokens, session = [row[-1], *draft.tokens[0]], drafter.sessions[0]
        told = [session.confidence([0], [tokens[: depth + 1]])[0] for depth in range(min(len(tokens), lm.block))]
        assert draft.calls[0].confidence == pytest.approx(told)
        assert [chance >= 0.0965 for chance in told] == [True] * (len(tokens) - 1) + [False] * (
            len(told) + 1 - len(tokens)
        )
        lengths.add(len(tokens) - 1)
    assert len(lengths) > 1


@pytest.mark.parametrize("name", [*[*CASES][1:11:3], "JetSpec", "Domino"])
def test_text_is_plain_decodings_in_chains_and_trees(name: str, tmp_path: Path) -> None:
    target = target_of("Qwen3")
    plain, lm = CausalLM(target), loaded(tmp_path, name, target)
    prompts = [text(5, 9, V), text(6, 3, V), [7]]
    for drawing in (greedy, lambda: sampler(0.8, 3, coupling="gumbel")):
        alone = answers(plain, prompts, None, drawing(), length=10)
        assert answers(plain, prompts, ModelDrafter(lm), drawing(), length=10) == alone
    for drafter in (Proposer([source_of(lm)], tree=True), LookupDrafter(model=source_of(lm), tree=True)):
        alone = answers(plain, prompts[:1], None, sampler(0.9, 1), length=10)
        assert answers(plain, prompts[:1], drafter, sampler(0.9, 1), length=10) == alone


# -- what is said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*BLOCKS, "pard-2"])
def test_the_emitted_law_is_the_targets_to_the_last_digit(kind: str) -> None:
    assert enumerated(kind, itself, "law", NaiveLaw(top_k=2), length=3) < EXACT


@pytest.mark.parametrize(
    "kind",
    ["dflash", "pard-2", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in BLOCKS if kind != "dflash")],
)
def test_a_wrong_law_is_seen(kind: str) -> None:
    assert enumerated(kind, OffByOne, "law", NaiveLaw(top_k=2), length=3) > 1e-4


@pytest.mark.parametrize("samples", tiers(1_000, 5_000))
@pytest.mark.parametrize("kind", [*BLOCKS, "pard-2"])
def test_sampled_tokens_have_the_targets_law(kind: str, samples: int) -> None:
    """Through the real noise; by every branch it is shown above."""
    assert counted(kind, "rejection", samples) > FAIL_BELOW


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_next_turns_and_rows_beside_each_other_draft_as_alone(kind: str) -> None:
    target = make_target(8, seed=10)
    lm, student = CausalLM(target), make_student(kind, target, short=[0, 2, 3, 4, 5, 6, 7], seed=2)
    prompts = [text(41, 3, 8), text(42, 17, 8), [6]]
    options = {"length": 16, "gamma": 3, "stop": {1}}
    together = decode(lm, prompts, make_drafter(student), greedy(), **options)
    kept = make_drafter(student)
    for row, prompt in enumerate(prompts):
        alone = decode(lm, [prompt], kept, greedy(), **options)
        same_rounds(together, alone, row)
        same_rounds(
            decode(lm, [[*prompt, *emitted(alone)[0], 5]], kept, greedy(), **options),
            decode(lm, [[*prompt, *emitted(alone)[0], 5]], make_drafter(student), greedy(), **options),
        )


# -- a model with a mask ----------------------------------------------------------------------------------


def test_a_pard_model_drafts_from_the_masks_behind_a_row() -> None:
    model, row = make_target(V, seed=9, pard_token=7), text(3, 8, V)
    assert pard_lm(make_target(V), None, "drafter", V) is None
    lm, plain = pard_lm(model, None, "drafter", V), CausalLM(target_of("Llama"))
    assert lm is not None
    session: Any = lm.open([row])
    for length in (6, 8):
        session.draft_block([row[:length]], 4)
        for depth, logits in enumerate(model(input_ids=torch.tensor([[*row[:length], 7, 7, 7]])).logits[0, -4:]):
            close(session.logits_after([0], [[0] * (depth + 1)])[0], logits)
    prompts = [text(5, 9, V), [7]]
    assert answers(plain, prompts, ModelDrafter(lm), greedy(), length=8) == answers(
        plain, prompts, None, greedy(), length=8
    )


PARD_2 = {"pard_token": 7, "pard2": True, "spd_type": "pard2", "pard2_target_dim": 48, "pard2_target_layers": [-1, -4]}


def pard_2(folder: Path, family: str, bias: bool, **changes: Any) -> Any:
    """The model in a folder as AMD-AGI/PARD's pard2_train.py leaves it, with a map of a target's states."""
    model = make_target(V, seed=9, family=family, hidden_size=16, **{**PARD_2, "pard2_scale": 0.5, **changes})
    model.save_pretrained(folder)
    noise = torch.Generator().manual_seed(2)
    parts = {"target_proj.weight": torch.randn(16, 48, generator=noise)}
    parts |= {"target_proj.bias": torch.randn(16, generator=noise)} if bias else {}
    torch.save(parts, folder / "warp_model.bin")
    assert head_kind(folder) is None
    return AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def warped(model: Any, folder: Path, target: Any, row: list[int], drafts: int) -> Any:
    """Logits [drafts, V] after a row and masks by the authors' equations, without a cache: to the embedding at p comes
    0.5 (W h + b), h the last and the fourth last of the target's hidden states at p − 1, zeros at 0; to masks that of
    the row's last token."""
    states = target(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states
    h = torch.cat([states[-1], states[-4]], dim=-1)[0]
    h = torch.cat([torch.zeros(1, 48), h[: len(row) - 1]])
    h = torch.cat([h, h[-1:].expand(drafts - 1, -1)])
    parts = torch.load(folder / "warp_model.bin")
    term = h @ parts["target_proj.weight"].T + parts.get("target_proj.bias", 0)
    return model(
        inputs_embeds=model.get_input_embeddings()(torch.tensor([[*row, *[7] * (drafts - 1)]])) + 0.5 * term
    ).logits[0, -drafts:]


@pytest.mark.parametrize(("family", "bias"), [("Llama", True), ("Qwen3", False)])
def test_a_pard_2_model_reads_its_targets_states(family: str, bias: bool, tmp_path: Path) -> None:
    target, row = target_of("Llama"), text(3, 12, V)
    model = pard_2(tmp_path, family, bias)
    lm: Any = pard_lm(model, target, "drafter", V)
    session, network = None, CausalLM(target).network
    for length, more in ((6, 0), (8, -2), (9, 0), (8, 1)):  # the target lags behind and moves on, then goes back
        held = fed(network, [row[:length]], [length - 1 + more], hidden=lm.reads_hidden)
        session = lm.open([row[:length]], previous=session, target=held)
        assert bool(session.held()[0]) == (length != 6)
        session.draft_block([row[:length]], 4)
        for depth, logits in enumerate(warped(model, tmp_path, target, row[:length], 4) if more >= 0 else ()):
            close(session.logits_after([0], [[0] * (depth + 1)])[0], logits, 1e-4)
    plain, prompts = CausalLM(target), [text(5, 9, V), text(6, 3, V), [7]]
    assert answers(plain, prompts, ModelDrafter(lm), greedy(), length=10) == answers(
        plain, prompts, None, greedy(), length=10
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pard2_target_layers": [-1]}, r"its map is \[16, 48\], not \[16, 24\] \(without that file the model drafts"),
        ({"pard2_target_layers": None}, "pard2_target_layers is None, no list of layers"),
        ({"pard2_target_layers": ["a"]}, r"pard2_target_layers is \['a'\], no list of layers"),
        ({"pard2_target_layers": [-1, -10]}, r"reads states \[8, -1\]: a target of 8 layers does not have them"),
    ],
)
def test_a_map_for_another_target_is_one_line(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    refused(pard_lm, pard_2(tmp_path, "Llama", False, **changes), target_of("Llama"), "drafter", V, match=told)


def test_a_pard_2_model_without_a_map_drafts_for_any_target(tmp_path: Path) -> None:
    model = pard_2(tmp_path, "Llama", False)
    for elsewhere in (None, object()):  # not loaded, or in a server
        assert not getattr(pard_lm(model, elsewhere, "drafter", V), "reads_hidden", True)
    torch.save(
        {"target_proj.weight": torch.zeros(16, 48), "target_proj.bias": torch.zeros(5)}, tmp_path / "warp_model.bin"
    )
    refused(pard_lm, model, target_of("Llama"), "drafter", V, match=r"damaged: target_proj.bias has the shape \[5\]")
    (tmp_path / "warp_model.bin").write_bytes(b"PK")
    refused(pard_lm, model, target_of("Llama"), "drafter", V, match="warp_model.bin is incomplete or damaged")
    (tmp_path / "warp_model.bin").unlink()
    lm: Any = pard_lm(model, target_of("Llama"), "drafter", V)
    assert not lm.reads_hidden


# -- refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("DFlash", {"aux_hidden_state_layer_ids": [2, 4, 9]}, r"reads states \[2, 4, 9\]: a target of 8 layers"),
        ("DFlash", {"aux_hidden_state_layer_ids": None}, "is None, no list of layers"),
        ("DFlash", {"aux_hidden_state_layer_ids": [2, 4]}, r"hidden size 36 \(org/Large-8B\), this one has 24"),
        ("DFlash", {"block_size": 1}, "block_size is 1, no number of rows from 2 on"),
        ("DFlash", {"mask_token_id": 40}, "mask_token_id is 40, no id of 40"),
        ("DFlash", {"mask_token_id": None}, "mask_token_id is None"),
        ("DFlash2", {"conv_group_size": 5}, "conv_group_size 5 does not divide 24"),
        ("DFlash2", {"selector_rank": 5}, "does not fit its config.json"),
        ("DSpark of DeepSpec, gated", {"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ("DSpark of DeepSpec, gated", {"enable_confidence_head": False}, "it has model.confidence_head.proj"),
        ("P-EAGLE", {"mask_token_id": None}, "mask_token_id is None, no id of 40"),
        ("P-EAGLE", {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "a target of 8 layers does not have them"),
        (
            "DFlare",
            {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 38}},
            "hidden size 36, this one has 24",
        ),
        ("JetSpec", {"draft_shift": True}, "has draft_shift, which is not read"),
        ("DFlash of z-lab", {"layer_types": ["full_attention"]}, "has 2 layers, its layer_types are"),
        ("DFlash of DeepSpec", {"target_layer_ids": [1, 3, 8]}, r"reads states \[2, 4, 9\]"),
    ],
)
def test_what_does_not_fit_is_one_line(name: str, changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    config, tensors = published(CASES[name])
    refused(load_student, written(tmp_path, {**config, **changes}, tensors), target_of("Llama"), match=told)


def test_the_layers_that_z_lab_reads_where_it_names_none(tmp_path: Path) -> None:
    config, tensors = published(CASES["DFlash of z-lab"])
    del config["dflash_config"]["target_layer_ids"]
    assert load_student(written(tmp_path, config, tensors), target_of("Llama")).config.reads == (2, 4, 6)
