"""Lanes: a loaded pair and the settings bound to the one decode loop, by the names of `--compare`.

A :class:`Lane` is one way of answering a prompt. `ar` is the target alone, `spec` the target with the pair's drafter,
`lossy` the same by a rule that is not exact, `draft` the drafter model alone, `beam` the target's beam search, `server`
or a URL a server's answer; any other name is the target with the drafter of that name (sampling/drafters/registry.py).
A :class:`PairEngine` keeps drafters from answer to answer and builds new ones when their settings change. Knows no
screen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from app.lanes.drafters import DrafterKey, PairDrafters
from app.settings.table import FORMS, Settings
from sampling.beam import BeamPlan, beam_generate
from sampling.constraint import FormConstraint
from sampling.drafters.draft_model import NoDrafter
from sampling.drafters.oracle import Oracle
from sampling.drafters.registry import LOSSY
from sampling.events import GRAMMAR, Event, Finished, Step
from sampling.gamma.acceptance import Acceptance
from sampling.gamma.controller import Controller, controller_of
from sampling.gamma.ratios import Ratios
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.encoder_decoder import go_on, lm_of
from sampling.models.fused import FusedNetwork
from sampling.models.remote import RemoteLM, scorer_of
from sampling.sampler import KeyedSampler
from sampling.stops import StopStrings
from sampling.types import LM, Drafter, FixedPace, GammaController, Hidden, Limits, Rows, Rule, Sampler, Session
from utils.catalogue.specs import head_kind_of
from utils.catalogue.templates import end_ids
from utils.errors import UsageError, holding, raise_first
from utils.loading.loaded import NO_LIMIT, LoadedPair
from utils.logits_processors import ARGUMENTS, Bias, LogitsProcessor
from utils.objects import HfTokenizer, Json
from utils.ordinary_text import continued_ids
from utils.processes import this_process
from utils.progress import never
from utils.remote.pieces import Pieces, PieceTokenizer
from utils.remote.server import BAN, OWN, PENALTIES, Server, ServerMessage, is_server, server_at

if TYPE_CHECKING:
    from utils.grammar import GrammarState

_UNDRAFTED: Json = {  # the other fields of a Step of which only the token and its time are known
    **dict.fromkeys(("drafted", "parents", "source", "path", "draft_p", "calls"), ()),
    **{"gamma": 0, "top2_gap": None, "draft_s": 0.0, "sample_s": 0.0},
}
# Settings that a request to a server cannot carry, each with the only value that the lane of a server takes:
NOT_IN_REQUESTS = {"no_repeat_ngram": 0, "penalty_window": 0, "typical_p": 1.0, "chat": True}


@dataclass
class Lane:
    """One way of answering a prompt. `shares_target`: it runs on a session of the target. `form`: the grammar's state
    at the beginning of an answer. `begun`: the tokens of the answer that the prompt already ends with."""

    served: ClassVar = False  # a server answers: no model of this pair runs, no pause is possible, the text may differ

    name: str
    lm: LM
    drafter: Drafter
    settings: Settings
    limits: Limits
    shares_target: bool = True
    reopen: Callable[[list[int], Sequence[int]], Session] | None = None  # of a lane that keeps its own session
    pace: Controller | None = None  # `gamma auto`
    beams: BeamPlan | None = None  # beam search in place of the loop
    stops: StopStrings | None = None
    bias: Bias = field(default_factory=dict)
    form: "GrammarState | None" = None
    begun: Sequence[int] = ()
    top_logprobs: int | None = None  # alternatives that a server reports with each token; None: no log-probabilities

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names that `Step.source` indexes into."""
        names = self.drafter.traits.names
        return names if self.form is None or not self.drafts else (*names, GRAMMAR)

    @property
    def drafts(self) -> bool:
        """Whether the lane has a drafter."""
        return not isinstance(self.drafter, NoDrafter)

    @property
    def most(self) -> int | None:
        """The most tokens a round may draft, for a drafter that fixes them (cascade, chain); None: gamma decides."""
        return self.drafter.traits.most

    @property
    def takes_gamma(self) -> bool:
        """Whether a fixed gamma changes anything."""
        return self.drafts and self.most is None

    @property
    def drawn_drafts(self) -> bool:
        """Whether its drafts may be drawn from a model's distribution: then sampled text may rightly be another draw
        from the target's distribution."""
        return self.drafter.traits.rule is not Rule.POINT

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return min(self.limits.context, self.lm.context)

    def run(
        self,
        prompt: list[int],
        *,
        session: Session | None = None,
        interrupt: Callable[[], bool] = never,
        begun: Sequence[int] = (),
        alternatives: int = 0,
        messages: Sequence[ServerMessage] = (),
    ) -> Iterator[Event]:
        """Decode one prompt. `session` is an open session of the target; without one the lane reads the prompt.

        `begun`: see :meth:`PairEngine.open`; a given `session` has read it. `alternatives`: how many tokens are
        recorded at each position, at least `log_top`. `messages`: the chat, which a server reads.
        """
        if session is None and self.reopen is not None:
            session = self.reopen(prompt, begun)
        if self.beams is not None:
            return beam_generate(
                self.lm,
                [prompt],
                self.limits,
                self.beams,
                processor=make_sampler(self.settings, self.bias).processor,
                session=session,
                interrupt=interrupt,
            )
        return self.run_rows([prompt], session=session, interrupt=interrupt, alternatives=alternatives)

    def run_rows(
        self,
        prompts: Rows,
        *,
        session: Session | None = None,
        interrupt: Callable[[], bool] = never,
        alternatives: int = 0,
    ) -> Iterator[Event]:
        """Decode several prompts as one batch; `session` is an open one of `lm` for them.

        UserError for a drafter that can follow only one row.
        """
        if self.pace is not None:
            self.pace.begin()
        sampler = make_sampler(self.settings, self.bias, self.constraint())
        if isinstance(self.drafter, Oracle):
            self.drafter.plain = lambda rows, own: self._generate(rows, sampler, NoDrafter(), FixedPace(0), own)
        gamma = self.settings.gamma if self.most is None else self.most
        pace = self.pace or FixedPace(int(gamma) if self.drafts else 0)
        events = self._generate(prompts, sampler, self.drafter, pace, session, interrupt, alternatives)
        return events if self.stops is None else self.stops.over(events, len(prompts))

    def _generate(
        self,
        rows: Rows,
        sampler: Sampler,
        drafter: Drafter,
        pace: GammaController,
        session: Session | None,
        interrupt: Callable[[], bool] = never,
        alternatives: int = 0,
    ) -> Iterator[Event]:
        return generate(
            self.lm,
            rows,
            drafter,
            sampler,
            self.limits,
            pace=pace,
            session=session,
            interrupt=interrupt,
            # A server reports only a few tokens of each position, too few to work out an entropy or a rank.
            alternatives=0 if isinstance(self.lm, RemoteLM) else max(alternatives, self.settings.log_top),
        )

    def constraint(self) -> FormConstraint | None:
        """Return the form of a new answer; UsageError if `begun`, the part that the prompt ends with, breaks it."""
        state = self.form
        for token in self.begun:
            state = None if state is None else state.after(token)
        if state is None and self.form is not None:
            raise UsageError(f"the answer so far is no beginning of one by {' '.join(self.settings.form or ())}")
        return None if state is None else FormConstraint(state)


# -- the lane of a server: a piece of text is a Step without a draft and without a call --------------


class ServerLane(Lane):
    """A server's answers. `pieces` gives each piece of their text an id."""

    served = True

    def __init__(self, name: str, server: Server, settings: Settings, pieces: Pieces, bias: Bias) -> None:
        super().__init__(
            name,
            RemoteLM(None, context=NO_LIMIT),
            NoDrafter(),
            settings,
            Limits(settings.max_new_tokens, context=NO_LIMIT),
            shares_target=False,
            bias=bias,
        )
        self.server, self.pieces = server, pieces
        self.logprobs: list[Json] = []  # of the last answer

    def run(
        self,
        prompt: list[int],
        *,
        session: Session | None = None,
        interrupt: Callable[[], bool] = never,
        begun: Sequence[int] = (),
        alternatives: int = 0,
        messages: Sequence[ServerMessage] = (),
    ) -> Iterator[Event]:
        """Yield the server's answer to the chat. UserError if it fails before the first piece."""
        answer = self.server.stream(messages, self.settings, self.bias, interrupt, self.top_logprobs)
        self.logprobs = answer.logprobs
        for text, seconds in answer:
            yield Step(
                0,
                token=self.pieces.id_of(text),
                target_p=() if answer.log_prob is None else (math.exp(answer.log_prob),),
                verify_s=seconds,
                **_UNDRAFTED,
            )
        yield Finished(0, answer.reason, answer.report)


def make_sampler(
    settings: Settings, bias: Bias | None = None, constraint: FormConstraint | None = None
) -> KeyedSampler:
    """Return the sampler of one answer."""
    return KeyedSampler(
        LogitsProcessor(**{name: getattr(settings, name) for name in ARGUMENTS}, logit_bias=bias or {}),
        settings.seed,
        coupling=settings.coupling,  # type: ignore[arg-type]
        draft_sampling=settings.draft_sampling,  # type: ignore[arg-type]
        constraint=constraint,
    )


@dataclass
class _LaneDrafter:
    """A lane's drafter from answer to answer, and its gamma controller if it has run under `gamma auto`. `ratios`:
    estimates from past rounds that both use."""

    key: DrafterKey
    drafter: Drafter
    ratios: Ratios
    pace: Controller | None = None


class PairEngine:
    """A loaded pair, ready to decode: its models as LMs and the drafters that outlive an answer.

    Raises UnusableDrafterError if the pair's own tables or draft head are damaged or made for another target.
    """

    def __init__(self, loaded: LoadedPair) -> None:
        self.loaded = loaded
        self.tokenizer: HfTokenizer = loaded.tokenizer
        self.stop_ids = frozenset(loaded.stop_ids)
        self.context = int(loaded.context)
        self.server = loaded.target.model if isinstance(loaded.target.model, Server) else None
        self.pieces = self.tokenizer.pieces if isinstance(self.tokenizer, PieceTokenizer) else Pieces()
        target: Any = self._remote() if self.server else lm_of(loaded.target.model, "target", loaded.vocab_size)
        self.target: CausalLM = target
        self.drafters = PairDrafters(loaded, self.target)
        self._lane_drafters: dict[str, _LaneDrafter] = {}  # by lane
        self._paces: dict[tuple[str, DrafterKey], Controller] = {}  # by lane and its drafter's key
        self._draft_session: Session | None = None  # of the lane `draft`
        self.measured: Any = None  # the Measured of app/lanes/warm.py, if it was warmed up

    def _remote(self) -> RemoteLM:
        """Return the server as a target that scores drafts; without a tokenizer of its ids, as one that cannot."""
        if self.server is None or self.reads_text:
            return RemoteLM(None)
        own = self.tokenizer.eos_token_id
        end_id = own if own in self.stop_ids else min(self.stop_ids, default=0)
        return RemoteLM(scorer_of(self.server, self.tokenizer, end_id), self.loaded.vocab_size, self.context)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the pair, to be shown once."""
        name, word = self.loaded.target.name, self.loaded.drafter_word
        own = {
            f"{name} ships a multi-token prediction layer: --drafter mtp drafts with it": (
                self.drafters.ships_mtp and "mtp" not in word
            ),
            f"{name} takes no token trees: drafts are chains": (
                not (self.target.takes_trees or self.server) and word != "none"
            ),
        }
        return (*self.loaded.notes, *holding(own))

    @property
    def encodes(self) -> bool:
        """Whether the target reads its prompt with an encoder."""
        return self.loaded.target.encodes

    @property
    def invariant(self) -> bool:
        """Whether a token gets the same logits, bit for bit, whatever else is in the target's pass."""
        return isinstance(getattr(self.target, "network", None), FusedNetwork)

    @property
    def reads_text(self) -> bool:
        """Whether the target is a server whose token ids are not known: only its own lane can run."""
        return isinstance(self.tokenizer, PieceTokenizer)

    def own_ids(self, ids: list[int]) -> list[int]:
        """Return an answer's ids as the conversation keeps them: ids of a server's pieces become the tokenizer's."""
        return ids if self.reads_text or not self.pieces.has(ids) else self._encode(self.pieces.text(ids))

    @property
    def start_id(self) -> int | None:
        """The id that the target's decoder starts from, if it has one."""
        return getattr(self.target, "start_id", None)

    def lanes(self, settings: Settings) -> list[Lane]:
        """Return the lanes of `settings.compare`, in order. UsageError names a lane that this pair cannot run."""
        return [self.lane(name, settings) for name in settings.compare]

    def lane(self, name: str, settings: Settings) -> Lane:
        """Return one lane by name."""
        if is_server(name):
            return self._server_lane(name, settings)
        if self.reads_text and self.server is not None:
            raise UsageError(
                f"lane {name}: {self.server.address} answers in text, lanes are server, URL (--pair or --tokenizer: "
                "drafts are made here)"
            )
        if self.server is not None and name != "draft":
            self._check_greedy(name, settings)
        limits = self.limits(settings)
        stops, bias, form = self._stops(settings), self.bias(settings), self._form(settings, limits.stop)
        lane_of = partial(Lane, name, settings=settings, limits=limits, stops=stops, bias=bias, form=form)
        if name == "draft":
            if (model := self.drafters.model) is None:
                if head_kind_of(word := self.loaded.drafter_word) is not None:
                    raise UsageError(f"lane draft: a {word} drafter reads the target's states and cannot run alone")
                raise UsageError(f"lane draft needs a drafter model, got drafter {word} (--drafter sets one)")
            if model.reads_hidden:
                raise UsageError("lane draft: this drafter reads the target's states and cannot run alone")
            return lane_of(model, NoDrafter(), shares_target=False, reopen=partial(self._reopen, model))
        if name == "beam":
            for setting in (setting for setting in ("stop", *FORMS) if getattr(settings, setting)):
                what = "stop strings" if setting == "stop" else setting
                raise UsageError(f"lane beam: a beam search has no {what} (now {settings.show(setting)})")
            return lane_of(
                self.target,
                NoDrafter(),
                beams=BeamPlan(settings.num_beams, settings.beam_top_k, settings.min_length, settings.length_penalty),
            )
        own = self._lane_drafter(name, settings)
        return lane_of(self.target, own.drafter, pace=own.pace if settings.gamma == "auto" else None)

    def _check_greedy(self, name: str, settings: Settings) -> None:
        """Raise UsageError for a beam search and for settings under which the next token need not be the server's
        likeliest."""
        wrong = [
            rule for rule in ("temperature", "no_repeat_ngram", *PENALTIES, "logit_bias") if getattr(settings, rule)
        ]
        wrong += [*["repetition_penalty"] * (settings.repetition_penalty != 1), *(settings.form or ())[:1]]
        if name == "beam" or wrong:
            why = f"{wrong[0]} {settings.show(wrong[0])}" if wrong else "a beam search"
            raise UsageError(f"lane {name}: drafts for a server are verified by its likeliest tokens, without {why}")

    def _server_lane(self, name: str, settings: Settings) -> ServerLane:
        """Return the lane of the pair's own server, or of the one at a URL. UsageError for a setting that no
        server takes."""
        server = self.server if name == OWN else server_at(name)
        if server is None:
            raise UsageError(
                f"lane {name}: the target is no server (--target http://HOST:PORT/v1, or a URL for a lane)"
            )
        for setting in (name for name, off in NOT_IN_REQUESTS.items() if getattr(settings, name) != off):
            raise UsageError(f"lane {name}: a server has no {setting} (now {settings.show(setting)})")
        texts = [token for token, _ in settings.logit_bias if isinstance(token, str)]
        known = name == OWN and not self.reads_text
        if texts and not known:
            raise UsageError(f"lane {name}: its tokens are not known here, so {texts[0]!r} has no id: bias by ids")
        bias = self.bias(settings, known)
        if several := next((ids for ids in bias if len(ids) > 1), ()):
            raise UsageError(f"lane {name}: a server biases single tokens, got a text of {len(several)}")
        return ServerLane(name, server, settings, self.pieces, bias)

    def bias(self, settings: Settings, known: bool = True) -> Bias:
        """Return the bias by ids. `known`: they are ids of the target's vocabulary. UsageError for an id outside it,
        and for a text of several tokens unless the text is banned."""
        bias: dict[tuple[int, ...], float] = {}
        for token, amount in settings.logit_bias:
            ids = [token] if isinstance(token, int) else continued_ids(token, self._encode)
            size, most = self.loaded.vocab_size, max(ids)
            raise_first(
                {
                    f"logit_bias: {token!r} is {len(ids)} tokens {ids}: only a ban (-100) takes several": (
                        len(ids) > 1 and amount > BAN
                    ),
                    f"logit_bias: id {most} is outside the vocabulary of {size} ids": known and most >= size,
                }
            )
            bias[tuple(ids)] = -math.inf if amount <= BAN else amount
        return bias

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _form(self, settings: Settings, ends: frozenset[int]) -> "GrammarState | None":
        """Return the state at the beginning of an answer, which may end with `ends`. UserError for a broken form."""
        if settings.form is None:
            return None
        from utils.grammar import GrammarState, compiled, form_text, vocabulary_of

        size, text = self.target.vocab_size, form_text(*settings.form)
        return GrammarState(compiled(settings.form[0], text, vocabulary_of(self.tokenizer, size, ends)), size, ends)

    def _stops(self, settings: Settings) -> StopStrings | None:
        """Return the stop strings over the target's tokenizer; None without any."""
        if not settings.stop:
            return None
        return StopStrings(
            settings.stop,
            partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            self._encode,
        )

    def mean_drafted(self, settings: Settings) -> float | None:
        """Return the mean of the tokens that `gamma auto` has drafted a round in the last lane with a controller; None
        without one."""
        paces = [
            own.pace for own in filter(None, map(self._lane_drafters.get, settings.compare)) if own.pace is not None
        ]
        return paces[-1].mean_drafted if paces else None

    def sampled_lane(self, settings: Settings) -> str:
        """Return the lane that draws several answers: the last one if it is a server's, else the target alone."""
        last = settings.compare[-1]
        return last if is_server(last) else OWN if self.server else "ar"

    def limits(self, settings: Settings) -> Limits:
        """Return the limits of an answer."""
        return Limits(settings.max_new_tokens, self.stop_ids | end_ids(self.tokenizer, settings.template), self.context)

    def open(
        self, prompt: list[int], previous: Session | None = None, *, hidden: Hidden = False, begun: Sequence[int] = ()
    ) -> Session:
        """Open a session of the target on the cache of `previous` (which must not be used again).

        `hidden`: the hidden states to keep. If `previous` lacks them, its tokens are read again; more of them do not
        matter. `begun`: the beginning of the answer for the decoder to read, if an encoder reads the prompt.
        """
        return go_on(self.target.open([prompt], previous=previous, hidden=hidden), begun)

    def forget(self) -> None:
        """Drop the lanes' drafters with what they keep from earlier answers: n-grams, caches.

        The finished answers that `suffix` reads are kept. So are the measured times of passes and the average
        acceptance, which describe the pair, not an answer.
        """
        self._lane_drafters.clear()
        self._draft_session = None

    def _reopen(self, model: LM, prompt: list[int], begun: Sequence[int]) -> Session:
        previous, self._draft_session = self._draft_session, None
        self._draft_session = go_on(model.open([prompt], previous=previous), begun)
        return self._draft_session

    def _lane_drafter(self, name: str, settings: Settings) -> _LaneDrafter:
        """Return the lane's drafter: that of the last answer unless its settings have changed."""
        if name.startswith("oracle") and this_process().world_size > 1:
            raise UsageError(f"lane {name} runs in one process, not in {this_process().world_size}")
        word = {"ar": "none", "spec": self.loaded.drafts_by, LOSSY: self.loaded.drafts_by}.get(name, name)
        key = self.drafters.key(word, settings)
        entry = self._lane_drafters.get(name)
        pace = self._paces.get((name, key))
        if entry is None or entry.key != key:
            ratios = Ratios() if pace is None else pace.acceptance.ratios
            entry = self._lane_drafters[name] = _LaneDrafter(key, self.drafters.make(word, settings, ratios), ratios)
            if name == LOSSY:
                entry.drafter.traits = replace(entry.drafter.traits, rule=Rule.TYPICAL)
        drafts = not isinstance(entry.drafter, NoDrafter) and entry.drafter.traits.most != 0
        if settings.gamma == "auto" and drafts and entry.pace is None:
            costs = self.measured and self.measured.costs(with_drafter=word == self.loaded.drafts_by)
            self._paces[name, key] = entry.pace = pace or controller_of(
                entry.drafter.traits,
                settings.nodes,
                costs,
                Acceptance(prior=self.drafters.alphas(word), ratios=entry.ratios),
            )
        return entry
