"""One inference as a client asks it: its body for each attempt, and the answer in the reply. No sockets here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from edgesplit.client.request_id import fresh_id
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.http1.response import Reply, error_of
from edgesplit.lazy_import import later
from edgesplit.observability.trace_context import of_application
from edgesplit.oip import protocol as oip
from edgesplit.oip import report
from edgesplit.oip.shared_memory import Memory, Place

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

PLAIN = {"accept": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True)
class Answer:
    """The one result of a request."""

    outputs: Mapping[str, oip.Tensor]
    report: report.Report | None
    """How the agent made it, or None where another server answered."""
    id: str
    frame: int | None = None
    """Its frame's number in a stream, from 0."""


@dataclass(frozen=True)
class Question:
    """What is asked, the same in every attempt."""

    path: str
    inputs: Mapping[str, oip.Tensor]
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, oip.Scalar] = field(default_factory=dict)
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers of the trace that the application asks in, if it asks in one."""

    @classmethod
    def of(
        cls,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str] = (),
        request_id: str | None = None,
        parameters: Mapping[str, oip.Scalar] | None = None,
    ) -> Question:
        """UsageError for inputs that cannot be sent. An id that is made up here is one request's in all the world."""
        tensors = {name: _tensor(name, value) for name, value in inputs.items()}
        path = f"/v2/models/{quote(model, safe='')}/infer"
        id_ = request_id or fresh_id()
        return cls(path, tensors, tuple(outputs), id_, parameters or {}, of_application())

    def body(
        self, left_s: float, inputs_at: Mapping[str, Place] | None = None, answer_at: Place | None = None
    ) -> tuple[dict[str, str], oip.Buffers]:
        """Headers and body of an attempt; the server is told how much time is left of the request's."""
        parameters = {**self.parameters, "timeout": max(1, int(left_s * 1e6))}
        asked = oip.InferRequest(
            self.inputs, self.outputs, self.id, parameters, inputs_at=inputs_at or {}, answer_at=answer_at
        )
        buffers, length = oip.encode_request(asked)
        headers = {"content-type": "application/octet-stream", oip.HEADER_LENGTH: str(length), **PLAIN, **self.trace}
        return headers, buffers

    def answer(self, reply: Reply, memory: Memory | None = None) -> Answer:
        """The answer in `reply`; the error that it tells of, or MalformedMessage where it answers something else."""
        if error := error_of(reply):
            raise error
        response = oip.decode_response(reply.body, oip.header_length(reply.headers), memory)
        if response.id != self.id:
            raise MalformedMessage(f"an answer to request {response.id[:80]!r}, not to {self.id[:80]!r}")
        missing = set(self.outputs) - set(response.outputs)
        if missing:
            raise MalformedMessage(f"the answer lacks output {sorted(missing)[0]!r}")
        return Answer(response.outputs, report.from_parameters(dict(response.parameters)), response.id)


def check_deadline(deadline_s: float) -> None:
    """UsageError for what is no time."""
    if math.isnan(deadline_s):
        raise UsageError(f"a deadline of {deadline_s} s")


def _tensor(name: str, value: oip.Tensor | bytes) -> oip.Tensor:
    """As an array; UsageError for what is none."""
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise UsageError(f"input {name[:80]!r} is a {type(value).__name__}, not a numpy array or bytes")
