"""Compares the probabilities with which sources offer tokens with how often the answer contains these tokens.

    python benchmarks/pool.py TEXTS [--limit 120] [--temperatures 0 0.7] [--tokens 128]

TEXTS: conversations of `distill --stage text` that no drafter was trained on; the answers are written again. The
default pair drafts trees of ten nodes and asks its head at three levels of every round. Prints, by source, depth and
kind of text, how often a token offered with a probability came next; and the constants of the pool
(sampling/drafters/proposal.py) under which the first half of the conversations is likeliest, with the mean nats a token
of the second half under these and under the present constants.
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
from sampling.drafters.tables.lookup import LookupDrafter
from sampling.events import Step
from sampling.gamma import worth
from sampling.gamma.constants import MAX_PROB

console = Console(highlight=False, soft_wrap=True)
LEVELS = 3  # at which the head runs
HEAD_ONLY = 99  # the source of a token that only the head offers
NAMES = "LISTED_WEIGHT", "UNLISTED_WEIGHT", "SHARPENING", "POOLED_NOISE_SHARE"


class Offered(NamedTuple):
    """The N tokens offered after one token. Of each token: the `source` other than the head, and its probability by
    this source `alone`, by all `others`, by the head (`own`), and `pooled`; its `noise`. `came`: the index of the token
    that came next; N: none of them."""

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
    """Keeps the offers that the pool gets in a round until the tokens that come next are known."""

    def __init__(self) -> None:
        self.kept: list[Offered] = []
        self._round: list[tuple[Any, list[Any]]] = []
        self._last: list[Any] = []
        pool, add = LookupDrafter.pool, proposal.Growth.add

        def noted(drafter: Any, node: Any, candidates: Any, offers: Any) -> Any:
            result, left, known = pool(drafter, node, candidates, offers), 1.0, {}
            for candidate in candidates:  # without the noise
                known[candidate.token] = candidate._replace(p=left * candidate.prob)
                left *= 1 - candidate.prob
            tokens = [candidate.token for candidate in result]
            factors = proposal.noise_factors(vars(drafter)["_noise"], node.depth, tokens, 1.0)
            self._last = [result, known, dict(offers), np.log(factors)]
            return result

        def added(growth: Any, parent: Any, candidates: Any, *rest: Any) -> None:
            if self._last and candidates is self._last[0]:
                self._round.append((parent, self._last))
            add(growth, parent, candidates, *rest)

        LookupDrafter.pool, proposal.Growth.add = noted, added  # type: ignore

    def close(self, kind: str, emitted: Sequence[int]) -> None:
        """End a round that emitted these tokens."""
        rounds, self._round = self._round, []
        for parent, (result, known, own, noise) in rounds:
            if parent.tokens != list(emitted[: parent.depth]) or len(emitted) <= parent.depth or not result:
                continue
            tokens = [candidate.token for candidate in result]
            none = proposal.Candidate(0, HEAD_ONLY, 0.0, 0.0)
            others = [known.get(token, none) for token in tokens]
            came = emitted[parent.depth]
            self.kept.append(
                Offered(
                    *(kind, parent.depth, np.array([other.source for other in others])),
                    *(np.array([other.prob for other in others]), np.array([other.p for other in others])),
                    *(np.array([own.get(token, 0.0) for token in tokens]), noise),
                    np.array([candidate.p for candidate in result]),
                    tokens.index(came) if came in tokens else len(tokens),
                )
            )


def nats(kept: list[Offered], trust: Sequence[float], constants: Sequence[float]) -> float:
    """Return the mean −log probability of the next token; all tokens without an offer have one probability together."""
    listed, unlisted, sharpening, share = constants
    each = np.array([*trust, 0.0])
    total = 0.0
    for offer in kept:
        weights = (each[np.minimum(offer.source, len(trust))] * offer.others + offer.own + listed) ** sharpening
        weights = np.append(weights * np.exp(np.minimum(share * offer.noise, proposal.MAX_NOISE)), unlisted)
        total -= float(np.log(min(MAX_PROB, weights[offer.came] / weights.sum())))
    return total / len(kept)


def fitted(kept: list[Offered], trust: list[float], constants: list[float]) -> tuple[list[float], list[float]]:
    """Return the trust in each source but the head, and the constants, under which the next tokens are likeliest."""
    start = np.log([*trust, *constants])
    split = len(trust)

    def cost(x: np.ndarray) -> float:
        values = np.exp(x)
        return nats(kept, values[:split], values[split:]) + 1e-4 * float(((x - start) ** 2).sum())

    best = np.exp(minimize(cost, start, method="Powell", options={"maxiter": 6, "ftol": 1e-5}).x)
    return list(best[:split]), list(best[split:])


def reliability(name: str, pairs: list[tuple[float, bool]]) -> None:
    """Print how often offered tokens came next, by tenths of their probability."""
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
    worth.ModelWorth.pays = lambda self, depth, *_: depth < LEVELS  # type: ignore
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
    for offer in kept:
        heat = offer.kind.partition(", ")[2]
        for index in range(len(offer.own)):
            came = index == offer.came
            by[f"pooled, depth {offer.depth + 1}, {heat}"].append((offer.pooled[index], came))
            by[f"pooled, {offer.kind}"].append((offer.pooled[index], came))
            if offer.own[index]:
                by[f"{sources[-1]}, depth {offer.depth + 1}, {heat}"].append((offer.own[index], came))
            if offer.source[index] < len(sources):
                by[f"{sources[offer.source[index]]}, {heat}"].append((offer.alone[index], came))
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
