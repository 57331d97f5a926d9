"""How a student is trained, and what a training says of itself. Knows no examples and no modules."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from training.losses import Held, Law


@dataclass(frozen=True)
class Job:
    """How a student is trained.

    `law` is what it learns: the target's full law within the short list, its k most probable ids, or "hard"; `hard`
    puts that share on the favourite. `steps` drafted steps are unrolled (feature), each weighted by `decay` more;
    the first part of the schedule, `single`, unrolls only one.
    `minutes` ends training early with the schedule brought down in time (None: after `epochs`).
    """

    epochs: float = 4.0
    lr: float = 3e-3
    batch_tokens: int = 1536
    law: Law = "full"
    hard: float = 0.0
    steps: int = 1
    single: float = 0.4
    decay: float = 0.8
    prompt_weight: float = 0.3
    warmup: float = 0.03
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 42
    minutes: float | None = None
    evaluations: int = 12
    patience: int = 4
    depth: int = 4
    save_every: float = 60.0
    precise: bool = False  # float32 products also where 16 bit is to be had


@dataclass(frozen=True)
class Mark:
    """A point of the curve."""

    step: int
    tokens: int
    seconds: float
    loss: float
    held: Held

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_pass": self.held.tokens_per_pass}


@dataclass(frozen=True)
class Result:
    """`curve` ends with the last evaluation; `finished`: not interrupted. The best student lies in the folder."""

    curve: list[dict[str, Any]]
    best: dict[str, Any]
    finished: bool
    steps: int
    seconds: float
