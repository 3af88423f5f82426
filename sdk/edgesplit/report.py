"""What an answer tells of itself, beside its tensors: carried as Open Inference Protocol response parameters."""

from __future__ import annotations

from typing import Any

import msgspec

PREFIX = "edgesplit_"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer was made. Times in seconds; `predicted_s` is the plan's, in the conditions then."""

    release: str
    row: str
    """Row of the plan that was tried."""
    after: str = ""
    """Last layer that ran on the device by that row."""
    fallback: bool = False
    """The cloud did not answer in time or at all, and the device finished alone."""
    cause: str = ""
    """Of the fallback: timeout, refused, link, server. Without one: `device`, where the device's own part had failed
    and the cloud did it all."""
    hedged: bool = False
    """The device began to finish it while the cloud might still have answered."""
    stale: bool = False
    """No answer to this request at all, but the last good one of its stream, which the application takes instead."""
    age_s: float = 0.0
    """Of a stale answer: since its request came."""
    emulated: bool = False
    late: bool = False
    """Emulated, and this host was slower than the profile."""
    latency_s: float = 0.0
    predicted_s: float = 0.0
    device_s: float = 0.0
    encode_s: float = 0.0
    link_s: float = 0.0
    remote_s: float = 0.0
    """On the server that was asked, and on all tiers and links beyond it."""
    hop_s: float = 0.0
    """Of `remote_s`: what the gateway waited for the cloud, their link included."""
    hop_server_s: float = 0.0
    """Of `hop_s`: in the cloud's server."""
    hop_cause: str = ""
    """Why the gateway finished without the cloud: timeout, refused, link, server, rejected; or `open`, its breaker."""
    up_bytes: int = 0
    down_bytes: int = 0


def to_parameters(report: Report) -> dict[str, Any]:
    """As Open Inference Protocol parameters, each name prefixed."""
    return {PREFIX + name: value for name, value in msgspec.to_builtins(report).items()}


def from_parameters(parameters: dict[str, Any]) -> Report | None:
    """The report in a response's parameters, or None if another server answered."""
    own = {name[len(PREFIX) :]: value for name, value in parameters.items() if name.startswith(PREFIX)}
    try:
        return msgspec.convert(own, Report, strict=False)
    except msgspec.ValidationError:
        return None
