"""From options to what is to be loaded: which pair of which catalogue, with which models put in their places.

Touches no model and no torch; :func:`load_options` alone imports the loader's record, when called.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.settings.layers import ModelOptions
from utils.distributed.world import World

if TYPE_CHECKING:
    from utils.catalogue.catalogue import Catalogue
    from utils.catalogue.specs import PairSpec
    from utils.loading.loaded import LoadOptions


CATALOGUE = Path(__file__).resolve().parents[2] / "models.yaml"


def catalogue(options: ModelOptions) -> Catalogue:
    """The catalogue of --models, or the program's own; UsageError in one line when it is wrong."""
    from utils.catalogue.catalogue import load_catalogue

    return load_catalogue(Path(options.models) if options.models else CATALOGUE)


def choose_pair(options: ModelOptions, name: str | None = None) -> PairSpec:
    """The pair called `name` (else --pair, else the catalogue's default) with --target and --drafter put in.

    A --target without --pair takes no other value from the catalogue's default pair but its settings for every
    pair, and the n-gram drafter unless --drafter names one. A pair named here (by /pair) is taken as it stands.
    """
    from utils.catalogue.specs import DRAFTER_WORDS, PairSpec, named_tables, spec_from_argument

    known = catalogue(options)
    if name is not None:
        return known.pair(name)
    model: Any = options.drafter
    more: dict[str, Any] = {}
    if model is not None and (file := named_tables(model)) is not None:
        model, more = "tables", {"tables": file}
    if model not in (None, *DRAFTER_WORDS):
        model = spec_from_argument(model)
    if model is not None:
        more = {**more, "drafter": model, "method": "spec"}
    pair = known.pair(options.pair)
    if options.target is None:
        return pair if model in (None, pair.method) else _trained(pair.model_copy(update=more))
    target = spec_from_argument(options.target)
    if options.pair is not None:
        return _trained(pair.model_copy(update={"target": target, **more}))
    return _trained(PairSpec(**{"name": target.name, "target": target, "defaults": known.defaults, **more}))


def _trained(pair: PairSpec) -> PairSpec:
    """The pair; UsageError if its drafter is a word for a trained one that it does not have."""
    from utils.catalogue.specs import trained_kind

    if (kind := trained_kind(pair.drafter)) is not None:
        pair.student(kind)
    return pair


def load_options(options: ModelOptions) -> LoadOptions:
    """The loader's half of the options. Imports the loader (and with it torch)."""
    from utils.loading.loaded import LoadOptions

    names = set(LoadOptions.__dataclass_fields__) - {"tp_size"}
    given = {name: value for name, value in options.model_dump().items() if name in names}
    return LoadOptions(**given, tp_size=World.of(os.environ).size)
