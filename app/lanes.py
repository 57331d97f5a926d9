"""Lanes: a loaded pair and the settings bound to the one decode loop, by the names of `--compare`.

`ar` is the target alone, `spec` the target with the pair's drafter, `ngram` the target with an n-gram
drafter, `tables` with static n-gram tables behind the conversation's own matches, `plain`, `glide` and `feature` with
one of the pair's trained drafters, `tables+…` with one of them where the tables are silent, `draft` the drafter
model alone. Drafters are kept from answer to answer and made anew when their settings change. Knows no text and no
screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.kinds import LANES
from app.students import Students, UnusableDrafterError
from sampling.causal import CausalLM
from sampling.costs import Costs
from sampling.drafters import ModelDrafter, NgramDrafter, NoDrafter, StaticTables, TablesDrafter
from sampling.drafters.takeover import TakeOverDrafter
from sampling.events import Event
from sampling.loop import generate, never
from sampling.pace import GoodputPace
from sampling.sampler import KeyedSampler
from sampling.types import LM, Drafter, FixedPace, Limits, Session
from utils.errors import UsageError, UserError
from utils.fit import fingerprint
from utils.logits_processors import make_processor
from utils.specs import BEHIND, STUDENTS, trained_kind

if TYPE_CHECKING:
    from app.settings import Settings
    from utils.loading import LoadedPair


LEAST = 0.12
"""Under `gamma auto` a trained drafter's chain ends where it has become less likely than this (docs/notes.md)."""
SURE = 0.35
"""How likely the first token of the tables must be, for a trained drafter not to take over (docs/notes.md)."""


@dataclass(frozen=True)
class Lane:
    """One way of answering a prompt. `shares_target`: it runs on a session of the target.

    `law_drafts`: its drafts may be drawn from a model's law, so that sampled text may rightly be
    another draw of the same distribution.
    """

    name: str
    lm: LM
    drafter: Drafter
    settings: Settings
    limits: Limits
    shares_target: bool = True
    law_drafts: bool = False
    reopen: Callable[[list[int]], Session] | None = None  # where the lane keeps a session of its own
    pace: GoodputPace | None = None  # `gamma auto`

    @property
    def source_names(self) -> tuple[str, ...]:
        """What `Step.source` indexes into."""
        return self.drafter.names

    @property
    def drafts(self) -> bool:
        """Whether anything is ever drafted, so that gamma matters."""
        return not isinstance(self.drafter, NoDrafter)

    @property
    def needs_hidden(self) -> bool:
        """Whether its target session must keep the target's hidden states."""
        return bool(getattr(self.drafter, "needs_hidden", False))

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return min(self.limits.context, self.lm.context)

    def run(
        self, prompt: list[int], *, session: Session | None = None, interrupt: Callable[[], bool] = never
    ) -> Iterator[Event]:
        """Decode one prompt. `session` is an open session of the target; without one the lane reads the prompt."""
        if session is None and self.reopen is not None:
            session = self.reopen(prompt)
        if self.pace is not None:
            self.pace.begin()
        sampler = make_sampler(self.settings)
        return generate(
            self.lm,
            [prompt],
            self.drafter,
            sampler,
            self.limits,
            pace=self.pace or FixedPace(int(self.settings.gamma) if self.drafts else 0),
            session=session,
            interrupt=interrupt,
        )


def make_sampler(settings: Settings) -> KeyedSampler:
    """The sampler of one answer."""
    processor = make_processor(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    return KeyedSampler(
        processor,
        settings.seed,
        coupling=settings.coupling,  # type: ignore[arg-type]
        draft_sampling=settings.draft_sampling,  # type: ignore[arg-type]
    )


def may_differ(lane: Lane, settings: Settings) -> bool:
    """Whether the lane's text may rightly differ from that of `ar` with the same seed."""
    sampled = settings.temperature > 0 and settings.coupling == "rejection" and settings.draft_sampling == "law"
    return lane.name == "draft" or (lane.law_drafts and sampled)


class Engine:
    """A loaded pair, ready to decode: its models as LMs and the drafters that outlive an answer.

    Raises UnusableDrafterError if the pair's own tables or trained drafter are damaged or made for another target.
    """

    def __init__(self, loaded: LoadedPair) -> None:
        self.loaded = loaded
        self.tokenizer: Any = loaded.tokenizer
        self.stop_ids = frozenset(loaded.stop_ids)
        self.context = int(loaded.context)
        self.target = CausalLM(loaded.target.model, "target", loaded.vocab_size)
        self.students = Students(loaded, self.target)
        self._kept: dict[str, tuple[Any, Drafter]] = {}
        self._paces: dict[str, tuple[Drafter, GoodputPace]] = {}
        self._costs: dict[tuple[str, Any], Costs] = {}
        self._own: Session | None = None  # the draft lane's session
        self._tables: StaticTables | None = None
        self.drafter: LM | None = None  # the pair's drafter, where it is a model that runs alone
        try:
            self._prepare(loaded)
        except UserError as error:
            raise UnusableDrafterError(str(error)) from error

    def _prepare(self, loaded: LoadedPair) -> None:
        """Build what the pair drafts with: a file that does not fit is told now."""
        kind = loaded.drafter_kind
        if kind == "model" and loaded.drafter is not None:
            self.drafter = CausalLM(loaded.drafter.model, "drafter", loaded.vocab_size)
        elif kind == "tables" or kind in BEHIND:
            self.tables()
        if (trained := trained_kind(kind)) is not None:
            lm = self.students.lm(trained)
            self.drafter = lm if trained == "plain" else None

    def lanes(self, settings: Settings) -> list[Lane]:
        """The lanes of `settings.compare`, in order. UsageError names a lane that this pair cannot run."""
        return [self.lane(name, settings) for name in settings.compare]

    def lane(self, name: str, settings: Settings) -> Lane:
        """One lane by name."""
        limits = self.limits(settings)
        if name == "draft":
            if self.drafter is None:
                kind = self.loaded.drafter_kind
                if trained_kind(kind) is not None:
                    raise UsageError(f"lane draft: a {kind} drafter reads the target's states and cannot run alone")
                raise UsageError(f"lane draft needs a drafter model, got drafter {kind} (--drafter sets one)")
            return Lane(name, self.drafter, NoDrafter(), settings, limits, shares_target=False, reopen=self._reopen)
        drafter = self._drafter(name, settings)
        law_drafts, pace = self._kept[name][0][0] in ("model", *STUDENTS, *BEHIND), self._pace(name, drafter, settings)
        return Lane(name, self.target, drafter, settings, limits, law_drafts=law_drafts, pace=pace)

    def pace(self, name: str) -> GoodputPace | None:
        """What chooses gamma in this lane under `gamma auto`; None before it has run so."""
        return self._paces[name][1] if name in self._paces else None

    def last_gamma(self, settings: Settings) -> int | None:
        """What `gamma auto` chose for the last round of the last lane that has one; None before."""
        paces = [self.pace(name) for name in reversed(settings.compare)]
        return next((pace.last for pace in paces if pace is not None), None)

    def tables(self) -> StaticTables | None:
        """The pair's static tables; None if it names none. UserError if the file cannot be used."""
        file = self.loaded.spec.tables
        if self._tables is None and file is not None:
            self._tables = StaticTables.open(
                file, vocab_size=self.target.vocab_size, fingerprint=fingerprint(self.tokenizer)
            )
        return self._tables

    def limits(self, settings: Settings) -> Limits:
        """When an answer ends."""
        return Limits(settings.max_new_tokens, self.stop_ids, self.context)

    def open(self, prompt: list[int], previous: Session | None = None, *, hidden: bool = False) -> Session:
        """A session of the target, going on from the cache of `previous` (which must not be used again).

        `hidden`: it keeps hidden states; a cache without them is read anew then, one with them serves either way.
        """
        return self.target.open([prompt], previous=previous, hidden=hidden)

    def forget(self) -> None:
        """Drop everything kept from earlier answers: n-gram stores, the drafters' caches, acceptances.

        How long passes take here is no answer's and stays known.
        """
        self._kept.clear()
        self._paces.clear()
        self._own = None

    def _reopen(self, prompt: list[int]) -> Session:
        assert self.drafter is not None
        previous, self._own = self._own, None
        self._own = self.drafter.open([prompt], previous=previous)
        return self._own

    def _drafter(self, name: str, settings: Settings) -> Drafter:
        """The lane's drafter; the one of the last answer unless its settings have changed."""
        if name not in LANES:
            raise UsageError(f"lane {name!r} is unknown; lanes are {', '.join(LANES)}")
        kind = {"ar": "none", "spec": self.loaded.drafter_kind}.get(name, name)
        key: tuple[Any, ...] = (kind,)
        if kind == "ngram":
            key = (kind, *_ngram_settings(settings).items())
        elif trained_kind(kind) is not None:
            key = (kind, settings.gamma == "auto")
        found = self._kept.get(name)
        if found is None or found[0] != key:
            found = self._kept[name] = (key, self._new_drafter(kind, settings))
        return found[1]

    def _pace(self, name: str, drafter: Drafter, settings: Settings) -> GoodputPace | None:
        """Under `gamma auto` the lane's pace: it lives as long as its drafter does."""
        if settings.gamma != "auto" or isinstance(drafter, NoDrafter):
            return None
        found = self._paces.get(name)
        if found is None or found[0] is not drafter:
            costs = self._costs.setdefault((name, self._kept[name][0]), Costs())
            found = self._paces[name] = (drafter, GoodputPace(costs=costs))
        return found[1]

    def _trained(self, kind: str, settings: Settings) -> Drafter:
        return self.students.drafter(kind, LEAST if settings.gamma == "auto" else 0.0)

    def _new_drafter(self, kind: str, settings: Settings) -> Drafter:
        if kind == "ngram":
            return NgramDrafter(self.target.vocab_size, **_ngram_settings(settings))
        if kind == "tables":
            return TablesDrafter(self.tables())
        if kind == "model" and self.drafter is not None:
            return ModelDrafter(self.drafter)
        if kind in BEHIND:
            then = self._trained(BEHIND[kind], settings)
            return TakeOverDrafter(TablesDrafter(self.tables()), then, sure=SURE, learn=settings.gamma == "auto")
        if kind in STUDENTS:
            return self._trained(kind, settings)
        return NoDrafter()


def _ngram_settings(settings: Settings) -> dict[str, Any]:
    return {
        "n": settings.ngram_n,
        "multi_level": settings.ngram_multi_level,
        "top_k_filler": settings.ngram_filler,
        "stop_if_unknown": settings.ngram_stop_if_unknown,
        "reset": settings.ngram_reset,
    }
