"""The demo's scenario: the devices, their links, and the events with their times. Plain values, no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal["calm", "link-drop", "link-back", "offload-killed", "offload-back", "agent-killed", "end"]

MODEL = "digits"
"""The whole model; other answers are counted as changed by comparison with its."""
STUDENT = "student"
FAMILY = "numerals"
"""Student and whole model. Its variants have the models' names."""
CHANGED = "2%"
"""Share of answers that the family's cascade may change."""
AUDIT_SHARE = "5%"
"""Share of frames that the cascade draws for audit: more than usual, as the demo is short."""
SAMPLES = 300
"""Labelled frames on which the promise is made: of the digits that are streamed, but other frames of them."""
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
    has_cascade: bool = False
    """It runs the family with a cascade, and not the whole model."""

    @property
    def model(self) -> str:
        """What it runs."""
        return FAMILY if self.has_cascade else MODEL

    @property
    def plan_options(self) -> tuple[str, ...]:
        """Options of the commands that plan and deploy it."""
        if self.has_cascade:
            return ("--cascade", "--changed", CHANGED, "--audit-share", AUDIT_SHARE)
        return ("--keep-raw-input",) if self.keep_raw_input else ()


DEVICES = (
    DemoDevice(
        "pi4-wifi", "raspberrypi4", "wifi", "Raspberry Pi 4 on Wi-Fi, raw frames may not leave it", keep_raw_input=True
    ),
    DemoDevice(
        "pi3-lte", "raspberrypi3b+", "lte", "Raspberry Pi 3B+ on LTE, the student answers where it is sure",
        has_cascade=True,
    ),
    DemoDevice("nano-3g", "jetson-nano", "3g", "Jetson Nano on 3G"),
)  # fmt: skip
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
