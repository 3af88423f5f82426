"""What an answer tells of itself, beside its tensors: carried as Open Inference Protocol response parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from edgesplit.msgspec_warmup import settle

PREFIX = "edgesplit_"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer was made. Times in seconds; `predicted_s` is the plan's, in the conditions then.

    `phases` divides `latency_s` into what no other phase holds.
    """

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
    raced: str = ""
    """The row by which the cloud was asked while the device worked too, as planned: whoever was first, nothing failed,
    and nothing was switched. Empty where there was no such race."""
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
    queue_s: float = 0.0
    """Waiting for a turn, and for the device's processor."""
    device_s: float = 0.0
    """All slices that ran on the device, `decode_s` and `tail_s` among them."""
    decode_s: float = 0.0
    """The input spec's slice."""
    tail_s: float = 0.0
    """Slices that ran to finish alone."""
    encode_s: float = 0.0
    link_s: float = 0.0
    """Up and down together: one clock cannot tell them apart."""
    remote_s: float = 0.0
    """On the server that was asked, and on all tiers and links beyond it. Of it, where the server tells:"""
    remote_queue_s: float = 0.0
    remote_decode_s: float = 0.0
    remote_load_s: float = 0.0
    remote_encode_s: float = 0.0
    answer_decode_s: float = 0.0
    """Making tensors of the cloud's answer."""
    waited_s: float = 0.0
    """For a cloud that did not help, until the device began to finish alone."""
    trace_id: str = ""
    """W3C trace context, where there is one: the trace that shows this request."""
    hop_s: float = 0.0
    """Of `remote_s`: what the gateway waited for the cloud, their link included."""
    hop_server_s: float = 0.0
    """Of `hop_s`: in the cloud's server."""
    hop_cause: str = ""
    """Why the gateway finished without the cloud: timeout, refused, link, server, rejected; or `open`, its breaker."""
    up_bytes: int = 0
    down_bytes: int = 0
    joules: float = 0.0
    """That the device spent on it; a tail that lost to the cloud is counted under hedging instead."""
    joules_basis: str = ""
    """`measured`: scaled to what this device's rails drew; `predicted`: by the plan's power figures. Empty: unknown."""


_PREFIXED = tuple(PREFIX + one.name for one in msgspec.structs.fields(Report))
_USUAL = tuple(one.default for one in msgspec.structs.fields(Report))
"""What each field mostly is; of one that has no default, what it never is."""


def to_parameters(report: Report) -> dict[str, Any]:
    """As Open Inference Protocol parameters, each name prefixed. What is as it mostly is, is left out."""
    told = zip(_PREFIXED, _USUAL, msgspec.structs.astuple(report), strict=True)
    return {name: value for name, usual, value in told if value != usual}


def from_parameters(parameters: dict[str, Any]) -> Report | None:
    """The report in a response's parameters, or None if another server answered."""
    own = {name[len(PREFIX) :]: value for name, value in parameters.items() if name.startswith(PREFIX)}
    try:
        return msgspec.convert(own, Report, strict=False)
    except msgspec.ValidationError:
        return None


PHASES = (
    "queue",
    "decode",
    "device",
    "encode",
    "link",
    "remote_queue",
    "remote_decode",
    "remote_load",
    "remote",
    "hop_link",
    "hop",
    "remote_encode",
    "answer_decode",
    "waited",
    "tail",
    "other",
)
"""Where a request's time goes, in the order in which it goes there; none overlaps another."""


def phases(report: Report) -> dict[str, float]:
    """Seconds by phase, only those that the request had; together they are its latency."""
    parts = (report.remote_queue_s, report.remote_decode_s, report.remote_load_s, report.remote_encode_s)
    within = report.hop_s + sum(parts)
    seconds = {
        "queue": report.queue_s,
        "decode": report.decode_s,
        "device": report.device_s - report.decode_s - report.tail_s,
        "encode": report.encode_s,
        "link": report.link_s,
        "remote_queue": report.remote_queue_s,
        "remote_decode": report.remote_decode_s,
        "remote_load": report.remote_load_s,
        "remote": report.remote_s - within,
        "hop_link": report.hop_s - report.hop_server_s,
        "hop": report.hop_server_s,
        "remote_encode": report.remote_encode_s,
        "answer_decode": report.answer_decode_s,
        "waited": report.waited_s,
        "tail": report.tail_s,
    }
    seconds["other"] = report.latency_s - sum(seconds.values())
    return {name: value for name, value in seconds.items() if value > 0.0}


settle(__name__)
