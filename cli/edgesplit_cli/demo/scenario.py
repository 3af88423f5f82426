"""What the demo tells: which devices on which links, and what goes wrong when. Plain values, no processes."""

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
    """One emulated device of the story."""

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
DROPPED = "pi3-lte"
"""Whose link drops to a tenth."""
KILLED = "pi4-wifi"
"""Whose agent is killed."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at a moment of the story."""

    at_s: float
    kind: EventKind
    text: str


def timeline(pace: float = 1.0) -> tuple[Event, ...]:
    """The story; `pace` stretches it. The outage of the offload server lasts ten seconds at pace 1."""
    story = (
        Event(0, "calm", "all three devices stream frames"),
        Event(9, "link-drop", "the LTE link drops to a tenth"),
        Event(21, "link-back", "the LTE link comes back"),
        Event(31, "offload-killed", "the offload server is killed (SIGKILL)"),
        Event(41, "offload-back", "the offload server comes back"),
        Event(50, "agent-killed", "the Raspberry Pi 4's agent is killed (SIGKILL) and restarted"),
        Event(60, "end", "the end"),
    )
    return tuple(Event(event.at_s * pace, event.kind, event.text) for event in story)
