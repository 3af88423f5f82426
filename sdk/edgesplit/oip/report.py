"""How the agent produced an answer: timings, row and energy, carried as Open Inference Protocol response parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from edgesplit.msgspec_warmup import warm_up_structs

PREFIX = "edgesplit_"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer was produced. Times are in seconds; `predicted_s` is the plan's prediction for the conditions of
    that moment.

    `phases` divides `latency_s` into parts that do not overlap.
    """

    release: str
    row: str
    """Row of the plan that was used."""
    split_after: str = ""
    """Last layer that ran on the device in that row (the split point)."""
    fallback: bool = False
    """The cloud did not answer in time or at all, and the device finished alone."""
    cause: str = ""
    """Cause of the fallback: timeout, refused, link, server. Without a fallback: `device` if the device's own part
    failed and the cloud ran everything."""
    raced: str = ""
    """Row of a planned race, in which the cloud and the device worked at the same time: either may have won, nothing
    failed, and no row was switched. Empty if there was no race."""
    hedged: bool = False
    """The device began to finish the request while the cloud might still have answered."""
    stale: bool = False
    """The answer is not to this request: it is the last good answer of its stream, which the application accepts
    instead."""
    age_s: float = 0.0
    """Of a stale answer: seconds since its request arrived."""
    repeated_age_s: float = 0.0
    """The frame is still, so it is given the answer to an earlier frame of its stream, whose request arrived so many
    seconds before. 0: the answer is to this request."""
    emulated: bool = False
    emulation_overrun: bool = False
    """Emulated, and this host was slower than the emulated profile."""
    latency_s: float = 0.0
    predicted_s: float = 0.0
    queue_s: float = 0.0
    """Waiting in the queue, and for the device's processor."""
    device_s: float = 0.0
    """All slices that ran on the device, including `decode_s` and `local_finish_s`."""
    decode_s: float = 0.0
    """The input decoder's slice."""
    local_finish_s: float = 0.0
    """Slices that the device ran to finish alone."""
    encode_s: float = 0.0
    link_s: float = 0.0
    """Upload and download together: a single clock cannot separate them."""
    remote_s: float = 0.0
    """On the offload target, and on all tiers and links behind it. The next four fields are parts of it, if the server
    reports them."""
    remote_queue_s: float = 0.0
    remote_decode_s: float = 0.0
    remote_load_s: float = 0.0
    remote_encode_s: float = 0.0
    answer_decode_s: float = 0.0
    """Decoding the tensors of the cloud's answer."""
    remote_wait_s: float = 0.0
    """Waiting for a cloud that did not help, until the device began to finish alone."""
    trace_id: str = ""
    """Id of the W3C trace that contains this request; empty without one."""
    next_tier_s: float = 0.0
    """Part of `remote_s`: the gateway's wait for the cloud, including their link."""
    next_tier_server_s: float = 0.0
    """Part of `next_tier_s`: in the cloud's server."""
    next_tier_cause: str = ""
    """Why the gateway finished without the cloud: timeout, refused, link, server, rejected, or `open` (its circuit
    breaker)."""
    up_bytes: int = 0
    down_bytes: int = 0
    joules: float = 0.0
    """Energy that the device spent on the request; a tail that lost against the cloud is counted under hedging instead.
    """
    reason: str = ""
    """Why this row was chosen, as one sentence for people. Empty: a lane answered, where there is nothing to choose, or
    the agent is older than 0.3."""
    variant: str = ""
    """Variant of a family that gave the answer, which is another than the row's where the device finished by it. Empty:
    the model is no family."""
    accuracy: float = 0.0
    """Accuracy of that variant, 0 to 1, among the family's labelled samples; 0: unknown."""
    score: float | None = None
    """In a cascade, how sure the first variant's answer is; larger is surer. None: no cascade, or it gave none."""
    escalated: bool = False
    """In a cascade, the second variant gave the answer, because the first one was unsure or failed."""
    unsure: bool = False
    """The first variant's answer is given although its score is below the cascade's threshold: the second one could not
    be asked in time."""
    joules_basis: str = ""
    """`measured`: scaled to the power measured on the device's rails; `predicted`: from the plan's power figures.
    Empty: unknown."""


_PARAMETER_NAMES = tuple(PREFIX + field.name for field in msgspec.structs.fields(Report))
_DEFAULTS = tuple(field.default for field in msgspec.structs.fields(Report))
"""The default of each field; for a field without a default a value that it never has."""


def to_parameters(report: Report) -> dict[str, Any]:
    """As Open Inference Protocol parameters, each name prefixed. Fields with their default value are left out."""
    fields = zip(_PARAMETER_NAMES, _DEFAULTS, msgspec.structs.astuple(report), strict=True)
    return {name: value for name, default, value in fields if value != default}


def from_parameters(parameters: dict[str, Any]) -> Report | None:
    """The report in a response's parameters; None if another server answered."""
    own = {name[len(PREFIX) :]: value for name, value in parameters.items() if name.startswith(PREFIX)}
    try:
        return msgspec.convert(own, Report, strict=False)
    except msgspec.ValidationError:
        return None


PHASES = (
    "queue", "decode", "device", "encode", "link", "remote_queue", "remote_decode", "remote_load", "remote",
    "next_tier_link",
    "next_tier", "remote_encode", "answer_decode", "remote_wait", "local_finish", "other",
)  # fmt: skip
"""The phases of a request in chronological order; they do not overlap."""


def phases(report: Report) -> dict[str, float]:
    """Seconds by phase, without phases of zero length; their sum is the request's latency."""
    parts = (report.remote_queue_s, report.remote_decode_s, report.remote_load_s, report.remote_encode_s)
    within = report.next_tier_s + sum(parts)
    seconds = {
        "queue": report.queue_s, "decode": report.decode_s,
        "device": report.device_s - report.decode_s - report.local_finish_s, "encode": report.encode_s,
        "link": report.link_s, "remote_queue": report.remote_queue_s, "remote_decode": report.remote_decode_s,
        "remote_load": report.remote_load_s, "remote": report.remote_s - within,
        "next_tier_link": report.next_tier_s - report.next_tier_server_s, "next_tier": report.next_tier_server_s,
        "remote_encode": report.remote_encode_s, "answer_decode": report.answer_decode_s,
        "remote_wait": report.remote_wait_s, "local_finish": report.local_finish_s,
    }  # fmt: skip
    seconds["other"] = report.latency_s - sum(seconds.values())
    return {name: value for name, value in seconds.items() if value > 0.0}


warm_up_structs(__name__)
