"""A clock that waits for the device, so that seconds are finished compute."""

import time

import torch


def synchronize(device: torch.device | None) -> None:
    """Wait until everything queued on `device` is done; nothing to do on the CPU."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Laps of device-synchronised wall time, in seconds."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device, self._last = device, 0.0
        self.lap()

    def lap(self) -> float:
        """Seconds since the last lap (or since the start)."""
        synchronize(self._device)
        before, self._last = self._last, time.perf_counter()
        return self._last - before
