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
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap (or since the start)."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds
