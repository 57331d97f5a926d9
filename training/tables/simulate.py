"""How far a drafter without a model gets, played against recorded answers: no model runs.

`python -m training.tables.simulate FILE.jsonl` holds 60 conversations of each temperature (0 and 0.7) out,
builds tables from the rest and prints a markdown table of tokens per pass. For point masses this is
what decoding gives: a draft is accepted iff it is the token that the target's own noise chose.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sampling.drafters.tables.prompt_lookup import TablesDrafter
from sampling.drafters.tables.table_file import StaticTables
from sampling.drafters.tables.tree import TableTreeDrafter
from sampling.rows import ALONE
from sampling.sampler import KeyedSampler
from sampling.types import Budget, Draft, Drafter, above
from training.tables.build import Passage, build
from utils.logits_processors import make_processor

HELD_OUT = 60
LENGTH = 128  # tokens of each answer that are played
SLOPE = 0.03  # what a drafted token adds to a pass, in one-token passes
GAMMAS = (1, 2, 4, 8, 12)


@dataclass(frozen=True)
class Played:
    """Counts over all rounds. The opening token counts nowhere, as in the program's own figures."""

    tokens: int
    passes: int
    drafted: int
    accepted: int

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def speedup(self) -> float:
        """Over plain decoding where a pass over 1 + n tokens costs 1 + SLOPE · n."""
        return self.tokens / (self.passes + SLOPE * self.drafted)


def play(passages: Sequence[Passage], drafter: Drafter, gamma: int, length: int = LENGTH) -> Played:
    """Draft `gamma` tokens a round for each recorded answer (the ids from `start` on)."""
    sampler = KeyedSampler(make_processor(0.0))
    tokens = passes = drafted = accepted = 0
    for passage in passages:
        ids = list(passage.ids[: passage.start + length])
        at = passage.start + 1
        drafter.start([ids[:at]], ALONE, ALONE)
        while at < len(ids):
            want = min(gamma, len(ids) - at - 1)
            draft = drafter.propose([ids[:at]], Budget([want]), sampler) if want else Draft.empty(1)
            held, count = _held(draft, ids[at : at + want]), draft.tokens.shape[1]
            tokens, passes = tokens + held + 1, passes + 1
            drafted, accepted = drafted + count, accepted + held
            at += held + 1
    return Played(tokens, passes, drafted, accepted)


def _held(draft: Draft, answer: Sequence[int]) -> int:
    """How many of the answer's tokens are a way down from the root of the draft of one row."""
    tokens = draft.tokens[0].tolist()
    down = {edge: node for node, edge in enumerate(zip(above(draft.parents, len(tokens)), tokens, strict=True))}
    node = -1
    for count, token in enumerate(answer):
        if (node, token) not in down:
            return count
        node = down[node, token]
    return len(answer)


def split(rows: Sequence[dict[str, Any]], temperature: float, count: int = HELD_OUT) -> list[int]:
    """Indices of `count` conversations of that temperature, evenly spread; always the same ones."""
    all_of_them = [index for index, row in enumerate(rows) if row["temperature"] == temperature]
    return all_of_them[:: max(1, len(all_of_them) // count)][:count]


def figures(rows: Sequence[dict[str, Any]], max_mb: float, gammas: Sequence[int] = GAMMAS) -> str:
    """The table, in markdown: tokens per pass (share accepted, speed-up at v(n) = 1 + SLOPE · (n − 1))."""
    held = {temperature: split(rows, temperature) for temperature in (0.0, 0.7)}
    out = {index for part in held.values() for index in part}
    rest = [Passage(row["ids"], row["start"]) for index, row in enumerate(rows) if index not in out]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tables.bin")
        size = 1 + max(max(row["ids"]) for row in rows)
        facts = build(rest, file, vocab_size=size, fingerprint=None, source="held-out split", max_mb=max_mb, choices=3)
        tables = StaticTables.open(file)
        drafters: dict[str, Drafter] = {
            "matches alone": TablesDrafter(None, least=0),
            "tables alone": TablesDrafter(tables, least=0, longest=0),
            "any match, then tables": TablesDrafter(tables, least=0, sure_match=1),
            "match of 2 or more, then tables": TablesDrafter(tables, least=0),
            "the same, weak chains cut": TablesDrafter(tables),
            "a tree of γ nodes, paths below .05 cut": TableTreeDrafter(tables, least=0.05),
        }
        lines = [f"{facts['tokens']:,} tokens counted, {facts['bytes'] / 1e6:.1f} MB", ""]
        lines += ["| temperature | drafts | " + " | ".join(f"γ = {gamma}" for gamma in gammas) + " |"]
        lines += ["| --- " * (2 + len(gammas)) + "|"]
        for temperature, indices in held.items():
            passages = [Passage(rows[index]["ids"], rows[index]["start"]) for index in indices]
            for name, drafter in drafters.items():
                cells = [_cell(play(passages, drafter, gamma)) for gamma in gammas]
                lines.append(f"| {temperature:g} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(played: Played) -> str:
    share = played.accepted / played.drafted if played.drafted else 0.0
    return f"{played.tokens_per_pass:.2f} ({share:.0%}, {played.speedup:.2f}×)"


def main(arguments: Sequence[str]) -> int:
    """FILE.jsonl [MAX_MB]; 0, or 2 for a usage error."""
    if not 1 <= len(arguments) <= 2:
        sys.stderr.write("usage: python -m training.tables.simulate FILE.jsonl [MAX_MB]\n")
        return 2
    lines = Path(arguments[0]).read_text(encoding="utf-8").splitlines()
    limit = float(arguments[1]) if len(arguments) > 1 else 10.0
    rows = [row for row in map(json.loads, lines) if row["ids"]]
    sys.stdout.write(figures(rows, limit) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
