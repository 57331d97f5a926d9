"""`replay` and the demo: a session log shown again, at its own speed, in any view; the demo's steps as data, the loop
over them, and the recorded tour. Needs no model, no tokenizer and no torch.

On a terminal each event appears at its time on the lane's clock; elsewhere only the end of each answer is printed. Both
tours, that of the loaded pair (app/console/demo.py) and the recorded one, run in :func:`walk`: a step says what to look
at, is played, and waits for Enter. Does not know the log's format (app/replay/session_log.py), nor engines.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from rich.text import Text

from app.chat.page import PageAnswer, page
from app.lanes.answers import plain_answer
from app.lanes.race import paced
from app.replay.session_log import LoggedAnswer, read_log
from app.screen.inspection import Inspection, forced_hint
from app.screen.live import Track, explained_track, play, rounds_of, show, stepped, streaming, tokens_of
from app.screen.output import fitted
from app.screen.rows import Lines, Row, plural
from app.screen.terminal import Interrupts, await_enter, await_key, is_live, make_console, quiet_keys, view
from app.screen.view import Surface, heading, question
from app.settings.table import FORMS, Field, ModelOptions, Settings
from app.settings.types import Whole
from sampling.stats.summary import disturbed, speedup
from utils.errors import UserError
from utils.files import check_outputs, write_text
from utils.logits_processors import ARGUMENTS
from utils.progress import INTERRUPTED
from utils.visible import to_stderr

LONGEST_WAIT = 10.0  # seconds between two answers


def replay(settings: Settings, options: ModelOptions, args: Namespace) -> int:
    """Show a session log, or write it as a page (--page); return the exit code. UserError for any other file."""
    log = read_log(args.file)
    answers = log.answer(args.answer)
    if args.page is not None:
        check_outputs({"--page": args.page}, [args.file])
        write_text(args.page, page(map(_on_page, answers), Path(args.file).name))
        to_stderr(f"wrote {plural(len(answers), 'answer')} to {args.page}")
        return 0
    console = make_console(settings)
    live = is_live(console) and not settings.quiet and args.speed > 0
    if args.inspect and answers:
        return walk_over(answers[-1], Surface(settings, console, is_live(console)))
    with quiet_keys(), Interrupts() as stop:
        if not all(map(Player(Surface(settings, console, live, stop), args.speed).play, answers)):
            return INTERRUPTED
    to_stderr(*log.notes, *([] if answers else [f"{args.file} holds no answer yet"]))
    return 0


def _on_page(answer: LoggedAnswer) -> PageAnswer:
    tracks = answer.over()
    return PageAnswer(answer.opening.prompt, answer.text(tracks), answer.head.model_dump(), answer.settings, tracks)


def walk_over(answer: LoggedAnswer, surface: Surface) -> int:
    """Walk over an answer's tokens on a terminal, elsewhere list them; return the exit code."""
    track = answer.over()[-1]
    if not any(step.positions for step in track.steps):
        raise UserError(f"{answer.place}: the answer was logged without its alternatives: --log-top 5 keeps them")
    before = track.decode(list(track.before)) if track.before else ""
    content, look = (
        Inspection(tokens_of(track), before=before, settings=answer.settings),
        surface.look,
    )
    if surface.live and find_spec("prompt_toolkit") is not None:  # replay works without prompt_toolkit
        view(content, lambda: surface.look)
        return 0
    surface.say(Lines(content.listed(look.sized()), look))
    return 0


class Player:
    """Shows answers one after the other on a surface, at `speed` times the speed at which they were shown first; if the
    surface's settings have a `slow`, that replaces the answers' own.
    """

    def __init__(self, surface: Surface, speed: float) -> None:
        self.surface, self.speed = surface, speed
        self._shown = list[Row]()

    def play(self, answer: LoggedAnswer) -> bool:
        """Show one answer; False if Ctrl-C ended it."""
        try:
            return self._play(answer)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # the log has impossible figures
            raise UserError(f"{answer.place}: the answer cannot be shown: {error}") from None

    def _play(self, answer: LoggedAnswer) -> bool:
        surface, tracks = self.surface, answer.tracks()
        looks = surface.settings if surface.settings.slow != 1 else answer.settings
        if surface.live and self._shown and answer.opening.waited:
            await_key(surface.stop, min(LONGEST_WAIT, answer.opening.waited) / self.speed)
        if not surface.settings.quiet:
            self._head(answer)
        if surface.live:
            with streaming(tracks, surface.out, surface.settings, can_continue=False) as draw:
                if looks.steps:
                    draw()
                    pauses = answer.closing.pauses if answer.closing and looks is answer.settings else ()
                    known = [(seconds / self.speed, key) for seconds, key in pauses]
                    play(stepped(answer.events, tracks, surface, draw, taken=[], known=known), tracks)
                else:
                    play(paced(answer.events, self.speed / looks.times_slower, surface.stop, idle=draw), tracks, draw)
        else:
            play(answer.events, tracks)
        if not surface.stop():
            show(tracks, answer.text(tracks), surface)
        return not surface.stop()

    def _head(self, answer: LoggedAnswer) -> None:
        """Show the models and settings, if they have changed, and the question."""
        look = self.surface.look
        if (line := heading(answer.head.model_dump(), answer.settings, look)).rows() != self._shown:
            self.surface.say(line)
        self._shown = line.rows()
        self.surface.say(question(answer.opening.prompt, look))
        if answer.opening.forced:
            self.surface.hint(forced_hint(answer.decode(list(answer.opening.before)), len(answer.opening.before), look))


PACE = 10.0  # tokens a second at which a tour shows plain decoding, slow enough to follow
# The tour of the default pair, as `python infer.py demo --quiet --log FILE` has written it:
RECORDED = Path(__file__).with_name("demo.jsonl")
PAGE = "docs/examples/win-and-loss.html"

_CODE = "Write a Python function that returns the n-th Fibonacci number, and explain it line by line."

_CHAIN = {"expand": "none", "max_new_tokens": 32}


@dataclass(frozen=True, eq=False)
class PlayedStep:
    """One step: the question is answered once under the settings of each of `plays`.

    `look` says in one sentence what to look at. `traced`: the rounds are shown afterwards, one a second. `varied`: the
    setting in which the answers differ, if there are several.
    """

    title: str
    look: str
    question: str
    plays: tuple[Mapping[str, object], ...]
    traced: bool = False
    varied: str = ""


# The settings under which every step runs, but for its own, so that it shows the same whatever the user has chosen:
BASE_SETTINGS: Mapping[str, object] = {
    **{"compare": "ar,spec", "gamma": "auto", "expand": "auto", "verify": "token", "coupling": "rejection"},
    **{name: rule.off for name, rule in ARGUMENTS.items()},
    **{**dict.fromkeys(FORMS, ""), "logit_bias": (), "stop": (), "temperature": 0, "max_new_tokens": 48},
    **{"seed": 42, "system": "", "chat": True, "view": "auto"},
}

STEPS = (
    PlayedStep(
        "A text that copies its source",
        "Where the answer repeats what was said, matches draft whole phrases: see the tokens a pass (tok/pass).",
        "Repeat the following text:\n\nThe old stone bridge at Harrow Mill was closed to cars on Monday after an "
        "inspector found cracks in its middle pier. Until then a ferry carries people on foot and on bicycles between "
        "seven in the morning and nine at night.",
        ({"gamma": 8, "expand": "none", "max_new_tokens": 64},),
    ),
    PlayedStep(
        "Plain decoding against drafts",
        "Plain decoding runs the target once for every token; with drafts it runs once for every token that is marked "
        "as the target's own: count its passes.",
        _CODE,
        ({"max_new_tokens": 64},),
    ),
    PlayedStep(
        "Gamma: how much to draft",
        "One question at gamma 1, 4 and 16: what a longer draft brings in tokens a pass, and what it costs in drafts "
        "that are rejected.",
        _CODE,
        tuple({**_CHAIN, "gamma": gamma} for gamma in (1, 4, 16)),
        varied="gamma",
    ),
    PlayedStep(
        "Temperature: how often drafts are accepted",
        "The hotter the draw, the less there is to guess: compare alpha at temperature 0, 0.7 and 1.5.",
        "What are the benefits of drinking water every day? Give a numbered list.",
        tuple({**_CHAIN, "gamma": 4, "temperature": heat} for heat in (0, 0.7, 1.5)),
        varied="temperature",
    ),
    PlayedStep(
        "A drafter that is often wrong",
        "It drafts 16 tokens a round. Its drafting and the wide passes take time whether a draft survives or not.",
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        ({"compare": "ar,plain", "expand": "none", "gamma": 16, "max_new_tokens": 32},),
    ),
    PlayedStep(
        "The tree of a round, slowly",
        "A round a second: what was drafted (q), what the target thinks of it (p), what was kept, and the target's own "
        "token after it.",
        _CODE,
        ({"gamma": 4, "expand": "dynamic", "nodes": 8, "max_new_tokens": 20},),
        traced=True,
    ),
)


def chosen(number: str | None) -> list[tuple[int, PlayedStep]]:
    """Return every step with its number from 1, or the one of this number; UsageError if there is none."""
    every = list(enumerate(STEPS, start=1))
    return every if number is None else [every[Field("step", Whole(1, len(STEPS))).read(number, "demo N") - 1]]


def slowness(settings: Settings, rate: float | None) -> float:
    """Return how many times slower to show an answer so that plain decoding, which ran at `rate` tokens a second, is
    shown at PACE; the user's `slow` is taken if it is set."""
    return settings.times_slower if settings.times_slower > 1 else min(1000.0, float(max(1, round((rate or 0) / PACE))))


Answers = Sequence[Sequence[Track]]  # the answers of a step, each by its lanes


def walk(
    steps: Sequence[tuple[int, PlayedStep]], play: Callable[[PlayedStep], Answers | None], surface: Surface
) -> bool:
    """Go through the steps; `play` returns a step's answers, None if Ctrl-C ended it. Return False after Ctrl-C."""
    for index, (number, step) in enumerate(steps):
        surface.say(
            Text.assemble("\n", (f"{number}/{len(STEPS)} {step.title}", "bold")),
            Text.assemble(("Look: ", "bold"), step.look),
        )
        answers = play(step)
        if answers is None or (step.traced and answers and not _slowly(answers[-1], surface)):
            return False
        if shown := [figures_of(step, tracks) for tracks in answers]:
            surface.say("", fitted(surface.out, surface.settings, shown, ["accepted", "alpha"]))
        surface.say("")
        if index + 1 < len(steps):
            surface.hint(f"Enter: step {number + 1} of {len(STEPS)}, {steps[index + 1][1].title}; Ctrl-C leaves")
            if not await_enter(surface.stop):
                return False
    return True


def figures_of(step: PlayedStep, tracks: Sequence[Track]) -> dict[str, str]:
    """Return the cells of an answer: the value that varies or the lane, its figures, plain decoding's rate."""
    lane = tracks[-1].lane
    answers = [track.answer() for track in tracks]
    last, plain = answers[-1], plain_answer(answers)
    timed = None if plain is None or plain is last or disturbed(plain.stats, last.stats) else plain
    figures = {
        "plain tok/s": (None if plain is None else plain.stats.predicted_per_second, ".1f"),
        "tok/s": (last.stats.predicted_per_second, ".1f"),
        "speed-up": (None if timed is None else speedup(timed.stats, last.stats), ".2f"),
        "tok/pass": (last.stats.tokens_per_pass, ".2f"),
        "accepted": (last.stats.acceptance_rate, ".0%"),
        "alpha": (last.stats.alpha, ".2f"),
    }
    return {
        step.varied or "lane": lane.settings.show(step.varied) if step.varied else lane.name,
        **{name: "-" if value is None else format(value, form) for name, (value, form) in figures.items()},
    }


def _slowly(tracks: Sequence[Track], surface: Surface) -> bool:
    """Show the rounds, on a terminal one a second, sooner at a key; return False after Ctrl-C."""
    surface.say("")
    for part in rounds_of(explained_track(tracks), surface.look.sized()).parts():
        surface.say(part)
        if surface.live:
            await_key(surface.stop, 1.0)
        if surface.stop():
            return False
    return True


# -- the recorded tour --------------------------------------------------------------------------


def steps_of(settings: Settings, path: Path = RECORDED) -> list[list[LoggedAnswer]]:
    """Return the answers of each step of a recorded tour, with the `slow` at which they are shown; UserError if the
    file is no recorded tour."""
    answers = read_log(path).answers
    if len(answers) != sum(len(step.plays) for step in STEPS) or any(answer.closing is None for answer in answers):
        raise UserError(f"{path} is no recorded demo: python infer.py demo --quiet --log FILE records one")
    rate = answers[0].over()[0].meter.stats.predicted_per_second
    for answer in answers:
        answer.settings = answer.settings.changed(slow=slowness(settings, rate))
    each = iter(answers)
    return [list(islice(each, len(step.plays))) for step in STEPS]


def play_recorded(settings: Settings, steps: Sequence[tuple[int, PlayedStep]]) -> bool:
    """Play the recorded tour; return whether it came to its end."""
    answers = dict(zip(STEPS, steps_of(settings), strict=True))
    console = make_console(settings)
    with quiet_keys(), Interrupts() as stop:
        surface = Surface(settings, console, is_live(console) and not settings.quiet, stop, touring=True)
        surface.say(f"This is what a win and a loss look like (page: {PAGE})")
        player = Player(surface, 1.0)

        def play(step: PlayedStep) -> Answers | None:
            for answer in answers[step]:
                surface.say("")
                if not player.play(answer):
                    return None
            return [answer.over() for answer in answers[step]]

        return walk(steps, play, surface)
