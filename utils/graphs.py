"""Passes as CUDA graphs: the kernels of a pass are recorded once and launched together later. Knows no models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Out = TypeVar("Out")

WARM = 2  # calls before the recording, in which libraries make what they need once


class Graphs:
    """Records functions as graphs that share one pool of memory: the result of a replay is read before the next."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Out]) -> Callable[[], Out]:
        """Return what replays `function`, which must read and write the same memory at every call."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self._pool):
            out = function()

        def replay() -> Out:
            graph.replay()
            return out

        return replay
