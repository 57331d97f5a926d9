"""The history of one chat, by token ids: the model's next prompt, and its answers.

An answer's ids are kept as they were decoded and not tokenised again; only the *tail*, the text between an answer and
the next, is tokenised. Where the template changes earlier answers (it strips thinking, or moves the system prompt into
the last message), the prompt is the template's text, of which all that differs from the prompt before is tokenised
again. An answer is planned first (:class:`Plan`) and entered by :meth:`Conversation.commit`, so an error or an
interrupt leaves the conversation as it was. Where an encoder reads the prompt, each message is a prompt by itself.
Knows no models and no screen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

from app.settings.table import Settings
from sampling.events import Reason
from sampling.stops import begins
from utils.catalogue.templates import AUTO, TEMPLATES, Thinking, carries_template, end_ids, render, thinking_marks
from utils.errors import UserError, raise_first
from utils.objects import HfTokenizer, Json
from utils.ordinary_text import CUT, Markers, ids_in_parts, without
from utils.tokenizer import first_ids

Message = dict[str, str]
CHANNEL = Thinking("<think>", "</think>", False)  # put around the thinking of models that answer in channels
SEAM = 16  # fewer than this many tokens at a prompt's end may differ in the next prompt: a mark that begins thinking


class Template:
    """A chat template, which renders the text of a chat, and the tail after an answer. `name`: a template of
    utils/catalogue/templates.py. Control tokens in messages are read as text unless `special`: a CUT stands in each
    (utils/ordinary_text.py), and tokenising splits the text there.
    """

    def __init__(self, tokenizer: HfTokenizer, name: str = AUTO, special: bool = False) -> None:
        self._tokenizer, self._name = tokenizer, name
        self.present = carries_template(tokenizer, name)
        self.folds_system = False  # the template refuses a system role: it goes into the first message
        source = str(tokenizer.chat_template if name == AUTO else TEMPLATES[name]) if self.present else ""
        self.markers = None if special else Markers(tokenizer, source)

    def render(self, system: str, messages: list[Message]) -> str:
        """Return the text of the chat up to the next answer, with its CUTs; UserError where the template refuses it."""
        plain, edged = self._cut(system, messages), self._cut(system, messages, edges=True)
        text, markers = self._render(*plain), self.markers
        if markers is None or edged == plain:
            return text
        other = self._render(*edged)  # the template's text may complete half a control token at a message's end
        return other if len(markers.found(other)) < len(markers.found(text)) else text

    def _cut(self, system: str, messages: list[Message], edges: bool = False) -> tuple[str, list[Message]]:
        """Return a chat with a CUT in each control token. Answers keep those that are not special tokens: the model
        wrote them. `edges`: as in :meth:`Markers.cut`."""
        if (markers := self.markers) is None:
            return system, messages
        keep = {"assistant": markers.written}
        rows = [
            {
                key: text if key == "role" else markers.cut(text, keep.get(row["role"], ()), edges)
                for key, text in row.items()
            }
            for row in messages
        ]
        return markers.cut(system, (), edges), rows

    def _render(self, system: str, messages: list[Message]) -> str:
        variants = [(False, messages)]
        if system:
            folded = {"role": "user", "content": f"{system}\n\n{messages[0]['content']}"}
            variants = [(False, [{"role": "system", "content": system}, *messages]), (True, [folded, *messages[1:]])]
        for folds, variant in variants:
            if system and self.folds_system and not folds:
                continue
            try:
                text = render(self._tokenizer, variant, self._name)
            except Exception as error:
                why = error
            else:
                self.folds_system = self.folds_system or folds
                return text
        raise UserError(f"the chat template refuses this chat ({why}); /set chat=off goes without it")

    def tail(self, system: str, messages: list[Message], text: str) -> str | None:
        """Return the text between the last answer and the next one, if `text` is the next message; None if the template
        leaves out the last answer.

        `messages` ends with the user's message before that answer; the answer's own text is not needed.
        """
        mark, texts = "answer-0", text + system + "".join(message["content"] for message in messages)
        while mark in texts:
            mark += "0"
        chat = [*messages, {"role": "assistant", "content": mark}, {"role": "user", "content": text}]
        _, separator, tail = self.render(system, chat).rpartition(mark)
        return tail if separator else None


@dataclass(frozen=True)
class Turn:
    """One message and its answer. `answer` holds the emitted ids, a closing stop id included."""

    user: str
    prompt: tuple[int, ...]  # everything the model read before the answer
    answer: tuple[int, ...]
    text: str
    reason: Reason
    regenerated: int = 0  # times that this turn was answered again
    seed: int | None = None
    record: Json = field(default_factory=dict)  # settings and lanes, for /save
    origin: "Turn | None" = None  # the turn that this one branches from by a forced token


@dataclass(frozen=True)
class Plan:
    """A turn about to be answered from `prompt`, after the first `keep` turns.

    `answer`: the ids with which a continued answer begins. `prompt` ends with them, unless an encoder reads the prompt:
    then `begun` holds them for the decoder. `forced`: the user chose the last of them.
    """

    user: str
    prompt: list[int]
    keep: int
    answer: tuple[int, ...] = ()
    regenerated: int = 0
    seed: int | None = None  # the seed the answer began with; None = the current one
    begun: tuple[int, ...] = ()
    forced: bool = False
    messages: tuple[Message, ...] = ()  # the chat up to `user`, for a server


def clean(text: str) -> str:
    """Return text that every tokenizer takes: lone surrogates become U+FFFD, NUL bytes are removed."""
    return text.replace("\x00", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ChatModels(NamedTuple):
    """The parts of a pair that a conversation depends on; see :class:`Conversation`."""

    tokenizer: HfTokenizer
    stop_ids: frozenset[int]
    context: int
    single: bool = False


class ChatSettings(NamedTuple):
    """The settings that a conversation depends on, by their names in app/settings/table.py."""

    system: str = ""
    chat: bool = True
    template: str = AUTO
    special_tokens: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(*(getattr(settings, name) for name in cls._fields))


class Conversation:
    """The turns of a chat. `stop_ids` end an answer; `context`: the most tokens that the model can read.

    `single`: an encoder reads each message by itself, without template, system prompt and history. `special_tokens`:
    control tokens in messages are read as such, as they always are without `chat`.
    """

    def __init__(
        self,
        tokenizer: HfTokenizer,
        stop_ids: frozenset[int],
        context: int,
        single: bool = False,
        system: str = "",
        chat: bool = True,
        template: str = AUTO,
        special_tokens: bool = False,
    ) -> None:
        self.models, self.settings = (
            ChatModels(tokenizer, stop_ids, context, single),
            ChatSettings(system, chat, template, special_tokens),
        )
        self.tokenizer, self.context, self.single, self.system = tokenizer, context, single, system
        self.template = Template(tokenizer, template, special_tokens or not chat)
        self.stop_ids = stop_ids | end_ids(tokenizer, template)
        self.turns: list[Turn] = []
        self.cleared: list[Turn] = []  # the turns that :meth:`restore` brings back
        self.branches: list[Turn] = []  # all versions of the last turn, if a token was forced in it; else []
        self.retokenised = False  # whether a new model's tokenizer has tokenised the answers again

    @property
    def templated(self) -> bool:
        """Whether messages go through a chat template; otherwise the text is simply continued."""
        return self.settings.chat and self.template.present and not self.single

    @property
    def thinking(self) -> Thinking | None:
        """The marks around the model's thinking in an answer, if it has any."""
        if "thinking" in self._fields and self._header_marks()[0]:
            return CHANNEL
        return thinking_marks(self.tokenizer, self.settings.template) if self.templated else None

    @property
    def ids(self) -> list[int]:
        """The ids of the chat so far, as the model has read and written them."""
        return [*self.turns[-1].prompt, *self.turns[-1].answer] if self.turns else []

    # -- plans --------------------------------------------------------------------------------

    def plan(self, text: str) -> Plan:
        """Plan a new turn. Raises UserError if it does not fit the context."""
        return self._fitting(Plan(text, self._prompt(self.turns, text), keep=len(self.turns)))

    def plan_regen(self) -> Plan:
        """Plan another answer to the last message; `regenerated` counts up, so that the seed can change with it."""
        last = self._last("/regen")
        return self._fitting(Plan(last.user, list(last.prompt), len(self.turns) - 1, regenerated=last.regenerated + 1))

    def plan_continue(self, stops: Sequence[str] = ()) -> Plan:
        """Plan to continue the last answer from its ids, without the tokens at its end that begin a stop string: they
        are decoded again, so that the whole string is found."""
        if (last := self._last("/continue")).reason == "eos":
            raise UserError(
                "nothing to continue: the last answer ended by itself (cut or stopped answers can be continued)"
            )
        answer = last.answer
        while answer and begins(self.text(answer), stops):
            answer = answer[:-1]
        return self._resumed(last, answer)

    def plan_force(self, position: int, token: int) -> Plan:
        """Plan to cut the last answer before its token number `position` (from 0) and continue with `token` there."""
        last = self._last("/inspect")
        if token in self.stop_ids:
            raise UserError("that token ends the answer: nothing can continue it")
        return self._resumed(last, (*last.answer[:position], token), forced=True)

    def _resumed(self, last: Turn, answer: tuple[int, ...], forced: bool = False) -> Plan:
        prompt, begun = (list(last.prompt), answer) if self.single else ([*last.prompt, *answer], ())
        return self._fitting(
            Plan(last.user, prompt, len(self.turns) - 1, answer, last.regenerated, last.seed, begun, forced)
        )

    def _last(self, command: str) -> Turn:
        if not self.turns:
            raise UserError(f"{command}: no message yet")
        return self.turns[-1]

    def _fitting(self, plan: Plan) -> Plan:
        count = len(plan.prompt)
        room = "" if count > self.context else " and an answer needs one more"
        too_long = f"the prompt is {count:,} tokens, the context holds {self.context:,}{room}: nothing was sent"
        raise_first(
            {
                "the message has no tokens: nothing was sent": not count,
                f"{too_long}; the conversation is unchanged": count >= self.context,
            },
            UserError,
        )
        system = [{"role": "system", "content": self.system}] if self.system else []
        return replace(plan, messages=(*system, *_messages(self.turns[: plan.keep], plan.user)))

    # -- changes ------------------------------------------------------------------------------

    def commit(
        self, plan: Plan, ids: list[int], reason: Reason, *, seed: int | None = None, record: Json | None = None
    ) -> Turn:
        """Enter the answer of a plan; `ids`: those that were emitted, without `plan.answer`."""
        answer = (*plan.answer, *ids)
        prompt = tuple(plan.prompt if plan.begun else plan.prompt[: len(plan.prompt) - len(plan.answer)])
        before = self.turns[plan.keep] if plan.answer else None
        origin = before if plan.forced or before is None else before.origin
        turn = Turn(plan.user, prompt, answer, self.text(answer), reason, plan.regenerated, seed, record or {}, origin)
        if before is None:
            self.branches = []
        elif plan.forced:
            self.branches = [*(self.branches or [before]), turn]
        else:
            self.branches = [turn if branch is before else branch for branch in self.branches]
        self.turns[plan.keep :] = [turn]
        return turn

    def undo(self) -> Turn | None:
        """Remove and return the last turn. None if it was a branch: the turn that it branched from replaces it."""
        if (last := self._last("/undo")).origin is not None:
            self.turns[-1] = last.origin
            return None
        self.branches = []
        return self.turns.pop()

    def take_branch(self, number: int) -> None:
        """Make branch `number`, from 1, of the last answer the last turn. UserError if there is none."""
        self._last("/branches")
        if not 1 <= number <= len(self.branches):
            raise UserError(f"there is no branch {number}: the last answer has {len(self.branches)}")
        self.turns[-1] = self.branches[number - 1]

    def clear(self, for_good: bool = False) -> None:
        """Forget the turns; :meth:`restore` brings them back, unless they are cleared for good."""
        self.turns, self.cleared, self.branches = [], [] if for_good else self.turns or self.cleared, []

    def restore(self) -> bool:
        """Bring back the turns that :meth:`clear` forgot, unless there are new ones; return whether it did."""
        restores = bool(self.cleared) and not self.turns
        if restores:
            self.turns, self.cleared = self.cleared, []
        return restores

    def changed(self, models: ChatModels | None = None, **settings: str | bool) -> "Conversation":
        """Return the conversation with another model, or with other :class:`ChatSettings`.

        The prompts of earlier turns are made again if the vocabulary, `single` or a setting other than `chat` changes.
        Answers keep their ids, unless the vocabulary or `single` changes: then their texts are tokenised again.
        UserError where the template refuses the chat. This conversation stays as it is.
        """
        changed = Conversation(*(models or self.models), *self.settings._replace(**settings))  # type: ignore[arg-type]
        same = changed.single == self.single and self._same_ids(changed.tokenizer)
        if same and changed.settings._replace(chat=self.settings.chat) == self.settings:
            changed.turns, changed.cleared, changed.branches = self.turns, self.cleared, self.branches
        else:
            changed.turns, changed.retokenised = changed._rebuilt(self.turns, same), bool(self.turns) and not same
        return changed

    def reads(self, turns: Sequence[Turn], vocab_size: int) -> bool:
        """Return whether this tokenizer decodes the ids of these turns to their texts."""
        ids = all(0 <= token < vocab_size for turn in turns for token in (*turn.prompt, *turn.answer))
        return ids and all(turn.prompt and turn.answer and self.text(turn.answer) == turn.text for turn in turns)

    def loaded(self, turns: Sequence[Turn], system: str, *, same: bool) -> "Conversation":
        """Return the conversation of these saved turns, to continue. `same`: their ids are this tokenizer's; else ids
        are made from their texts."""
        loaded = Conversation(*self.models, *self.settings._replace(system=system))
        loaded.turns, loaded.cleared = list(turns) if same else loaded._rebuilt(turns, same), self.cleared
        return loaded

    # -- texts and ids ------------------------------------------------------------------------

    def text(self, ids: Sequence[int]) -> str:
        """Return the answer's text, without the stop token that closed it and the headers of its channels, and with
        marks around the channel of thinking."""
        end = -1 if ids and ids[-1] in self.stop_ids else None
        texts = list[str]()
        for part, thinks, closed in self._without_headers(list(ids[:end])):
            text = str(self.tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            texts.append(f"{CHANNEL.open}{text}{CHANNEL.close * closed}" if thinks and text else text)
        return "\n\n".join(filter(None, texts))

    def _without_headers(self, ids: list[int]) -> list[tuple[list[int], bool, bool]]:
        """Return each channel's ids without its header (`<|channel|>analysis<|message|>`), with whether the channel is
        thinking, and whether it is closed."""
        begins, ends, closes = self._header_marks()
        opening = self._thinking_header() if ends else []
        parts: list[tuple[list[int], bool, bool]] = [([], False, False)]
        header: list[int] | None = None
        for token in [*self._begun_header, *ids]:
            if token in ends:
                parts.append(([], [*(header or []), token][-len(opening) :] == opening, False))
                header = None
            elif header is not None or token in begins:
                header = [*(header or []), token]
            elif token in closes:
                parts[-1] = (*parts[-1][:2], True)
            else:
                parts[-1][0].append(token)
        return parts

    @cached_property
    def _begun_header(self) -> list[int]:
        """The ids at a prompt's end with which a channel's header begins, or the whole header; often none."""
        if not (opening := self._thinking_header()):
            return []
        ids = self._encode(self.template.render("", _messages([], "")))
        begins = [at for at, token in enumerate(ids) if token == opening[0]]
        open_ = bool(begins) and self._header_marks()[2].isdisjoint(ids[begins[-1] :])
        return ids[begins[-1] :] if open_ else []

    def _thinking_header(self) -> list[int]:
        """Return the ids of the header of the channel of thinking; none if the model has no such channel."""
        return self._encode(self._fields["thinking"]["open"]) if "thinking" in self._fields else []

    @property
    def _fields(self) -> Json:
        """The channels of the tokenizer's response template (transformers), by the chat template's names for them."""
        schema = getattr(self.tokenizer, "response_template", None) if self.templated else None
        return schema.get("fields", {}) if isinstance(schema, dict) else {}

    def _header_marks(self) -> tuple[set[int], set[int], set[int]]:
        """Return the tokens that begin a channel's header, that end it, and that close a channel, by the tokenizer's
        response template; three empty sets without one."""
        headers = [self._encode(open_) for entry in self._fields.values() if (open_ := entry.get("open"))]
        headers = [header for header in headers if len(header) > 1]
        if not headers:
            return set(), set(), set()
        listed = [entry.get("close") or [] for entry in self._fields.values()]
        closes = [self._encode(text) for close in listed for text in ([close] if isinstance(close, str) else close)]
        closing = {ids[0] for ids in closes if len(ids) == 1}
        return {header[0] for header in headers}, {header[-1] for header in headers}, closing

    def _channels(self, ids: Sequence[int]) -> dict[str, str] | None:
        """Return the texts of an answer by the chat template's names for them; None without a response template."""
        if not self.templated or getattr(self.tokenizer, "response_template", None) is None:
            return None
        # The text that the template puts before an answer may hold the header of its first channel.
        parsed = self.tokenizer.parse_response(list(ids), prefix=self.template.render("", _messages([], "")))
        return {name: text for name, text in parsed.items() if isinstance(text, str) and name != "role"}

    def _messages(self, turns: Sequence[Turn], text: str) -> list[Message]:
        """Return the chat up to a user's message, as the chat template takes it."""
        messages = _messages(turns, text)
        for message, turn in zip(messages[1::2], turns, strict=False):
            if channels := self._channels(turn.answer):
                message.update({"content": "", **channels})
        return messages

    def _encode(self, text: str, first: Callable[[str], list[int]] | None = None) -> list[int]:
        def alone(part: str) -> list[int]:
            return list(self.tokenizer(part, add_special_tokens=False)["input_ids"])

        return ids_in_parts(text, alone, first or alone)

    def _encode_after(self, last: int, text: str) -> list[int]:
        """Return the ids of a text that follows the token `last`: its first token may differ from one at the start."""
        before = self.tokenizer.decode([last])

        def after_last(part: str) -> list[int]:
            alone, whole = self._encode(before), self._encode(before + part)
            return whole[len(alone) :] if whole[: len(alone)] == alone else self._encode(part)

        return self._encode(text, after_last)

    def _ordinary(self, text: str) -> str:
        """Return a text with a CUT in each control token, for use without a template."""
        return self.template.markers.cut(text) if self.template.markers else text

    def markers_in(self, plan: Plan) -> list[str]:
        """Return the control tokens in the messages of a plan that are read as text, each once."""
        text = "\n".join([plan.user, *(turn.user for turn in self.turns[: plan.keep])])
        return [*dict.fromkeys(self.template.markers.found(text))] if self.template.markers else []

    def _same_ids(self, tokenizer: HfTokenizer) -> bool:
        mine, other = (getattr(each, "get_vocab", None) for each in (self.tokenizer, tokenizer))
        return tokenizer is self.tokenizer or bool(mine and other and mine() == other())

    def _rebuilt(self, before: Sequence[Turn], same: bool) -> list[Turn]:
        """Return the turns with new prompts, their answers tokenised again unless their ids stay the `same`."""
        turns: list[Turn] = []
        for turn in before:
            answer = turn.answer if same else tuple(self._encode(self._ordinary(turn.text)))
            turns.append(replace(turn, prompt=tuple(self._prompt(turns, turn.user)), answer=answer, origin=None))
        return turns

    def _prompt(self, turns: list[Turn], text: str) -> list[int]:
        """Return the ids of the next prompt: the turns so far, the text that ends the last, the new message."""
        if not turns or self.single:
            message = self.template.render(self.system, _messages([], text)) if self.templated else self._ordinary(text)
            return self._encode(message, None if self.templated else partial(first_ids, self.tokenizer))
        ids, tail = [*turns[-1].prompt, *turns[-1].answer], self._tail(turns, text)
        if self.templated:
            before = self.template.render(self.system, self._messages(turns[:-1], turns[-1].user))
            whole = self.template.render(self.system, self._messages(turns, text))
            if _squeezed(whole) != _squeezed(f"{before}{self._sent(turns[-1])}{tail}"):
                return self._continued(list(turns[-1].prompt), whole)
        end = self.tokenizer.decode([ids[-1]]) if ids[-1] in self.stop_ids else None
        if end is not None and tail.lstrip().startswith(end):  # the answer closed the turn itself, as the template does
            tail = tail.lstrip()[len(end) :]
        elif end is not None:
            ids.pop()
        return ids + self._encode_after(ids[-1], tail)

    def _continued(self, prompt: list[int], whole: str) -> list[int]:
        """Return the ids of the text `whole`. They begin with those of `prompt`, except fewer than SEAM of its last,
        so that the cache can be used; if the texts differ earlier, the whole text is tokenised again."""
        plain = whole.replace(CUT, "")
        for count in range(len(prompt), max(0, len(prompt) - SEAM), -1):
            if count and plain.startswith(text := self.tokenizer.decode(prompt[:count])):
                return prompt[:count] + self._encode_after(prompt[count - 1], without(whole, len(text)))
        return self._encode(whole)

    def _sent(self, turn: Turn) -> str:
        """Return the answer's text as it stands in the rendered chat: with the headers of its channels."""
        if not self._channels(turn.answer):
            return turn.text
        return str(self.tokenizer.decode(list(turn.answer[: len(turn.answer) - (turn.answer[-1] in self.stop_ids)])))

    def _tail(self, turns: list[Turn], text: str) -> str:
        if not self.templated:
            return f"\n{self._ordinary(text)}"
        if (tail := self.template.tail(self.system, self._messages(turns[:-1], turns[-1].user), text)) is None:
            raise UserError("the model's chat template leaves out earlier answers: use /clear or /set chat=off")
        return tail


def as_text(markers: Sequence[str]) -> str:
    """Return a note that these control tokens are read as text."""
    return f"read as text, not as control tokens: {' '.join(markers)} (/set special_tokens=on lets them through)"


def _squeezed(text: str) -> str:
    """Return a text without white space and CUT."""
    return "".join(text.replace(CUT, "").split())


def _messages(turns: Sequence[Turn], text: str) -> list[Message]:
    """Return the chat up to a user's message."""
    parts = [(role, part) for turn in turns for role, part in (("user", turn.user), ("assistant", turn.text))]
    return [{"role": role, "content": part} for role, part in (*parts, ("user", text))]
