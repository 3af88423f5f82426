"""The demo's scenario: the devices, their links, and the events with their times. Plain values, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal["calm", "link-drop", "link-back", "offload-killed", "offload-back", "agent-killed", "end"]

MODEL = "digits"
INPUT_SPEC = "image/jpeg 128x128 q90 rgb nchw scale=1/255"
FRAME_PERIOD_S = 0.18
DEADLINE_S = 8.0


@dataclass(frozen=True, slots=True)
class DemoDevice:
    """One emulated device."""

    name: str
    profile: str
    link: str
    title: str
    keep_raw_input: bool = False


DEVICES = (
    DemoDevice(
        "pi4-wifi", "raspberrypi4", "wifi", "Raspberry Pi 4 on Wi-Fi, raw frames may not leave it", keep_raw_input=True
    ),
    DemoDevice("pi3-lte", "raspberrypi3b+", "lte", "Raspberry Pi 3B+ on LTE"),
    DemoDevice("nano-3g", "jetson-nano", "3g", "Jetson Nano on 3G"),
)
SLOWED_DEVICE = "pi3-lte"
"""The device whose link drops to a tenth."""
KILLED_DEVICE = "pi4-wifi"
"""The device whose agent is killed."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event at a time of the scenario."""

    at_s: float
    kind: EventKind
    text: str


def scenario_events(time_scale: float = 1.0) -> tuple[Event, ...]:
    """The events, their times multiplied by `time_scale`. The offload server's outage lasts ten seconds at 1."""
    events = (
        Event(0, "calm", "all three devices stream frames"),
        Event(9, "link-drop", "the LTE link drops to a tenth"),
        Event(21, "link-back", "the LTE link comes back"),
        Event(31, "offload-killed", "the offload server is killed (SIGKILL)"),
        Event(41, "offload-back", "the offload server comes back"),
        Event(50, "agent-killed", "the Raspberry Pi 4's agent is killed (SIGKILL) and restarted"),
        Event(60, "end", "the end"),
    )
    return tuple(Event(event.at_s * time_scale, event.kind, event.text) for event in events)
