"""The benchmark's own small prompt set: Spec-Bench's kinds of task in our own words. Knows no models."""

from __future__ import annotations

_BRIDGE = (
    "The old stone bridge at Harrow Mill was closed to cars on Monday after an inspector found cracks in its middle "
    "pier. The town had planned to repair it next year for 40,000 euros. The council now expects twice that sum, "
    "because the pier must be rebuilt from the river bed up. Until then a ferry carries people on foot and on bicycles "
    "between seven in the morning and nine at night. Drivers have to take the road over Upper Harrow, which is eleven "
    "kilometres longer. The school bus leaves twenty minutes earlier from Wednesday on."
)
_GARDEN = (
    "Minutes of the garden club, 4 May. Present: nine members. Ines reported that the greenhouse heating failed on two "
    "nights in April and that about sixty seedlings were lost. Tom has found a second-hand heater for 120 euros; the "
    "club agreed to buy it. The plant sale moves from the 11th to the 18th of May, as the hall is taken. Ruth will "
    "print new posters. Nobody has yet offered to run the cake stand. The next meeting is on the 1st of June."
)
_WHALES = (
    "[1] The blue whale is the largest animal that has ever lived; adults reach 30 metres.\n"
    "[2] Sperm whales dive deeper than 1,000 metres for squid and can stay below for more than an hour.\n"
    "[3] Humpback whales sing; a song may last twenty minutes and is repeated for hours.\n"
    "[4] Baleen whales filter small animals out of the water; toothed whales hunt single prey."
)
_LIBRARY = (
    "Opening hours: Tuesday to Friday 10 to 18, Saturday 10 to 14. Books are lent for four weeks and may be renewed "
    "twice unless somebody has reserved them. Films are lent for one week and cannot be renewed. The fee for a day's "
    "delay is 20 cents a book and 1 euro a film. Children under 14 pay no fees."
)

FIRST_QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it line by line."

PROMPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("writing", ("Write a short story about a lighthouse keeper who finds a message in a bottle.",)),
    ("coding", (FIRST_QUESTION,)),
    ("reasoning", ("A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show your steps.",)),
    ("extraction", ("List the colours in this text: a red barn, two white horses, a green tractor.",)),
    ("rewriting", ("Rewrite in formal English, then as a poem: thanks a lot, see you all at the beach!",)),
    ("explaining", ("Explain in simple words why the sky is blue and why sunsets are red.",)),
    (
        "chat",
        (
            "I have a free weekend and like walking and old trains. What could I do?",
            "That sounds good. Make a packing list for it, with at most eight things.",
        ),
    ),
    ("translation", ("Translate German to English: Der Zug nach Hamburg hat heute vierzig Minuten Verspätung.",)),
    ("translation", ("Translate French to English: Le marché ouvre à huit heures, mais il vaut mieux venir tôt.",)),
    ("summarisation", (f"Summarise in two sentences: {_BRIDGE}",)),
    ("summarisation", (f"Summarise for a member who was away: {_GARDEN}",)),
    ("qa", ("Which planet of our solar system has the shortest year, and how long is it?",)),
    ("maths", ("A baker sells 36 rolls at 45 cents and 8 loaves at 3.20 euros. How much is that in all?",)),
    ("maths", ("Anna is three times as old as Ben. In ten years she will be twice as old. How old are they now?",)),
    ("retrieval", (f"Use only these notes. Which whales dive deepest, and what for?\n\n{_WHALES}",)),
    ("retrieval", (f"{_LIBRARY}\n\nI am 30 and bring a book and a film back three days late. What do I pay?",)),
)
"""(category, turns) of each prompt; their question_id is their number, from 1."""
