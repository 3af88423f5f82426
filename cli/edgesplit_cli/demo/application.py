"""One device's application in the demo: a thread that sends frame after frame to the local agent and keeps the books.

Lost and answered twice mean what DESIGN section 7 says: a request is lost when `Client.infer` neither returns nor
raises a typed error by its deadline; answered twice when one id yields two results.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
import numpy.typing as npt

from edgesplit.client.client import Answer, Client
from edgesplit.errors import EdgeError
from edgesplit.input_spec import FRAME
from edgesplit_cli.demo.scenario import DEADLINE_S, FRAME_PERIOD_S, MODEL

GRACE_S = 0.5
"""How much later than its deadline a call may return before it counts as lost."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A held-out frame, its label, and what the whole model answers on it."""

    name: str
    jpeg: bytes
    label: int
    reference: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request."""

    at_s: float
    """Since the story began, when the request was made."""
    row: str
    after: str
    fallback: bool
    cause: str
    raced: bool
    """Device and cloud both worked on it, as planned."""
    late: bool
    latency_s: float
    """As the application felt it."""
    agent_s: float
    predicted_s: float
    up_bytes: int
    equal: bool
    """Same numbers as the whole model, within 1e-4."""
    right: bool
    """Same top-1 as the whole model."""
    correct: bool
    """Same top-1 as the label."""


@dataclass(slots=True)
class Books:
    """What a device's application saw."""

    samples: list[Sample] = field(default_factory=list)
    requests: int = 0
    lost: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Typed errors by name."""
    results: Counter[str] = field(default_factory=Counter)
    """Results per request id."""

    @property
    def duplicated(self) -> int:
        """Ids that yielded more than one result."""
        return sum(1 for count in self.results.values() if count > 1)


class Stream(threading.Thread):
    """Sends frames until told to stop."""

    def __init__(self, name: str, url: str, frames: list[Frame], began: float) -> None:
        super().__init__(name=f"stream-{name}", daemon=True)
        self.books = Books()
        self._client = Client(url)
        self._device = name
        self._frames = frames
        self._began = began
        self._done = threading.Event()

    def finish(self) -> None:
        """Stop after the request under way."""
        self._done.set()

    def run(self) -> None:
        """Frame after frame, at most one every FRAME_PERIOD_S."""
        number = 0
        while not self._done.is_set():
            due = monotonic() + FRAME_PERIOD_S
            self._one(number, self._frames[number % len(self._frames)])
            number += 1
            self._done.wait(max(0.0, due - monotonic()))

    def _one(self, number: int, frame: Frame) -> None:
        identity = f"{self._device}-{number}"
        self.books.requests += 1
        start = monotonic()
        try:
            answer = self._client.infer(MODEL, {FRAME: frame.jpeg}, deadline_s=DEADLINE_S, request_id=identity)
        except EdgeError as error:
            self.books.failed[type(error).__name__] += 1
            self.books.lost += monotonic() - start > DEADLINE_S + GRACE_S
            return
        took_s = monotonic() - start
        self.books.results[answer.id] += 1
        self.books.lost += took_s > DEADLINE_S + GRACE_S
        self.books.samples.append(_sample(start - self._began, took_s, answer, frame))


def _sample(at_s: float, took_s: float, answer: Answer, frame: Frame) -> Sample:
    report = answer.report
    if report is None:
        raise EdgeError("the agent's answer carries no report")
    output = next(iter(answer.outputs.values())).reshape(-1)
    reference = frame.reference.reshape(-1)
    return Sample(
        at_s=at_s,
        row=report.row,
        after=report.after,
        fallback=report.fallback,
        cause=report.cause,
        raced=bool(report.raced),
        late=report.late,
        latency_s=took_s,
        agent_s=report.latency_s,
        predicted_s=report.predicted_s,
        up_bytes=report.up_bytes,
        equal=bool(np.allclose(output, reference, rtol=1e-4, atol=1e-4 * float(np.abs(reference).max()))),
        right=int(output.argmax()) == int(reference.argmax()),
        correct=int(output.argmax()) == frame.label,
    )


def load_frames(folder: Path, whole_model: bytes, input_spec: object) -> list[Frame]:
    """The held-out frames with the whole model's answers, run here as the devices run it (exact mode)."""
    import json

    from edgesplit.input_spec import InputSpec, prepare
    from edgesplit_cli.demo.reference_model import WholeModel

    if not isinstance(input_spec, InputSpec):
        raise TypeError("an input spec is needed")
    whole = WholeModel(whole_model)
    labels: dict[str, int] = json.loads((folder / "labels.json").read_text())
    frames = []
    for name, label in sorted(labels.items()):
        jpeg = (folder / name).read_bytes()
        frames.append(Frame(name, jpeg, label, whole.run(prepare(input_spec, jpeg))))
    return frames
