"""The device's speed, learnt from the measured times of the requests that it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

from edgesplit_agent.offload.target import OffloadTarget
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.telemetry.request_record import RequestRecord


@dataclass(frozen=True)
class DeviceSpeed:
    """Learns the slices' measured times, and how fast the device is with its present clock cap divided out."""

    targets: Callable[[], Iterable[OffloadTarget]]
    power: PowerMonitor

    def finished(self, record: RequestRecord) -> None:
        """Learn from one request's slices."""
        if record.timing is None:
            return
        release, seconds = record.release, record.timing.seconds
        release.learn(record.timing)
        # The cap is divided out: it is applied again, at its current value, by the engine and `select_row`.
        cap = self.power.slowdown
        is_repriced = release.on_work({name: run_s / cap for name, run_s in seconds.items()}, monotonic())
        measured = sum(s for name, s in seconds.items() if name in release.plan.slice_s)
        for target in self.targets():
            if is_repriced:
                target.on_repriced()
            target.on_compute(measured / cap, release.predicted_s(seconds))
