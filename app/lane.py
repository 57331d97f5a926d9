"""A lane: one way of answering a prompt, bound to its settings. Knows no text, no screen, and not who made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sampling.beam import beam_generate
from sampling.beam_plan import BeamPlan
from sampling.drafters import NoDrafter
from sampling.events import Event
from sampling.loop import generate, never
from sampling.pace import GoodputPace
from sampling.sampler import KeyedSampler
from sampling.types import LM, Drafter, FixedPace, Limits, Rows, Session
from utils.errors import UsageError
from utils.logits_processors import make_processor

if TYPE_CHECKING:
    from app.settings import Settings


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
    reopen: Callable[[list[int], Sequence[int]], Session] | None = None  # where the lane keeps a session of its own
    pace: GoodputPace | None = None  # `gamma auto`
    beams: BeamPlan | None = None  # beam search in place of the loop

    @property
    def source_names(self) -> tuple[str, ...]:
        """What `Step.source` indexes into."""
        return self.drafter.names

    @property
    def drafts(self) -> bool:
        """Whether anything is ever drafted."""
        return not isinstance(self.drafter, NoDrafter)

    @property
    def most(self) -> int | None:
        """Tokens that a round may draft where the drafter itself says how many (cascade, chain); None: gamma does."""
        return getattr(self.drafter, "most", None)

    @property
    def takes_gamma(self) -> bool:
        """Whether a fixed gamma changes anything."""
        return self.drafts and self.most is None

    @property
    def needs_hidden(self) -> bool:
        """Whether its target session must keep the target's hidden states."""
        return bool(getattr(self.drafter, "needs_hidden", False))

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
    ) -> Iterator[Event]:
        """Decode one prompt. `session` is an open session of the target; without one the lane reads the prompt.

        `begun`: see :meth:`Engine.open`; a session that is given has it already.
        """
        if session is None and self.reopen is not None:
            session = self.reopen(prompt, begun)
        if self.beams is not None:
            processor = make_sampler(self.settings).processor
            return beam_generate(
                self.lm, [prompt], self.limits, self.beams, processor=processor, session=session, interrupt=interrupt
            )
        return self.run_rows([prompt], session=session, interrupt=interrupt)

    def run_rows(
        self, prompts: Rows, *, session: Session | None = None, interrupt: Callable[[], bool] = never
    ) -> Iterator[Event]:
        """Decode several prompts as one batch; `session` is an open one of `lm` for them.

        UsageError for a lane that searches, UserError for a drafter that follows one row.
        """
        if self.beams is not None:
            raise UsageError(f"lane {self.name} searches for one prompt at a time, got {len(prompts)}")
        if self.pace is not None:
            self.pace.begin()
        return generate(
            self.lm,
            prompts,
            self.drafter,
            make_sampler(self.settings),
            self.limits,
            pace=self.pace or FixedPace(self._gamma()),
            session=session,
            interrupt=interrupt,
        )

    def _gamma(self) -> int:
        if not self.drafts:
            return 0
        return int(self.settings.gamma) if self.most is None else self.most


def make_sampler(settings: Settings) -> KeyedSampler:
    """The sampler of one answer."""
    processor = make_processor(
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
    )
    return KeyedSampler(
        processor,
        settings.seed,
        coupling=settings.coupling,  # type: ignore[arg-type]
        draft_sampling=settings.draft_sampling,  # type: ignore[arg-type]
        verification=settings.verify,  # type: ignore[arg-type]
    )


def make_plan(settings: Settings) -> BeamPlan:
    """How the lane `beam` searches."""
    return BeamPlan(settings.num_beams, settings.beam_top_k, settings.min_length, settings.length_penalty)
