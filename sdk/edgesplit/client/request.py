"""One inference request of a client: its encoding for each attempt, and the answer decoded from the reply. No
sockets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from edgesplit.client.answer import Answer
from edgesplit.client.request_id import new_request_id
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.http1.response import Reply, error_of
from edgesplit.observability.trace_context import application_headers
from edgesplit.oip import protocol as oip
from edgesplit.oip import report
from edgesplit.oip.shared_memory import Memory, TensorRef

PLAIN_HEADERS = {"accept": "application/json", "accept-encoding": "identity"}


@dataclass(frozen=True)
class InferenceRequest:
    """One inference request, identical in every attempt."""

    path: str
    inputs: Mapping[str, oip.Tensor]
    outputs: tuple[str, ...]
    id: str
    parameters: Mapping[str, oip.Scalar] = field(default_factory=dict)
    trace: Mapping[str, str] = field(default_factory=dict)
    """W3C trace context headers of the application's current span; empty if there is none."""

    @classmethod
    def create(
        cls,
        model: str,
        inputs: Mapping[str, oip.Tensor | bytes],
        outputs: Sequence[str] = (),
        request_id: str | None = None,
        parameters: Mapping[str, oip.Scalar] | None = None,
    ) -> InferenceRequest:
        """A request for `model`. UsageError for inputs that cannot be sent. Without `request_id` a globally unique one
        is generated."""
        check_inputs(inputs)
        tensors = {name: oip.to_tensor(name, value) for name, value in inputs.items()}
        path = f"/v2/models/{quote(model, safe='')}/infer"
        id_ = request_id or new_request_id()
        return cls(path, tensors, tuple(outputs), id_, parameters or {}, application_headers())

    @property
    def model_path(self) -> str:
        """Path of the model's metadata."""
        return self.path.removesuffix("/infer")

    def encode(
        self, left_s: float, inputs_at: Mapping[str, TensorRef] | None = None, answer_at: TensorRef | None = None
    ) -> tuple[dict[str, str], oip.Buffers]:
        """Headers and body of an attempt; `left_s`, the time left, is sent to the server as the request's timeout.

        `inputs_at` and `answer_at` refer to shared memory that holds inputs and has room for the answer.
        """
        parameters = {**self.parameters, "timeout": max(1, int(left_s * 1e6))}
        request = oip.InferRequest(
            self.inputs, self.outputs, self.id, parameters, inputs_at=inputs_at or {}, answer_at=answer_at
        )
        buffers, length = oip.encode_request(request)
        headers = {
            "content-type": "application/octet-stream", oip.HEADER_LENGTH: str(length), **PLAIN_HEADERS, **self.trace,
        }  # fmt: skip
        return headers, buffers

    def decode_answer(self, reply: Reply, memory: Memory | None = None) -> Answer:
        """The answer in `reply`. Raises the error that the reply carries, or MalformedMessage if it answers another
        request."""
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
    """UsageError if `deadline_s` is not a number."""
    if math.isnan(deadline_s):
        raise UsageError(f"the deadline is not a number of seconds: {deadline_s}")


def check_inputs(inputs: object) -> None:
    """UsageError if `inputs` are no tensors by name, but one tensor, for example."""
    if not isinstance(inputs, Mapping):
        given = type(inputs).__name__
        raise UsageError(
            f"inputs are given by name, not as one {given}: {{'frame': jpeg}} for a model that was pushed with --input,"
            f" {{NAME: array}} for others; `metadata(model)['inputs']` lists the names"
        )
