"""The client's side of shared memory: one segment per connection, used by one exchange at a time.

Inputs lie at the front, the room for the answer behind them. A connection carries one exchange at a time, and an
exchange that is given up closes its connection, so memory is never reused while a server may still read it. Where the
server does not support segments, tensors travel as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from edgesplit.client.request import InferenceRequest
from edgesplit.decoding import DECODE_ERRORS
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.http1.response import Reply
from edgesplit.lazy_import import np
from edgesplit.limits import LIMITS
from edgesplit.oip.protocol import MIN_SHARED_BYTES, Tensor
from edgesplit.oip.shared_memory import TensorRef
from edgesplit.shared_memory.segment import SUPPORTED, Segment

SEGMENT_PATH = "/v2/edgesplit/segment"
_ALIGN = 64
_MIN_ANSWER_BYTES = 1 << 20


@dataclass
class ClientSharedMemory:
    """The shared memory segment of one connection, and what is known of the sizes it needs.

    Implements `Memory` for `InferenceRequest.decode_answer`: `read` returns the outputs that the server put into the
    segment.
    """

    answer_bytes: int = _MIN_ANSWER_BYTES
    """Bytes reserved for answers."""
    segment: Segment | None = None
    region: str = ""
    is_refused: bool = not SUPPORTED
    _input_bytes: int = field(default=0)

    def prepare(self, request: InferenceRequest) -> Segment | None:
        """A new segment that must be passed to the server before `store_inputs` is called; None if none is needed or
        memory is short."""
        self._input_bytes = sum(_aligned_size(tensor) for tensor in _shareable(request.inputs).values())
        needed = self._input_bytes + self.answer_bytes
        big = self._input_bytes >= MIN_SHARED_BYTES or self.answer_bytes > _MIN_ANSWER_BYTES
        if self.is_refused or not big or needed > LIMITS.http_body_bytes:
            return None
        if self.segment is not None and self.segment.size >= needed:
            return None
        self.close()
        self.segment = None
        try:
            return Segment.create(1 << (needed - 1).bit_length() if needed < LIMITS.http_body_bytes // 2 else needed)
        except OSError:
            self.is_refused = True
            return None

    def on_segment_reply(self, segment: Segment, reply: Reply) -> None:
        """Adopt `segment` if the server's reply accepts it; otherwise close it and use bytes from now on."""
        region = _accepted_region(reply)
        if region:
            self.segment, self.region = segment, region
        else:
            segment.close()
            self.is_refused = True

    def store_inputs(self, request: InferenceRequest) -> tuple[Mapping[str, TensorRef], TensorRef | None]:
        """Copy the large inputs into the segment; returns a reference per input and one to the room for the answer.
        Empty and None without a segment."""
        if self.segment is None or self.segment.size < self._input_bytes + self.answer_bytes:
            return {}, None
        references: dict[str, TensorRef] = {}
        offset = 0
        for name, tensor in _shareable(request.inputs).items():
            references[name] = TensorRef(self.region, tensor.nbytes, offset)
            target = np.frombuffer(self.segment.memory, np.uint8, tensor.nbytes, offset)
            np.copyto(target.view(tensor.dtype.newbyteorder("<")).reshape(tensor.shape), tensor)
            offset += _aligned_size(tensor)
        return references, TensorRef(self.region, self.segment.size - offset, offset)

    def reserve_for(self, outputs: Mapping[str, Tensor]) -> None:
        """Reserve room for answers as large as `outputs` from the next exchange on."""
        size = sum(_aligned_size(tensor) for tensor in _shareable(outputs).values())
        self.answer_bytes = max(self.answer_bytes, size)

    def close(self) -> None:
        """Close the segment; outputs of the last answer stay readable."""
        if self.segment is not None:
            self.segment.close()

    def renewed(self) -> ClientSharedMemory:
        """The memory of the next connection, which reserves as much for answers."""
        return ClientSharedMemory(answer_bytes=self.answer_bytes)

    # The protocol `edgesplit.oip.shared_memory.Memory`

    def check(self, reference: TensorRef) -> None:
        """MalformedMessage unless `reference` lies within the segment."""
        if (
            self.segment is None
            or reference.region != self.region
            or reference.offset + reference.size > self.segment.size
        ):
            raise MalformedMessage(f"the answer refers to {reference}, which is not in the shared memory for it")

    def read(self, reference: TensorRef, *, stable: bool) -> memoryview:
        """A copy of what lies at `reference`, because the next exchange reuses the memory."""
        self.check(reference)
        assert self.segment is not None
        return memoryview(bytearray(self.segment.memory[reference.offset : reference.offset + reference.size]))

    def write(self, reference: TensorRef, parts: Sequence[bytes | memoryview]) -> None:
        """UsageError: only servers write answers."""
        raise UsageError("a client writes no answers")


def segment_request_body(segment: Segment) -> bytes:
    """Body of the request that passes the segment's descriptor."""
    return msgspec.json.encode({"byte_size": segment.size})


def _accepted_region(reply: Reply) -> str:
    """The region name in the server's reply to a passed segment; empty if it was refused."""
    if reply.status != 200:
        return ""
    try:
        region = msgspec.json.decode(reply.body, type=dict[str, object]).get("region")
    except DECODE_ERRORS:
        return ""
    return region if isinstance(region, str) else ""


def _shareable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are large enough for shared memory and made of numbers."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.nbytes >= MIN_SHARED_BYTES and tensor.dtype.kind in "biuf"
    }


def _aligned_size(tensor: Tensor) -> int:
    """Bytes of the tensor, rounded up to the alignment of the next one."""
    return tensor.nbytes + -tensor.nbytes % _ALIGN
