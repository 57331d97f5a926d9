"""Multi-token prediction layers that ship with their target: they draft what transformers' own module of them drafts,
and change no text, on hybrids as on mixtures.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from sampling.drafters.draft_heads.mtp import MtpLM, naming
from sampling.drafters.draft_model import ModelDrafter, source_of
from sampling.drafters.proposal import Proposer
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support import speculators
from tests.support.architectures import END, PROMPTS, generated
from tests.support.mtp import SHIPPING, drafted, folder_of, loaded, shipped, target_of, tensors, with_tensors
from tests.support.reference import NaiveLaw, chi_square_p, exact_law
from tests.support.refusals import refused
from tests.support.runs import answers, crossed, decode, emitted, greedy, sampler
from tests.support.scripted import catalogue_of, run_lines
from tests.support.students import PrefixLM, close
from tests.support.tiny import TinyPair, noisy_copy

QUICK = ("qwen3_5_text", "deepseek_v3")
ROW = [(7 * at + 5 * at * at) % 61 + 20 for at in range(24)]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHIPPING]
)
def test_the_logits_are_those_of_transformers_own_module(name: str) -> None:
    target = CausalLM(target_of(name))
    lm, held = MtpLM(target), target.open([ROW], hidden=True)
    session: Any = None
    for length in (9, 10, 14, 24):  # again behind more tokens, on the cache that was kept
        row = ROW[:length]
        held.score([row[:-1]], Draft.empty(1))
        session = lm.open([row], previous=session, target=held)
        logits, tokens = drafted(name, row, 4)
        for depth, wanted in enumerate(logits):
            close(session.score([[*row, *tokens[:depth]]], Draft.empty(1))[0, 0], wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not speculators.IMPORTABLE, reason="the package speculators is not there")
@pytest.mark.parametrize("name", [name for name in SHIPPING if "qwen" in name])
def test_speculators_computes_the_same_of_qwens_layers(name: str) -> None:
    model, module = shipped(name)
    states = model(input_ids=torch.tensor([ROW[:8]]), output_hidden_states=True, use_cache=False).hidden_states[-1]
    theirs = speculators.mtp_states(model, module.layers[0].state_dict(), states, ROW[:9])
    close(model.lm_head(theirs[0, -1]), drafted(name, ROW[:9], 1)[0][0], 1e-4)


@pytest.mark.parametrize(("name", "gamma"), crossed(SHIPPING, (4, 1, 7)))
def test_greedy_text_is_that_of_generate(name: str, gamma: int) -> None:
    target = CausalLM(target_of(name))
    said = answers(target, PROMPTS[1:], ModelDrafter(MtpLM(target)), greedy(), length=64, gamma=gamma, stop=[END])
    assert said[0] == generated(shipped(name)[0], PROMPTS[1], 64)


def test_the_next_turn_and_a_stop_within_a_draft_draft_as_a_new_session_does() -> None:
    target = CausalLM(target_of("qwen3_5_text"))
    kept, row = ModelDrafter(MtpLM(target)), [*PROMPTS[1]]
    for stop in (set(), {answers(target, [row], None, greedy(), length=12)[0][6]}, set()):
        options: dict[str, Any] = {"length": 12, "gamma": 4, "stop": stop}
        events = decode(target, [row], kept, greedy(), **options)
        assert emitted(events) == answers(target, [row], None, greedy(), length=12, stop=stop)
        again = decode(target, [row], ModelDrafter(MtpLM(target)), greedy(), **options)
        assert [event.drafted for event in events if hasattr(event, "drafted")] == [
            event.drafted for event in again if hasattr(event, "drafted")
        ]
        row = [*row, *emitted(events)[0], 55]


def test_rows_beside_each_other_and_trees_say_what_each_row_says_alone() -> None:
    target = CausalLM(target_of("deepseek_v3"))
    lm, prompts = MtpLM(target), [*PROMPTS, [40]]
    alone = [answers(target, [prompt], None, greedy(), length=16)[0] for prompt in prompts]
    assert answers(target, prompts, ModelDrafter(lm), greedy(), length=16) == alone
    tree = Proposer([source_of(lm)], tree=True, nodes=8)
    assert [answers(target, [prompt], tree, greedy(), length=16)[0] for prompt in prompts] == alone


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["mtp", pytest.param("model", marks=pytest.mark.exhaustive)])
def test_sampled_text_of_a_hybrid_has_its_law(drafts: str) -> None:
    target = CausalLM(target_of("qwen3_5_text"))
    lm: Any = MtpLM(target) if drafts == "mtp" else CausalLM(noisy_copy(target_of("qwen3_5_text"), 0.03), "drafter")
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(240):
        said = answers(target, [PROMPTS[0]], ModelDrafter(lm), sampler(1.0, seed, top_k=2), length=4, gamma=2)[0]
        found[tuple(said[:3])] += 1
    assert chi_square_p(found, exact_law(PrefixLM(target_of("qwen3_5_text")), PROMPTS[0], NaiveLaw(top_k=2), 3)) > 1e-6
    wrong = exact_law(PrefixLM(target_of("qwen3_5_text")), PROMPTS[0], NaiveLaw(temperature=9.0, top_k=2), 3)
    assert chi_square_p(found, wrong) < 1e-6, "so many samples see another law"


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("qwen3_5_text", "mtp.pre_fc_norm_hidden.weight", None, "it lacks mtp.pre_fc_norm_hidden.weight"),
        ("qwen3_5_text", "mtp.fc.weight", torch.zeros(3, 4), r"mtp.fc.weight is \(3, 4\), not \(64, 128\)"),
        ("qwen3_5_text", "mtp.layers.0.more.weight", torch.zeros(3), "it has mtp.layers.0.more.weight, which nothing"),
        ("deepseek_v3", "model.layers.2.mlp.experts.3.up_proj.weight", None, "it lacks .*experts.3.up_proj.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_one_line(name: str, key: str, value: Any, told: str, tmp_path: Path) -> None:
    target = CausalLM(loaded(with_tensors(name, tmp_path / name, {key: value})))
    refused(MtpLM, target, match=rf"layer of {name} does not fit its configuration: {told}")


def test_a_target_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    without = with_tensors("qwen3_5_text", tmp_path / "bare", dict.fromkeys(tensors("qwen3_5_text")))
    refused(MtpLM, CausalLM(loaded(without)), match="bare ships no multi-token prediction layer")
    assert naming(["model.layers.1.eh_proj.weight"], 2) is None
    assert folder_of("qwen3_5_text").is_dir()


def test_the_console_names_the_layer_and_drafts_with_it(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v3")
    catalogue = catalogue_of(tmp_path, {"ships-ngram": TinyPair(folder, folder)})
    lines = ["abcab", "/clear", "/drafter mtp", "abcab", "/stats", "/clear", "/compare ar,tables+mtp", "abcab"]
    ran = run_lines(catalogue, *lines, settings={"chat": False, "max_new_tokens": 8})
    assert not ran.errors
    assert "deepseek_v3 ships a multi-token prediction layer: --drafter mtp drafts with it" in ran.text
    assert "← mtp drafter" in ran.text
    assert re.search(r"calls: mtp \d+ of", ran.after("/stats"))
    assert re.search(r"tables\+mtp +8 tok", ran.after("abcab"))
