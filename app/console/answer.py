"""One answer: every lane decodes the same plan (app/chat/conversation.py: Plan), the last lane's answer is entered into
the conversation, and all are printed.

Knows neither commands nor keys. The text printed at the end stays in the scrollback.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from rich.text import Text

from app.chat.conversation import Plan
from app.chat.saved import Answered
from app.console.state import ConsoleState
from app.lanes.costs import SEEN
from app.lanes.race import Race, slowed
from app.replay.session_log import AnswerLog
from app.screen.inspection import SaidToken, forced_in
from app.screen.live import Pause, Track, play, sampled, show, stepped, streaming, tracks_of, undrawn
from app.screen.samples import Branch
from app.screen.view import models_of
from app.settings.table import Settings
from sampling.events import ENOUGH
from utils.errors import UserError
from utils.objects import Json

FIRST = "decoding, to be shown slowly"
UNANSWERED = "no token came: the conversation is unchanged"


def answer(plan: Plan, state: ConsoleState) -> bool:
    """Decode `plan` and show it; the conversation continues from the last lane.

    False if the answer got no token, for example after an early Ctrl-C. Raises what decoding raises. In both cases the
    conversation is unchanged.
    """
    prepared = _prepare(plan, state)
    return _commit(plan, prepared, _play(prepared, state), state)


@dataclass(frozen=True)
class Prepared:
    """An answer after validation, ready to be decoded. `log`: its part of the session log."""

    settings: Settings
    tracks: list[Track]
    race: Race
    log: AnswerLog | None


def _prepare(plan: Plan, state: ConsoleState) -> Prepared:
    """Do all that may raise an error before decoding: make the lanes, take the target's session, open the log."""
    engine, chat, settings = state.engine(), state.conversation(), _seeded(state.settings, plan)
    lanes = engine.lanes(settings)
    if plan.answer and any(lane.served for lane in lanes):
        raise UserError("a server answers whole messages: only the other lanes continue an answer (/compare)")
    for lane in lanes:
        lane.begun = plan.answer
    state.say_markers(plan)
    previous, state.session = state.session, None
    decode = engine.pieces.beside(chat.text)
    tracks = tracks_of(lanes, engine, plan.prompt, decode, plan.answer, chat.thinking, plan.forced)
    if plan.regenerated and not plan.answer:
        state.hint(f"seed {settings.seed}" if settings.temperature else "temperature 0: the same answer again")
    # A what-if needs ENOUGH alternatives of each position.
    race = Race(lanes, engine, plan.prompt, previous, state.stop, plan.begun, ENOUGH, plan.messages)
    records = [track.lane for track in tracks]
    log = None if state.log is None else state.log.open_answer(engine, records, plan, settings, decode)
    return Prepared(settings, tracks, race, log)


def _play(prepared: Prepared, state: ConsoleState) -> list[Pause]:
    """Run the race to its end, and on a terminal show it as the settings say; return the pauses of a race in steps."""
    settings, tracks, pauses = prepared.settings, prepared.tracks, list[Pause]()
    live = state.live and not settings.quiet
    if live and (settings.times_slower > 1 or settings.steps):
        for track in tracks:
            track.waiting = FIRST
    with streaming(tracks, state.out, settings, state.can_continue) if live else nullcontext(undrawn) as draw:
        events = prepared.log.tee(prepared.race) if prepared.log else prepared.race
        if live and settings.steps:
            draw()
            events = stepped(events, tracks, state, draw, taken=pauses)
        elif live and settings.times_slower > 1:
            events = slowed(events, settings.times_slower, state.stop, idle=draw)
        play(events, tracks, undrawn if settings.steps else draw)
    return pauses


def _commit(plan: Plan, prepared: Prepared, pauses: list[Pause], state: ConsoleState) -> bool:
    """End the log, keep the target's session, enter the answer and show it. Return False, with nothing entered, if no
    token was decoded; only a continued answer may end ("stop") without a new one."""
    engine, last, settings = state.engine(), prepared.tracks[-1], prepared.settings
    ids = engine.own_ids(last.meter.ids)
    seen = settings.suffix != "off" and engine.drafters.answers.share(plan.prompt, ids) > SEEN
    for track in prepared.tracks:
        track.lane = replace(track.lane, terms=replace(track.lane.terms, seen=seen))
    if prepared.log is not None and (problem := prepared.log.end(seen, pauses)):
        state.say(Text(problem, style="bold yellow"))
    state.session = prepared.race.session
    if state.stop():
        state.stopped_at = time.monotonic()
    if not ids and not (plan.answer and last.reason == "stop"):
        return False
    _enter(plan, prepared.tracks, ids, settings, state, {})
    return True


def _enter(
    plan: Plan, tracks: list[Track], ids: list[int], settings: Settings, state: ConsoleState, record: Json
) -> None:
    """Enter an answer, whose new ids are `ids`, into the conversation and show it. `record`: what else
    /save keeps of it."""
    engine, chat = state.engine(), state.conversation()
    before = chat.turns[plan.keep].record if plan.answer else {}
    forced = list(plan.answer) if plan.forced else before.get("forced")
    record |= {} if forced is None else {"forced": forced}
    engine.drafters.answers.add(plan.prompt, ids)  # only now, after the lanes of this turn have ended
    turn = chat.commit(plan, ids, tracks[-1].reason, seed=settings.seed, record=record)
    state.latest = Answered(settings, turn, tracks, models_of(engine), kept_tokens(plan, state.latest))
    turn.record["decodings"] = [*([] if plan.forced else before.get("decodings", ())), state.latest]
    state.answers.append(state.latest)
    show(tracks, turn.text, state)


def samples_of(plan: Plan, count: int, state: ConsoleState) -> list[Track]:
    """Return the finished lanes of `count` answers to a plan, drawn by the target alone (or by a server)."""
    engine, settings = state.engine(), _seeded(state.settings, plan)
    decode = engine.pieces.beside(state.conversation().text)
    return sampled(engine, settings, plan.prompt, count, decode, state.stop, plan.messages)


def take_sample(plan: Plan, track: Track, tree: Sequence[Branch], state: ConsoleState) -> None:
    """Enter one of several answers into the conversation, and into the log, and show it."""
    if state.log is not None:
        state.log.log_answer(state.engine(), track, plan)
    ids = state.engine().own_ids(list(track.meter.ids))
    _enter(plan, [track], ids, track.lane.settings, state, {"samples": [branch.model_dump() for branch in tree]})


def kept_tokens(plan: Plan, latest: Answered | None) -> tuple[SaidToken, ...]:
    """Return the tokens with which a continued answer begins, a forced one included; () if they are unknown."""
    count, tokens = len(plan.answer) - plan.forced, latest.tokens if latest is not None and plan.answer else []
    if len(tokens) < len(plan.answer) or [token.token for token in tokens[:count]] != list(plan.answer[:count]):
        return ()
    return (*tokens[:count], *([forced_in(tokens[count], plan.answer[-1])] if plan.forced else []))


def _seeded(settings: Settings, plan: Plan) -> Settings:
    """Return the settings with this answer's seed: a continuation keeps the answer's, a new answer to the same message
    takes the next one."""
    seed = settings.seed + plan.regenerated if plan.seed is None else plan.seed
    return settings.changed(seed=seed % (2**63 - 1))
