"""Chooses the pair to load: a pair of the catalogue, some of whose models the options may replace.

Reads no model and imports no torch before :func:`load`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from app.settings.table import ModelOptions, Settings, from_pair
from app.settings.types import got
from sampling.drafters.registry import DRAFTERS, LANES, MEMBERS, REVIEWERS, ROWS
from utils.catalogue.catalogue import Catalogue, load_catalogue, ships_mtp
from utils.catalogue.heads import HEAD_KINDS
from utils.catalogue.specs import (
    KnownNames,
    ModelSpec,
    PairSpec,
    head_kind_of,
    named_tables,
    spec_from_argument,
)
from utils.errors import UsageError, UserError, did_you_mean, raise_first
from utils.loading.loaded import LoadedPair, LoadOptions
from utils.objects import Json
from utils.processes import this_process
from utils.progress import Progress
from utils.remote.server import is_url

CATALOGUE = Path(__file__).resolve().parents[2] / "models.yaml"


_PRESET_TYPES: dict[Any, Any] = {  # by a setting's type: what a catalogue may hold for it, where YAML lacks the type
    int | str: int | Literal["auto"],
    tuple[str, ...]: str | list[str],
    tuple[tuple[int, ...], ...]: str | list[list[int]],
    tuple[tuple[int | str, float], ...]: str | dict[int | str, float] | list[list[int | str | float]],
}


def catalogue_in(file: str | Path) -> Catalogue:
    """Read the catalogue in a file, with the words for drafters and the settings of this program."""
    types = {
        name: _PRESET_TYPES.get(field.annotation, field.annotation) for name, field in Settings.model_fields.items()
    }
    return load_catalogue(file, KnownNames(DRAFTERS, MEMBERS, REVIEWERS, types, from_pair))


def catalogue(options: ModelOptions) -> Catalogue:
    """Read the catalogue of --models, or the program's own; UsageError in one line when it is wrong."""
    return catalogue_in(options.models or CATALOGUE)


def choose_pair(options: ModelOptions, name: str | None = None) -> PairSpec:
    """Return the pair called `name` (else --pair, else the catalogue's default) with --target, --drafter, --tables.

    A --target without --pair takes no model and no setting from the default pair: it gets the catalogue's settings for
    every pair, and the n-gram drafter unless --drafter names one. The options do not change a pair chosen by `name`
    (/pair).
    """
    known = catalogue(options)
    if name is not None:
        return known.pair(name)
    pair, drafter = known.pair(options.pair), options.drafter
    tables = {} if options.tables is None else {"tables": os.path.expanduser(options.tables)}
    raise_first(
        {
            f"--{flag} is a server's: it goes with --target http://HOST:PORT/v1": (
                getattr(options, flag) is not None and (options.target is None or not is_url(options.target))
            )
            for flag in ("model", "tokenizer")
        }
    )
    if options.target is not None:
        target = spec_from_argument(options.target)
        if target.url is not None:
            pair = _served(pair, target.url, options, known.defaults)
        elif options.pair is not None:
            pair = pair.model_copy(update={"target": target})
        else:
            pair = PairSpec(name=target.name, target=target, defaults=known.defaults)
    elif drafter == pair.method:
        return pair.model_copy(update=tables)
    pair = pair if drafter is None else with_drafter(pair, drafter)
    pair = pair.model_copy(update=tables)
    if (options.target or drafter) and (kind := head_kind_of(pair.drafter)) is not None:
        pair.head_folder(kind)  # UsageError where it has none
    return pair


def _served(pair: PairSpec, url: str, options: ModelOptions, defaults: Json) -> PairSpec:
    """Return the pair of a server. With --pair it has that pair's settings, drafter and tokenizer, but no draft head,
    since a head reads the target's states; else `defaults`.
    """
    own = None if options.pair is None else pair.target
    tokenizer = own if options.tokenizer is None else spec_from_argument(options.tokenizer)
    target = ModelSpec(url=url, model=options.model, tokenizer=tokenizer)
    if options.pair is None:
        pair = PairSpec(name=target.name, target=target, defaults=defaults)
    changes: dict[str, Any] = {"target": target}
    if head_kind_of(pair.drafter) is not None:
        changes |= {"drafter": str(pair.drafter).rpartition("+")[0] or "ngram", "method": "spec"}
    changed = pair.model_copy(update=changes)
    return changed.model_copy(update={"defaults": {**pair.defaults, **changed.presets}})


def with_drafter(pair: PairSpec, text: str) -> PairSpec:
    """Return the pair with the drafter that --drafter or /drafter names: a word, `tables:FILE`, or a model.

    A model is a hub id, a folder or a GGUF file; a folder may hold a trained draft head. UsageError for anything else.
    """
    if pair.target.url is not None and pair.target.tokenizer is None and text != "none":
        raise UsageError(f"{pair.name} is a server: nothing drafts for it here without its tokenizer (--tokenizer)")
    changes: dict[str, Any] = {"method": "spec"}  # the pair's own method was for the drafter that is replaced
    if (file := named_tables(text)) is not None:
        text, changes["tables"] = "tables", file
    if text in LANES and text not in DRAFTERS and not os.path.exists(text):
        raise UsageError(f"{text} drafts only in a separate lane (compare ar,{text}); {_words(pair)}")
    changes["drafter"] = text if text in DRAFTERS else spec_from_argument(text)
    return pair.model_copy(update=changes)


def has_parts(pair: PairSpec, word: str, cascade: Sequence[str] = ()) -> bool:
    """Return whether the pair, with this cascade or its own, has the parts of a drafter's row. Reads folders only."""
    if (needs := ROWS[word].needs) in HEAD_KINDS:
        return os.path.exists(pair.students.get(needs, ""))
    parts = {
        "model": not isinstance(pair.drafter, str),
        "tables": pair.tables,
        "cascade": cascade or pair.cascade,
        "mtp": needs == "mtp" and ships_mtp(pair.target.path or ""),
    }
    return bool(parts.get(needs, True))


def _words(pair: PairSpec) -> str:
    return (
        f"drafters of {pair.name} are {', '.join(word for word in DRAFTERS if has_parts(pair, word))}, or a model: "
        "a folder, a GGUF file or a hub id like org/name"
    )


@contextmanager
def drafter_words(pair: PairSpec) -> Iterator[None]:
    """Add the words for drafters to an error about a drafter whose name has no slash: it may be a misspelt word."""
    try:
        yield
    except UserError as error:
        name = None if isinstance(pair.drafter, str) else pair.drafter.id
        if name is None or "/" in name or name not in str(error):
            raise
        raise UserError(f"no drafter {got(name)}{did_you_mean(name, DRAFTERS)}: {_words(pair)} ({error})") from error


def load(spec: PairSpec, options: LoadOptions, progress: Progress) -> LoadedPair:
    """Return the pair with its models loaded, or with its server. Imports the loader."""
    from utils.loading.loading import load_pair, load_served

    return (load_pair if spec.target.url is None else load_served)(spec, options, progress)


def load_options(options: ModelOptions) -> LoadOptions:
    """Return the options that the loader reads."""
    return LoadOptions(
        **options.model_dump(include={*LoadOptions.__dataclass_fields__}), tp_size=this_process().world_size
    )
