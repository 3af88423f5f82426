"""Robust estimates from device telemetry of what a plan assumed (pure): link, seconds per slice, server times, bytes
sent.

No single device is trusted. Each device counts once, with its own medians, however much it sends; the estimate for a
class is the median over devices, and for an even number the inner value nearer to the plan's assumption. So of n
devices fewer than half can be broken or lie without moving the estimate beyond what honest devices report. Emulated and
simulated devices never count where there are real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median
from typing import Any, Literal

import msgspec

from edgesplit.mqtt.messages import TelemetryWindow
from edgesplit.plan import Link, Plan
from edgesplit_partitioner.costs.from_telemetry import FieldMeasurements, SliceMeasurement, TransferMeasurement

Kind = Literal["measured", "emulated", "simulated"]
KINDS: tuple[Kind, ...] = ("measured", "emulated", "simulated")
"""Kinds of devices; a class is judged by the first kind of which there are any."""
MOST_LATE_RATIO = 0.2
"""An emulated window in which a larger part of the samples was late is ignored for the device's times."""
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 100.0, 1e11
"""Reported links outside these bounds are ignored."""
LONGEST_TRIP_S = 60.0
"""Longest round trip that is accepted as a link."""


class TelemetryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a stored telemetry message that count as evidence."""

    at: float
    emulated: bool
    up_bytes_per_s: float
    rtt_s: float
    remote_usable: bool
    models: tuple[TelemetryWindow, ...]
    down_bytes_per_s: float = 0.0

    @property
    def kind(self) -> Kind:
        """Whether the times are measured or emulated."""
        return "emulated" if self.emulated else "measured"


def parse_message(content: Mapping[str, Any]) -> TelemetryEvidence | None:
    """Parse a stored message; None if it is malformed."""
    try:
        return msgspec.convert(content, TelemetryEvidence)
    except msgspec.ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Observation:
    """One telemetry window of one device that served the release in question."""

    at: float
    link: Link
    window: TelemetryWindow


@dataclass(frozen=True, slots=True)
class DeviceMeasurements:
    """What one device measured, as medians over its windows."""

    device: str
    kind: Kind
    observations: tuple[Observation, ...]
    slice_s: Mapping[str, float]
    """Median seconds by slice."""
    remote_s: Mapping[str, float]
    """Median seconds of a row's layers on the server, by row."""
    sent_bytes: Mapping[str, float]
    """Median bytes of a request, by row."""
    fixed_s: float | None
    """Median seconds in the server besides the layers, beyond what the rows planned; None if nothing was offloaded."""

    @property
    def requests(self) -> int:
        """Requests answered in these windows."""
        return sum(moment.window.requests for moment in self.observations)

    @property
    def span_s(self) -> float:
        """Seconds between the first window and the last."""
        return self.observations[-1].at - self.observations[0].at if self.observations else 0.0

    @property
    def link(self) -> Link:
        """Average link over all windows. Bandwidths are averaged as seconds per byte (harmonic mean), not as rates."""
        return Link(
            up_bytes_per_s=harmonic_mean([moment.link.up_bytes_per_s for moment in self.observations]),
            down_bytes_per_s=harmonic_mean([moment.link.down_bytes_per_s for moment in self.observations]),
            rtt_s=median(moment.link.rtt_s for moment in self.observations),
        )


def measurements_of(
    device: str, messages: Iterable[TelemetryEvidence], model: str, release: str, plan: Plan, *, simulated: bool = False
) -> DeviceMeasurements | None:
    """A device's measurements of a release, from its messages (oldest first); None if there are none. Only the newest
    run of messages of one kind counts. Whether a device is simulated is known from its birth message."""
    moments: list[Observation] = []
    kind: Kind | None = None
    for message in messages:
        link = _link(message, plan.link)
        window = next(
            (candidate for candidate in message.models if (candidate.model, candidate.release) == (model, release)),
            None,
        )
        if link is None or window is None or not window.requests:
            continue
        message_kind: Kind = "simulated" if simulated else message.kind
        # A device that changes its kind (emulated, then real) starts again: observations of two kinds are not mixed.
        moments, kind = (
            [*(moments if kind == message_kind else ()), Observation(message.at, link, window)],
            message_kind,
        )
    if kind is None:
        return None
    layers_s, sent, fixed_s = _offload_medians(moments, plan)
    return DeviceMeasurements(device, kind, tuple(moments), _slice_medians(moments, kind), layers_s, sent, fixed_s)


def best_kind(devices: Iterable[DeviceMeasurements]) -> list[DeviceMeasurements]:
    """Devices of the first kind in `KINDS` of which there are any."""
    by_kind: dict[Kind, list[DeviceMeasurements]] = {}
    for device in devices:
        by_kind.setdefault(device.kind, []).append(device)
    return next((by_kind[kind] for kind in KINDS if kind in by_kind), [])


def robust_median(values: Iterable[float], assumed: float) -> float:
    """Median of the devices' values; of an even number the inner value nearer to `assumed`; `assumed` if there are
    none."""
    ordered = sorted(values)
    if not ordered:
        return assumed
    # For an even number, n/2 lying devices could pull the mean of both inner values: only one of them is used.
    lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(lower, upper, key=lambda value: _distance(value, assumed))


def estimate(
    devices: Sequence[DeviceMeasurements], plan: Plan, layers: Mapping[str, Sequence[str]]
) -> FieldMeasurements:
    """Estimates for a device class from its devices. `layers`: the layers of each slice, by its name."""
    rows = {row.name: row for row in plan.rows}
    remote = _majority_medians(devices, lambda device: device.remote_s, {name: rows[name].remote_s for name in rows})
    sent = _majority_medians(
        devices, lambda device: device.sent_bytes, {name: float(rows[name].up_bytes) for name in rows}
    )
    fixed = [device.fixed_s for device in devices if device.fixed_s is not None]
    return FieldMeasurements(
        link=Link(
            up_bytes_per_s=robust_median([device.link.up_bytes_per_s for device in devices], plan.link.up_bytes_per_s),
            down_bytes_per_s=robust_median(
                [device.link.down_bytes_per_s for device in devices], plan.link.down_bytes_per_s
            ),
            rtt_s=robust_median([device.link.rtt_s for device in devices], plan.link.rtt_s),
        ),
        device=tuple(
            SliceMeasurement(tuple(layers[name]), seconds)
            for name, seconds in _majority_medians(devices, lambda device: device.slice_s, plan.slice_s).items()
            if name in layers
        ),
        remote=tuple(
            SliceMeasurement(_layers_of(rows[name].remote, layers), seconds) for name, seconds in remote.items()
        ),
        sent=tuple(
            TransferMeasurement(rows[name].sends, rows[name].codecs, rows[name].compress, weight, name)
            for name, weight in sent.items()
        ),
        fixed_s=min(LONGEST_TRIP_S, max(0.0, robust_median(fixed, 0.0))),
        devices=len(devices),
        basis=devices[0].kind if devices else "measured",
    )


def _majority_medians(
    devices: Sequence[DeviceMeasurements],
    values_of: Callable[[DeviceMeasurements], Mapping[str, float]],
    assumed: Mapping[str, float],
) -> dict[str, float]:
    """Estimates by name, where more than half of the devices report a value and the plan contains the name."""
    names = dict.fromkeys(name for device in devices for name in values_of(device) if name in assumed)
    reported = {name: [values_of(device)[name] for device in devices if name in values_of(device)] for name in names}
    return {
        name: robust_median(values, assumed[name])
        for name, values in reported.items()
        if 2 * len(values) > len(devices)
    }


def _layers_of(slices: Iterable[str], layers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(layer for name in slices for layer in layers.get(name, ()))


def _link(message: TelemetryEvidence, assumed: Link) -> Link | None:
    """The link that the device reported; None if it is implausible or the server was not reachable. A downlink that was
    not reported is taken from the plan."""
    down = message.down_bytes_per_s or assumed.down_bytes_per_s
    rates = (message.up_bytes_per_s, down)
    if not all(SLOWEST_BYTES_PER_S <= rate <= FASTEST_BYTES_PER_S for rate in rates):
        return None
    if not (message.remote_usable and 0.0 <= message.rtt_s <= LONGEST_TRIP_S):
        return None
    return Link(up_bytes_per_s=message.up_bytes_per_s, down_bytes_per_s=down, rtt_s=message.rtt_s)


def _slice_medians(observations: Sequence[Observation], kind: Kind) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for moment in observations:
        window = moment.window
        if kind == "emulated" and window.emulation_overruns > MOST_LATE_RATIO * window.requests:
            continue
        for timing in window.slices:
            seconds.setdefault(timing.name, []).append(timing.seconds)
    return _medians(seconds)


def _offload_medians(
    observations: Sequence[Observation], plan: Plan
) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Seconds of each row's layers on the server, bytes of its requests, and the server's seconds besides the layers.
    Only windows in which a single row was used and offloading always succeeded. Rows through a gateway are left out,
    because their times contain two servers."""
    rows = {row.name: row for row in plan.rows if not row.is_local and not row.hops}
    layers_s: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    fixed_s: list[float] = []
    for moment in observations:
        window, row = moment.window, rows.get(moment.window.row)
        if row is None or window.switches or window.fallbacks:
            continue  # the window mixes several rows, or requests that ended on the device
        sent.setdefault(row.name, []).append(window.up_bytes / window.requests)
        phases = {phase.phase: phase.total_s / window.requests for phase in window.phases}
        if "remote" in phases:
            layers_s.setdefault(row.name, []).append(phases["remote"])
            fixed_s.append(_overhead_s(phases) - row.decode_s)
    return _medians(layers_s), _medians(sent), median(fixed_s) if fixed_s else None


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(each) for name, each in values.items()}


def _overhead_s(phases: Mapping[str, float]) -> float:
    """Seconds in the server besides the layers."""
    around = ("remote_queue", "remote_decode", "remote_load", "remote_encode")
    return sum(phases.get(name, 0.0) for name in around)


def _distance(value: float, assumed: float) -> float:
    """Distance of a value from the assumed one: the absolute log ratio where both are positive, else the difference."""
    return abs(math.log(value / assumed)) if value > 0.0 and assumed > 0.0 else abs(value - assumed)
