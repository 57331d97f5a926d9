"""The table of console commands; /help, completion, dispatch and the README are made from it.

What the commands do is in app/command_actions.py, what Tab offers in app/completion.py. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app import command_actions as act
from app import completion as tab
from app.commands import Apply, Command, ConsoleActions
from app.fields import SETTING_FIELDS

CHAT, DECODING, LANE, MODEL, LOOK, SETTING = "Chat", "Decoding", "Lanes", "Models", "Figures and looks", "Settings"


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
    Command("/help", "/help [CMD]", "this page, or one command", SETTING, act.show_help, (), tab.command_names),
)  # fmt: skip
COMMANDS: Mapping[str, Command] = {name: command for command in TABLE for name in (command.name, *command.aliases)}
