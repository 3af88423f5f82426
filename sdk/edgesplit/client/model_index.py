"""What a server says of its models, read without sockets: for every client of ours."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from edgesplit.errors import MalformedMessage
from edgesplit.http1.response import Reply, error_of
from edgesplit.msgspec_warmup import settle

INDEX = "/v2/repository/index"
READY = "/v2/health/ready"


class _IndexEntry(msgspec.Struct):
    name: str
    state: str = ""


def model_path(model: str) -> str:
    """Of its metadata."""
    return f"/v2/models/{quote(model, safe='')}"


def ready_path(model: str | None) -> str:
    """Of the question whether the server, or that model on it, could answer now."""
    return READY if model is None else f"{model_path(model)}/ready"


def names(reply: Reply) -> tuple[str, ...]:
    """The models of an index that can be asked for now."""
    entries: list[_IndexEntry] = said(INDEX, reply, list[_IndexEntry])
    return tuple(sorted({entry.name for entry in entries if entry.state in ("", "READY")}))


def said(path: str, reply: Reply, kind: Any) -> Any:
    """The reply's JSON; the error that it tells of, or MalformedMessage."""
    if error := error_of(reply):
        raise error
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise MalformedMessage(f"{path}: {error}") from error


settle(__name__)
