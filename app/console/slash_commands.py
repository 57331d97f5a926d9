"""The table of the console's commands, from which the dispatch of lines, /help, completion and the README are made.

A command is one row: usage, help, group, its handler and how its argument is read. All handlers but that of /help are
in app/console/setting_commands.py and app/console/chat_commands.py. Importing this imports no torch.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from prompt_toolkit.completion import Completion

from app.console import chat_commands as chat
from app.console.setting_commands import (
    Command,
    assignments,
    file,
    files,
    one,
    reset,
    set_values,
    setting_names,
    text,
    unquoted,
    value,
    words,
)
from app.console.source_words import SOURCE_WORDS
from app.console.state import ConsoleState
from app.prompts.questions import FIRST_QUESTION
from app.screen.terminal import BELOW
from app.settings.table import SETTING_FIELDS
from app.settings.types import Choice, Whole, got, named
from utils.errors import UsageError, UserError, did_you_mean
from utils.visible import visible

CHAT, DECODING, MODEL, LOOK, SETTING = "Chat", "Decoding", "Models and lanes", "Figures and looks", "Settings"
SAVED, LOADED = (".json", ".txt", ".html", ".svg"), (".json",)
STATS, PLOTS, HEATS = ("last", "session"), ("gamma", "ranks", "time"), ("p", "entropy", "off")


def show_help(state: ConsoleState, name: str) -> None:
    if name and name != "all":
        return state.say(help_of(name, state, COMMANDS))
    width, height = state.out.size
    short = state.live and not name and len(help_page(TABLE).splitlines()) > height - BELOW
    return state.say(help_names(TABLE, width)) if short else state.page(help_page(TABLE))


def command_names(state: ConsoleState, so_far: str) -> Iterable[tuple[str, str]]:
    """Complete the name of a command, with or without its slash."""
    slash = "/" if so_far.startswith("/") else ""
    return [(slash + command.name.removeprefix("/"), command.help) for command in TABLE]


TABLE: tuple[Command, ...] = (
    Command(
        "/clear [all]", "forget the conversation; all: earlier answers too", CHAT, chat.clear,
        one(Choice(("all",)), None), words("all"),
    ),
    Command("/undo", "take the last exchange back", CHAT, chat.undo),
    Command("/regen", "answer the last message again", CHAT, chat.regen),
    Command("/continue", "continue an answer that was cut off", CHAT, chat.go_on),
    Command(
        "/save FILE", "write the chat: .json .txt .html .svg", CHAT, chat.save, file(SAVED), files(SAVED),
        spaces=True,
    ),
    Command(
        "/load FILE", "go on with a chat that /save wrote", CHAT, chat.load, file(LOADED), files(LOADED),
        spaces=True,
    ),
    Command("/system [TEXT|clear]", "system prompt", CHAT, chat.system, text, words("clear"), setting="system"),
    Command("/history", "show the chat so far", CHAT, chat.history),
    Command("/exit", "leave (also Ctrl-D)", CHAT, chat.leave, aliases=("/quit", "/bye")),
    value("gamma", DECODING),
    value("temperature", DECODING),
    value("top_p", DECODING),
    value("top_k", DECODING),
    value("length", DECODING, name="max_new_tokens"),
    value("seed", DECODING),
    value("json", DECODING, name="json_schema"),
    value("compare", MODEL),
    Command("/pair [NAME]", "load another pair", MODEL, chat.pair, text, chat.pair_names, aliases=("/model",)),
    Command(
        "/drafter [NAME]", "another drafter: a word, ORG/NAME, FILE.gguf", MODEL, chat.drafter, unquoted,
        chat.drafters, spaces=True,
    ),
    Command("/info", "the models: size, memory, device", MODEL, chat.info),
    Command(
        "/stats [WHICH]", "figures: last or session", LOOK, chat.stats, one(Choice(STATS), "last"),
        words(*STATS),
    ),
    Command("/why", "why the answer was as fast as it was, what to try", LOOK, chat.why),
    Command("/trace [N]", "the answer's rounds, or round N", LOOK, chat.trace, one(Whole(1, 1_000_000), None)),
    Command(
        "/inspect [N]", "the answer token by token", LOOK, chat.inspect, one(Whole(1, 1_000_000), None),
    ),
    Command(
        "/samples N", "answer N times, as a tree", CHAT, chat.samples, one(Whole(2, 64)),
    ),
    Command(
        "/branches [N]", "answers with a forced token", CHAT, chat.branches,
        one(Whole(1, 1_000_000), None),
    ),
    Command(
        "/plot KIND", "gamma, ranks or time", LOOK, chat.plot, one(Choice(PLOTS)),
        words(*PLOTS),
    ),
    Command(
        "/heat [p|entropy|off]", "colour the answer by the target's uncertainty", LOOK, chat.heat,
        one(Choice(HEATS), HEATS[0]), words(*HEATS),
    ),
    value("view", LOOK),
    value("render", LOOK, after=chat.plain_text),
    value("slow", LOOK),
    value("thinking", LOOK, after=chat.last_thinking),
    Command(
        "/set [NAME=VALUE …]", "change settings; alone: show all", SETTING, set_values, text,
        assignments, many=True,
    ),
    Command("/reset [NAME]", "back to the defaults", SETTING, reset, text, setting_names, many=True),
    Command(
        "/help [CMD|all]", "the commands, one or all of them", SETTING, show_help, text, command_names,
        aliases=("/?",),
    ),
)  # fmt: skip
COMMANDS: Mapping[str, Command] = {name: command for command in TABLE for name in (command.name, *command.aliases)}
# Words that users may expect to be commands, and what does that here.
_INSTEAD = {
    "/copy": "/save FILE.txt, or the terminal's own way to copy",
    "/demo": "infer.py demo",
    "/draft": "/compare ar,draft",
    "/tables": "/compare ar,tables",
    "/settings": "/set",
    "/prompts": "infer.py bench --prompts",
    "/bench": "infer.py bench",
    "/edit": "/undo, which puts your last message into the input line",
    "/quantization": "infer.py --quantization KIND",
}


# -- what a typed line means ------------------------------------------------------------------


def parse(line: str, commands: Mapping[str, Command]) -> tuple[Command | None, str]:
    """Return a command and the text after it if the line starts with a single "/"; None and the message otherwise.

    A lone "exit" or "quit" leaves; "//text" is the message "/text". UsageError for a "/word" that is no command: such a
    line is never sent.
    """
    line = line.strip()
    if line.lower() in ("exit", "quit"):
        return commands["/exit"], ""
    if not line.startswith("/") or line.startswith("//"):
        return None, line.removeprefix("/")
    word, *rest = line.split(maxsplit=1)
    if (command := commands.get(word) or SOURCE_WORDS.get(word)) is not None:
        return command, rest[0] if rest else ""
    if instead := _INSTEAD.get(word) or (word[1:] in SETTING_FIELDS and f"/set {word[1:]}=VALUE"):
        raise UsageError(f"{word} is no command: use {instead}")
    if word == "/":
        raise UsageError("unknown command / (/help lists the commands)")
    hint = did_you_mean(word, commands) or " (/help lists the commands; // sends a literal slash)"
    raise UsageError(
        f"unknown command {named(word)}{' (to send it as a message start with //)' if '/' in word[1:] else hint}"
    )


def dispatch(line: str, state: ConsoleState, commands: Mapping[str, Command]) -> str:
    """Run a line if it is a command. Return the message to send, "" if the line was blank, a command or an error.

    A UserError goes to `state.fail`; no other error is caught.
    """
    try:
        command, rest = parse(line, commands)
        if command is None:
            return rest
        command.handler(state, command.reads(command.name, rest))
    except UserError as error:
        state.fail(str(error))
    return ""


def completions(line: str, state: ConsoleState) -> list[Completion]:
    """Return the completions of the line up to the cursor: of an empty line in a new chat a first question; of a
    message none."""
    typed = line.lstrip()
    if not line and (state.chat is None or not state.chat.turns):
        return [Completion(FIRST_QUESTION, display_meta="a first question")]
    if not typed.startswith("/") or typed.startswith("//"):
        return []
    word, space, argument = typed.partition(" ")
    if not space:
        return [
            Completion(name, -len(word), display_meta=command.help)
            for name, command in COMMANDS.items()
            if name.startswith(word)
        ]
    command = COMMANDS.get(word)
    if command is None or command.complete is None:
        return []
    argument = argument.lstrip()
    so_far = argument.rpartition(" ")[2] if command.many else argument
    if " " in so_far and not command.spaces:
        return []
    return [
        Completion(value, -len(so_far), visible(value), note)
        for value, note in command.complete(state, so_far)
        if value.startswith(so_far)
    ]


# -- /help: text only, fits 60 columns --------------------------------------------------------

WIDTH = 60
_USAGE = 26


def help_page(table: Iterable[Command]) -> str:
    """Return every command with its help, by group."""
    lines: list[str] = []
    for command in table:
        lines += [command.group] if command.group not in lines else []
        usage = f"  {command.usage:<{_USAGE - 3}} "
        lines.append(textwrap.fill(command.help, WIDTH, initial_indent=usage, subsequent_indent=" " * _USAGE))
    return "\n".join([*lines, "//text sends a line that begins with a slash"])


def help_names(table: Sequence[Command], width: int) -> str:
    """Return the names of the commands by group, short enough for a screen of 24 rows."""
    groups = dict.fromkeys(command.group for command in table)
    texts = [
        *(f"{group}: {' '.join(each.name for each in table if each.group == group)}" for group in groups),
        "/help CMD explains one, /help all lists all; //text sends a line that begins with a slash",
    ]
    return "\n".join(textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False) for text in texts)


def help_of(name: str, state: ConsoleState, commands: Mapping[str, Command]) -> str:
    """Return usage, range and present value of one command or setting; UsageError for an unknown name."""
    bare = name.removeprefix("/")
    name = next((field.name for field in SETTING_FIELDS.values() if field.also == name), name)
    command = commands.get(f"/{bare}") or SOURCE_WORDS.get(f"/{bare}")
    if command is None and name not in SETTING_FIELDS:
        names = [known.removeprefix("/") for known in commands] + list(SETTING_FIELDS)
        raise UsageError(f"no help on {got(name)}{did_you_mean(bare, names)}")
    if command is None:
        usage, setting, lines = f"/set {name}=VALUE", name, []
    else:
        usage, setting, lines = command.usage, command.setting, [command.help]
        lines += [f"also {', '.join(command.aliases)}"] if command.aliases else []
    if setting:
        known, defaults = SETTING_FIELDS[setting], state.layers.defaults
        now = f"now {state.settings.show(setting)}, default {defaults.show(setting)}"
        lines += [f"setting {setting}: {known.kind.allowed}", known.help, now]
    filled = [textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  ") for line in dict.fromkeys(lines)]
    return "\n".join([usage, *filled])
