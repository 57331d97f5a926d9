"""The parts of a loaded pair that drafters are built from: its models, its tables, its trained draft heads.

Each drafter is built by its row (sampling/drafters/registry.py). A draft head is built from its folder at its first
use, checked, and kept. Knows no lanes and keeps no drafter.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from app.settings.table import Settings
from sampling.drafters import registry
from sampling.drafters.draft_heads.assistant import AssistantLM, is_assistant
from sampling.drafters.draft_heads.checkpoint import load_student, read_config
from sampling.drafters.draft_heads.dflash import pard_lm
from sampling.drafters.draft_heads.modules import DraftHead
from sampling.drafters.draft_model import of_lm
from sampling.drafters.registry import MEMBERS, ROWS, TREE, DraftRequest, row_of
from sampling.drafters.tables.suffix import SuffixIndex
from sampling.drafters.tables.table_file import StaticTables
from sampling.gamma.ratios import Ratios
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import lm_of
from sampling.models.translated import TranslatedLM, Translation
from sampling.types import LM, Drafter
from utils.catalogue.catalogue import ships_mtp
from utils.catalogue.heads import HEAD_KINDS
from utils.catalogue.specs import Matrix, ModelSpec, head_kind_of
from utils.errors import UsageError, UserError, raise_first
from utils.kernels.quantized_linear import QuantizedEmbedding, unpacked_copy
from utils.loading.fit import SAMPLE, TokenBytes, fingerprint
from utils.loading.loaded import LoadedModel, LoadedPair
from utils.loading.sources import head_folder

DrafterKey = tuple[Any, ...]  # the word of a drafter and the settings that it depends on


class PairDrafters:
    """Makes the drafters of a loaded pair. `given_fingerprint`: the fingerprint of the target's tokenizer, for a pair
    that is loaded without a tokenizer.

    Raises UnusableDrafterError if the pair's own tables or draft head are damaged or made for another target.
    """

    def __init__(self, loaded: LoadedPair, target: CausalLM, given_fingerprint: str | None = None) -> None:
        self._loaded, self.target, self._given_fingerprint = loaded, target, given_fingerprint
        self.model: LM | None = None  # the pair's drafter, where it is a model that runs alone
        self.answers = SuffixIndex()  # finished answers: the callers that decode add them
        self.in_session = False  # whether `suffix: auto` uses them
        self._tables: StaticTables | None = None
        self._models: dict[str, LM] = {}  # of cascades, by name
        self._heads: dict[str, LM] = {}  # by kind
        try:
            self._prepare(loaded.drafter_word)
        except UserError as error:
            why, file, folder = str(error), loaded.spec.drafter, loaded.draft_head
            if isinstance(file, ModelSpec) and file.gguf and folder is not None:
                why = why.replace(folder.name, file.name)
            raise UnusableDrafterError(why) from error

    def _prepare(self, word: str) -> None:
        """Build the pair's drafter once, so that a file that does not fit is an error now."""
        if word == "model" and self._loaded.drafter is not None:
            self.model = self._lm(self._loaded.drafter, "drafter")
        for member in self._loaded.spec.cascade_names if ROWS[word].needs == "cascade" else (word,):
            if member in ROWS and member != "model":
                drafter: Any = self.build(DraftRequest(member, Settings()))
                self.model = drafter.lm if word == "plain" else self.model

    # -- for builders -------------------------------------------------------------------------

    @functools.cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """The fingerprint of the target's tokenizer."""
        return self._given_fingerprint if self._loaded.tokenizer is None else fingerprint(self._loaded.tokenizer)

    @functools.cached_property
    def ships_mtp(self) -> bool:
        """Whether multi-token prediction layers lie beside the target's weights."""
        return ships_mtp(getattr(getattr(self._loaded.target.model, "config", None), "name_or_path", ""))

    def tables(self) -> StaticTables | None:
        """Return the pair's static tables; None if it names none. UserError if the file cannot be used."""
        file = self._loaded.spec.tables
        if self._tables is None and file is not None:
            target = self._loaded.target
            size = None if target.model is None else target.vocab_size  # the size in a recording is a guess
            self._tables = StaticTables.open(file, vocab_size=size, fingerprint=self.tokenizer_fingerprint)
        return self._tables

    def finished(self, request: DraftRequest) -> SuffixIndex | None:
        """Return the finished answers if `suffix` is on; under "auto" for the lane `suffix` and in the console."""
        auto = self.in_session or request.word == "suffix"
        return self.answers if {"on": True, "off": False}.get(request.settings.suffix, auto) else None

    def head(self, kind: str, make: Callable[[DraftHead], LM]) -> LM:
        """Return the draft head's model, which `make` builds at the first call. UserError names an unusable file."""
        # The loaded head is not kept, so its dense weights are freed: the model that decodes has packed ones.
        return self._once(kind, lambda: make(self._load(kind)))

    def shipped(self, word: str, make: Callable[[CausalLM, Path | None], LM]) -> LM:
        """Return the model of layers that ship with the target, beside it or in the drafter's file, which `make` builds
        at the first call. UserError if there are none that can be read."""
        folder = self._loaded.draft_head if self._loaded.drafter_word == word else None
        return self._once(word, lambda: make(self.target, folder))

    def _once(self, word: str, make: Callable[[], LM]) -> LM:
        if word not in self._heads:
            lane = f"lane {word}: {self._loaded.target.name}"
            raise_first(
                {
                    f"{lane} is an encoder-decoder model, which has no trained drafters": self._loaded.target.encodes,
                    f"{lane} runs in a server, a trained drafter reads its states": self._loaded.spec.target.url,
                }
            )
            self._heads[word] = make()
        return self._heads[word]

    def alphas(self, word: str) -> tuple[float, ...]:
        """Return alpha by position of a draft head on held-out text, from its configuration; () if that has none,
        and for other drafters."""
        if row_of(word).needs not in HEAD_KINDS or "+" in word:
            return ()
        try:
            alphas = tuple(map(float, read_config(self.folder(word))["held_out"]["held"]["alpha"]))
        except (KeyError, TypeError, ValueError):
            return ()
        return alphas if all(0 < alpha < 1 for alpha in alphas) else ()

    def cascade(self, request: DraftRequest) -> tuple[list[Drafter], Matrix, float]:
        """Return drafters large to small, K matrix and lenience of the settings, else of the pair.

        UsageError if neither names drafters, or if drafters and matrix do not go together.
        """
        spec, settings, lane = self._loaded.spec, request.settings, f"lane {request.word}"
        names, lenience = settings.cascade, settings.lenience
        matrix = settings.k_matrix or tuple(map(tuple, spec.k_matrix or ()))
        if not names:
            names, lenience = spec.cascade_names, spec.lenience or lenience
        rows = f"{len(names)} row{'' if len(names) == 1 else 's'} for the cascade {','.join(names)}"
        raise_first(
            {
                f"{lane} needs drafters, pair '{spec.name}' names none (--cascade model,maxgram …)": not names,
                f"{lane} needs a k_matrix with {rows}, got none": not matrix,
                f"k_matrix must have {rows}, got {len(matrix)}": len(matrix) != len(names),
            }
        )
        drafters = [  # new ones, which no other lane uses; the matrix decides how much each drafts
            self.build(each) if each.word in MEMBERS else of_lm(self._named(lane, each.word), each, 0.0)
            for each in (DraftRequest(name, settings) for name in names)
        ]
        return drafters, matrix, lenience

    def build(self, request: DraftRequest) -> Drafter:
        """Build a new drafter; UsageError if the pair lacks a part."""
        if "model" in request.word.split("+") and self.model is None:
            raise UsageError(f"lane {request.word} needs a drafter model, pair '{self._loaded.spec.name}' has none")
        if row_of(request.word).needs == "tables" and self.tables() is None:
            has = f"pair '{self._loaded.spec.name}' has none (infer.py distill --stage tables builds some)"
            raise UsageError(f"lane {request.word} needs n-gram tables, {has}")
        return registry.build(self, request)

    # -- for lanes ----------------------------------------------------------------------------

    def key(self, word: str, settings: Settings) -> DrafterKey:
        """Return the word and all settings that the drafter depends on: a changed key needs a new drafter."""
        values = {name: getattr(settings, name) for name in row_of(word).settings}
        if "gamma" in values:
            values["gamma"] = settings.gamma == "auto"
        if row_of(word).needs == "cascade":  # its members grow no trees
            members = {*(settings.cascade or self._loaded.spec.cascade_names)} & {*ROWS}
            own = {name for member in members for name in ROWS[member].settings if name not in (*TREE, "gamma")}
            values |= {name: getattr(settings, name) for name in own}
        return (word, *sorted(values.items()))

    def make(self, word: str, settings: Settings, ratios: Ratios | None = None) -> Drafter:
        """Build a new drafter under these settings; UsageError if the pair lacks a part.

        Drafts are trees only where the target takes them. `expand auto` is the value in the drafter's row, the fastest
        by measurement (docs/notes.md); then at a fixed gamma only "joint" grows trees.
        """
        expand = row_of(word).expand if settings.expand == "auto" else settings.expand
        trees = settings.expand != "auto" or settings.gamma == "auto" or expand == "joint"
        expand = expand if trees and self.target.takes_trees else "none"
        return self.build(DraftRequest(word, settings, expand, settings.gamma == "auto", ratios))

    def folder(self, kind: str) -> Path:
        """Return the draft head's folder: the pair's drafter if it is of this kind, else that among its `students`.

        UsageError if the pair has none or its folder does not exist.
        """
        folder = self._loaded.draft_head
        if head_kind_of(self._loaded.drafter_word) == kind and folder is not None and folder.is_dir():
            return folder
        return head_folder(self._loaded.spec.head_folder(kind))

    # -- inside -------------------------------------------------------------------------------

    def _load(self, kind: str) -> DraftHead:
        loaded, folder, drafter = self._loaded, self.folder(kind), self._loaded.spec.drafter
        try:
            head = load_student(folder, loaded.target.model, self.tokenizer_fingerprint, loaded.spec.target.id)
            if head.config.kind != kind:
                raise UserError(f"the drafter {folder} is a {head.config.kind} drafter, not a {kind} one")
        except UserError as error:  # name a GGUF file as the user did
            own = drafter if loaded.drafter_word == kind and isinstance(drafter, ModelSpec) else None
            source = own.source if own else loaded.spec.students.get(kind, str(folder))
            raise type(error)(str(error).replace(str(folder), source)) from error
        network = self.target.network
        head.rounded = True
        packs = network.device.type == "cpu"  # the head stays float32 there, since only float32 can be packed
        return head if packs else moved(head, network.device, network.dtype, loaded.target.model)

    def _named(self, lane: str, name: str) -> LM:
        """Return a model that was loaded for the cascade; UsageError if there is none."""
        loaded = self._loaded
        if name not in self._models:
            if name not in loaded.cascade_models:
                hint = " (--drafter cascade loads it)" if name in loaded.spec.cascade_names else ""
                raise UsageError(
                    f"{lane}: no model {name} is loaded for the cascade, have "
                    f"{', '.join(loaded.cascade_models) or 'none'}{hint}"
                )
            self._models[name] = self._lm(loaded.cascade_models[name], name)
        return self._models[name]

    def lm(self, name: str) -> Any:
        """Return a model that was loaded with the pair: "drafter", or its name in the cascade."""
        return self.model if name == "drafter" else self._named("check", name)

    def _lm(self, model: LoadedModel, name: str) -> LM:
        """Return a drafter model that reads and drafts the target's ids, whatever its own are."""
        if model.vocabulary is None:
            if is_assistant(model.model):
                return AssistantLM(model.model, self.target, name)
            size = self._loaded.vocab_size
            return pard_lm(model.model, self._loaded.target.model, name, size) or lm_of(model.model, name, size)
        ours, sizes = TokenBytes(self._loaded.tokenizer), (self._loaded.vocab_size, model.vocab_size)
        return TranslatedLM(
            CausalLM(model.model, name), Translation.of(ours, model.vocabulary, sizes, SAMPLE), sizes[0]
        )


class UnusableDrafterError(UserError):
    """The pair's own drafter cannot be used: `why` names the file, the text also a drafter that needs no file."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why} (--drafter ngram goes without)")


def moved(head: DraftHead, device: torch.device, dtype: torch.dtype, target: Any) -> DraftHead:
    """Return the head with its parameters on `device` in `dtype`. Its rotary angles stay float32. A shared embedding is
    the target's own, unless that is quantized, split over processes or of another dtype: then it is a copy."""
    if isinstance(head.model.embed_tokens, QuantizedEmbedding) and device.type == "cpu" and dtype == torch.float32:
        return head  # nothing to move, and the embedding is the target's
    head = cast("DraftHead", unpacked_copy(head)).to(device)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(dtype)
    shared = target.get_input_embeddings()
    whole = not isinstance(shared, QuantizedEmbedding) and not hasattr(shared.weight, "full_tensor")
    if head.config.shared_embedding and whole and shared.weight.dtype == dtype:
        head.model.embed_tokens.weight = shared.weight
    return head
