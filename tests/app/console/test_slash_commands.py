"""The console's commands against a scripted console: whole transcripts, help and completion."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from app.console import chat_commands
from app.console.setting_commands import Command
from app.console.slash_commands import COMMANDS, TABLE, completions, dispatch, help_of, help_page, parse
from app.console.source_words import SOURCE_WORDS
from app.console.state import ConsoleState, load_engine
from app.settings.table import SETTING_FIELDS, Layers, ModelOptions
from app.settings.types import LANES


class ScriptedConsole(ConsoleState):
    """A console of two pairs, none of which is loaded; what it says is written down."""

    def __init__(self, **flags: Any) -> None:
        out = Console(file=io.StringIO())
        super().__init__(Layers.of(flags=flags), ModelOptions(), out, out, load_engine, live=False)
        self.lines: list[str] = []

    def say(self, what: Any) -> None:
        self.lines += str(what).split("\n")

    def fail(self, text: str) -> None:
        self.lines.append(f"error: {text}")

    def pair_names(self) -> list[str]:
        return ["smollm2", "qwen3-8b"]


def noted(command: Command) -> Command:
    """The command, which writes its argument down where it would ask for models and a conversation."""

    def handler(state: ConsoleState, argument: Any) -> None:
        state.say(f"[{command.name} {argument}]")

    asks = command.handler.__module__ == chat_commands.__name__ and command.name not in ("/pair", "/system")
    return replace(command, handler=handler) if asks else command


def transcript(script: str) -> str:
    """Run the lines of `script` that begin with "> " and return it as it should stand."""
    console = ScriptedConsole()
    for line in (line[2:] for line in script.strip().splitlines() if line.startswith("> ")):
        console.lines.append(f"> {line}")
        sent = dispatch(line, console, {name: noted(command) for name, command in COMMANDS.items()})
        if sent:
            console.lines.append(f"[send {sent!r}]")
    return "\n".join(console.lines)


@pytest.mark.parametrize(
    "script",
    [
        """
> /gamma
gamma = 4
> /gamma 8
gamma = 8
> /gamma 0
error: gamma must be a whole number from 1 to 64 or auto, got 0 (still 8)
> /gamma 4 5
error: gamma must be a whole number from 1 to 64 or auto, got '4 5' (still 8)
> /gama 3
error: unknown command /gama (did you mean /gamma?)
> /gam 3
error: unknown command /gam (did you mean /gamma?)
> /temperature 0.8
temperature = 0.8
> /top_p 1.5
error: top_p must be above 0 and at most 1, got 1.5 (still 1)
> /top_k 40
top_k = 40
> /length 0
error: max_new_tokens must be a whole number from 1 to 1000000, got 0 (still 128)
> /length 64
max_new_tokens = 64
> /seed 7
seed = 7
> /seed x
error: seed must be a whole number from 0 to 9223372036854775807 or random, got 'x' (still 7)
> /view trace
view = trace
> /palette cb
error: /palette is no command: use /set palette=VALUE
> /draft
error: /draft is no command: use /compare ar,draft
""",
        """
> /processor topknucleus 0.8 40 0.95
processor = top_k_nucleus 0.8 40 0.95
> /processor topk 0.7 5
processor = top_k 0.7 5
> /processor greedy 1.0
processor = greedy
> /processor greedy hot
error: temperature must be a number from 0 to 5, got 'hot' (still 0)
> /processor greedy 1 2
error: /processor greedy takes 0 values, got 2 (still greedy)
> /cache
the cache is always used: it changes no output
> /top_k_filler 1
ngram_filler = 1
> /top_k_filler 0
error: ngram_filler must be a whole number from 1 to 64, got 0 (still 1)
> /reset_in_between
ngram_reset = off
> /set_ngramstorage onelevel 5
ngram_multi_level = off
ngram_n = 5
> /set_ngramstorage basic 4
ngram_multi_level = on
ngram_n = 4
> /set_ngramstorage basic 99
error: ngram_n must be a whole number from 2 to 16, got 99 (still 4)
> /set_ngramstorage two 3
error: /set_ngramstorage takes basic N or onelevel N, got 'two 3'
> /set_ngramstorage
error: /set_ngramstorage takes basic N or onelevel N, got ''
""",
        """
> /processor
processor = greedy
> /processor nucleus 0.6 0.9
processor = nucleus 0.6 0.9
> /top_p
top_p = 0.9
> /processor top_k_nucleus 0.8 40 0.95
processor = top_k_nucleus 0.8 40 0.95
> /set min_p=0.1
min_p = 0.1
> /processor
processor = temperature 0.8, top_k 40, top_p 0.95, min_p 0.1
> /processor multinomial 1
processor = multinomial 1
> /top_k
top_k = 0
> /processor top_k 1
error: /processor top_k T K takes 2 values, got 1 (still multinomial 1)
> /processor nucleus 0.6 2
error: top_p must be above 0 and at most 1, got 2 (still 1)
> /processor nukleus 0.6 0.9
error: /processor takes one of greedy, multinomial T, top_k T K, nucleus T P, top_k_nucleus T K P, min_p T P; \
got 'nukleus' (did you mean nucleus?)
> /processor min_p 0.7 0.05
processor = min_p 0.7 0.05
> /processor greedy
processor = greedy
> /temperature
temperature = 0
""",
        """
> /compare
compare = ar,spec
> /ngram
compare = ar,ngram,spec
> /ngram on
compare = ar,ngram,spec
> /target off
compare = ngram,spec
> /speculative
compare = ngram
> /ngram
error: ngram is the last lane and stays on (still ngram)
> /ngram off
error: ngram is the last lane and stays on (still ngram)
> /target maybe
error: /target must be on or off, got 'maybe' (still off)
> /compare spec,ar
compare = spec,ar
> /compare ar,ar
error: compare must be a comma list of LANES, server, URL, each once, got 'ar,ar' (still spec,ar)
""".replace("LANES", ", ".join(LANES)),
        """
> /chat
chat = off
> /chat on
chat = on
> /debug off
debug = off
""",
        """
> /set gamma=8 top_p=0.9
gamma = 8
top_p = 0.9
> /set gamma=2 top_p=9
error: top_p must be above 0 and at most 1, got 9 (still 0.9)
> /set gamma
gamma = 8
> /set tempreature=1
error: unknown setting 'tempreature' (did you mean temperature?)
> /set gamma=2 top_p
error: /set takes NAME=VALUE pairs, got 'top_p' (nothing changed)
> /set gamma=2 gamma=3
error: /set: gamma is given twice (still 8)
> /set system="count from x=[1, 2]"
system = count from x=[1, 2]
> /set system="be brief" ngram_n=2
system = be brief
ngram_n = 2
> /set stop=["a","b c"] ngram_n=2
stop = ["a", "b c"]
ngram_n = 2
> /set system="be brief
error: /set: a quotation mark is not closed in 'system="be brief' (nothing changed)
> /set length=
error: max_new_tokens must be a whole number from 1 to 1000000, got '' (still 128)
> /reset gamma
gamma = 4
> /reset gama
error: unknown setting 'gama' (did you mean gamma?)
> /reset
top_p = 1
system = (none)
stop = (none)
ngram_n = 3
> /reset
every setting already has its default
""",
        """
> /pair
pair = no pair (not loaded); there are smollm2, qwen3-8b
> /pair smolm2
error: unknown pair 'smolm2' (did you mean smollm2?)
> /pair xyz
error: unknown pair 'xyz' (/pair lists them)
> /drafter ngram
[/drafter ngram]
> /drafter "my models/draft"
[/drafter my models/draft]
> /info
[/info None]
> /info now
error: /info takes no argument, got 'now'
> /system
system = (none)
> /system Don't ramble.
system = Don't ramble.
> /system clear
system = (none)
""",
        """
> /clear
[/clear None]
> /continue
[/continue None]
> /copy
error: /copy is no command: use /save FILE.txt, or the terminal's own way to copy
> /save
error: /save needs a file name ending in .json, .txt, .html or .svg
> /save my chat.json
[/save my chat.json]
> /save "a b.TXT"
[/save a b.TXT]
> /save chat.pdf
error: /save needs a file ending in .json, .txt, .html or .svg, got 'chat.pdf'
> /save .json
error: /save needs a file ending in .json, .txt, .html or .svg, got '.json'
> /load
error: /load needs a file name ending in .json
> /load "my chat.JSON"
[/load my chat.JSON]
> /load chat.txt
error: /load needs a file ending in .json, got 'chat.txt'
> /stats all
error: /stats must be last or session, got 'all'
> /trace
[/trace None]
> /trace 0
error: /trace must be a whole number from 1 to 1000000, got 0
> /exit
[/exit None]
> /exit now
error: /exit takes no argument, got 'now'
""",
        """
> What is a river?
[send 'What is a river?']
> //gamma is a letter
[send '/gamma is a letter']
> /usr/bin is what?
error: unknown command /usr/bin (to send it as a message start with //)
> //usr/bin is what?
[send '/usr/bin is what?']
> /
error: unknown command / (/help lists the commands)
> /xyzzy
error: unknown command /xyzzy (/help lists the commands; // sends a literal slash)
> /prompts mine of 2.jsonl
error: /prompts is no command: use infer.py bench --prompts
>   /gamma   6
gamma = 6
> 1/2 is a half
[send '1/2 is a half']
""",
    ],
    ids=["values", "words of elsewhere", "processor", "lanes", "toggles", "set", "models", "chat", "messages"],
)
def test_a_transcript_reads_as_written(script: str) -> None:
    assert transcript(script) == script.strip()


def test_a_random_seed_is_shown_so_that_it_can_be_repeated() -> None:
    console = ScriptedConsole()
    dispatch("/seed random", console, COMMANDS)
    assert console.lines == [f"seed = {console.settings.seed}"]


def test_a_reset_goes_back_to_the_flag_not_to_the_built_in() -> None:
    console = ScriptedConsole(gamma="9")
    for line in ("/gamma 2", "/reset gamma"):
        dispatch(line, console, COMMANDS)
    assert console.lines == ["gamma = 2", "gamma = 9"]


def test_set_alone_lists_every_setting_and_marks_the_changed_ones() -> None:
    console = ScriptedConsole()
    console.change(gamma=8)
    dispatch("/set", console, COMMANDS)
    assert {sum(line.startswith(f"  {name} = ") for line in console.lines) for name in SETTING_FIELDS} == {1}
    assert [line for line in console.lines if "default" in line] == [
        "  gamma = 8  (default 4)",
        "  palette = default",
    ]


def test_lines_of_a_message_stay_together() -> None:
    assert parse("one\n/gamma 4\ntwo", COMMANDS) == (None, "one\n/gamma 4\ntwo")
    assert parse("/system one\ntwo", COMMANDS) == (COMMANDS["/system"], "one\ntwo")


def test_an_error_is_one_line_whatever_was_typed() -> None:
    console = ScriptedConsole()
    for line in ("/gamma 4\n5", "/" + "x" * 5000, "/set a\tb=\x00", "/save a\nb.txt", "/help \x1b[31m", "/a/\x00"):
        dispatch(line, console, COMMANDS)
    assert len(console.lines) == 6
    for line in console.lines:
        assert line.startswith("error: ")
        assert len(line) < 200
        assert line.isprintable()


# ---- help


def test_the_help_page_fits_60_columns_and_names_every_command_once() -> None:
    page = help_page(TABLE).splitlines()
    assert max(map(len, page)) <= 60
    for command in TABLE:
        assert sum(line.split()[:1] == [command.name] for line in page) == 1, command.name


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_on_every_command_begins_with_its_usage_and_fits(name: str) -> None:
    for word in (name, name.removeprefix("/")):
        console = ScriptedConsole()
        dispatch(f"/help {word}", console, COMMANDS)
        assert console.lines[0] == COMMANDS[name].usage
        assert max(map(len, console.lines)) <= 60


def test_help_on_a_setting_tells_range_and_values() -> None:
    console = ScriptedConsole(gamma="8")
    for line in ("/gamma 2", "/help gamma", "/help ngram_n", "/help gama"):
        dispatch(line, console, COMMANDS)
    assert console.lines[1:] == [
        "/gamma [N|auto]",
        "  tokens to draft a round; auto: the fastest number",
        "  setting gamma: a whole number from 1 to 64 or auto",
        "  now 2, default 8",
        "/set ngram_n=VALUE",
        "  setting ngram_n: a whole number from 2 to 16",
        "  longest n-gram looked up",
        "  now 3, default 3",
        "error: no help on 'gama' (did you mean gamma?)",
    ]


def test_the_words_of_the_sources_work_and_are_on_no_list() -> None:
    console = ScriptedConsole()
    listed = {one.text for one in completions("/", console)}
    assert set(SOURCE_WORDS) & {*listed, *COMMANDS, *help_page(TABLE).split()} == set()
    assert all(help_of(name, console, COMMANDS).startswith(command.usage) for name, command in SOURCE_WORDS.items())
