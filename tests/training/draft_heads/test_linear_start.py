"""A feature head may begin as the linear map that is nearest to its target's next state."""

import pytest
import torch

from sampling.drafters.draft_heads.modules import RMSNorm
from tests.support.students import make_target
from training.draft_heads.build import new_draft_head, shape_for, start_linear
from training.draft_heads.features import Example, StoredExamples


@pytest.mark.parametrize("several", [False, True])
def test_a_target_that_is_such_a_map_is_foreseen_without_training(several: bool) -> None:
    """Its next state is a map of the token's embedding and of the state before, both normed; the prompt's differ."""
    noise, target = torch.Generator().manual_seed(0), make_target(vocab=40, num_hidden_layers=7)
    head = new_draft_head(shape_for(target, "feature", several), target, [], 0)
    width = target.config.hidden_size
    of_token, of_state = (torch.randn(width, width, generator=noise) / width**0.5 for _ in range(2))
    trunk, examples, norm = head.model, [], RMSNorm(width, 1e-5)
    for _ in range(40):
        ids = torch.randint(40, (20,), generator=noise)
        hidden = torch.randn(20, width, generator=noise)
        for at in range(4, 20):
            hidden[at] = of_token @ trunk.embed_norm(trunk.embed_tokens(ids[at])) + of_state @ norm(hidden[at - 1])
        examples.append(Example(ids, 5, hidden, {}))
    start_linear(head, StoredExamples(examples[:-1]), ridge=1e-3)
    ids, hidden = examples[-1].ids[None], examples[-1].hidden[None]
    read = torch.cat([hidden, *(torch.randn(1, 20, width, generator=noise) for _ in head.config.reads[1:])], dim=-1)
    agree = head.lm_head(head.states(ids, read)[0]).argmax(dim=-1) == head.lm_head(hidden).argmax(dim=-1)
    assert agree[0, 4:].float().mean() > 0.9
