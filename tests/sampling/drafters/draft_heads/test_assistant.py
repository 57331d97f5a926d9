"""Gemma 4's assistants: their drafts are those of transformers' own loop, and change no text."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from app.lanes.lane import PairEngine
from app.settings.table import Settings
from sampling.drafters.draft_heads.assistant import AssistantLM
from sampling.models.causal import CausalLM
from sampling.types import Draft
from tests.support.architectures import PROMPTS, generated, save
from tests.support.mtp import assistant_folder, gemma
from tests.support.refusals import refused
from tests.support.runs import answers, greedy
from tests.support.students import close, make_target
from utils.catalogue.specs import ModelSpec, PairSpec
from utils.loading.loaded import LoadOptions
from utils.loading.loading import load_pair

ROW = [(7 * at + 5 * at * at) % 61 + 20 for at in range(24)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PairEngine:
    folder = tmp_path_factory.mktemp("gemma")
    models = [save(gemma(), folder / "target"), assistant_folder(folder / "assistant")]
    target, drafter = (ModelSpec(path=str(model)) for model in models)
    return PairEngine(load_pair(PairSpec(name="gemma", target=target, drafter=drafter), LoadOptions(device="cpu")))


@torch.no_grad()
def drafted(model: Any, assistant: Any, row: list[int], count: int) -> list[torch.Tensor]:
    """Logits of greedy drafts, as `SinglePositionMultiTokenCandidateGenerator` of transformers makes them."""
    read = model(input_ids=torch.tensor([row[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, token, logits = read.hidden_states[-1][:, -1:], torch.tensor([row[-1:]]), list[torch.Tensor]()
    for _ in range(count):
        out = assistant(
            inputs_embeds=torch.cat([model.get_input_embeddings()(token), state], dim=-1),
            position_ids=torch.tensor([[len(row) - 1]]),
            shared_kv_states=read.shared_kv_states,
            use_cache=False,
        )
        logits.append(out.logits[0, 0])
        state, token = out.last_hidden_state, out.logits.argmax(dim=-1)
    return logits


def test_the_logits_are_those_of_transformers_own_loop(engine: Any) -> None:
    # In double precision: of rounding in single precision the fourth draft makes 2e-4 on some processors.
    assert isinstance(engine.drafters.model, AssistantLM)
    model, assistant = (deepcopy(part.model).double() for part in (engine.target.network, engine.drafters.model))
    lm, held, session = AssistantLM(assistant, CausalLM(model)), CausalLM(model).open([ROW], hidden=True), None
    for length in (9, 10, 24):  # beyond the window of 12 as well
        row = ROW[:length]
        held.score([row[:-1]], Draft.empty(1))
        session = lm.open([row], previous=session, target=held)
        for wanted in drafted(gemma().double(), assistant, row, 4):
            close(session.score([row], Draft.empty(1))[0, 0], wanted, 1e-6)
            row = [*row, int(wanted.argmax())]


@pytest.mark.parametrize("gamma", [4, *(pytest.param(gamma, marks=pytest.mark.exhaustive) for gamma in (1, 7))])
def test_greedy_text_is_that_of_generate(engine: PairEngine, gamma: int) -> None:
    drafter = engine.drafters.make("model", Settings())
    said = answers(engine.target, PROMPTS[1:], drafter, greedy(), length=64, gamma=gamma, stop=[95])
    assert said[0] == generated(gemma(), PROMPTS[1], 64)
    both = answers(engine.target, PROMPTS[1:] * 2, drafter, greedy(), length=12, gamma=gamma, stop=[95])
    assert both == [said[0][:12]] * 2


def test_what_does_not_fit_is_one_line(engine: Any) -> None:
    refused(engine.drafters.model.open, [ROW], match="reads its target's session: it cannot run alone")
    refused(
        AssistantLM,
        engine.drafters.model.model,
        CausalLM(make_target(40)),
        match="of a Gemma 4 target, which this one is not",
    )
