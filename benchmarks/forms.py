"""Tokens a pass and speed-up of the lanes under JSON schemas: plain constrained decoding of the same target is 1.

    python benchmarks/forms.py [--pair NAME] [--lanes spec,tables,ngram] [--repeat 3] [--gamma auto] [--file F.jsonl]

Each schema is answered by every lane in turn, several times; the least time counts. Texts must be equal. `forced`: the
share of the answer's tokens that the form itself drafted, because no other token could follow.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.chat.conversation import Conversation
from app.screen.output import load_engine
from app.settings.table import ModelOptions, Settings
from sampling.stats.metrics import Meter
from sampling.stats.summary import Stats

TOKENS = 300


def answered(lane: Any, prompt: list[int]) -> tuple[list[int], Stats]:
    """Return the ids of a lane's answer, and its figures."""
    meter = Meter(len(prompt))
    for event in lane.run(prompt):
        meter.add(event)
    return meter.ids, meter.stats


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--lanes", default="spec,tables,ngram")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gamma", default="auto")
    parser.add_argument("--file", default=Path(__file__).resolve().parents[1] / "docs/examples/schemas.jsonl")
    args = parser.parse_args()
    options = ModelOptions(pair=args.pair, offline=True)
    engine = load_engine(Settings(), options, lambda: False)
    names, sums = ("ar", *args.lanes.split(",")), dict[str, list[float]]()
    say("| schema | tokens | forced | " + " | ".join(f"{name}: tokens a pass | speed-up" for name in names[1:]) + " |")
    say("|---|---|---|" + "---|---|" * (len(names) - 1))
    for line in Path(args.file).read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        settings = Settings(
            compare=names, gamma=args.gamma, max_new_tokens=TOKENS, json_schema=json.dumps(case["schema"])
        )
        chat = Conversation(engine.tokenizer, engine.stop_ids, engine.context)
        prompt, best = chat.plan(case["prompt"]).prompt, dict[str, Stats]()
        text, forced = list[int](), 0
        for _ in range(args.repeat):
            for lane in engine.lanes(settings):
                ids, stats = answered(lane, prompt)
                text = text or ids
                assert ids == text, f"{case['name']}: {lane.name} says something else"
                if lane.name not in best or stats.predicted_ms < best[lane.name].predicted_ms:
                    best[lane.name] = stats
                if lane.drafts and len(stats.sources) == len(lane.source_names):
                    forced = max(forced, stats.sources[-1][1])
        answer = engine.tokenizer.decode([token for token in text if token not in engine.stop_ids])
        assert isinstance(json.loads(answer), dict | list), f"{case['name']}: cut at {TOKENS} tokens"
        cells = [case["name"], str(len(text)), f"{forced / len(text):.0%}"]
        for name in names[1:]:
            faster = best["ar"].predicted_ms / best[name].predicted_ms
            cells += [f"{best[name].tokens_per_pass or 0:.2f}", f"{faster:.2f}"]
            sums.setdefault(name, []).append(faster)
        say(f"| {' | '.join(cells)} |")
    means = ", ".join(f"{name} {sum(all_) / len(all_):.2f}" for name, all_ in sums.items())
    say(f"\nmean speed-up: {means}")


if __name__ == "__main__":
    main()
