"""How the user's turns of training chats begin, by kind of task; the target writes the rest of them itself.

Every beginning is of our own making and of no benchmark; in kind they ask what people ask: a text to be summarised,
passages to be asked about, a sentence to be translated, a sum, a question, a list, some code. Knows no tokenizer and
no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Part:
    """A piece of a turn: `opening` is given, then the target goes on for at most `tokens`.

    A part that is `loose` may be cut there, at its last full sentence; another one has to end by itself.
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


def _begun(beginnings: Sequence[str]) -> Callable[[Random], list[Part]]:
    return lambda dice: [Part(dice.choice(beginnings))]


def _sum(dice: Random) -> list[Part]:
    """Two facts to reckon with, half of the time with the question's first words."""
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
    return [Part(f"{story} {question}" if dice.random() < 0.5 else story)]


def _extract(dice: Random) -> list[Part]:
    return [Part(dice.choice(_EXTRACTS), 128, loose=True)]


def _passage(dice: Random) -> list[Part]:
    passage = Part(dice.choice(_SUBJECTS), dice.choice((120, 200)), loose=True)
    return [passage, Part("\n" + dice.choice(_ASKS), 32)]


def _article(dice: Random) -> list[Part]:
    return [Part(dice.choice(_SUMMARIES) + dice.choice(_HEADS), 224, loose=True)]


def _sentence(dice: Random) -> list[Part]:
    return [Part(dice.choice(_TRANSLATIONS) + dice.choice(_GERMAN), 48)]


KINDS: Mapping[str, Callable[[Random], list[Part]]] = {
    "chat": _begun(("",)),
    "writing": _begun(_TASKS),
    "coding": _begun(_PROGRAMS),
    "extraction": _extract,
    "qa": _begun(_ASKS),
    "maths": _sum,
    "rag": _passage,
    "summarization": _article,
    "translation": _sentence,
}
"""Kind → the pieces of one user's turn, drawn by the dice."""
