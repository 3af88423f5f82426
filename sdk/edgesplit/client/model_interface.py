"""What a client knows of a model that it asks: its inputs, its input spec and its output kind, from its metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import msgspec

from edgesplit.client.model_index import decode_reply
from edgesplit.http1.response import Reply
from edgesplit.input_spec import InputSpec
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.output_kind import OutputKind

FRESH_S = 10.0
"""Seconds after which a model's interface is asked for again: a deployment may have changed it."""


class ModelInterface(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model takes and gives, beside its tensors: the key `edgesplit` of its metadata."""

    input_spec: InputSpec | None = None
    """How what arrives becomes the first tensor; None where applications send tensors."""
    output_kind: OutputKind | None = None
    """What the outputs are; None where they are just tensors."""
    inputs: tuple[str, ...] = ()
    """Names of the inputs."""


class _Tensor(msgspec.Struct):
    name: str


class _Metadata(msgspec.Struct):
    inputs: tuple[_Tensor, ...]
    edgesplit: ModelInterface = ModelInterface()


def decode_interface(path: str, reply: Reply) -> ModelInterface:
    """The interface in a reply of metadata. Servers other than the agent tell the inputs' names only."""
    metadata = decode_reply(path, reply, _Metadata)
    names = tuple(tensor.name for tensor in metadata.inputs)
    return msgspec.structs.replace(metadata.edgesplit, inputs=names)


class InterfaceCache:
    """Interfaces by the path of the model's metadata, each for `FRESH_S`. Usable from any number of threads."""

    def __init__(self, *, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, ModelInterface]] = {}

    def last(self, path: str) -> ModelInterface | None:
        """The interface as it was last known, however long ago."""
        with self._lock:
            return self._known.get(path, (0.0, None))[1]

    def find(self, path: str) -> ModelInterface | None:
        """The interface, if it is known and fresh."""
        with self._lock:
            asked_at, interface = self._known.get(path, (0.0, None))
        return interface if interface is not None and self._now() - asked_at < FRESH_S else None

    def keep(self, path: str, reply: Reply) -> ModelInterface:
        """The interface in this reply, from now on known."""
        interface = decode_interface(path, reply)
        with self._lock:
            self._known[path] = (self._now(), interface)
        return interface


warm_up_structs(__name__)
