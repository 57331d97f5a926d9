"""A first run on a GPU: the tests on the device, then a random target of a 7B model's shape, timed. Writes one JSON.

    benchmarks/gpu.sh [--device cuda] [--small] [--parts passes,plain] [--out gpu.json]

Part by part, each of which is written when it ends: the machine; `python -m pytest -m device`; identity in
bfloat16 (texts may part where rounding explains it); v(n), eagerly and as graphs; plain decoding of 1, 4 and 16 rows;
decoding with a drafter of a 160M model's shape and with an EAGLE head, whose drafts are right by plan in 70% of the
cases; and passes of two layers in int8 and nf4. After a part that fails the next one begins; none begins after 450
seconds. `--small` takes tiny models, to try the script.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from app.lanes.warm import measure_costs
from sampling.drafters.draft_model import ModelDrafter, NoDrafter
from sampling.loop import generate
from sampling.models.causal import CausalLM
from sampling.models.llama import FixedNetwork, LlamaNetwork
from sampling.sampler import KeyedSampler
from sampling.stats.metrics import Meter
from sampling.types import Drafter, FixedPace, Limits
from tests.support.proofs import SHARE, PlantedDrafter, ScriptedNetwork, identical, rounding_of
from tests.support.students import make_drafter, make_student
from utils.catalogue.specs import spec_from_argument
from utils.device_map import Graphs
from utils.errors import UserError
from utils.files import write_json
from utils.loading.build import load_model
from utils.loading.loaded import LoadOptions
from utils.logits_processors import make_processor
from utils.machine import facts
from utils.timing import Stopwatch

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 450.0  # seconds until no further part begins
TESTS = 200  # seconds that the tests may take
GAMMAS, ROWS, WIDTHS = (1, 2, 4, 8), (1, 4, 16), (1, 2, 3, 4, 5, 8, 9, 16, 32)
LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
DRAFTER = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
HEAD = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Run:
    """The models of a run and their measurements."""

    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.length, self.repeats = (12, 2) if small else (64, 9)
        self.model = self.random(SMALL if small else LARGE)
        self.eager = LlamaNetwork(self.model)
        self.capture: Any = Graphs() if device.type == "cuda" else lambda function: function
        self.script = [
            (7 * at * at + 3 * at) % self.eager.vocab_size for at in range(64 + self.length + 1 + max(GAMMAS))
        ]

    def random(self, shape: dict[str, Any]) -> Any:
        """A random Llama of this shape on the device."""
        config = LlamaConfig(vocab_size=300 if self.small else 32000, max_position_embeddings=4096, **shape)
        with torch.random.fork_rng(devices=[]), self.device:
            torch.manual_seed(0)
            return LlamaForCausalLM._from_config(config, dtype=self.dtype).eval().requires_grad_(False)  # type: ignore

    def networks(self) -> dict[str, Any]:
        """Return the target's network, run eagerly and replayed as graphs."""
        return {"eager": self.eager, "graphs": FixedNetwork(self.eager, self.capture)}

    def machine(self) -> dict[str, Any]:
        """Return facts about the machine, the bytes a second of a copy, and the time of reading the weights once."""
        size, best = 1 << (22 if self.small else 30), 0.0
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target, watch = torch.empty_like(source), Stopwatch(self.device)
        for _ in range(6):
            target.copy_(source)
            best = max(best, 2 * size / watch.lap())
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        weights = sum(weight.numel() * weight.itemsize for weight in self.model.parameters())
        floor = weights / best
        return {
            **facts(self.device),
            "device_name": name,
            "copy_bytes_per_s": best,
            "weights": weights,
            "floor_ms": 1e3 * floor,
        }

    def tests(self) -> dict[str, Any]:
        """Run the tests marked `device`, for 200 seconds at most."""
        which = ["-k", "recorded and float32"] if self.small else []
        command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "--device", str(self.device), *which]
        done = subprocess.run(
            [*command, "-n", "0", "tests/sampling/test_devices.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TESTS,
            check=False,
        )
        lines = done.stdout.splitlines()
        return {"passed": done.returncode == 0, "says": lines[-1:], "failed": [x for x in lines if "FAILED" in x]}

    def planted(self, script: list[int]) -> PlantedDrafter:
        """Return a drafter of this text, 70% of whose drafts are right."""
        return PlantedDrafter(NoDrafter(), script, SHARE, self.eager.vocab_size)

    def identity(self) -> dict[str, str]:
        """Compare texts with planted drafts with plain decoding's, eagerly and replayed."""
        precision, said = str(self.dtype).removeprefix("torch."), dict[str, str]()
        for name, network in self.networks().items():
            lm = CausalLM(network)
            rounding = rounding_of(lm, precision, self.script[:40], self.length)
            greedy, prompts = {"greedy": KeyedSampler(make_processor(0.0))}, [self.script[:40], self.script[8:60]]
            said[name] = identical(lm, self.planted, greedy, prompts, self.length, rounding)
        return said

    def passes(self) -> dict[str, dict[int, float]]:
        """Milliseconds of a pass over n tokens."""
        costs = {name: measure_costs(network, WIDTHS, 64, self.repeats) for name, network in self.networks().items()}
        return {name: {n: 1e3 * seconds for n, seconds in each.items()} for name, each in costs.items()}

    def rate(self, network: Any, drafter: Drafter, gamma: int, rows: int = 1) -> float:
        """Tokens a second of all rows, the median of three answers that follow the script; the prompt is left out."""
        lm, rates = CausalLM(ScriptedNetwork(network, self.script)), list[float]()
        for _ in range(3):
            meter, sampler = Meter(64), KeyedSampler(make_processor(0.0))  # a row is charged its share of a pass
            prompts = [self.script[:64]] * rows
            for event in generate(lm, prompts, drafter, sampler, Limits(self.length), pace=FixedPace(gamma)):
                meter.add(event)
            rates.append(meter.stats.predicted_per_second or 0.0)
        return sorted(rates)[1]

    def plain(self) -> dict[str, dict[int, float]]:
        """Tokens a second, by rows."""
        each = self.networks().items()
        return {name: {rows: self.rate(network, NoDrafter(), 0, rows) for rows in ROWS} for name, network in each}

    def drafted(self) -> dict[str, dict[str, float]]:
        """Tokens a second with drafts of which 70% are right, by gamma and by the drafter whose passes are run for
        them."""
        drafter = LlamaNetwork(self.random(SMALL if self.small else DRAFTER))
        shape: dict[str, Any] = {} if self.small else {**HEAD, "head_dim": 64}
        student = make_student("feature", self.model, dtype=self.dtype, **shape)
        head = make_drafter(student.to(self.device))
        drafters: dict[str, Any] = {"eager": drafter, "graphs": FixedNetwork(drafter, self.capture)}
        rates = dict[str, dict[str, float]]()
        for name, network in self.networks().items():
            rates[name] = {}
            for who, inner in {"drafter": ModelDrafter(CausalLM(drafters[name], "drafter")), "head": head}.items():
                for gamma in GAMMAS:
                    planted = PlantedDrafter(inner, self.script, SHARE, self.eager.vocab_size)
                    rates[name][f"{who}, gamma {gamma}"] = self.rate(network, planted, gamma)
        return rates

    def few_bits(self) -> dict[str, dict[int, float] | str]:
        """Milliseconds of a pass over n tokens of two layers, by the bits of their weights."""
        times = dict[str, dict[int, float] | str]()
        shape = {**(SMALL if self.small else LARGE), "num_hidden_layers": 2}
        with tempfile.TemporaryDirectory() as name:
            self.random(shape).save_pretrained(name)
            spec = spec_from_argument(name)
            for kind in ("none", "int8", "nf4"):
                try:
                    model = load_model(spec, Path(name), LoadOptions(), str(self.device), kind).model
                except UserError as error:
                    times[kind] = str(error)
                    continue
                costs = measure_costs(CausalLM(model), WIDTHS, 64, self.repeats)
                times[kind] = {n: 1e3 * seconds for n, seconds in costs.items()}
        return times


PARTS = ("machine", "tests", "identity", "passes", "plain", "drafted", "few_bits")


def main() -> int:
    """Run the parts; return 1 if one failed or had no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where to run: cuda[:N] or cpu")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, separated by commas")
    parser.add_argument("--out", default="gpu.json", help="the file to write")
    flags = parser.parse_args()
    started, run, results = time.monotonic(), Run(torch.device(flags.device), flags.small), dict[str, Any]()
    for part in flags.parts.split(","):
        begun = time.monotonic()
        try:
            late = begun - started > LIMIT
            results[part] = {"error": "no time was left"} if late else getattr(run, part)()
        except Exception as error:  # the next part may still work
            results[part] = {"error": f"{type(error).__name__}: {error}"[:500]}
        results[part]["seconds"] = round(time.monotonic() - begun, 1)
        write_json(Path(flags.out), results)
        sys.stdout.write(f"{part}: {results[part]['seconds']} s{'' if 'error' not in results[part] else ', failed'}\n")
    return int(
        any("error" in part for part in results.values()) or not results.get("tests", {"passed": True}).get("passed")
    )


if __name__ == "__main__":
    sys.exit(main())
