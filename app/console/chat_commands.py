"""The commands that use the loaded pair and the conversation: models, conversation, files, figures, single tokens;
and the text of /info and /stats.

Errors that a user can correct are raised as UserError; the caller that dispatched the command shows them.
Importing this imports no torch.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from app.chat.conversation import Conversation, Plan
from app.chat.page import PageAnswer, page
from app.chat.saved import Answered, answered_of, as_json, as_text, picture, read_chat
from app.console.answer import UNANSWERED, answer, samples_of, take_sample
from app.console.setting_commands import can_run, files
from app.console.state import ConsoleState, Work, load_another_drafter
from app.lanes.answers import Answer, comparisons_of, difference, promise
from app.lanes.costs import LaneRecord, Terms, cost_lines
from app.lanes.pairing import choose_pair
from app.screen.inspection import Force, Inspection, forced_hint
from app.screen.live import explained_track, rounds_of, tokens_of
from app.screen.palette import Look
from app.screen.panes import PaneData, stats_lines
from app.screen.rows import Lines, fit, in_short, one_line, plural
from app.screen.samples import BRANCHES, SampleTree, tree_of
from app.screen.spans import answer_text, thoughts
from app.screen.terminal import view
from app.screen.trace import RoundPictures
from app.screen.view import Summary, drafter_name, dtype_name, kernels_of, models_of, question
from app.screen.why import Why
from app.settings.table import Layers
from app.settings.types import got
from sampling.drafters.registry import DRAFTERS, ROWS
from sampling.stats.summary import Stats, disturbed, merge, speedup_over
from utils.catalogue.specs import PairSpec
from utils.errors import UsageError, UserError, did_you_mean
from utils.files import write_text
from utils.loading.loaded import NO_LIMIT, LoadedModel, limit_text
from utils.visible import visible

if TYPE_CHECKING:
    from app.lanes.lane import PairEngine


# -- models -----------------------------------------------------------------------------------


def pair(state: ConsoleState, name: str) -> None:
    names, pairs = state.pair_names(), state.pairs
    if not name:
        loaded = "loading" if pairs.job else "loaded" if pairs.engine else "not loaded"
        return state.say(f"pair = {pairs.name} ({loaded}); there are {', '.join(names)}")
    if name not in names:
        raise UsageError(f"unknown pair {got(name)}{did_you_mean(name, names) or ' (/pair lists them)'}")
    spec = choose_pair(state.options, name)
    layers = state.layers.resolve(spec.defaults)
    return _switch(state, name, lambda *job: pairs.loader(spec, state.options, *job), spec=spec, layers=layers)


def drafter(state: ConsoleState, name: str) -> None:
    pairs = state.pairs
    if not name:
        spec = pairs.engine.loaded.spec if pairs.engine else pairs.spec
        return state.say(f"drafter = {spec.drafter_name if spec else 'none is loaded'}")
    engine = state.engine()
    return _switch(state, name, lambda *job: load_another_drafter(engine, name, state.options, *job))


def _switch(
    state: ConsoleState, label: str, work: Work, *, spec: PairSpec | None = None, layers: Layers | None = None
) -> None:
    """Load a pair and switch to it; after any error the old pair and its settings stay."""
    pairs = state.pairs
    engine = pairs.switch(label, work, state.out, state.stop, live=state.live)
    try:
        state.take(layers or state.layers, engine, spec)
    except UserError as error:
        raise UserError(f"{error} ({pairs.still()})") from error


def info(state: ConsoleState, _: object) -> None:
    pairs = state.pairs
    loading = f"{pairs.name}: {pairs.job.status}" if pairs.engine is None and pairs.job is not None else ""
    state.say(loading or facts(state.engine(), state.conversation()))


def pair_names(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Complete a name: the pairs of the catalogue."""
    return [(name, "") for name in state.pair_names()]


def drafters(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Complete a drafter: the words that the loaded pair can run, then folders."""
    words = ((word, ROWS[word].help) for word in DRAFTERS if can_run(state, word))
    return [*words, *(files(())(state, so_far) if so_far else ())]


# -- the conversation -------------------------------------------------------------------------


def system(state: ConsoleState, text: str) -> None:
    if text:
        state.change(system="" if text == "clear" else text)
    state.say(f"system = {state.settings.system or '(none)'}")


def clear(state: ConsoleState, which: str | None) -> None:
    if state.chat is not None:
        state.chat.clear(for_good=which == "all")
    if state.pairs.engine is not None:
        state.pairs.engine.forget()
    said = state.said_before.values()
    if which == "all":
        for answers in said:
            answers.clear()
        return state.say("conversation cleared, and every answer before it")
    back = " (/undo brings it back)" if state.chat is not None and state.chat.cleared else ""
    kept = "\nits answers are still remembered for drafts (/clear all forgets them)" if any(said) else ""
    return state.say(f"conversation cleared{back}{kept}")


def undo(state: ConsoleState, _: object) -> None:
    if state.chat is not None and state.chat.restore():
        return state.say(f"{plural(len(state.chat.turns), 'turn')} back: the conversation is as it was before /clear")
    if (taken := state.said().undo()) is None:
        return back_to(state, "the answer is as it was before a token was forced")
    state.next_line = taken.user
    return state.say("the last message is taken back, it is in the input line")


def back_to(state: ConsoleState, line: str) -> None:
    """Show the answer that the conversation continues from."""
    turn = state.said().turns[-1]
    state.latest = next((answered for answered in reversed(state.answers) if answered.turn is turn), None)
    state.say(line, shown_answer(state, turn.text))


def shown_answer(state: ConsoleState, text: str) -> RenderableType:
    """Return an answer's text with its thinking as the settings show it."""
    return answer_text(text, state.settings, live=state.live, marks=state.conversation().thinking)


def regen(state: ConsoleState, _: object) -> None:
    decode(state, state.said().plan_regen())


def go_on(state: ConsoleState, _: object) -> None:
    decode(state, state.said().plan_continue(state.settings.stop))


def decode(state: ConsoleState, plan: Plan) -> None:
    if not answer(plan, state):
        state.hint(UNANSWERED)


def history(state: ConsoleState, _: object) -> None:
    state.page(_chat(state))


def _chat(state: ConsoleState) -> Group:
    """Return every message and its answer, as they were shown."""
    parts = list[RenderableType]()
    for turn in state.said().turns:
        parts += [question(turn.user, state.look), shown_answer(state, turn.text), ""]
    return Group(*parts[:-1])


def last_thinking(state: ConsoleState) -> RenderableType:
    """Return the last answer with its thinking as the settings show it; "" if it has none."""
    marks, turns = (None, []) if state.chat is None else (state.chat.thinking, state.chat.turns)
    thinks = marks is not None and turns and thoughts(turns[-1].text, marks, state.settings.thinking)
    return shown_answer(state, turns[-1].text) if thinks else ""


def plain_text(state: ConsoleState) -> str:
    """Return the last answer's plain text if `render` is off, else ""."""
    turns = [] if state.chat is None or state.settings.render else state.chat.turns
    return turns[-1].text if turns else ""


def leave(state: ConsoleState, _: object) -> None:
    state.leaving = True


# -- the conversation's file ------------------------------------------------------------------


def save(state: ConsoleState, path: Path) -> None:
    chat, ending, file = state.said(), path.suffix.lower(), path.resolve()
    if path.is_file() and file not in state.replaceable:
        state.replaceable.add(file)
        raise UserError(f"{path} is there already: nothing was saved; the same /save again replaces it")
    if ending == ".json":
        text = saved(state)
    else:
        text = as_text(chat.turns, chat.system) if ending == ".txt" else _page(state, ending)
    write_text(path, text)
    state.replaceable.add(file)
    state.say(f"saved {plural(len(chat.turns), 'turn')} to {path}")


def _page(state: ConsoleState, ending: str) -> str:
    """Return the conversation as a page, for the ending ".svg" as a picture."""
    chat = state.said()
    turns = [(turn, answered_of(turn, chat.text)) for turn in chat.turns]
    if ending == ".svg":
        return picture(turns, state.settings)
    answers = list[PageAnswer]()
    for turn, decodings in turns:
        question = turn.user
        for answered in decodings:
            answers.append(PageAnswer(question, turn.text, answered.models, answered.settings, answered.tracks))
            question = ""
        answers += [] if decodings else [PageAnswer(question, turn.text)]
        with suppress(ValueError):  # samples in a loaded file that /save did not write
            answers[-1] = answers[-1]._replace(samples=BRANCHES.validate_python(turn.record.get("samples", ())))
    return page(answers)


def saved(state: ConsoleState) -> str:
    """Return the conversation as JSON, which /load reads."""
    chat, spec = state.said(), state.pairs.spec
    about = {
        "pair": state.pairs.name,
        "drafter": spec.drafter_name if spec else None,
        "system": chat.system,
        "tokenizer": _tokenizer(chat),
    }
    return as_json(chat.turns, about)


def _tokenizer(chat: Conversation) -> str:
    """Return a mark that differs if ids mean other tokens, or if an encoder reads the prompts."""
    from utils.loading.fit import fingerprint

    return fingerprint(chat.tokenizer) + (" encoder" if chat.single else "")


def load(state: ConsoleState, path: Path) -> None:
    file = read_chat(path)
    engine, chat = state.engine(), state.conversation()
    same = file.tokenizer in (None, _tokenizer(chat)) and chat.reads(file.turns, engine.target.vocab_size)
    before = len(chat.turns)
    layers = (
        state.layers if file.system == state.settings.system else state.layers.with_console_changes(system=file.system)
    )
    state.chat = chat = chat.loaded(file.turns, file.system, same=same)
    state.layers = layers
    for turn in chat.turns:
        engine.drafters.answers.add(turn.prompt, turn.answer)
    state.latest = next(reversed(answered_of(chat.turns[-1], chat.text)), None) if same else None
    state.page(_chat(state))
    instead = f" in place of {before} before" if before else ""
    said = f", system = {file.system}" if file.system else ""
    state.say(f"loaded {plural(len(file.turns), 'turn')} from {path}{instead}{said}")
    if not same:
        state.hint("made with another tokenizer: the conversation continues from its texts, without figures and traces")
    elif state.latest is None:
        state.hint("the file has no figures of its last answer: no /stats and /trace of it")
    elif (there := state.latest.models.get("where")) != (here := models_of(engine)["where"]):
        state.hint(f"it was computed as {there}, here {here}: nearly tied tokens may fall otherwise")


# -- looking back -----------------------------------------------------------------------------


def last_answer(state: ConsoleState) -> Answered:
    """Return the answer that /stats, /trace and the like are about. UserError if there is none."""
    if state.latest is not None:
        return state.latest
    loaded = state.chat is not None and state.chat.turns
    raise UserError("the last answer was loaded without its figures" if loaded else "no answer yet")


def stats(state: ConsoleState, which: str) -> None:
    if which == "session":
        if not state.answers:
            raise UserError("no answer yet in this session")
        state.page(session_stats(state.answers, state.look.sized()))
    else:
        state.page(last_stats(last_answer(state), state.look.sized()))


def why(state: ConsoleState, _: object) -> None:
    """Say in a paragraph why the last answer was as fast as it was, and what to try."""
    state.say(str(Why(last_answer(state).tracks, lambda word: can_run(state, word))))


def trace(state: ConsoleState, number: int | None) -> None:
    """Show all rounds, or the picture of one of them, from which keys go to others on a terminal."""
    track = explained_track(last_answer(state).tracks)
    if number is None:
        return state.say(rounds_of(track, state.look.sized()))
    pictures = RoundPictures(lambda look: rounds_of(track, look), number)
    if state.live:
        view(pictures, lambda: state.look)
    return state.say(Lines(pictures.picture(state.look), state.look))


def plot(state: ConsoleState, which: str) -> None:
    from app.screen import plots  # imports torch

    tracks, look = last_answer(state).tracks, state.look.sized()
    if which == "gamma" and not state.answers:
        raise UserError("/plot gamma needs an answer of this run: the last one was loaded")
    if which == "gamma":
        return state.say(plots.gamma_bars([answered.tracks for answered in state.answers], look))
    return state.say(*(plots.rank_bars if which == "ranks" else plots.time_bars)(tracks, look))


def heat(state: ConsoleState, by: str) -> None:
    """Show the last answer tinted by `by`; "off" shows it as it was printed."""
    from app.screen.plots import Heat

    if by == "off":
        return state.say(shown_answer(state, state.said().turns[-1].text))
    return state.page(Heat(last_answer(state).tokens, by, state.look.sized(height=None)))


def inspect(state: ConsoleState, number: int | None) -> None:
    """Walk over the last answer from token `number` on; without a terminal list all tokens, or show one."""
    answered = last_answer(state)
    if answered.tracks[-1].lane.beams is not None:
        raise UserError("a beam search has no tokens to inspect")
    tokens = answered.tokens
    if not 1 <= (number or 1) <= len(tokens):
        raise UserError(f"there is no token {number or 1}: the answer has {len(tokens)}")
    forces = state.chat is not None and state.chat.turns[-1:] == [answered.turn]
    content = Inspection(tokens, (number or 1) - 1, before=answered.before, forces=forces, settings=answered.settings)
    if state.live and isinstance(wanted := view(content, lambda: state.look), Force):
        return force(state, wanted)
    look = state.look.sized()  # the size may have changed during the view
    return state.say(Lines(content.panel(look) if state.live or number is not None else content.listed(look), look))


def force(state: ConsoleState, wanted: Force) -> None:
    """Cut the last answer and continue from the token that the user wants there."""
    chat = state.said()
    begun = len(chat.turns[-1].answer) - len(last_answer(state).tokens)  # first tokens, whose rounds are not recorded
    plan = chat.plan_force(begun + wanted.position, wanted.token)
    state.hint(forced_hint(chat.text(list(plan.answer)), wanted.position + 1, state.look))
    if not answer(plan, state):
        return state.hint(UNANSWERED)
    return state.hint(f"branch {len(chat.branches)} of {len(chat.branches)} (/branches lists them, /undo goes back)")


def samples(state: ConsoleState, count: int) -> None:
    """Answer the last message `count` times, and show the answers as a tree; on a terminal one of them can be taken."""
    plan = state.said().plan_regen()
    tracks = samples_of(plan, count, state)
    tree = tree_of([tokens_of(track) for track in tracks])
    content = SampleTree(tree)
    row = view(content, lambda: state.look) if state.live and tree else None
    if row is not None:
        return take_sample(plan, tracks[row], tree, state)
    if tree:
        state.said().turns[-1].record["samples"] = [branch.model_dump() for branch in tree]
    return state.say(Lines(content.rows(state.look.sized()), state.look))


def branches(state: ConsoleState, number: int | None) -> None:
    """List the branches of the last answer, or continue with one of them."""
    chat = state.said()
    if not chat.branches:
        raise UserError("the last answer has no branches: /inspect, then Enter on another token, makes one")
    if number is not None:
        chat.take_branch(number)
        return back_to(state, f"branch {number} of {len(chat.branches)}")
    look = state.look
    for at, turn in enumerate(chat.branches, start=1):
        cut = ""
        if turn.origin is not None:
            position = difference(turn.answer, turn.origin.answer, prefix=True) or 0
            origin = next((i for i, other in enumerate(chat.branches, start=1) if other is turn.origin), None)
            cut = f"from {origin or '-'} at token {position + 1}: "
        now = "*" if turn is chat.turns[-1] else " "
        state.say(fit(f"{now}{at}  {cut}{one_line(turn.text, look)}", look.width, look))
    return None


# -- /info and /stats ----------------------------------------------------------------------------


def _model(model: LoadedModel) -> str:
    return (
        f"{model.name}: {in_short(model.parameters)} parameters, {model.bytes / 1e6:,.0f} MB, {dtype_name(model)} on "
        f"{model.device}, context {limit_text(model.context).removesuffix(' tokens')}, loaded in {model.seconds:.1f} s"
    )


def facts(engine: "PairEngine", chat: Conversation) -> str:
    """Return the lines of /info: pair, models, context."""
    loaded = engine.loaded
    if engine.server is not None:
        return f"pair     {loaded.spec.name}\ntarget   {loaded.target.name}, served at {engine.server.address}"
    used, prompts = len(chat.ids), "chat template" if chat.templated else "plain text"
    if chat.single:
        prompts = "each message by itself, as it is (the encoder reads it)"
    return "\n".join(
        [
            f"pair     {loaded.spec.name}",
            f"target   {_model(loaded.target)}",
            f"drafter  {_model(loaded.drafter) if loaded.drafter is not None else drafter_name(engine)}",
            *(f"  {name}  {_model(model)}" for name, model in loaded.cascade_models.items()),
            f"vocabulary {engine.target.vocab_size:,} ids, stop ids {', '.join(map(str, sorted(engine.stop_ids)))}",
            f"prompts  {prompts}",
            f"kernels  {kernels_of(loaded.target)}{', the whole pass as one' if engine.invariant else ''}",
            f"output   {promise(loaded.target.precision, engine.invariant)}",
            _context(used, engine.context),
        ]
    )


def _context(used: int, context: int) -> str:
    return (
        f"context  {plural(used, 'token')} used, {limit_text(context)}"
        if context >= NO_LIMIT
        else f"context  {used:,} of {context:,} tokens used, {max(0, context - used):,} left"
    )


def last_stats(answered: Answered, look: Look) -> RenderableType:
    """Return the figures of the last answer and how its lanes compare, with where the time went."""
    panes, lines = [track.pane() for track in answered.tracks], list[str]()
    for pane, given in zip(panes, answered.answers, strict=True):
        first, *more = _times(given.stats), *cost_lines(given.stats, given.terms)
        lines += [f"{pane.label}: {first}", *(f"{' ' * len(pane.label)}  {line}" for line in more)]
    return Group(
        Summary(panes, look, comparisons_of(answered.answers), legend=False),
        Text(visible("\n".join(lines)), style="dim"),
    )


def _times(stats: Stats) -> str:
    draft, verify, sample = (f"{ms:.0f} ms" for ms in (stats.draft_ms, stats.verify_ms, stats.sample_ms))
    return (
        f"draft {draft}, verify {verify}, sample {sample}, other {stats.overhead_ms:.0f} ms; {stats.draft_n} drafted, "
        f"{stats.draft_n_discarded} of them discarded"
    )


def session_stats(answers: Sequence[Answered], look: Look) -> RenderableType:
    """Return the figures of every lane over the answers of this run, separately for each pair and drafter."""
    every = list({tuple(answered.models.values()): answered.models for answered in answers}.values())
    parts: list[RenderableType] = []
    for models in every:
        if len(every) > 1:
            parts.append(Text(visible(f"{models['target']} {look.glyph('arrow')} {models['drafter']}")))
        parts += _lanes_of([answered for answered in answers if answered.models == models], look)
    return Group(*parts)


def _lanes_of(answers: Sequence[Answered], look: Look) -> list[RenderableType]:
    """Return the figures of the lanes of answers by the same models. A lane's speed-up is over the answers that have
    both the lane and plain decoding."""
    rows = [{answer.method: answer for answer in answered.answers} for answered in answers]
    lanes = {
        name: [row[name] for row in rows if name in row] for name in dict.fromkeys(name for row in rows for name in row)
    }
    merged = {name: merge(answer.stats for answer in lane) for name, lane in lanes.items()}
    seen = sum(any(track.pane().seen for track in answered.tracks) for answered in answers)
    lines = [plural(len(answers), "answer") + (f", {seen} of them seen before" if seen else "")]
    for name, stats in merged.items():
        both = [(row["ar"].stats, row[name].stats) for row in rows if name != "ar" and "ar" in row and name in row]
        more = [_over_both(both)] if both else []
        lines += [f"{name}: {line}" for line in (*more, *cost_lines(stats, _shared(lanes[name])))]
    panes = [PaneData(LaneRecord(name), (), stats, "done") for name, stats in merged.items()]
    return [stats_lines(panes, look), Text(visible("\n".join(lines)), style="dim")]


def _over_both(both: Sequence[tuple[Stats, Stats]]) -> str:
    """Return a lane's speed-up over plain decoding, over the answers of both whose timing was not disturbed."""
    sound = [pair for pair in both if not disturbed(*pair)]
    ratio, left_out = speedup_over(sound), len(both) - len(sound)
    both_gave = f"over {plural(len(sound), 'answer')} of both"
    rate = f"{ratio:.2f}x the rate of plain decoding {both_gave}" if ratio else "no speed-up"
    return rate + (f" ({plural(left_out, 'answer')} with disturbed timing left out)" if left_out else "")


def _shared(answers: Sequence[Answer]) -> Terms:
    """Return the terms of these answers; empty ones if the models or sources differ between them."""
    first = answers[0].terms
    same = all((answer.terms.models, answer.terms.sources) == (first.models, first.sources) for answer in answers)
    return first if same else Terms()
