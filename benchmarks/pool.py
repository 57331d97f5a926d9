"""How sure the sources of drafts may be: what they offered after each token of an answer, and what came.

    python benchmarks/pool.py TEXTS [--limit 120] [--temperatures 0 0.7] [--tokens 128]

TEXTS: conversations of `distill --stage text` that no drafter was trained on; the answers are written again. The
default pair drafts trees of ten nodes and asks its head at three levels of every round. Prints, by source, depth and
kind of text, how often a token offered with a probability came; and the constants of the pool
(sampling/drafters/proposal.py) that make what came likeliest in the first half of the conversations, with the nats a
token that they and the present ones take in the second half.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from scipy.optimize import minimize

sys.path.insert(0, str(Path.cwd()))

from app.command_line.arguments import read_request
from app.command_line.main import layers_of
from app.screen.output import load_engine
from sampling.drafters import proposal
from sampling.events import Step
from sampling.gamma import worth

console = Console(highlight=False, soft_wrap=True)
LEVELS = 3  # at which the head runs
NOBODY = 99  # the source of a token that only the head offers
NAMES = "LISTED_WEIGHT", "UNLISTED_WEIGHT", "SHARPENING", "POOLED_NOISE_SHARE"


class Offered(NamedTuple):
    """What was offered after one token. By token [N]: its source but the head (their number: none), that source's own
    probability, the one it has beside other sources, the head's, its noise, the pooled one. `came`: the index of the
    token that came; N: none of them."""

    kind: str
    depth: int
    source: np.ndarray
    alone: np.ndarray
    others: np.ndarray
    own: np.ndarray
    noise: np.ndarray
    pooled: np.ndarray
    came: int


class Recorder:
    """Keeps what the pool is given in a round, until it is known what came."""

    def __init__(self) -> None:
        self.kept: list[Offered] = []
        self._round: list[tuple[Any, list[Any]]] = []
        self._last: list[Any] = []
        pooled, add = proposal.pooled, proposal.Growth.add

        def noted(trust: Any, candidates: Any, offers: Any, depth: int, noise: Any) -> Any:
            result = pooled(trust, candidates, offers, depth, noise)
            added = noise(depth, [one.token for one in result]) if noise else [0.0] * len(result)
            self._last = [result, {one.token: one for one in candidates}, dict(offers), added]
            return result

        def added(growth: Any, parent: Any, candidates: Any, *rest: Any) -> None:
            if self._last and candidates is self._last[0]:
                self._round.append((parent, self._last))
            add(growth, parent, candidates, *rest)

        vars(proposal)["pooled"] = noted
        proposal.Growth.add = added  # type: ignore[method-assign]

    def close(self, kind: str, emitted: Sequence[int]) -> None:
        """End a round that brought these tokens."""
        rounds, self._round = self._round, []
        for parent, (result, known, own, noise) in rounds:
            if parent.tokens != list(emitted[: parent.depth]) or len(emitted) <= parent.depth or not result:
                continue
            tokens = [one.token for one in result]
            none = proposal.Candidate(0, NOBODY, 0.0, 0.0)
            others = [known.get(token, none) for token in tokens]
            came = emitted[parent.depth]
            self.kept.append(
                Offered(
                    *(kind, parent.depth, np.array([one.source for one in others])),
                    *(np.array([one.prob for one in others]), np.array([one.p for one in others])),
                    *(np.array([own.get(token, 0.0) for token in tokens]), np.array(noise)),
                    np.array([one.p for one in result]),
                    tokens.index(came) if came in tokens else len(tokens),
                )
            )


def nats(kept: list[Offered], trust: Sequence[float], constants: Sequence[float]) -> float:
    """Return the mean −log probability of what came; tokens that nobody offered have one probability together."""
    listed, unlisted, sharpening, share = constants
    each = np.array([*trust, 0.0])
    total = 0.0
    for one in kept:
        weights = (each[np.minimum(one.source, len(trust))] * one.others + one.own + listed) ** sharpening
        weights = np.append(weights * np.exp(np.minimum(share * one.noise, proposal.MAX_NOISE)), unlisted)
        total -= float(np.log(min(proposal.MAX_PROB, weights[one.came] / weights.sum())))
    return total / len(kept)


def fitted(kept: list[Offered], trust: list[float], constants: list[float]) -> tuple[list[float], list[float]]:
    """Return the trust in each source but the head and the constants under which what came is likeliest."""
    start = np.log([*trust, *constants])
    split = len(trust)

    def cost(x: np.ndarray) -> float:
        values = np.exp(x)
        return nats(kept, values[:split], values[split:]) + 1e-4 * float(((x - start) ** 2).sum())

    best = np.exp(minimize(cost, start, method="Powell", options={"maxiter": 6, "ftol": 1e-5}).x)
    return list(best[:split]), list(best[split:])


def reliability(name: str, pairs: list[tuple[float, bool]]) -> None:
    """Print how often offers of each tenth of probability came."""
    p, came = np.array([p for p, _ in pairs]), np.array([came for _, came in pairs])
    tenth = np.minimum((10 * p).astype(int), 9)
    cells = [
        f"{p[tenth == n].mean():.2f}:{came[tenth == n].mean():.2f}" if (tenth == n).sum() >= 30 else "-"
        for n in range(10)
    ]
    console.print(f"{name:28} {len(p):7} offers  " + "  ".join(cells))


def main() -> None:
    """Print the tables and the constants."""
    parser = argparse.ArgumentParser(description="How sure the sources of drafts may be.")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--limit", type=int, default=120, help="conversations")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    recorder = Recorder()
    worth.ModelWorth.may_pay = worth.ModelWorth.pays = lambda self, depth, *_: depth < LEVELS  # type: ignore
    request = read_request(["check", "smollm2"], os.environ)
    changed = {"gamma": 4, "nodes": 10, "max_new_tokens": args.tokens}
    settings = layers_of(request).settings.changed(expand="dynamic", **changed)
    engine: Any = load_engine(settings, request.options, lambda: False)
    rows = [json.loads(line) for line in args.texts.read_text().splitlines()]
    rows = [row for row in rows if row["ids"] and row["start"] < 1500]
    rows = rows[:: max(1, len(rows) // args.limit)]
    halves: tuple[list[Offered], list[Offered]] = [], []
    for number, row in enumerate(rows):
        for temperature in args.temperatures:
            lane = engine.lane("spec", settings.changed(temperature=temperature))
            most = min(args.tokens, len(row["ids"]) - row["start"] + 1)
            lane.limits = replace(lane.limits, max_new_tokens=most)
            for event in lane.run(row["ids"][: row["start"]]):
                if isinstance(event, Step):
                    recorder.close(f"{row.get('kind', 'chat')}, T {temperature:g}", event.emitted)
            halves[2 * number >= len(rows)].extend(recorder.kept)
            recorder.kept = []
    sources, kept = list(lane.drafter.traits.names), halves[0] + halves[1]
    console.print(f"{len(rows)} conversations, {len(kept)} places, sources {', '.join(sources)}")
    by = defaultdict[str, list[tuple[float, bool]]](list)
    for one in kept:
        heat = one.kind.partition(", ")[2]
        for index in range(len(one.own)):
            came = index == one.came
            by[f"pooled, depth {one.depth + 1}, {heat}"].append((one.pooled[index], came))
            by[f"pooled, {one.kind}"].append((one.pooled[index], came))
            if one.own[index]:
                by[f"{sources[-1]}, depth {one.depth + 1}, {heat}"].append((one.own[index], came))
            if one.source[index] < len(sources):
                by[f"{sources[one.source[index]]}, {heat}"].append((one.alone[index], came))
    for name, pairs in sorted(by.items()):
        reliability(name, pairs)
    trust = [source.trust for source in lane.drafter.sources][:-1]
    now = [getattr(proposal, name) for name in NAMES]
    best = fitted(halves[0], trust, now)
    for name, constants in (("now", (trust, now)), ("fitted", best)):
        console.print(f"{name}: {nats(halves[1], *constants):.4f} nats; " + shown(sources, *constants))


def shown(sources: list[str], trust: Sequence[float], constants: Sequence[float]) -> str:
    """Return the constants in words."""
    each = [*zip(sources, trust, strict=False), *zip(NAMES, constants, strict=True)]
    return ", ".join(f"{name} {value:.4g}" for name, value in each)


if __name__ == "__main__":
    main()
