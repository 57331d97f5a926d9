"""Every architecture of transformers as a small random model, loaded as a user's: right with drafts; some are refused.

    python -m pytest -m exhaustive tests/sampling/models/test_architectures.py

takes about ten minutes; the default run leaves it out.
"""

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tests.support.architectures import architecture, outcome, save

REFUSED = (  # what they keep cannot go back to a token; emu3 and mllama have no class for text
    *("cpmant", "deepseek_v4", "emu3", "fsmt", "hrm_text", "inkling2_text", "inkling_text", "openai-gpt", "prophetnet"),
    *("minimax", "mllama", "recurrent_gemma", "reformer", "xlm", "xlnet", "xlstm", "zaya"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [*{**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}]
)
def test_its_text_is_that_of_generate_or_it_is_one_of_those_refused_in_one_line(name: str, tmp_path: Path) -> None:
    try:
        model = architecture(name)
    except Exception as error:  # transformers has no default configuration of it that makes a model
        pytest.skip(f"{type(error).__name__}: {error}")
    folder = save(model, tmp_path / name)
    reference = type(model).from_pretrained(folder).eval()
    reference.generation_config = model.generation_config
    assert outcome(folder, reference) == ("refused in one line" if name in REFUSED else [])
