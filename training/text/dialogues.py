"""The chats that a target writes: chats that it invents, by kind of task, or answers to given prompts.

A chat is a generator that yields requests for continuations (:class:`Ask`), is sent the continuations, and returns the
lines of its answers, which are kept. The beginnings of the user's turns are written for this project and come from no
benchmark; their kinds are common ones: a text to be summarised, passages with a question, a sentence to be translated,
arithmetic, a question, a list, code.
Knows a tokenizer and no model; training/text/synthesize.py samples the text.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from utils.catalogue.templates import render
from utils.errors import UserError
from utils.tokenizer import first_ids

_MARK = "user-turn-0"  # stands for a user's turn, to find where a template puts it
TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, chat by chat
TURNS = 4  # of the user in a conversation, at most
USER_TOKENS = 96  # a longer user turn is thrown away
_LONG_TURN = 288  # the most tokens of a user turn of another kind than "chat", its given beginning included
_TAIL = 32  # tokens that a template puts between a user's turn and its answer, at most
_SENTENCE = re.compile(r"(?<!\d)[.!?][\"'”’)]*(?=\s|$)")  # its end; a point after a digit may be none


@dataclass(frozen=True)
class TurnPart:
    """A piece of a turn: `opening` is given, then the target continues for at most `tokens`.

    If the target has not ended by then, a `loose` part is cut after its last full sentence and any other discarded.
    """

    opening: str
    tokens: int = 96
    loose: bool = False


_NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jamal"),
    *("Kim", "Leo", "Maria", "Nora", "Omar", "Paula", "Quentin", "Rosa", "Sam", "Tara"),
)
_THINGS = (
    *("apples", "books", "tickets", "stamps", "cookies", "marbles", "pencils"),
    *("shirts", "eggs", "cards", "chairs", "flowers", "bottles", "coins"),
)
_HEADS = (
    "Police in",
    "A man from",
    "The government of",
    "Scientists at the University of",
    "A new report says",
    "Thousands of people",
    "The football club",
    "The company announced on Monday that",
    "A woman who",
    "The president said",
    "Doctors in",
    "A court has",
    "The city council",
    "After years of",
    "Firefighters",
    "Two brothers",
)
_SUBJECTS = (
    "The city of",
    "The river",
    "The novel",
    "The song",
    "The film",
    "The planet",
    "The theory of",
    "The battle of",
    "The human heart",
    "In the 19th century,",
    "The term",
    "The king of",
    "The television series",
    "A volcano is",
    "Photosynthesis is",
    "The bank",
    "The United States",
    "The ancient Greeks",
    "The team",
    "Copper is",
)
_ASKS = (
    "Who",
    "When did",
    "When was",
    "Where is",
    "Where was",
    "What is the",
    "What is",
    "What was",
    "How many",
    "Which",
    "Why do",
    "How do you",
    "What are the",
    "Describe",
    "What does",
)
_GERMAN = (
    "Die Regierung hat",
    "Der neue Präsident",
    "Im Jahr",
    "Am Montag",
    "Viele Menschen",
    "Die Stadt",
    "Nach dem Spiel",
    "Ich habe",
    "Das Unternehmen",
    "Wir wollen",
    "Der Minister sagte, dass",
    "Seit dem",
    "Es gibt",
    "In der Schule",
    "Die Polizei",
    "Mit dem Auto",
    "Der Film",
    "Für die Kinder",
)
_TASKS = (
    "Write a short story about",
    "Write an email to",
    "Write a blog post about",
    "Write a poem about",
    "Write a speech for",
    "Describe a scene",
    "Speak as if you were",
    "Play the part of",
    "Give me a list of",
    "Explain the difference between",
    "Explain how",
    "What are the advantages of",
    "Draft a letter",
    "Give advice on",
    "Compare",
    "Write a paragraph that",
    "Tell me about",
    "Plan a trip to",
)
_CODE = (
    *("a Python function", "a function in Python", "a short Python function", "a Python class", "a Python script"),
    *("a Python generator", "a Python decorator", "a Python program", "a JavaScript function", "a TypeScript function"),
    *("a C function", "a C++ function", "a C++ class", "a Java method", "a Java class", "a Go function"),
    *("a Rust function", "a Bash script", "a SQL query", "a regular expression", "a React component"),
    *("unit tests for a function", "a command line tool in Python", "a small web server", "an algorithm"),
    *("a data class", "a context manager", "an iterator", "a pandas script", "a recursive function"),
)
_PROGRAMS = (
    "Write a Python function that",
    "Write a Python program to",
    "Write a program in C++ that",
    "Write a JavaScript function to",
    "Write code that",
    "Write a SQL query that",
    "Write an HTML page with",
    "How can I find out in Python whether",
    "Explain what this code does:\n\ndef",
    "Fix the error in this code:\n\ndef",
    "Design a class that",
    "Write a recursive function",
    *(
        f"{verb} {code} {link}"
        for verb in ("Write", "Implement", "Create", "Show me", "I need", "Please write")
        for code in _CODE
        for link in ("that", "to", "which takes", "for")
    ),
)
_EXTRACTS = (
    "Extract all names from the following text:",
    "Make a list of all places and dates in this paragraph:",
    "Is each of these comments friendly or not? One word a line.\n1.",
    "Which sentence of this text is the longest?",
    "Turn this text into a table of two columns:",
    "Which of these sentences is about money?\n1.",
    "Put these words into groups and name each group:",
    "What does the writer of this email want?\n\nDear",
    "List the main facts of the following report as bullet points:",
)
_SUMMARIES = (
    "Sum up this news item: ",
    "Summarize the following article:\n\n",
    "What is this text about, in short?\n\n",
)
_TRANSLATIONS = ("Translate this sentence into English: ", "What is this in English? ", "From German into English: ")


def _begun(*beginnings: Sequence[str], tokens: int = 96, loose: bool = False) -> Callable[[Random], list[TurnPart]]:
    """Return a function that makes one part, whose opening joins a random one of each of `beginnings`."""
    return lambda dice: [TurnPart("".join(map(dice.choice, beginnings)), tokens, loose)]


def _sum(dice: Random) -> list[TurnPart]:
    """Return the facts of an arithmetic problem, half of the time with the question's first words."""
    name, other = dice.sample(_NAMES, 2)
    thing = dice.choice(_THINGS)
    many, some, few = dice.randrange(40, 90), dice.randrange(11, 30), dice.randrange(2, 10)
    story, question = dice.choice(
        (
            (f"{name} has {many} {thing}, gives {some} of them to {other} and loses {few}.", "How many"),
            (f"{name} has ${many * 10} and buys {few} {thing} for ${some} each.", "How much money"),
            (f"{name} works {few} hours a day and is paid ${some} an hour.", "How much does"),
            (f"A shop sells {many} {thing} on Monday and {some} fewer on Tuesday.", "How many"),
            (f"{name} drives {many * few} miles in {few} hours.", "At this speed, how"),
            (f"There are {some} boxes with {few} {thing} in each, and {name} takes out {few + 1}.", "How many"),
            (f"{name} is {many} years old and {other} is {some} years younger.", "How old will"),
            (f"In a club of {many} members {some} swim and {few} others row.", "How many"),
            (f"{name} reads {some} pages a day of a book that has {many * 10} pages.", f"After {few} days, how many"),
            (f"{name} saves ${some} a week, {other} ${few} more than that.", "How many weeks"),
        )
    )
    return [TurnPart(f"{story} {question}" if dice.random() < 0.5 else story)]


def _passage(dice: Random) -> list[TurnPart]:
    return [
        TurnPart(dice.choice(_SUBJECTS), dice.choice((120, 200)), loose=True),
        TurnPart("\n" + dice.choice(_ASKS), 32),
    ]


_EVERYDAY = (
    *("How do I", "How can I", "What is the best way to", "Can you recommend", "What should I", "Why does my"),
    *("I have", "Is it safe to", "How long does it take to", "Tell me a joke about", "Help me"),
    *("What can I cook with", "My dog", "What is the difference between", "I want to learn", "How much"),
    *("Give me tips for", "Can I", "Explain to a child", "What happens if", "What happens when", "How does a"),
    *("Why do people", "I am looking for", "Suggest", "What are"),
)
_LISTS = tuple(
    f"{verb} {count} {things}"
    for verb in ("List", "Give me", "Name", "Write down", "I need")
    for count in ("three", "five", "5", "seven", "ten", "10", "some")
    for things in ("ideas for", "ways to", "examples of", "reasons", "things", "names for", "questions about", "famous")
)
_SHORT = (
    *("Answer with one word:", "Yes or no:", "True or false:", "In one sentence, what is"),
    *("What is the capital of", "Who wrote", "Who painted", "How do you spell", "What is the opposite of"),
    *("Give me one", "Name one", "What year", "What colour is", "Hello", "Hi", "Thanks", "Good morning"),
    *("Which is larger,", "Finish this sentence:", "Is this sentence positive or negative?", "What is 1"),
    *("What is 2", "What is 3", "How many days", "In short, why", "Correct the spelling:"),
    *("Give me a synonym of", "Give me a title for", "How many legs", "What is the plural of"),
)
_FIRST = ("I", "The", "We", "My", "She", "It is", "Where", "Can you", "Please", "There is", "He", "When", "Good")
_INTO = tuple(
    f"{ask} {language}: {first}"
    for ask in ("Translate into", "Translate to", "Translate this sentence into", "How do you say in", "Say in")
    for language in ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")
    for first in _FIRST
)
_ABROAD = (
    *("Comment", "Qu'est-ce que", "Pourquoi", "Quelle est", "Quels sont", "Explique", "Écris", "Donne-moi"),
    *("Bonjour", "¿Cómo", "¿Qué es", "¿Por qué", "¿Cuál es", "¿Cuáles son", "Explica", "Escribe", "Dame"),
    *("Hola", "Haz una lista", "Wie", "Was ist", "Warum", "Welche", "Erkläre", "Schreibe", "Nenne", "Gib mir"),
    *("Hallo", "Was sind", "Wo liegt", "Come", "Che cos'è", "Perché", "Qual è", "Spiega", "Scrivi", "O que é"),
    *("Como", "Por que", "Escreva", "Wat is"),
)
_FURTHER = (
    *("", "", "Can you", "And", "Why", "What about", "Make it shorter", "Give me an example", "How", "Now"),
    *("Thanks", "Explain", "Write it", "Is that", "Tell me more", "What is", "In one sentence"),
    *("Translate that into", "Are there"),
)


# Kind → the pieces of one user's turn, drawn by the dice.
TASKS: Mapping[str, Callable[[Random], list[TurnPart]]] = {
    "chat": _begun(("",)),
    "writing": _begun(_TASKS),
    "coding": _begun(_PROGRAMS, tokens=64, loose=True),
    "extraction": _begun(_EXTRACTS, tokens=128, loose=True),
    "qa": _begun(_ASKS),
    "maths": _sum,
    "rag": _passage,
    "summarization": _begun(_SUMMARIES, _HEADS, tokens=224, loose=True),
    "translation": _begun(_TRANSLATIONS, _GERMAN, tokens=48),
    "everyday": _begun(_EVERYDAY),
    "lists": _begun(_LISTS),
    "short": _begun(_SHORT, tokens=48),
    "translation-out": _begun(_INTO, tokens=48),
    "foreign": _begun(_ABROAD, tokens=64),
    "conversation": _begun((*_EVERYDAY, *_TASKS, *_ASKS, *_SHORT, *_LISTS)),
}


@dataclass(frozen=True)
class Ask:
    """Continue `prompt` at `temperature` until a stop id or `limit` tokens."""

    prompt: list[int]
    temperature: float
    limit: int


# One answer: `ids`, `start` (the index of the answer's first token), `temperature`, `number` (the chat's) and, of other
# kinds than "chat", `kind`.
DialogueLine = dict[str, Any]
Chat = Generator[Ask, list[int], list[DialogueLine]]


class Talk:
    """A tokenizer's chat template, as ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.templated = bool(getattr(tokenizer, "chat_template", None))

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the ids of the chat up to where its answer begins; without a template, those of its first message."""
        if self.templated:
            return self.ids(render(self._tokenizer, messages))
        return first_ids(self._tokenizer, messages[0]["content"])

    def opening(self, messages: Sequence[dict[str, str]] = ()) -> list[int]:
        """Return the ids of the chat up to where the user's next turn begins. UserError where that is not found."""
        if not self.templated:
            raise UserError("the target has no chat template to write to itself with: give it files or prompts")
        head, mark, _ = render(self._tokenizer, [*messages, _user(_MARK)]).partition(_MARK)
        if not mark:
            raise UserError("the target's chat template changes the user's turn: give it files or prompts")
        return self.ids(head)

    def answered(
        self, messages: list[dict[str, str]], text: str, temperature: float, limit: int, number: int
    ) -> Generator[Ask, list[int], DialogueLine]:
        """Return the line of an answer to the chat with one more user turn; `messages` get both."""
        messages.append(_user(text))
        prompt = self.prompt(messages)
        answer = yield Ask(prompt, temperature, limit)
        messages.append({"role": "assistant", "content": self.text(answer).strip()})
        return {"ids": [*prompt, *answer], "start": len(prompt), "temperature": temperature, "number": number}

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class OwnChats:
    """Chats without end whose user turns the target samples itself (Magpie, arXiv 2406.08464).

    A turn of kind "chat" is sampled whole; the beginning of other kinds is given, drawn by `seed`. Chats take the kinds
    in turn, a kind given twice comes twice as often, and each kind takes the temperatures in turn. Raises UserError for
    a tokenizer whose chat template does not allow it.
    """

    endless = True

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: frozenset[int],
        answer_tokens: int = 384,
        temperatures: Sequence[float] = TEMPERATURES,
        kinds: Sequence[str] = ("chat",),
        seed: int = 0,
    ) -> None:
        self._talk, self._stop, self._answer = Talk(tokenizer), stop_ids, answer_tokens
        self._temperatures, self._kinds, self._seed = tuple(temperatures), tuple(kinds), seed
        self._head = self._talk.opening()
        room = USER_TOKENS if set(kinds) == {"chat"} else _LONG_TURN
        self.longest = len(self._head) + (TURNS if "conversation" in kinds else 1) * (room + _TAIL + answer_tokens)

    def chat(self, number: int) -> Chat:
        turn, kind = number % len(self._kinds), self._kinds[number % len(self._kinds)]
        temperature = self._temperatures[(number // len(self._kinds) + turn) % len(self._temperatures)]
        dice, head = Random(f"{self._seed}/{number}"), self._head
        parts = TASKS[kind](dice)
        messages, lines = list[dict[str, str]](), list[DialogueLine]()
        for _ in range(dice.randint(2, TURNS) if kind == "conversation" else 1):
            text = yield from self._turn(head, parts)
            if not text.strip():
                break
            line = yield from self._talk.answered(messages, text.strip(), temperature, self._answer, number)
            lines.append(line if kind == "chat" else {**line, "kind": kind})
            head, parts = self._talk.opening(messages), [TurnPart(dice.choice(_FURTHER), 48)]
        return lines

    def _turn(self, head: list[int], pieces: Sequence[TurnPart]) -> Generator[Ask, list[int], str]:
        """Return a user's turn, requested piece by piece; empty if a piece did not end and could not be cut."""
        text = ""
        for piece in pieces:
            given = self._talk.ids(text + piece.opening)
            more = yield Ask(head + given, 1.0, piece.tokens)
            ended = bool(more) and more[-1] in self._stop
            # Decoded with the tokens before it: some tokenizers drop the space in front of the first token.
            added = self._talk.text(given + (more[:-1] if ended else more))[len(self._talk.text(given)) :]
            if not ended:
                added = whole_sentences(added) if piece.loose else ""
            if not added.strip():
                return ""
            text += piece.opening + added
        return text


def whole_sentences(text: str) -> str:
    """Return the text up to the end of its last full sentence; empty if it holds none."""
    ends = [sentence.end() for sentence in _SENTENCE.finditer(text)]
    return text[: ends[-1]] if ends else ""


class GivenPrompts:
    """Chats whose user turns are given, each answered once at each temperature: all at the first, then at the next.

    Without a chat template only the first turn of each is answered. `most`: the most tokens of a sequence.
    """

    endless = False

    def __init__(
        self,
        tokenizer: Any,
        turns: Sequence[Sequence[str]],
        answer_tokens: int = 384,
        temperatures: Sequence[float] = TEMPERATURES,
        most: int = 1024,
    ) -> None:
        self._talk = Talk(tokenizer)
        self._turns = [list(texts) if self._talk.templated else list(texts[:1]) for texts in turns]
        self._answer, self._temperatures, self._most = answer_tokens, tuple(temperatures), most

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, up to `most`; a chat ends before a turn whose prompt has as many."""
        first = [len(self._talk.prompt([_user(texts[0])])) for texts in self._turns]
        several = any(len(texts) > 1 for texts in self._turns)
        return self._most if several else min(self._most, max(first, default=0) + self._answer)

    def chat(self, number: int) -> Chat | None:
        return self._chat(number) if number < len(self._turns) * len(self._temperatures) else None

    def _chat(self, number: int) -> Chat:
        temperature = self._temperatures[number // len(self._turns)]
        messages, lines = list[dict[str, str]](), list[DialogueLine]()
        for text in self._turns[number % len(self._turns)]:
            line = yield from self._talk.answered(messages, text, temperature, self._answer, number)
            if len(line["ids"]) == line["start"]:  # no answer
                break
            lines.append(line)
        return lines


# Where chats come from; the content of `chat(number)` depends on the number alone, None means that there are no more.
# `endless`: there is always a further chat, and writing ends if none has an answer. `longest`: tokens of a sequence.
PromptSource = OwnChats | GivenPrompts
