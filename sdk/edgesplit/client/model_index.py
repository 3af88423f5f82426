"""Paths and replies of the model index, metadata and readiness calls, without sockets; shared by the clients."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

import msgspec

from edgesplit.decoding import decode_json
from edgesplit.http1.response import Reply, error_of
from edgesplit.msgspec_warmup import warm_up_structs

INDEX = "/v2/repository/index"
READY = "/v2/health/ready"
T = TypeVar("T")


class _IndexEntry(msgspec.Struct):
    name: str
    state: str = ""


def model_path(model: str) -> str:
    """Path of the model's metadata."""
    return f"/v2/models/{quote(model, safe='')}"


def ready_path(model: str | None) -> str:
    """Path of the readiness check of the server, or of `model` on it."""
    return READY if model is None else f"{model_path(model)}/ready"


def names(reply: Reply) -> tuple[str, ...]:
    """Names of the models in an index reply that can be used now, sorted."""
    entries = decode_reply(INDEX, reply, list[_IndexEntry])
    return tuple(sorted({entry.name for entry in entries if entry.state in ("", "READY")}))


def decode_reply(path: str, reply: Reply, kind: type[T]) -> T:
    """The reply's JSON decoded as `kind`. Raises the error that the reply carries, or MalformedMessage if it is not
    such JSON."""
    if error := error_of(reply):
        raise error
    return decode_json(reply.body, kind, path)


warm_up_structs(__name__)
