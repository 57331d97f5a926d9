"""A finished answer with its lanes and figures, and the files of a conversation: the text or JSON that /save writes
and /load reads, and a picture (.svg) of the drafts as the console shows them.

A lane's text is decoded from its ids, so it is read correctly only with the tokenizer that it was made with. A picture
loads no other file, and markup in a text is shown, not obeyed. Knows no models.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from app.chat.conversation import Turn
from app.lanes.answers import Answer, shown_settings
from app.lanes.costs import LaneRecord, event_of, settings_of
from app.screen.inspection import SaidToken
from app.screen.live import LaneViews, Track, panes, tokens_of
from app.screen.terminal import Screen
from app.screen.view import heading, look_of, question
from app.settings.table import Settings
from sampling.events import Reason
from utils.errors import UserError
from utils.growing_text import Decode
from utils.objects import Json
from utils.visible import visible

VERSION = 1
_KEYS = {
    **{name: name for name in ("user", "text", "reason", "seed", "regenerated")},
    **{"prompt_ids": "prompt", "answer_ids": "answer"},
}


@dataclass(frozen=True, eq=False)
class Answered:
    """A finished decoding (an answer, or a continuation of one): its settings, lanes and models. A turn's record lists
    its decodings in `decodings`."""

    settings: Settings
    turn: Turn
    tracks: list[Track]
    models: Mapping[str, str] = field(default_factory=dict)  # the models that ran, as app/screen/view.py names them
    earlier: tuple[SaidToken, ...] = ()  # tokens of the answer from before a continuation

    @property
    def tokens(self) -> list[SaidToken]:
        """The answer token by token, as far as its drafts are known."""
        return [*self.earlier, *tokens_of(self.tracks[-1])]

    @property
    def before(self) -> str:
        """The text before the first of :attr:`tokens`."""
        track = self.tracks[-1]
        return "" if self.earlier or not track.before else track.decode(list(track.before))

    @property
    def answers(self) -> list[Answer]:
        """The answer of each lane."""
        return [track.answer() for track in self.tracks]

    def to_json(self) -> Json:
        """Return the decoding as files have it, without what they keep of the turn."""
        return {
            "models": self.models,
            "settings": shown_settings(self.settings),
            "lanes": [track.record() for track in self.tracks],
        }


def as_json(turns: Sequence[Turn], about: Json) -> str:
    """Return the conversation with ids, texts, settings, figures and events; `about`: pair and system prompt."""
    rows = [{name: getattr(turn, key) for name, key in _KEYS.items()} | turn.record for turn in turns]
    return json.dumps(
        {"version": VERSION, **about, "turns": rows}, ensure_ascii=False, indent=1, default=Answered.to_json
    )


def as_text(turns: Sequence[Turn], system: str) -> str:
    """Return the conversation as plain text, with control characters made visible, so that no terminal obeys them."""
    head = [f"[system]\n{system}\n"] if system else []
    return visible("\n".join([*head, *(f"[user]\n{turn.user}\n\n[assistant]\n{turn.text}\n" for turn in turns)]))


class _SavedTurn(BaseModel, extra="allow"):
    user: str
    text: str
    reason: Reason
    seed: int | None = None
    regenerated: int = 0
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    decodings: list[Json] | None = None

    def turn(self) -> Turn:
        more = {} if self.decodings is None else {"decodings": self.decodings, **(self.model_extra or {})}
        return Turn(record=more, **{key: getattr(self, name) for name, key in _KEYS.items()})


class _SavedLane(BaseModel):
    lane: LaneRecord
    prompt_n: int = Field(ge=0)
    events: list[Json]


class _Decoding(BaseModel):
    models: Json
    settings: Json
    lanes: list[_SavedLane] = Field(min_length=1)


class SavedChat(BaseModel):
    """A saved conversation. `tokenizer` is its fingerprint, None if the file has none."""

    version: Literal[1]
    system: str = ""
    tokenizer: str | None = None
    saved: list[_SavedTurn] = Field(alias="turns", min_length=1)

    @property
    def turns(self) -> list[Turn]:
        return [turn.turn() for turn in self.saved]


def read_chat(path: Path) -> SavedChat:
    """Read the conversation in a file; UserError, in one line, for any other file."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or "turns" not in data:
            raise UserError("holds no conversation that /save wrote")
        if data.get("version") != VERSION:
            raise UserError(f"has format {data.get('version')!r:.20}, this program reads {VERSION}")
        return SavedChat.model_validate(data)
    except OSError as error:
        problem = f"cannot read {path}: {error.strerror or error}"
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError):
        problem = f"{path} is no JSON, or a part is missing"
    except UserError as error:
        problem = f"{path} {error}"
    raise UserError(f"{problem} (the conversation is unchanged)")


def answered_of(turn: Turn, decode: Decode) -> list[Answered]:
    """Return each decoding of a turn's answer, continuations included; none if the turn was saved without them, or if
    together they are not the turn's answer."""
    decodings = list[Answered]()
    try:
        before = tuple(map(int, turn.record.get("forced", ())))  # the beginning of a branch
        for decoding in turn.record.get("decodings", []):
            forced = bool(before) and not decodings
            answered = decoding if isinstance(decoding, Answered) else _read(turn, decoding, before, decode, forced)
            before = (*before, *answered.tracks[-1].meter.ids)
            decodings.append(answered)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, UserError):
        decodings = []
    return decodings if decodings and before == turn.answer else []


def _read(turn: Turn, record: Json, before: tuple[int, ...], decode: Decode, forced: bool) -> Answered:
    """Return one decoding. All derived figures are worked out, so that an impossible record raises here."""
    decoding = _Decoding.model_validate(record)
    settings = settings_of(decoding.settings)
    tracks = []
    for saved in decoding.lanes:
        track = Track(replace(saved.lane, settings=settings), decode, saved.prompt_n, before, forced=forced)
        views = LaneViews(track)
        for event in map(event_of, saved.events):
            views.feed(event)
        tracks.append(track)
    return Answered(settings, turn, tracks, {name: str(text) for name, text in decoding.models.items()})


WIDTH = 100
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font-family: 'Fira Code',Menlo,'DejaVu Sans Mono',Consolas,monospace; \
font-size: {char_height}px; line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(turns: Iterable[tuple[Turn, Sequence[Answered]]], settings: Settings) -> str:
    """Return the conversation as the console shows it, as an SVG picture that loads no other file: each turn with its
    decodings, if they were saved; in full colour, whatever the terminal's colours are.
    """
    console = Screen(
        file=io.StringIO(),
        record=True,
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
    )
    look, last = look_of(console, settings), Text()
    for turn, decodings in turns:
        for answered in decodings[:1]:
            rows = heading(answered.models, answered.settings, look).rows()
            line = Text("\n").join(Text.assemble(*((part.text, part.style or "") for part in row)) for row in rows)
            if str(line) != str(last):
                console.print(line)
            last = line
        console.print(question(turn.user, look))
        console.print(turn.text)
        console.print()
        for answered in decodings:
            console.print(panes(answered.tracks, console, settings))
        if not decodings:
            console.print("the drafts and figures of this answer are not there", style="dim")
        console.print()
    return _NO_XML.sub("\ufffd", console.export_svg(title="python infer.py", code_format=_SVG, theme=SVG_EXPORT_THEME))
