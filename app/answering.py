"""One answer: a plan is decoded by every lane, entered into the conversation, and printed for good.

Knows neither commands nor keys. What is printed at the end stays in the scrollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from app.answers import Answer, compared, judged, plain_answer, results, shown_settings
from app.conversation import Conversation, Plan, Turn
from app.costs import terms_of
from app.heading import models_of
from app.known_lane import lenience_of
from app.live import Track, frame, look_of, play, play_live
from app.race import Race
from app.recorder import Asked
from app.settings import Settings
from app.terminal import Interrupts
from app.view import StatsLine, note
from app.wrap import visible

if TYPE_CHECKING:
    from app.lanes import Engine
    from app.palette import Look
    from app.recorder import Recorder
    from app.spans import Decode
    from sampling.types import Session


class Place(Protocol):
    """Where an answer is shown."""

    out: Console
    live: bool
    stop: Interrupts
    recorder: Recorder | None

    @property
    def settings(self) -> Settings: ...
    def say(self, what: Any) -> None: ...
    def hint(self, text: str) -> None: ...


@dataclass(frozen=True)
class Answered:
    """A finished answer with everything that is known about it."""

    pair: str
    settings: Settings
    turn: Turn
    tracks: list[Track]
    models: Mapping[str, str] = field(default_factory=dict)  # what ran, as app/heading.py tells it

    @property
    def answers(self) -> list[Answer]:
        return [track.answer() for track in self.tracks]

    def to_json(self) -> dict[str, Any]:
        """The object that `run --json` prints."""
        answers = self.answers
        return {
            "pair": self.pair,
            "prompt": self.turn.user,
            "settings": shown_settings(self.settings),
            "results": results(answers),
            **compared(answers),
        }


def answer(
    plan: Plan, chat: Conversation, engine: Engine, previous: Session | None, place: Place
) -> tuple[Answered | None, Session | None]:
    """Decode `plan` and show it; the conversation goes on from the last lane.

    Returns the answer, None if it was stopped before its first token, and the target's session for
    the next turn. `previous` must not be used again. Raises what decoding raises; the conversation
    is unchanged then.
    """
    settings = _seeded(place.settings, plan)
    lanes = engine.lanes(settings)
    size, most = len(plan.prompt), settings.max_new_tokens

    def made(decode: Decode) -> list[Track]:
        return [Track(lane, decode, size, most, plan.answer, terms_of(lane, engine)) for lane in lanes]

    tracks = made(chat.text)
    if plan.regenerated and not plan.answer:
        still = "temperature 0: the same answer again" if settings.temperature == 0 else f"seed {settings.seed}"
        place.hint(still)
    race = Race(lanes, engine, plan.prompt, previous, place.stop, plan.begun)
    asked = Asked(plan.user, plan.prompt, plan.answer, bool(plan.begun))
    take = None if place.recorder is None else place.recorder.take(engine, asked, settings, made, chat.text)
    events = race if take is None else take.tee(race)
    if place.live and not settings.quiet:
        play_live(events, tracks, place.out, settings, place.stop)
    else:
        play(events, tracks)
    if take is not None and (problem := take.end()):
        place.say(Text(problem, style="bold yellow"))
    last = tracks[-1]
    if not last.meter.ids:
        return None, race.session
    earlier = chat.turns[plan.keep].record.get("decodings", []) if plan.answer else []
    models = models_of(engine)
    lanes_told = [track.record() for track in tracks]
    decoding = {"models": models, "settings": shown_settings(settings), "lanes": lanes_told}
    turn = chat.commit(plan, last.meter.ids, last.reason, seed=settings.seed, decodings=[*earlier, decoding])
    answered = Answered(engine.loaded.spec.name, settings, turn, tracks, models)
    show(answered, place)
    return answered, race.session


def _seeded(settings: Settings, plan: Plan) -> Settings:
    """A continuation keeps its seed; answering anew takes the next one."""
    seed = settings.seed + plan.regenerated if plan.seed is None else plan.seed
    return settings.changed(seed=seed % (2**63 - 1))


def show(answered: Answered, place: Place) -> None:
    """The final print: panes, figures, verdict and legend, then the text alone, to be copied."""
    settings = place.settings
    look = look_of(place.out, settings).sized(height=None)
    last = answered.tracks[-1].pane()
    if settings.quiet:
        place.out.print(Text(visible(answered.turn.text)), soft_wrap=True)
        place.say(StatsLine(last, look))
        if note(last):
            place.say(note(last))
        return
    place.say(panes(answered, place.out, settings))
    if settings.view == "trace":
        place.say(traced(answered, place.out, settings, None))
    place.out.print()
    place.out.print(Text(visible(answered.turn.text)))


def panes(answered: Answered, console: Console, settings: Settings) -> RenderableType:
    """All lanes in full with verdict and legend."""
    look = look_of(console, settings).sized(height=None)
    answers = answered.answers
    plain = plain_answer(answers)
    if plain is not None:
        for track, found in zip(answered.tracks, answers, strict=True):
            track.expected = found.expected(plain)
    return frame(answered.tracks, look, settings.view, verdict=judged(answers), show_discarded=settings.debug)


def traced(answered: Answered, console: Console, settings: Settings, rounds: int | None) -> RenderableType:
    """The last lane that drafted or searched, round by round (the last lane, if none did)."""
    from app.trace import Trace, rule_of

    track = next((one for one in reversed(answered.tracks) if one.pane().telling), answered.tracks[-1])
    used = track.lane.settings
    if track.lane.beams is not None:
        return _searched(track, look_of(console, settings).sized(height=None), rounds)
    shaped = (used.top_k, used.top_p, used.min_p, used.repetition_penalty, used.no_repeat_ngram)
    exact = used.temperature == 1 and shaped == (0, 1.0, 0.0, 1.0, 0)
    rule = rule_of(
        used.temperature, sampled=track.lane.law_drafts, coupling=used.coupling, draft_sampling=used.draft_sampling
    )
    look = look_of(console, settings).sized(height=None)
    names, lenience = track.lane.source_names, lenience_of(track.lane)
    return Trace(track.steps, track.decode, look, names, rule=rule, last=rounds, exact=exact, lenience=lenience)


def _searched(track: Track, look: Look, steps: int | None) -> RenderableType:
    """A beam search, step by step."""
    from app.beam_view import BeamTrace, rule_of

    plan = track.lane.beams
    rule = rule_of(plan.num_beams, plan.alpha, plan.offset)
    return BeamTrace(track.beam_steps, track.decode, look, rule=rule, last=steps)
