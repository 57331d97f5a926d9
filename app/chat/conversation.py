"""The history of one chat, by token ids: which prompt goes to the model next, and what came back.

An answer's ids are kept as they were decoded and never tokenised again; only the *tail* that the
chat template puts behind an answer is. Where the template changes what was said (it strips thinking, or moves the
system prompt into the last message), the prompt is the template's text, tokenised again.
Every change is planned first (:class:`Plan`) and made by
:meth:`Conversation.commit`, so an error or an interrupt leaves the conversation as it was.
Where an encoder reads the prompt, messages stand alone: each is a prompt by itself.
Knows no models, no sampling and no screen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from app.chat.template_text import Message, Template
from sampling.events import Reason
from utils.catalogue.templates import AUTO, Thinking, end_ids, thinking_marks
from utils.errors import UserError

SEAM = 16  # tokens at a prompt's end that the next one may leave out, such as a mark that begins the thinking


@dataclass(frozen=True)
class Turn:
    """One message and its answer. `answer` holds the emitted ids, a closing stop id included."""

    user: str
    prompt: tuple[int, ...]  # everything the model read before the answer
    answer: tuple[int, ...]
    text: str
    reason: Reason
    regenerated: int = 0  # how often this turn was answered anew
    seed: int | None = None
    record: dict[str, Any] = field(default_factory=dict)  # settings and lanes, for /save
    origin: Turn | None = None  # the turn that it branches from: a token of it was forced


@dataclass(frozen=True)
class Plan:
    """A turn about to be answered: `prompt` is what to decode from, `keep` the turns before it.

    `answer` are ids that the answer has already (a continuation); they are part of `prompt`, unless the decoder has
    them by itself: then they are `begun` as well. `forced`: the last of them was chosen by the user.
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
    """Text that every tokenizer takes: lone surrogates become U+FFFD, NUL bytes go."""
    return text.replace("\x00", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Conversation:
    """Turns by their ids. `stop_ids` end an answer; `context` is the most the model can read.

    `single`: an encoder reads each message by itself, without template, system prompt and history.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int],
        context: int,
        *,
        system: str = "",
        chat: bool = True,
        single: bool = False,
        template: str = AUTO,
    ) -> None:
        self.turns: list[Turn] = []
        self.cleared: list[Turn] = []  # what :meth:`restore` brings back
        self.branches: list[Turn] = []  # the last turn and those that it was branched from or into; [] if it was not
        self.system, self.chat, self.template_name = system, chat, template
        self._take(tokenizer, stop_ids, context, single)

    def _take(self, tokenizer: Any, stop_ids: frozenset[int], context: int, single: bool) -> None:
        self.tokenizer, self.own_stop_ids, self.context, self.single = tokenizer, stop_ids, context, single
        self.template = Template(tokenizer, self.template_name)
        self.stop_ids = stop_ids | end_ids(tokenizer, self.template_name)  # what ends an answer

    @property
    def templated(self) -> bool:
        """Whether messages go through a chat template; otherwise the text is simply continued."""
        return self.chat and self.template.present and not self.single

    @property
    def thinking(self) -> Thinking | None:
        """The marks around the model's thinking in an answer."""
        return thinking_marks(self.tokenizer, self.template_name) if self.templated else None

    @property
    def ids(self) -> list[int]:
        """Everything said so far, as the model has it."""
        return [*self.turns[-1].prompt, *self.turns[-1].answer] if self.turns else []

    # -- plans --------------------------------------------------------------------------------

    def plan(self, text: str) -> Plan:
        """A new turn. Raises UserError if it does not fit the context."""
        return self._fitting(Plan(text, self._prompt(self.turns, text), keep=len(self.turns)))

    def plan_edit(self, text: str) -> Plan:
        """The last message replaced by `text`."""
        before = self.turns[:-1] if self._last("/edit") else []
        return self._fitting(Plan(text, self._prompt(before, text), keep=len(before)))

    def plan_regen(self) -> Plan:
        """The last message answered anew; `regenerated` counts up, so that a seed can follow it."""
        last = self._last("/regen")
        return self._fitting(Plan(last.user, list(last.prompt), len(self.turns) - 1, regenerated=last.regenerated + 1))

    def plan_continue(self) -> Plan:
        """The last answer goes on from its ids."""
        last = self._last("/continue")
        if last.reason == "eos":
            raise UserError("nothing to continue: the last answer ended by itself (cut or stopped answers go on)")
        prompt, begun = (list(last.prompt), last.answer) if self.single else (self.ids, ())
        keep = len(self.turns) - 1
        return self._fitting(Plan(last.user, prompt, keep, last.answer, last.regenerated, last.seed, begun))

    def plan_force(self, position: int, token: int) -> Plan:
        """The last answer cut before its token number `position` (from 0), going on from another token there."""
        last = self._last("/inspect")
        if token in self.stop_ids:
            raise UserError("that token ends the answer: nothing can go on from it")
        answer = (*last.answer[:position], token)
        prompt, begun = (list(last.prompt), answer) if self.single else ([*last.prompt, *answer], ())
        keep = len(self.turns) - 1
        return self._fitting(Plan(last.user, prompt, keep, answer, last.regenerated, last.seed, begun, forced=True))

    def _last(self, command: str) -> Turn:
        if not self.turns:
            raise UserError(f"{command}: no message yet")
        return self.turns[-1]

    def _fitting(self, plan: Plan) -> Plan:
        count = len(plan.prompt)
        if count == 0:
            raise UserError("the message has no tokens: nothing was sent")
        if count >= self.context:
            room = "" if count > self.context else " and an answer needs one more"
            raise UserError(
                f"the prompt is {count:,} tokens, the context holds {self.context:,}{room}: nothing was sent; "
                "the conversation is unchanged"
            )
        return replace(plan, messages=self._sent_messages(plan))

    def _sent_messages(self, plan: Plan) -> tuple[Message, ...]:
        """The chat of a plan as a server reads it: it has a template of its own."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return (*system, *_messages(self.turns[: plan.keep], plan.user))

    # -- changes ------------------------------------------------------------------------------

    def commit(self, plan: Plan, ids: list[int], reason: Reason, *, seed: int | None = None, **record: Any) -> Turn:
        """Enter the answer of a plan: `ids` are the newly emitted ones."""
        answer = (*plan.answer, *ids)
        prompt = tuple(plan.prompt if plan.begun else plan.prompt[: len(plan.prompt) - len(plan.answer)])
        before = self.turns[plan.keep] if plan.answer else None
        origin = before if plan.forced or before is None else before.origin
        turn = Turn(plan.user, prompt, answer, self.said(answer), reason, plan.regenerated, seed, record, origin)
        if before is None:
            self.branches = []
        elif plan.forced:
            self.branches = [*(self.branches or [before]), turn]
        else:
            self.branches = [turn if branch is before else branch for branch in self.branches]
        self.turns[plan.keep :] = [turn]
        return turn

    def undo(self) -> Turn | None:
        """Take the last turn back; None where it was a branch: the turn that it branched from is the last one then."""
        last = self._last("/undo")
        if last.origin is not None:
            self.turns[-1] = last.origin
            return None
        self.branches = []
        return self.turns.pop()

    def take_branch(self, number: int) -> Turn:
        """Go on with branch `number`, from 1, of the last answer. UserError if there is none."""
        self._last("/branches")
        if not 1 <= number <= len(self.branches):
            raise UserError(f"there is no branch {number}: the last answer has {len(self.branches)}")
        self.turns[-1] = self.branches[number - 1]
        return self.turns[-1]

    def clear(self, for_good: bool = False) -> None:
        """Forget the turns; :meth:`restore` brings them back, unless they are cleared for good."""
        self.turns, self.cleared, self.branches = [], [] if for_good else self.turns or self.cleared, []

    def restore(self) -> bool:
        """Bring back what :meth:`clear` took, if nothing was said since; whether it did."""
        back = bool(self.cleared) and not self.turns
        if back:
            self.turns, self.cleared = self.cleared, []
        return back

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All of a change, or with an error nothing of it."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def settle(self, *, system: str | None = None, chat: bool | None = None, template: str | None = None) -> None:
        """Another system prompt or template, for the turns already there as well; answers keep their ids.

        None leaves one as it is. UserError, and nothing has changed, where the template refuses the chat.
        """
        models = (self.tokenizer, self.own_stop_ids, self.context, self.single)
        self.adopt(*models, template, system=system, chat=chat)

    def adopt(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int],
        context: int,
        single: bool = False,
        template: str | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
    ) -> bool:
        """Go on with another model, and as :meth:`settle` does. True if the history had to be tokenised anew, from its
        texts.
        """
        same = single == self.single and (tokenizer is self.tokenizer or self._same_ids(tokenizer))
        before = (self.template_name, self.system)
        with self.whole():
            self.template_name = template or self.template_name
            self.system = self.system if system is None else system
            self.chat = self.chat if chat is None else chat
            self._take(tokenizer, stop_ids, context, single)
            alike = same and (self.template_name, self.system) == before
            unchanged = not self.turns or alike
            self.cleared = self.cleared if alike else []
            if not unchanged:
                self._rebuild(same)
        return not (unchanged or same)

    def reads(self, turns: Sequence[Turn], vocab_size: int) -> bool:
        """Whether the ids of these turns say here what their texts say."""
        ids = all(0 <= one < vocab_size for turn in turns for one in (*turn.prompt, *turn.answer))
        return ids and all(turn.prompt and turn.answer and self.said(turn.answer) == turn.text for turn in turns)

    def load(self, turns: Sequence[Turn], system: str, *, same: bool) -> None:
        """Go on with a saved conversation: by its ids where they are this tokenizer's, else from its texts."""
        with self.whole():
            self.turns, self.system, self.branches = list(turns), system, []
            if not same:
                self._rebuild(same)

    # -- inside -------------------------------------------------------------------------------

    def text(self, ids: tuple[int, ...] | list[int]) -> str:
        """The answer's text: without the stop token that closed it, and without the headers of its channels."""
        end = -1 if ids and ids[-1] in self.stop_ids else None
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        texts = [str(self.tokenizer.decode(part, **how)) for part in self._without_headers(list(ids[:end]))]
        return "\n\n".join(filter(None, texts))

    def _without_headers(self, ids: list[int]) -> list[list[int]]:
        """The ids in parts, one a channel, without the headers before them (`<|channel|>analysis<|message|>`).

        Ids may begin inside a header: what stands before its end without a beginning belongs to it.
        """
        begins, ends = self._header_marks()
        parts: list[list[int]] = [[]]
        inside = False
        for token in ids:
            if token in ends:
                if not inside:
                    parts = [[]]
                parts.append([])
                inside = False
            elif inside or token in begins:
                inside = True
            else:
                parts[-1].append(token)
        return parts

    def _header_marks(self) -> tuple[set[int], set[int]]:
        """The tokens that begin and end a channel's header, by the tokenizer's schema; none without one."""
        schema = getattr(self.tokenizer, "response_template", None) if self.templated else None
        fields = schema.get("fields", {}) if isinstance(schema, dict) else {}
        headers = [self._encode(open_) for entry in fields.values() if (open_ := entry.get("open"))]
        headers = [header for header in headers if len(header) > 1]
        return {header[0] for header in headers}, {header[-1] for header in headers}

    def said(self, ids: Sequence[int]) -> str:
        """The text of an answer from its first token on: where the tokenizer has a schema for channels, theirs alone.

        An answer that ended without any channel is its text as it stands.
        """
        channels, ended = self._channels(ids), bool(ids) and ids[-1] in self.stop_ids
        if channels is None or (ended and not channels):
            return self.text(list(ids))
        return "\n\n".join(filter(None, channels.values()))

    def _channels(self, ids: Sequence[int]) -> dict[str, str] | None:
        """The texts of an answer by the names that the chat template has for them; None without a schema for it."""
        if not self.templated or getattr(self.tokenizer, "response_template", None) is None:
            return None
        prefix = self.template.render("", _messages([], ""))  # the template may begin the answer
        parsed = self.tokenizer.parse_response(list(ids), prefix=prefix)
        return {name: text for name, text in parsed.items() if isinstance(text, str) and name != "role"}

    def _messages(self, turns: Sequence[Turn], text: str) -> list[Message]:
        """The chat up to a user's message, as the chat template takes it."""
        messages = _messages(turns, text)
        for message, turn in zip(messages[1::2], turns, strict=False):
            if channels := self._channels(turn.answer):
                message.update({"content": "", **channels})
        return messages

    def _encode(self, text: str, special: bool = False) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _same_ids(self, tokenizer: Any) -> bool:
        mine, other = (getattr(one, "get_vocab", None) for one in (self.tokenizer, tokenizer))
        return bool(mine and other and mine() == other())

    def _rebuild(self, same: bool = True) -> None:
        """Make all prompts anew; the answers as well, from their texts, where their ids are another tokenizer's."""
        turns: list[Turn] = []
        for turn in self.turns:
            answer = turn.answer if same else tuple(self._encode(turn.text))
            turns.append(replace(turn, prompt=tuple(self._prompt(turns, turn.user)), answer=answer, origin=None))
        self.turns, self.branches = turns, []

    def _prompt(self, turns: list[Turn], text: str) -> list[int]:
        """The ids of the next prompt: everything before, the closing of the last turn, the new message."""
        if not turns or self.single:
            message = self.template.render(self.system, _messages([], text)) if self.templated else text
            return self._encode(message, special=not self.templated)
        said, tail = [*turns[-1].prompt, *turns[-1].answer], self._tail(turns, text)
        if self.templated:
            before = self.template.render(self.system, self._messages(turns[:-1], turns[-1].user))
            whole = self.template.render(self.system, self._messages(turns, text))
            if "".join(whole.split()) != "".join(f"{before}{self._sent(turns[-1])}{tail}".split()):
                return self._going_on(list(turns[-1].prompt), whole)
        end = self.tokenizer.decode([said[-1]]) if said[-1] in self.stop_ids else None
        if end is not None and tail.lstrip().startswith(end):  # the answer closed the turn itself, as the template does
            tail = tail.lstrip()[len(end) :]
        elif end is not None:
            said.pop()
        return said + self._encode(tail)

    def _going_on(self, prompt: list[int], whole: str) -> list[int]:
        """The ids of the text `whole`: those of the last prompt as far as it begins with it, so that a cache serves."""
        for count in range(len(prompt), max(0, len(prompt) - SEAM), -1):
            if count and whole.startswith(text := self.tokenizer.decode(prompt[:count])):
                return prompt[:count] + self._encode(whole[len(text) :])
        return self._encode(whole)

    def _sent(self, turn: Turn) -> str:
        """The answer between the template's texts before and after it: with the marks of its channels."""
        if not self._channels(turn.answer):
            return turn.text
        closed = turn.answer[-1] in self.stop_ids
        return str(self.tokenizer.decode(list(turn.answer[: len(turn.answer) - closed])))

    def _tail(self, turns: list[Turn], text: str) -> str:
        if not self.templated:
            return f"\n{text}"
        tail = self.template.tail(self.system, self._messages(turns[:-1], turns[-1].user), text)
        if tail is None:
            raise UserError("the model's chat template leaves out earlier answers; /clear or /set chat=off goes on")
        return tail


def _messages(turns: Sequence[Turn], text: str) -> list[Message]:
    """The chat up to a user's message."""
    said = [(role, part) for turn in turns for role, part in (("user", turn.user), ("assistant", turn.text))]
    return [{"role": role, "content": part} for role, part in (*said, ("user", text))]
