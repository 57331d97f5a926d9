"""What runs, in a line: models, place and settings, of a loaded pair or as a file tells of one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.palette import Look
from app.settings import Settings
from app.toolbar import gamma_text
from app.view import Header
from utils.specs import BEHIND, CASCADES

if TYPE_CHECKING:
    from app.lanes import Engine
    from utils.loading import LoadedModel

Models = Mapping[str, str]  # pair, target, drafter, where


def models_of(engine: Engine) -> dict[str, str]:
    """The names of what is loaded, and where it runs."""
    target = engine.loaded.target
    return {
        "pair": engine.loaded.spec.name,
        "target": target.name,
        "drafter": drafter_name(engine),
        "where": f"{dtype_name(target)} {target.device}",
    }


def heading(models: Models, settings: Settings, look: Look, last_gamma: int | None = None) -> Header:
    """The line over everything; `last_gamma` is what `auto` chose last."""
    return Header(
        models.get("target", ""),
        models.get("drafter", ""),
        look,
        where=models.get("where", ""),
        gamma=gamma_text(settings, last_gamma),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
        seed=settings.seed,
    )


def drafter_name(engine: Engine) -> str:
    """How the pair drafts, in a word or two."""
    loaded = engine.loaded
    if loaded.drafter is not None:
        return loaded.drafter.name
    names = {"ngram": "n-gram drafter", "tables": "n-gram tables", "maxgram": "max-gram drafter", "none": "no drafter"}
    names |= {word: f"{word} of {', '.join(loaded.spec.cascade_names)}" for word in CASCADES}
    names |= {word: f"n-gram tables and {kind} drafter" for word, kind in BEHIND.items()}
    return names.get(loaded.drafter_kind, f"{loaded.drafter_kind} drafter")


def dtype_name(model: LoadedModel) -> str:
    """The number format of a model's weights."""
    name = model.dtype_text
    return name if model.quantization == "none" else f"{model.quantization} ({name})"
