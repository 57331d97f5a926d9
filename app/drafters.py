"""What drafts for a loaded pair, by kind: a lane's drafter is made here, its parts are kept in memory.

A kind is a lane's name, or a drafter's word of the catalogue. Knows how each is put together from the pair's models,
tables and trained drafters; knows no lanes and keeps no drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from app.kinds import MATCHED
from app.students import Students, UnusableDrafterError
from sampling.cascades import cascade_of, chain_of
from sampling.causal import CausalLM
from sampling.drafters import ModelDrafter, NgramDrafter, NoDrafter, StaticTables, TablesDrafter
from sampling.drafters.expand import Expansion
from sampling.drafters.joint_tree import JointTreeDrafter
from sampling.drafters.max_gram import MaxGramDrafter
from sampling.drafters.table_tree import TableTreeDrafter
from sampling.drafters.takeover import TakeOverDrafter
from sampling.encdec import lm_of
from sampling.types import LM, Drafter
from utils.errors import UsageError, UserError
from utils.fit import fingerprint
from utils.k_matrix import Matrix
from utils.specs import BEHIND, CASCADES, STUDENTS, trained_kind

if TYPE_CHECKING:
    from app.settings import Settings
    from utils.loading import LoadedPair

LEAST = 0.12
"""Under `gamma auto` a trained drafter's chain ends where it has become less likely than this (docs/notes.md)."""
SURE = 0.35
"""How likely the first token of the tables must be, for a trained drafter not to take over (docs/notes.md)."""

GROWN = {"tables": "dynamic", "match": "dynamic", "static": "dynamic"} | dict.fromkeys((*BEHIND, *MATCHED), "joint")
"""How drafts grow under `expand auto`, by kind; others stay chains. "joint": one tree of what both drafters offer."""


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
            self._tables = StaticTables.open(file, vocab_size=self._target.vocab_size, fingerprint=mark)
        return self._tables

    def key(self, kind: str, settings: Settings) -> tuple[Any, ...]:
        """What the drafter of this kind depends on: another key, another drafter."""
        if kind in CASCADES:
            cascade = self.cascade(kind, settings)
            ngram = tuple(_ngram_settings(settings).values()) if "ngram" in cascade.names else ()
            return (kind, *cascade, *ngram)
        if kind == "ngram":
            return (kind, *_ngram_settings(settings).values())
        grown = (self._grown(kind, settings), settings.nodes)
        if kind in MATCHED or trained_kind(kind) is not None:
            return (kind, settings.gamma == "auto", *grown)
        return (kind, *grown)

    def from_laws(self, kind: str, settings: Settings) -> bool:
        """Whether drafts of this kind may be drawn from a model's law."""
        if kind in CASCADES:
            return any(name not in ("tables", "ngram", "maxgram") for name in self.cascade(kind, settings).names)
        if self._grown(kind, settings) == "joint":
            return False
        if self._grown(kind, settings) == "dynamic" and BEHIND.get(kind, MATCHED.get(kind, kind)) == "feature":
            return False
        return kind in ("model", *STUDENTS, *BEHIND, *MATCHED)

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
        """none, cape, dynamic or joint: whether drafts of this kind become trees.

        "auto" is what was found fastest (docs/notes.md), where the target's pass can score a tree: what looks up alone
        grows under `gamma auto` only.
        """
        if settings.expand != "auto":
            return settings.expand
        grown = GROWN.get(kind, "none")
        fits = (settings.gamma == "auto" or grown == "joint") and getattr(self._target.network, "takes_trees", False)
        return grown if fits else "none"

    def _trained(self, kind: str, settings: Settings, grown: str) -> Drafter:
        least = LEAST if settings.gamma == "auto" else 0.0
        return self.students.drafter(kind, least, _expansion(grown, settings), grown == "dynamic")

    def _with_trained(self, kind: str, trained: str, settings: Settings) -> Drafter:
        """What looks up, and a trained drafter: one tree of both, or the second where the first is unsure."""
        tables, grown = self.tables() if kind in BEHIND else None, self._grown(kind, settings)
        auto = settings.gamma == "auto"
        if grown == "joint":
            lm, agreement = self.students.lm(trained), self.students.agreement(trained)
            recall = kind in BEHIND
            return JointTreeDrafter(lm, tables, learn=auto, agreement=agreement, peek=True, recall=recall)
        behind = self._trained(trained, settings, grown)
        return TakeOverDrafter(TablesDrafter(tables), behind, sure=SURE, learn=auto)

    def _looking_up(self, kind: str, settings: Settings) -> Drafter:
        """Drafts from what was said and from tables: as a tree, which may look at the noise as it drafts alone, or as a
        chain."""
        grown = self._grown(kind, settings) == "dynamic"
        tables = None if kind == "match" else self._static() if kind == "static" else self.tables()
        alone = {"longest": 0} if kind == "static" else {}
        if grown:
            return TableTreeDrafter(tables, peek=True, recall=kind == "tables", **alone)
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
            return ModelDrafter(self.model, expansion=_expansion(self._grown(kind, settings), settings))
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
            return self.students.drafter(name)
        if name in ("tables", "ngram", "maxgram"):
            return self._simple(name, settings)
        if name == "model":
            if self.model is None:
                raise UsageError(f"lane {kind}: model is the pair's drafter model, got {self._loaded.drafter_kind}")
            return ModelDrafter(self.model)
        return ModelDrafter(self._named(kind, name))

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
