"""The table of the console's commands, and what a typed line means by it; /help, completion, dispatch and the README
are made from it.

:func:`dispatch` runs a line against any :class:`ConsoleActions`; it returns the text to send to the model, if the line
was a message. What the commands do is in app/console/handlers.py, what Tab offers in app/console/completion.py. Knows
no screen, no models and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.console import completion as tab
from app.console import handlers as act
from app.console.completion import Command, Completion
from app.console.handlers import Apply, ConsoleActions
from app.settings.table import SETTING_FIELDS
from app.settings.types import did_you_mean, named
from utils.errors import UsageError, UserError

CHAT, DECODING, LANE, MODEL, LOOK, SETTING = "Chat", "Decoding", "Lanes", "Models", "Figures and looks", "Settings"


@dataclass(frozen=True)
class Message:
    """Text for the model."""

    text: str


@dataclass(frozen=True)
class Invocation:
    """A command and its arguments: split at white space, and as typed."""

    command: Command
    args: list[str]
    rest: str


def parse(line: str) -> Message | Invocation:
    """A message, or a command when the line starts with one "/"; "//text" is the message "/text".

    UsageError for a first word that is no command: such a line is never sent by itself.
    """
    text = line.strip()
    if text.startswith("//"):
        return Message(text[1:])
    if not text.startswith("/"):
        return Message(text)
    word, *tail = text.split(maxsplit=1)
    command = COMMANDS.get(word)
    if command is None:
        raise UsageError(_unknown(word, COMMANDS))
    rest = tail[0] if tail else ""
    return Invocation(command, rest.split(), rest)


def _unknown(word: str, names: Iterable[str]) -> str:
    shown = named(word)
    if word == "/":
        return "unknown command / (/help lists the commands)"
    if "/" in word[1:]:
        return f"unknown command {shown} (to send it as a message start with //)"
    hint = did_you_mean(word, names)
    return f"unknown command {shown}{hint or ' (/help lists the commands; // sends a literal slash)'}"


def dispatch(line: str, console: ConsoleActions) -> str | None:
    """Run a line: the text to send when it is a message, None when it was blank, a command or an error.

    Errors that a user can mend go to `console.fail`; nothing else is caught.
    """
    try:
        parsed = parse(line)
        if isinstance(parsed, Message):
            return parsed.text or None
        parsed.command.apply(console, parsed.args, parsed.rest)
    except UserError as error:
        console.fail(str(error))
    return None


def completions(line: str, cursor: int, console: ConsoleActions) -> list[Completion]:
    """What may stand at column `cursor` of `line`; empty when the line is a message."""
    typed = line[:cursor]
    start = len(typed) - len(typed.lstrip())
    text = typed[start:]
    if not text.startswith("/") or text.startswith("//"):
        return []
    word, space, argument = text.partition(" ")
    if not space:
        return [Completion(name, start, c.help) for name, c in COMMANDS.items() if name.startswith(word)]
    command = COMMANDS.get(word)
    if command is None or command.complete is None:
        return []
    argument = argument.lstrip()
    so_far = argument.rpartition(" ")[2] if command.many else argument
    if " " in so_far and not command.spaces:
        return []
    offered = command.complete(console, so_far)
    return [Completion(value, cursor - len(so_far), note) for value, note in offered if value.startswith(so_far)]


def command_names(console: ConsoleActions, word: str) -> Iterable[tuple[str, str]]:
    """Every command, with or without its slash."""
    slash = "/" if word.startswith("/") else ""
    return [(slash + command.name.removeprefix("/"), command.help) for command in TABLE]


def show_help(console: ConsoleActions, args: list[str], rest: str) -> None:
    from app.console.help import help_of, help_page

    console.say(help_of(rest, console, COMMANDS) if rest else help_page(TABLE))


def _value(word: str, group: str = DECODING, name: str = "", apply: Apply | None = None) -> Command:
    field = SETTING_FIELDS[name or word]
    usage = f"/{word} [{field.kind.metavar if len(field.kind.metavar) <= 12 else 'NAME'}]"
    complete = tab.setting_values(field.name)
    return Command(f"/{word}", usage, field.help, group, apply or act.value_of(field.name), (), complete, field.name)


def _switch(word: str, group: str) -> Command:
    field, complete = SETTING_FIELDS[word], tab.setting_values(word)
    return Command(f"/{word}", f"/{word} [on|off]", field.help, group, act.toggle_of(word), (), complete, word)


def _lane(lane: str) -> Command:
    word, complete = act.LANE_WORDS[lane], tab.choices("on", "off")
    text = f"lane {lane}: {tab.LANE_HELP[lane]}"
    return Command(f"/{word}", f"/{word} [on|off]", text, LANE, act.lane_toggle(lane), (), complete)


def _plain(
    word: str, text: str, do: Callable[[ConsoleActions], None], group: str = CHAT, aliases: tuple[str, ...] = ()
) -> Command:
    return Command(f"/{word}", f"/{word}", text, group, act.without_argument(do, f"/{word}"), aliases)


TABLE: tuple[Command, ...] = (
    _plain("clear", "forget the conversation", lambda console: console.clear()),
    _plain("undo", "take the last exchange back", lambda console: console.undo()),
    _plain("regen", "answer the last message again", lambda console: console.regen()),
    _plain("continue", "go on with a cut answer", lambda console: console.continue_()),
    Command("/edit", "/edit [TEXT]", "change your last message", CHAT, act.edit),
    _plain("copy", "copy the last answer", lambda console: console.copy()),
    Command(
        "/save", "/save FILE", "write the chat: .json .txt .md .html .svg", CHAT, act.save,
        (), tab.paths, spaces=True,
    ),
    Command("/load", "/load FILE", "go on with a chat that /save wrote", CHAT, act.load, (), tab.chats, spaces=True),
    Command(
        "/system", "/system [TEXT|clear]", "system prompt", CHAT, act.system, (), tab.choices("clear"), "system"
    ),
    _switch("chat", CHAT),
    _value("template", CHAT),
    _plain("exit", "leave (also Ctrl-D)", lambda console: console.exit(), aliases=("/quit", "/bye")),
    _value("gamma", apply=act.gamma),
    _value("temperature"),
    _value("top_p"),
    _value("top_k"),
    _value("min_p"),
    _value("repetition_penalty"),
    _value("no_repeat_ngram"),
    _value("length", name="max_new_tokens"),
    _value("seed"),
    Command(
        "/processor", "/processor [NAME ARGS]", "sampling, e.g. nucleus T P", DECODING, act.processor,
        (), tab.processors,
    ),
    _value("verify"),
    _value("expand"),
    _value("nodes"),
    _value("compare", LANE),
    _value("cascade", LANE),
    _value("k_matrix", LANE),
    _value("lenience", LANE),
    _value("num_beams", LANE),
    _value("length_penalty", LANE),
    _lane("spec"),
    _lane("ar"),
    _lane("draft"),
    _lane("ngram"),
    _lane("tables"),
    Command("/pair", "/pair [NAME]", "load another pair", MODEL, act.pair, (), tab.pairs),
    Command("/drafter", "/drafter [NAME]", "take another drafter", MODEL, act.drafter, (), tab.drafters, spaces=True),
    _plain("info", "the models: size, memory, device", lambda console: console.info(), MODEL),
    Command(
        "/prompts", "/prompts FILE|NAME", "ask a file's prompts, one by one", LOOK, act.prompts,
        (), tab.prompt_sets, spaces=True,
    ),
    Command("/bench", "/bench [GAMMAS]", "time the lanes over a few prompts", LOOK, act.bench),
    Command("/stats", "/stats [WHICH]", "figures: last, session or json", LOOK, act.stats, (), tab.choices(*act.STATS)),
    Command("/trace", "/trace [N]", "the last answer round by round", LOOK, act.trace),
    Command(
        "/plot", "/plot gamma|positions", "expected speed-up, acceptance", LOOK, act.plot, (), tab.choices(*act.PLOTS)
    ),
    _value("view", LOOK),
    _value("palette", LOOK),
    _switch("debug", LOOK),
    Command("/settings", "/settings", "every setting", SETTING, act.without_argument(act.show_settings, "/settings")),
    Command(
        "/set", "/set NAME=VALUE …", "change settings, all or none", SETTING, act.set_values,
        (), tab.assignments, many=True,
    ),
    Command("/reset", "/reset [NAME]", "back to the defaults", SETTING, act.reset, (), tab.setting_names, many=True),
    Command("/help", "/help [CMD]", "this page, or one command", SETTING, show_help, (), command_names),
)  # fmt: skip
COMMANDS: Mapping[str, Command] = {name: command for command in TABLE for name in (command.name, *command.aliases)}
