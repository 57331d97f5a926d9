"""One answer: a plan is decoded by every lane, entered into the conversation, and printed for good.

Knows neither commands nor keys. What is printed at the end stays in the scrollback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rich.text import Text

from app.chat.answered import Answered
from app.chat.conversation import Conversation, Plan
from app.lanes.answers import shown_settings
from app.lanes.costs import terms_of
from app.lanes.race import Race
from app.replay.log_writer import Asked
from app.screen.live import Surface, Track, play, play_live, show
from app.screen.terminal import Interrupts
from app.screen.view import models_of
from app.settings.layers import Settings

if TYPE_CHECKING:
    from app.lanes.lane import Engine
    from app.replay.log_writer import Recorder
    from app.screen.spans import Decode
    from sampling.types import Session


class Place(Surface, Protocol):
    """Where an answer is shown while it is made."""

    live: bool
    stop: Interrupts

    @property
    def recorder(self) -> Recorder | None: ...
    def hint(self, text: str) -> None: ...


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
    show(tracks, turn.text, place)
    return answered, race.session


def _seeded(settings: Settings, plan: Plan) -> Settings:
    """A continuation keeps its seed; answering anew takes the next one."""
    seed = settings.seed + plan.regenerated if plan.seed is None else plan.seed
    return settings.changed(seed=seed % (2**63 - 1))
