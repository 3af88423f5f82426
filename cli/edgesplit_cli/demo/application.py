"""The application of one device in the demo: a thread that sends frames to the local agent and records the outcomes.

By DESIGN section 7, a request is lost when `Client.infer` neither returns nor raises a typed error by its deadline, and
answered twice when one id yields two results.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
import numpy.typing as npt

from edgesplit.client.client import Answer, Client
from edgesplit.errors import EdgeError
from edgesplit.input_spec import FRAME, InputSpec, prepare
from edgesplit.plan import VARIANT_MARK
from edgesplit_cli.demo.scenario import DEADLINE_S, FRAME_PERIOD_S, MODEL, DemoDevice

GRACE_S = 0.5
"""Seconds after its deadline by which a call must return, or it counts as lost."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A held-out frame, its label, and what each whole model answers to it."""

    name: str
    jpeg: bytes
    label: int
    references: Mapping[str, npt.NDArray[np.float32]]
    """By model."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request."""

    at_s: float
    """Seconds from the start of the scenario to the request."""
    row: str
    """Of a family without the variant's name, as are its layers."""
    after: str
    fallback: bool
    cause: str
    raced: bool
    """Device and offload server both worked on it, as planned."""
    emulation_overrun: bool
    latency_s: float
    """Seconds as measured by the application."""
    predicted_s: float
    up_bytes: int
    equals_reference: bool
    """The output equals that of the whole model that gave it within 1e-4: of a family's variant its own."""
    same_top1: bool
    """The top-1 class is that of the whole model that gave it."""
    matches_label: bool
    """The top-1 class is the label."""
    changed: bool = False
    """The top-1 class is another than `MODEL`'s, because another variant answered."""
    variant: str = ""
    """Variant of a family that answered; empty for a model."""
    escalated: bool = False
    """In a cascade, the second variant answered."""
    answered_first: bool = False
    """In a cascade, the first variant answered."""
    unsure: bool = False
    """In a cascade, the first variant answered although it was unsure."""


@dataclass(slots=True)
class RequestLog:
    """The outcomes of all requests of one device's application."""

    samples: list[Sample] = field(default_factory=list)
    requests: int = 0
    lost: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Number of typed errors by class."""
    results: Counter[str] = field(default_factory=Counter)
    """Number of results by request id."""

    @property
    def duplicated(self) -> int:
        """Number of request ids with more than one result."""
        return sum(count > 1 for count in self.results.values())


class FrameSender(threading.Thread):
    """A thread that sends frames until `finish` is called."""

    def __init__(self, device: DemoDevice, url: str, frames: list[Frame], started_at: float) -> None:
        super().__init__(name=f"stream-{device.name}", daemon=True)
        self.log = RequestLog()
        self._client = Client(url)
        self._device = device
        self._frames = frames
        self._started_at = started_at
        self._stopping = threading.Event()

    def finish(self) -> None:
        """Stop after the request in flight."""
        self._stopping.set()

    def run(self) -> None:
        """Send frame after frame, at most one every FRAME_PERIOD_S seconds."""
        number = 0
        while not self._stopping.is_set():
            due = monotonic() + FRAME_PERIOD_S
            self._send(number, self._frames[number % len(self._frames)])
            number += 1
            self._stopping.wait(max(0.0, due - monotonic()))

    def _send(self, number: int, frame: Frame) -> None:
        identity = f"{self._device.name}-{number}"
        self.log.requests += 1
        start = monotonic()
        try:
            answer = self._client.infer(
                self._device.model, {FRAME: frame.jpeg}, deadline_s=DEADLINE_S, request_id=identity
            )
        except EdgeError as error:
            self.log.failed[type(error).__name__] += 1
            self.log.lost += monotonic() - start > DEADLINE_S + GRACE_S
            return
        elapsed_s = monotonic() - start
        self.log.results[answer.id] += 1
        self.log.lost += elapsed_s > DEADLINE_S + GRACE_S
        self.log.samples.append(sample_of(start - self._started_at, elapsed_s, answer, frame))


def sample_of(at_s: float, took_s: float, answer: Answer, frame: Frame) -> Sample:
    """What an answer shows: how it came about, and whether it equals that of the whole model that gave it."""
    report = answer.report
    if report is None:
        raise EdgeError("the agent's answer carries no report")
    output = next(iter(answer.outputs.values())).reshape(-1)
    reference = frame.references[report.variant or MODEL].reshape(-1)
    top1 = int(output.argmax())
    return Sample(
        at_s=at_s, row=_own_name(report.row), after=_own_name(report.split_after), fallback=report.fallback,
        cause=report.cause, raced=bool(report.raced), emulation_overrun=report.emulation_overrun,
        latency_s=took_s, predicted_s=report.predicted_s,
        up_bytes=report.up_bytes,
        equals_reference=bool(np.allclose(output, reference, rtol=1e-4, atol=1e-4 * float(np.abs(reference).max()))),
        same_top1=top1 == int(reference.argmax()), matches_label=top1 == frame.label,
        changed=report.variant not in ("", MODEL) and top1 != int(frame.references[MODEL].argmax()),
        variant=report.variant, escalated=report.escalated, unsure=report.unsure,
        answered_first=report.score is not None and not report.escalated,
    )  # fmt: skip


def _own_name(name: str) -> str:
    """A row's or layer's name without the variant's."""
    return name.rpartition(VARIANT_MARK)[2]


def load_frames(folder: Path, models: Mapping[str, bytes], input_spec: InputSpec) -> list[Frame]:
    """The held-out frames with the answers of whole models, computed here in exact mode, as devices do."""
    from edgesplit_cli.demo.reference_model import WholeModel

    whole = {name: WholeModel(raw) for name, raw in models.items()}
    labels: dict[str, int] = json.loads((folder / "labels.json").read_text())
    frames = []
    for name, label in sorted(labels.items()):
        jpeg = (folder / name).read_bytes()
        prepared = prepare(input_spec, jpeg)
        frames.append(Frame(name, jpeg, label, {model: one.run(prepared) for model, one in whole.items()}))
    return frames
