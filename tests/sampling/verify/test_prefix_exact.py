"""Processors that look at the prefix stay exact under speculation: at draft i they see prefix + drafts[:i].

By taking every branch, by counting, by greedy identity with transformers; prefixes without the
drafts are caught by each of them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sampling.drafters.draft_model import ModelDrafter, ModelSource, NoDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.proposal import Proposer
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.models.causal import CausalLM
from sampling.sampler import KeyedSampler
from sampling.types import Draft, Drafter, Rows
from tests.sampling.verify.test_chi_square import PROMPT as START, V, model, target as target_lm
from tests.sampling.verify.test_enumeration import EXACT, PROMPT, sure_start
from tests.support import cascades
from tests.support.reference import NaiveLaw, chi_square_p, exact_law, same_or_tied, transformers_greedy
from tests.support.runs import answers, crossed, enumeration_error, sample_counts
from tests.support.students import KINDS, PrefixLM, make_drafter, make_student, make_target
from tests.support.tiny import noisy_copy, tiny_model
from tests.support.toys import LawDrafter, MixedDrafter, PointDrafter, TableLM
from utils.logits_processors import make_processor

CAUGHT, FAIL_BELOW = 1e-3, 1e-6
Rules = dict[str, Any]
LAWS = {
    "penalty": NaiveLaw(repetition_penalty=1.8),
    "penalty below 1": NaiveLaw(repetition_penalty=0.6, temperature=1.3),
    "bigrams once": NaiveLaw(no_repeat_ngram=2),
    "both, shaped": NaiveLaw(0.8, 0, 0.9, 0.05, repetition_penalty=1.5, no_repeat_ngram=2),
    "presence": NaiveLaw(presence_penalty=1.2),
    "frequency in a window": NaiveLaw(frequency_penalty=0.7, penalty_window=2),
    "all": NaiveLaw(0.8, 0, 0.9, 0.0, 1.2, 0, 0.5, -0.4, 3, 0.9),
    "both, greedy": NaiveLaw(0.0, repetition_penalty=1.5, no_repeat_ngram=2),
}
MAKERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "model": lambda: ModelDrafter(TableLM(3, seed=7)),
    "model, same law": lambda: ModelDrafter(TableLM(3, seed=1)),
    "law": lambda: LawDrafter(TableLM(3, seed=9)),
    "drawn, then points": lambda: MixedDrafter(TableLM(3, seed=9)),
    "early stop": lambda: LawDrafter(TableLM(3, seed=9), least_top=0.55),
    "always 0": lambda: PointDrafter(3, lambda row: 0),
    "ngram": lambda: NgramDrafter(3),
    "tables": lambda: LookupDrafter(least=0.0),
    "maxgram": MaxGramDrafter,
    "model, its likeliest": lambda: Proposer([ModelSource(TableLM(3, seed=7))]),
}


@pytest.mark.parametrize("drafts", ["law", "greedy"])
@pytest.mark.parametrize(("name", "law"), crossed(MAKERS, LAWS))
def test_every_drafter_emits_the_targets_law(name: str, law: str, drafts: str) -> None:
    options = {"prompt": PROMPT, "length": 4, "gamma": 2, "drafts": drafts, "law": LAWS[law], "together": 128}
    assert enumeration_error(sure_start(3, 1), MAKERS[name], **options) < EXACT


@pytest.mark.parametrize(
    ("name", "lenience"),
    crossed(["model < points", "model < model", "model < law", "chain", "chain of models"], [1.0, 3.0]),
)
def test_cascades_and_chains_too(name: str, lenience: float) -> None:
    law = NaiveLaw(top_k=2, repetition_penalty=1.8, no_repeat_ngram=2)
    options = {"prompt": PROMPT, "length": 4, "gamma": 64, "law": law, "together": 128}
    assert enumeration_error(sure_start(3, 1), lambda: cascades.drafter(name, lenience, 3), **options) < EXACT


@pytest.mark.parametrize(("kind", "drafts"), crossed(KINDS, ["law", "greedy"]))
def test_trained_drafters_with_a_short_list_too(kind: str, drafts: Any) -> None:
    """V = 4, one id outside the student's list; its law covers the whole vocabulary under such processors."""
    target = make_target(4, seed=3, dtype=torch.float64)
    drafter = make_drafter(make_student(kind, target, short=[0, 1, 3]))
    law = NaiveLaw(top_k=2, repetition_penalty=1.8, no_repeat_ngram=2)
    options = {"prompt": [0, 1, 0, 2], "length": 4, "gamma": 2, "drafts": drafts, "law": law}
    assert enumeration_error(CausalLM(target), lambda: drafter, oracle=PrefixLM(target), **options) < EXACT


# -- the negative control -------------------------------------------------------------------------


def committed_only(rows: Rows, draft: Draft, places: list[tuple[int, int]] | None = None) -> Rows:
    """A mutant of `prefixes_of`: every law of a row's draft is made with the committed tokens alone."""
    if places is not None:
        return [rows[row] for row, _ in places]
    return [row for row in rows for _ in range(draft.width + 1)]


@pytest.mark.parametrize("law", ["penalty", "bigrams once", "presence", "frequency in a window"])
@pytest.mark.parametrize("name", ["model", "always 3"])
def test_ignoring_the_drafts_in_the_prefix_is_caught(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Id 3 is in no prompt: whether it is in the prefix is the drafts' doing."""
    target, right = sure_start(4, 1), LAWS[law]
    make = {"model": lambda: ModelDrafter(TableLM(4, seed=7)), "always 3": lambda: PointDrafter(4, lambda row: 3)}[name]
    options = {"prompt": PROMPT, "length": 4, "gamma": 2, "law": right, "together": 128}
    assert enumeration_error(target, make, **options) < EXACT
    monkeypatch.setattr("sampling.verify.distributions.prefixes_of", committed_only)
    assert enumeration_error(target, make, **options) > CAUGHT


# -- counting -------------------------------------------------------------------------------------

RULES: Rules = {"repetition_penalty": 1.6, "no_repeat_ngram": 2}


COUNTED: dict[str, tuple[Callable[[], Drafter], Rules, Rules]] = {
    "rejection": (model, {}, {}),
    "rejection, shaped": (model, {}, {"temperature": 0.8, "top_k": 6, "top_p": 0.9}),
    "gumbel": (model, {"coupling": "gumbel"}, {}),
    "ngram": (lambda: NgramDrafter(V), {}, {}),
    "cascade": (lambda: cascades.drafter("model < points", 2.0, V), {}, {}),
}


def counted(name: str, samples: int) -> float:
    make, options, law = COUNTED[name]
    processor = make_processor(**{"temperature": 1.0, **law}, **RULES)
    gamma = 64 if name == "cascade" else 3
    found = sample_counts(
        target_lm(),
        make,
        lambda seed: KeyedSampler(processor, seed=700 + seed, **options),
        prompt=START,
        samples=samples,
        length=4,
        gamma=gamma,
    )
    return chi_square_p(found, exact_law(target_lm(), START, NaiveLaw(**law, **RULES), 3))


@pytest.mark.parametrize("name", COUNTED)
def test_sampled_tokens_have_the_targets_law(name: str) -> None:
    assert counted(name, 3_000) > FAIL_BELOW


@pytest.mark.parametrize("name", ["rejection", "gumbel"])
def test_the_count_sees_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampling.verify.distributions.prefixes_of", committed_only)
    assert counted(name, 3_000) < FAIL_BELOW


# -- greedy identity with transformers --------------------------------------------------------------

PENALTIES: list[Rules] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram": 3},
    {"repetition_penalty": 1.1, "no_repeat_ngram": 2},
]


def theirs(rules: Rules) -> Rules:
    return {{"no_repeat_ngram": "no_repeat_ngram_size"}.get(name, name): value for name, value in rules.items()}


@pytest.mark.parametrize(("rules", "shape"), crossed(PENALTIES, [(1, True), (4, False), (8, True)]))
def test_greedy_text_is_that_of_transformers(rules: Rules, shape: tuple[int, bool]) -> None:
    """Of prompts alone and of ragged rows, each ruled by its own prefix."""
    gamma, together = shape
    model = tiny_model(3)
    lm, small = CausalLM(model), CausalLM(noisy_copy(model, 0.05), "drafter")
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [250, 9, 9, 9], list(range(40, 80))]
    references = [transformers_greedy(model, prompt, 40, [2], **theirs(rules)) for prompt in prompts]
    for make in (NoDrafter, lambda: ModelDrafter(small), lambda: NgramDrafter(lm.vocab_size), MaxGramDrafter):
        sampler, options = KeyedSampler(make_processor(0.0, **rules)), {"length": 40, "gamma": gamma, "stop": [2]}
        if together:
            found = answers(lm, prompts, make(), sampler, **options)
        else:
            found = [answers(lm, [prompt], make(), sampler, **options)[0] for prompt in prompts]
        assert all(same_or_tied(ids, told) != "different" for ids, told in zip(found, references, strict=True))


def test_the_default_model_says_what_transformers_says(default_pair: Any, reference_model: Any) -> None:
    rules = PENALTIES[2]  # both at once; a small model shows each alone, above
    lm = CausalLM(default_pair.target.model, vocab_size=default_pair.vocab_size)
    told: list[str] = []
    chats = [
        [{"role": "user", "content": text}]
        for text in ("List the days of the week, one a line.", "Say the word fish five times, then explain why.")
    ]
    template = default_pair.tokenizer.apply_chat_template
    prompts = [list(template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
    stop = default_pair.stop_ids
    references = [transformers_greedy(reference_model, prompt, 14, stop, **theirs(rules)) for prompt in prompts]
    for drafter in (NoDrafter(), LookupDrafter(), NgramDrafter(lm.vocab_size)):
        found = answers(lm, prompts, drafter, KeyedSampler(make_processor(0.0, **rules)), length=14, gamma=4, stop=stop)
        told += [same_or_tied(ids, reference) for ids, reference in zip(found, references, strict=True)]
    assert "different" not in told
    assert told.count("same") >= 5
