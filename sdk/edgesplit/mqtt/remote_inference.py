"""Remote inference: messages by which a device answers an operator's request that came through the controller.

A request is an `InferenceJob`, which the director's key signs as it signs statements, followed by the body in pieces;
the job names the body's SHA-256, so no other body is run. A job is valid for one device, in one of its sessions (so a
restart of the agent invalidates it), once, until it expires. Bodies are those of the Open Inference Protocol. The
answer goes to the controller process that sent the job, on a topic of its own, and is authenticated as all messages of
a device are: by the broker, which lets a device write under its own name only.

    edgesplit/v1/{device}/infer                  controller -> device   QoS 1   SignedJob, InferencePiece, CancelJob
    edgesplit/v1/{device}/infer_reply/{process}  device -> controller   QoS 1   JobProgress, AnswerHead, InferencePiece,
                                                                                JobFailed
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import JobId
from edgesplit.mqtt.telemetry import Count
from edgesplit.msgspec_warmup import warm_up_structs

MAX_DEADLINE_S = 60.0
"""Longest deadline of a remote inference, in seconds."""
MAX_MODEL_CHARS = 120
MAX_REASON_CHARS = 1_000


class BodyHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and digest of an Open Inference Protocol body that follows in pieces."""

    size: Annotated[int, Meta(ge=1, le=LIMITS.remote_inference_bytes)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    json_bytes: Annotated[int, Meta(ge=0, le=LIMITS.remote_inference_bytes)] | None = None
    """Length of its JSON part; None: all of it is JSON."""

    @classmethod
    def of(cls, body: bytes, json_bytes: int | None) -> BodyHead:
        """The head of this body."""
        return cls(len(body), hashlib.sha256(body).hexdigest(), json_bytes)


class InferenceJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="inference_job"):
    """One inference that a device is to run, as signed by the director's key."""

    device: Annotated[str, Meta(max_length=63)]
    id: JobId
    session: Count
    """The device's session in which the job is valid."""
    number: Count
    """Microseconds since 1970 at the controller: a device accepts no job that is much older than its newest one."""
    process: Annotated[int, Meta(ge=1, le=1_024)]
    """Number of the controller process that waits for the answer."""
    model: Annotated[str, Meta(max_length=MAX_MODEL_CHARS)]
    """`name` or `name@version`."""
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]
    """Seconds from the job's arrival until its answer is worthless."""
    expires: int
    """Unix seconds; afterwards the job is not run."""
    body: BodyHead


class SignedJob(msgspec.Struct, frozen=True, tag="signed_job"):
    """A job with its signatures. `signed`: an encoded `edgesplit.release.manifest.Signed` over an `InferenceJob`."""

    signed: Annotated[bytes, Meta(max_length=LIMITS.request_bytes)]


class InferencePiece(msgspec.Struct, frozen=True, tag="inference_piece"):
    """The next piece of a request's or an answer's body."""

    id: JobId
    offset: Annotated[int, Meta(ge=0, lt=LIMITS.remote_inference_bytes)]
    data: Annotated[bytes, Meta(min_length=1, max_length=LIMITS.chunk_bytes)]


class CancelJob(msgspec.Struct, frozen=True, tag="cancel_job"):
    """The operator waits no longer: the job is not started, and its answer not sent."""

    id: JobId


class JobProgress(msgspec.Struct, frozen=True, tag="job_progress"):
    """How far the device is with a job."""

    id: JobId
    state: Literal["waiting", "running"]


class AnswerHead(msgspec.Struct, frozen=True, tag="answer_head"):
    """The job was answered; the body follows in pieces."""

    id: JobId
    body: BodyHead


class JobFailed(msgspec.Struct, frozen=True, tag="job_failed"):
    """The job gets no answer."""

    id: JobId
    kind: Annotated[str, Meta(max_length=40)]
    """Name of a class in `edgesplit.errors`."""
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


Request = SignedJob | InferencePiece | CancelJob
Reply = JobProgress | AnswerHead | InferencePiece | JobFailed


def pieces(job: str, body: bytes) -> Iterator[InferencePiece]:
    """The body in pieces, in order."""
    for offset in range(0, len(body), LIMITS.chunk_bytes):
        yield InferencePiece(job, offset, body[offset : offset + LIMITS.chunk_bytes])


class BodyAssembly:
    """A body being received. Pieces come in order, and may come twice, as QoS 1 permits."""

    def __init__(self, head: BodyHead) -> None:
        self.head = head
        self._received = bytearray()

    def add(self, piece: InferencePiece) -> bytes | None:
        """Add a piece; returns the body once it is whole. MalformedMessage where it is not the announced one."""
        if piece.offset < len(self._received):
            return None
        if piece.offset > len(self._received) or piece.offset + len(piece.data) > self.head.size:
            raise MalformedMessage(f"a piece at {piece.offset} of a body of {self.head.size} bytes does not fit")
        self._received += piece.data
        if len(self._received) < self.head.size:
            return None
        if hashlib.sha256(self._received).hexdigest() != self.head.sha256:
            raise MalformedMessage("the body is not the announced one: its SHA-256 is another")
        return bytes(self._received)


def too_large(what: str, size: int) -> str:
    """Why a body cannot go through the controller, and what to do instead."""
    return (
        f"{what} of {size} bytes: at most {LIMITS.remote_inference_bytes} go through the controller. Send the picture"
        " as JPEG where the model takes one, ask for fewer outputs, or run `edgectl infer` on the device itself"
    )


warm_up_structs(__name__)
