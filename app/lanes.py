"""Lanes: a loaded pair and the settings bound to the one decode loop, by the names of `--compare`.

`ar` is the target alone, `spec` the target with the pair's drafter, `draft` the drafter model alone, `beam` the target
searching; the others are the target with a drafter of that kind (app/completion.py says what each is, app/drafters.py
makes them). Drafters are kept from answer to answer and made anew when their settings change. Knows no text, no screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.drafters import Drafters
from app.kinds import LANES
from app.lane import Lane, make_plan
from app.rules import may_differ as may_differ
from sampling.costs import Costs
from sampling.drafters import NoDrafter, StaticTables
from sampling.encdec import go_on, lm_of
from sampling.pace import GoodputPace
from sampling.tree_pace import pace_of
from sampling.types import LM, Drafter, Limits, Session
from utils.errors import UsageError
from utils.specs import trained_kind
from utils.templates import end_ids

if TYPE_CHECKING:
    from app.settings import Settings
    from app.students import Students
    from utils.loading import LoadedPair


class Engine:
    """A loaded pair, ready to decode: its models as LMs and the drafters that outlive an answer.

    Raises UnusableDrafterError if the pair's own tables or trained drafter are damaged or made for another target.
    """

    def __init__(self, loaded: LoadedPair) -> None:
        self.loaded = loaded
        self.tokenizer: Any = loaded.tokenizer
        self.stop_ids = frozenset(loaded.stop_ids)
        self.context = int(loaded.context)
        self.target = lm_of(loaded.target.model, "target", loaded.vocab_size)
        self.drafters = Drafters(loaded, self.target)
        self._kept: dict[str, tuple[Any, Drafter]] = {}
        self._paces: dict[str, tuple[Drafter, GoodputPace]] = {}
        self._costs: dict[tuple[str, Any], Costs] = {}
        self._own: Session | None = None  # the draft lane's session

    @property
    def encodes(self) -> bool:
        """Whether the target reads its prompt with an encoder."""
        return self.loaded.target.encodes

    @property
    def start_id(self) -> int | None:
        """What the target's decoder starts from, where it has one of its own."""
        return getattr(self.target, "start_id", None)

    @property
    def students(self) -> Students:
        """The pair's trained drafters."""
        return self.drafters.students

    @property
    def drafter(self) -> LM | None:
        """The pair's drafter, where it is a model that runs alone."""
        return self.drafters.model

    def tables(self) -> StaticTables | None:
        """The pair's static tables; None if it names none. UserError if the file cannot be used."""
        return self.drafters.tables()

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
        if name == "beam":
            return Lane(name, self.target, NoDrafter(), settings, limits, beams=make_plan(settings))
        kind = self._kind(name)
        drafter, law_drafts = self._drafter(name, settings), self.drafters.from_laws(kind, settings)
        pace = self._pace(name, drafter, settings)
        return Lane(name, self.target, drafter, settings, limits, law_drafts=law_drafts, pace=pace)

    def _kind(self, name: str) -> str:
        """What drafts in the lane; UsageError for an unknown lane."""
        if name not in LANES:
            raise UsageError(f"lane {name!r} is unknown; lanes are {', '.join(LANES)}")
        return {"ar": "none", "spec": self.loaded.drafter_kind}.get(name, name)

    def pace(self, name: str) -> GoodputPace | None:
        """What chooses gamma in this lane under `gamma auto`; None before it has run so."""
        return self._paces[name][1] if name in self._paces else None

    def last_gamma(self, settings: Settings) -> int | None:
        """What `gamma auto` chose for the last round of the last lane that has one; None before."""
        paces = [self.pace(name) for name in reversed(settings.compare)]
        return next((pace.last for pace in paces if pace is not None), None)

    def limits(self, settings: Settings) -> Limits:
        """When an answer ends."""
        stop_ids = self.stop_ids | end_ids(self.tokenizer, settings.template)
        return Limits(settings.max_new_tokens, stop_ids, self.context)

    def open(
        self, prompt: list[int], previous: Session | None = None, *, hidden: bool = False, begun: Sequence[int] = ()
    ) -> Session:
        """A session of the target, going on from the cache of `previous` (which must not be used again).

        `hidden`: it keeps hidden states; a cache without them is read anew then, one with them serves either way.
        `begun`: what the decoder has of the answer already, where an encoder reads the prompt.
        """
        return go_on(self.target.open([prompt], previous=previous, hidden=hidden), begun)

    def forget(self) -> None:
        """Drop everything kept from earlier answers: n-gram stores, the drafters' caches, acceptances.

        How long passes take here is no answer's and stays known.
        """
        self._kept.clear()
        self._paces.clear()
        self._own = None

    def _reopen(self, prompt: list[int], begun: Sequence[int]) -> Session:
        assert self.drafter is not None
        previous, self._own = self._own, None
        self._own = go_on(self.drafter.open([prompt], previous=previous), begun)
        return self._own

    def _drafter(self, name: str, settings: Settings) -> Drafter:
        """The lane's drafter; the one of the last answer unless its settings have changed."""
        kind = self._kind(name)
        key = self.drafters.key(kind, settings)
        found = self._kept.get(name)
        if found is None or found[0] != key:
            found = self._kept[name] = (key, self.drafters.make(kind, settings))
        return found[1]

    def _pace(self, name: str, drafter: Drafter, settings: Settings) -> GoodputPace | None:
        """Under `gamma auto` the lane's pace: it lives as long as its drafter does."""
        if settings.gamma != "auto" or isinstance(drafter, NoDrafter) or getattr(drafter, "most", None) == 0:
            return None
        found = self._paces.get(name)
        if found is None or found[0] is not drafter:
            costs = self._costs.setdefault((name, self._kept[name][0]), Costs())
            found = self._paces[name] = (drafter, pace_of(drafter, costs, settings.nodes))
        return found[1]
