"""What drafts for a loaded pair, by kind: a lane's drafter is made here, its parts are kept in memory.

A kind is a lane's name, or a drafter's word of the catalogue. A trained drafter is built from its folder when it is
first asked for, checked, and kept. Knows how each is put together from the pair's models, tables and trained drafters;
knows no lanes and keeps no drafter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from app.settings.types import MATCHED
from sampling.drafters.cape import Expansion
from sampling.drafters.cascade import cascade_of, chain_of
from sampling.drafters.draft_heads.checkpoint import load_student, read_config
from sampling.drafters.draft_heads.eagle import FeatureDrafter, FeatureLM, FeatureTreeDrafter
from sampling.drafters.draft_heads.glide import GlideLM
from sampling.drafters.draft_heads.modules import Student
from sampling.drafters.draft_heads.network import StudentNetwork
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.drafters.fallback import FallbackDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.tables.joint_tree import JointTreeDrafter
from sampling.drafters.tables.ngram import NgramDrafter
from sampling.drafters.tables.prompt_lookup import TablesDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.drafters.tables.tree import TableTreeDrafter
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import lm_of
from sampling.types import LM, Drafter, Rule
from utils.catalogue.k_matrix import Matrix
from utils.catalogue.specs import BEHIND, CASCADES, STUDENTS, trained_kind
from utils.errors import UsageError, UserError
from utils.loading.fit import fingerprint

if TYPE_CHECKING:
    from app.settings.layers import Settings
    from utils.loading.loaded import LoadedPair


LEAST = 0.12
"""Under `gamma auto` a trained drafter's chain ends where it has become less likely than this (docs/notes.md)."""
SURE = 0.35
"""How likely the first token of the tables must be, for a trained drafter not to take over (docs/notes.md)."""

GROWN = {"tables": "dynamic", "match": "dynamic", "static": "dynamic"} | dict.fromkeys((*BEHIND, *MATCHED), "joint")
"""How drafts grow under `expand auto`, by kind; others stay chains. "joint": one tree of what both drafters offer."""

WITHOUT = "--drafter ngram goes without"


class Cascade(NamedTuple):
    """Drafters by name, large to small, how many tokens each adds, and how much they let pass."""

    names: tuple[str, ...]
    matrix: Matrix
    lenience: float


class Drafters:
    """Makes the drafters of a loaded pair. `mark` is the target's tokenizer's fingerprint where the pair has none.

    Raises UnusableDrafterError if the pair's own tables or trained drafter are damaged or made for another target.
    """

    def __init__(self, loaded: LoadedPair, target: CausalLM, mark: str | None = None) -> None:
        self._loaded, self._target, self._mark = loaded, target, mark
        self.students = Students(loaded, target)
        self.model: LM | None = None  # the pair's drafter, where it is a model that runs alone
        self._tables: StaticTables | None = None
        self._models: dict[str, LM] = {}  # of cascades, by name
        try:
            self._prepare(loaded.drafter_kind)
        except UserError as error:
            raise UnusableDrafterError(str(error)) from error

    def _prepare(self, kind: str) -> None:
        """Build what the pair drafts with: a file that does not fit is told now."""
        loaded = self._loaded
        if kind == "model" and loaded.drafter is not None:
            self.model = lm_of(loaded.drafter.model, "drafter", loaded.vocab_size)
        words = loaded.spec.cascade_names if kind in CASCADES else (kind,)
        for word in words:
            if word in ("tables", "maxgram") or word in BEHIND:
                self.tables()
            if (trained := trained_kind(word)) is not None:
                lm = self.students.lm(trained)
                self.model = lm if trained == "plain" and word == kind else self.model

    def tables(self) -> StaticTables | None:
        """The pair's static tables; None if it names none. UserError if the file cannot be used."""
        file = self._loaded.spec.tables
        if self._tables is None and file is not None:
            tokenizer = self._loaded.tokenizer
            mark = self._mark if tokenizer is None else fingerprint(tokenizer)
            self._tables = StaticTables.open(file, vocab_size=self._loaded.target.vocab_size, fingerprint=mark)
        return self._tables

    def key(self, kind: str, settings: Settings) -> tuple[Any, ...]:
        """What the drafter of this kind depends on: another key, another drafter."""
        if kind in CASCADES:
            cascade = self.cascade(kind, settings)
            ngram = tuple(_ngram_settings(settings).values()) if "ngram" in cascade.names else ()
            return (kind, settings.verify, *cascade, *ngram)
        if kind == "ngram":
            return (kind, *_ngram_settings(settings).values())
        grown = (self._grown(kind, settings), settings.nodes)
        if kind in MATCHED or trained_kind(kind) is not None:
            return (kind, settings.verify, settings.gamma == "auto", *grown)
        return (kind, settings.verify, *grown)

    def make(self, kind: str, settings: Settings) -> Drafter:
        """A new drafter; UsageError if the pair lacks what it is made of."""
        if kind in CASCADES:
            return self._cascade(kind, settings)
        if (trained := BEHIND.get(kind, MATCHED.get(kind))) is not None:
            return self._with_trained(kind, trained, settings)
        if kind in STUDENTS:
            return self._trained(kind, settings, self._grown(kind, settings))
        if kind in ("static", "match", "tables"):
            return self._looking_up(kind, settings)
        return self._simple(kind, settings)

    def _grown(self, kind: str, settings: Settings) -> str:
        """none, cape, dynamic or joint: whether drafts of this kind become trees, where the target takes them.

        "auto" is what was found fastest (docs/notes.md): what looks up alone grows under `gamma auto` only.
        """
        grown = GROWN.get(kind, "none") if settings.expand == "auto" else settings.expand
        asked = settings.expand != "auto" or settings.gamma == "auto" or grown == "joint"
        return grown if asked and self._target.takes_trees else "none"

    def _trained(self, kind: str, settings: Settings, grown: str) -> Drafter:
        least = LEAST if settings.gamma == "auto" else 0.0
        return self.students.drafter(kind, least, _expansion(grown, settings), grown == "dynamic", _rule(settings))

    def _with_trained(self, kind: str, trained: str, settings: Settings) -> Drafter:
        """What looks up, and a trained drafter: one tree of both, or the second where the first is unsure."""
        tables, grown = self.tables() if kind in BEHIND else None, self._grown(kind, settings)
        auto = settings.gamma == "auto"
        if grown == "joint":
            lm, agreement = self.students.lm(trained), self.students.agreement(trained)
            recall = kind in BEHIND
            return JointTreeDrafter(lm, tables, learn=auto, agreement=agreement, shared_noise=True, recall=recall)
        behind = self._trained(trained, settings, grown)
        return FallbackDrafter(TablesDrafter(tables), behind, sure=SURE, learn=auto)

    def _looking_up(self, kind: str, settings: Settings) -> Drafter:
        """Drafts from what was said and from tables: as a tree, which may look at the noise as it drafts alone, or as a
        chain."""
        grown = self._grown(kind, settings) == "dynamic"
        tables = None if kind == "match" else self._static() if kind == "static" else self.tables()
        alone = {"longest": 0} if kind == "static" else {}
        if grown:
            return TableTreeDrafter(tables, shared_noise=True, recall=kind == "tables", **alone)
        return TablesDrafter(tables, **alone)

    def _simple(self, kind: str, settings: Settings) -> Drafter:
        """A drafter that is no trained one and made of no others."""
        if kind == "ngram":
            return NgramDrafter(self._target.vocab_size, **_ngram_settings(settings))
        if kind == "tables":
            return TablesDrafter(self.tables())
        if kind == "maxgram":
            return MaxGramDrafter(self.tables())
        if kind == "model" and self.model is not None:
            grown = self._grown(kind, settings)
            return ModelDrafter(self.model, expansion=_expansion(grown, settings), rule=_rule(settings))
        return NoDrafter()

    def _static(self) -> StaticTables:
        tables = self.tables()
        if tables is None:
            name = self._loaded.spec.name
            raise UsageError(f"lane static needs n-gram tables, pair '{name}' has none (infer.py tables builds some)")
        return tables

    # -- cascades -----------------------------------------------------------------------------

    def cascade(self, kind: str, settings: Settings) -> Cascade:
        """What the settings say, else the pair; UsageError where they name nothing or do not go together."""
        spec = self._loaded.spec
        names, matrix, lenience = settings.cascade, settings.k_matrix or _tuples(spec.k_matrix), settings.lenience
        if not names:
            names, lenience = spec.cascade_names, spec.lenience or lenience
        if not names:
            raise UsageError(f"lane {kind} needs drafters, pair '{spec.name}' names none (--cascade model,maxgram …)")
        shown, rows = ",".join(names), f"{len(names)} row{'' if len(names) == 1 else 's'}"
        if not matrix:
            raise UsageError(f"lane {kind} needs a k_matrix with {rows} for the cascade {shown}, got none")
        if len(matrix) != len(names):
            raise UsageError(f"k_matrix must have {rows} for the cascade {shown}, got {len(matrix)}")
        return Cascade(names, matrix, lenience)

    def _cascade(self, kind: str, settings: Settings) -> Drafter:
        names, matrix, lenience = self.cascade(kind, settings)
        members = [self._member(kind, name, settings) for name in names]
        try:
            return cascade_of(members, matrix, lenience) if kind == "cascade" else chain_of(members, matrix[0])
        except UserError as error:
            raise UsageError(f"lane {kind}: {error}") from error

    def _member(self, kind: str, name: str, settings: Settings) -> Drafter:
        """One drafter of a cascade, its own instance; how much it drafts is the matrix's affair."""
        if name in STUDENTS:
            return self.students.drafter(name, rule=_rule(settings))
        if name in ("tables", "ngram", "maxgram"):
            return self._simple(name, settings)
        if name == "model":
            if self.model is None:
                raise UsageError(f"lane {kind}: model is the pair's drafter model, got {self._loaded.drafter_kind}")
            return ModelDrafter(self.model, rule=_rule(settings))
        return ModelDrafter(self._named(kind, name), rule=_rule(settings))

    def _named(self, kind: str, name: str) -> LM:
        """A model that the pair brought along; UsageError if it did not."""
        loaded = self._loaded
        if name not in self._models:
            if name not in loaded.cascade_models:
                hint = " (--drafter cascade loads it)" if name in loaded.spec.cascade_names else ""
                have = ", ".join(loaded.cascade_models) or "none"
                raise UsageError(f"lane {kind}: no model {name} is loaded for the cascade, have {have}{hint}")
            self._models[name] = lm_of(loaded.cascade_models[name].model, name, loaded.vocab_size)
        return self._models[name]


def _rule(settings: Settings) -> Rule:
    """By which what a model drafts is judged."""
    return Rule.BLOCK if settings.verify == "block" else Rule.DRAWN


def _expansion(grown: str, settings: Settings) -> Expansion | None:
    return None if grown == "none" else Expansion(settings.nodes)


def _tuples(matrix: list[list[int]] | None) -> Matrix:
    return tuple(map(tuple, matrix or ()))


def _ngram_settings(settings: Settings) -> dict[str, Any]:
    return {
        "n": settings.ngram_n,
        "multi_level": settings.ngram_multi_level,
        "top_k_filler": settings.ngram_filler,
        "stop_if_unknown": settings.ngram_stop_if_unknown,
        "reset": settings.ngram_reset,
    }


class UnusableDrafterError(UserError):
    """The pair's own drafter cannot be used: `why` names the file, the text also says what goes without it."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why[:-1]}, {WITHOUT})" if why.endswith(")") else f"{why} ({WITHOUT})")


class Students:
    """The trained drafters of a loaded pair, by kind: "plain", "glide" or "feature"."""

    def __init__(self, loaded: LoadedPair, target: CausalLM) -> None:
        self._loaded, self._target = loaded, target
        self._fresh: dict[str, ModelDrafter] = {}  # of each kind one that never starts
        self._agreement: dict[str, float] = {}

    def folder(self, kind: str) -> Path:
        """Where the student lies: the pair's drafter if it is of this kind, else the pair's `students`.

        UsageError if the pair has none or its folder is not there.
        """
        own = self._loaded.student
        if trained_kind(self._loaded.drafter_kind) == kind and own is not None and own.is_dir():
            return own
        return self._loaded.spec.student(kind)

    def lm(self, kind: str) -> LM:
        """What the drafter of this kind drafts from; UserError names a file that cannot be used."""
        if kind not in self._fresh:
            self._fresh[kind] = self._build(kind)
        return self._fresh[kind].lm

    def agreement(self, kind: str) -> float:
        """How often its likeliest token was the target's on held-out text, as its training found; 0 if it says not."""
        if kind not in self._agreement:
            self._agreement[kind] = _agreement(read_config(self.folder(kind)))
        return self._agreement[kind]

    def drafter(
        self,
        kind: str,
        least: float = 0.0,
        expansion: Expansion | None = None,
        dynamic: bool = False,
        rule: Rule = Rule.DRAWN,
    ) -> Drafter:
        """A new drafter of this kind, on the weights of those before it; UserError as :meth:`lm`.

        `least`, `expansion` and `rule` as in :class:`ModelDrafter`. `dynamic`: dynamic trees, from the kind that can
        (feature).
        """
        lm = self.lm(kind)
        if dynamic and isinstance(lm, FeatureLM):
            return FeatureTreeDrafter(lm, least, expansion)
        return ModelDrafter(lm, least, expansion, rule)

    def _build(self, kind: str) -> ModelDrafter:
        if (target := self._loaded.target).encodes:
            raise UsageError(f"lane {kind}: {target.name} is an encoder-decoder model, which has no trained drafters")
        student = self._load(kind)  # released here: what decodes keeps packed weights of its own
        if kind == "feature":
            return FeatureDrafter(student, vocab_size=self._target.vocab_size)
        if kind == "glide":
            layers = self._target.network.layers
            return ModelDrafter(GlideLM(student, layers, vocab_size=self._target.vocab_size))
        return ModelDrafter(CausalLM(StudentNetwork(student), kind, self._target.vocab_size))

    def _load(self, kind: str) -> Student:
        loaded, place = self._loaded, self.folder(kind)
        student = load_student(place, loaded.target.model, fingerprint(loaded.tokenizer))
        if student.config.kind != kind:
            raise UserError(f"the drafter {place} is a {student.config.kind} drafter, not a {kind} one")
        network = self._target.network
        student.rounded = True
        if network.device.type == "cpu":
            return student  # float32, which is what can be packed
        return moved(student, network.device, network.dtype, loaded.target.model)


def moved(student: Student, device: torch.device, dtype: torch.dtype, target: Any) -> Student:
    """The student's parameters on `device` in `dtype`, its angles in float32, a shared embedding the target's own."""
    student = student.to(device)
    for parameter in student.parameters():
        parameter.data = parameter.data.to(dtype)
    embedding = target.get_input_embeddings().weight
    if student.config.shared_embedding and embedding.dtype == dtype:
        student.model.embed_tokens.weight = embedding
    return student


def described(kind: str, folder: Path) -> str:
    """One line about a student from its configuration; UserError if that cannot be read."""
    told = read_config(folder)
    layers, ids = told.get("num_hidden_layers"), told.get("short_list")
    parts = [
        f"{layers} layer{'' if layers == 1 else 's'} of width {told.get('hidden_size')}",
        f"short list of {ids:,} ids" if isinstance(ids, int) and ids else "head of the whole vocabulary",
    ]
    if isinstance(size := told.get("bytes"), int):
        parts.append(f"{size / 1e6:.1f} MB")
    parts.append(_origin(told))
    return f"{kind}: {', '.join(filter(None, parts))} ({folder})"


def _agreement(told: dict[str, Any]) -> float:
    try:
        return float(told["held_out"]["held"]["alpha"][0])
    except (KeyError, IndexError, TypeError, ValueError):
        return 0.0


def _origin(told: dict[str, Any]) -> str:
    target, date = told.get("target"), told.get("date")
    made = f"trained for {target}" if target else ""
    return f"{made} on {date}" if made and date else made or (f"of {date}" if date else "")
