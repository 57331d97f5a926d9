"""docs/models.md says of every architecture what its small model shows."""

from pathlib import Path

import pytest

from sampling.drafters.draft_model import ModelDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.events import Step
from sampling.models.encoder_decoder import lm_of
from tests.support.architectures import END, PROMPTS, architecture, generated
from tests.support.models_table import NAMES, row_of, table, written
from tests.support.refusals import refused
from tests.support.runs import answers, decode, greedy
from tests.support.tiny import noisy_copy


@pytest.mark.exhaustive
def test_the_table_of_models_is_what_they_show() -> None:
    page = Path("docs/models.md").read_text(encoding="utf-8")
    assert page == written(page, table())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_64_tokens_are_those_of_generate_at_every_gamma_and_its_own_drafts_are_all_accepted(name: str) -> None:
    model = architecture(name)
    if "refused" in row_of(name):
        refused(lm_of, model)
        return
    target = lm_of(model)
    wanted = [generated(model, PROMPTS[1], 64)]
    for drafter in (
        NgramDrafter(target.vocab_size, stop_if_unknown=False),
        ModelDrafter(lm_of(noisy_copy(model, 0.03), "drafter")),
    ):
        for gamma in (1, 4, 7):
            said = answers(target, PROMPTS[1:], drafter, greedy(), length=64, gamma=gamma, stop=[END])
            assert said == wanted, (drafter.traits.names, gamma)
    events = decode(target, PROMPTS[1:], ModelDrafter(lm_of(model, "drafter")), greedy(), length=64, gamma=4)
    steps = [event for event in events if isinstance(event, Step) and event.drafted]
    assert steps
    assert all(len(step.path) == len(step.drafted) for step in steps)
