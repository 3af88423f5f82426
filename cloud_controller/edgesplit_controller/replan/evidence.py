"""What devices tell of themselves, as evidence of what their plan assumed: pure, from telemetry to estimates.

No single device is believed. Each has one voice whatever it sends, and says its own median; a class believes the
middle of these voices, and of an even number the one that is nearer to what was assumed. So of n devices fewer than
half can be broken or lie as they like without moving their class further than honest ones say. Emulated and simulated
devices never speak for real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import harmonic_mean, median
from typing import Any, Literal

import msgspec

from edgesplit.mqtt.messages import Window
from edgesplit.plan import Link, Plan
from edgesplit_partitioner.costs.from_telemetry import Group, Measured, Sent

Kind = Literal["measured", "emulated", "simulated"]
KINDS: tuple[Kind, ...] = ("measured", "emulated", "simulated")
"""The first of which there is any is what a class is judged by."""
LATE = 0.2
"""An emulated window with more late samples than this part says nothing of the device's times."""
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 100.0, 1e11
LONGEST_TRIP_S = 60.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of one telemetry message; the rest of it is no evidence."""

    at: float
    emulated: bool
    up_bytes_per_s: float
    rtt_s: float
    remote_ok: bool
    models: tuple[Window, ...]
    down_bytes_per_s: float = 0.0

    @property
    def kind(self) -> Kind:
        """Whose times these are."""
        return "emulated" if self.emulated else "measured"


def read(content: Mapping[str, Any]) -> Told | None:
    """A stored message; None for one that is none any more."""
    try:
        return msgspec.convert(content, Told)
    except msgspec.ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Moment:
    """One window of one device, while it served the release in question."""

    at: float
    link: Link
    window: Window


@dataclass(frozen=True, slots=True)
class Voice:
    """What one device says."""

    device: str
    kind: Kind
    moments: tuple[Moment, ...]
    slice_s: Mapping[str, float]
    """Median seconds by slice."""
    remote_s: Mapping[str, float]
    """By row, median seconds of its layers on the server."""
    sent: Mapping[str, float]
    """By row, median bytes of a request."""
    fixed_s: float | None
    """Median seconds in the server beside the layers, beyond what the rows planned; None where nothing crossed."""

    @property
    def requests(self) -> int:
        """That it answered in these moments."""
        return sum(moment.window.requests for moment in self.moments)

    @property
    def span_s(self) -> float:
        """Between its first moment and its last."""
        return self.moments[-1].at - self.moments[0].at if self.moments else 0.0

    @property
    def link(self) -> Link:
        """The link as it was over all of it: seconds per byte are averaged, not rates."""
        return Link(
            up_bytes_per_s=harmonic_mean([moment.link.up_bytes_per_s for moment in self.moments]),
            down_bytes_per_s=harmonic_mean([moment.link.down_bytes_per_s for moment in self.moments]),
            rtt_s=median(moment.link.rtt_s for moment in self.moments),
        )


def voice(
    device: str, told: Iterable[Told], model: str, release: str, plan: Plan, *, simulated: bool = False
) -> Voice | None:
    """What a device says of its plan, in these messages (oldest first); None where it says nothing. That a device is
    simulated it says at its birth."""
    moments: list[Moment] = []
    kind: Kind | None = None
    for one in told:
        link = _link(one, plan.link)
        window = next((each for each in one.models if (each.model, each.release) == (model, release)), None)
        if link is None or window is None or not window.requests:
            continue
        is_of: Kind = "simulated" if simulated else one.kind
        moments, kind = [*(moments if kind == is_of else ()), Moment(one.at, link, window)], is_of
    if kind is None:
        return None
    layers_s, sent, fixed_s = _crossing(moments, plan)
    return Voice(device, kind, tuple(moments), _slices(moments, kind), layers_s, sent, fixed_s)


def voices_of_best_kind(voices: Iterable[Voice]) -> list[Voice]:
    """Those of real devices where there are any; else the emulated; else the simulated."""
    by_kind: dict[Kind, list[Voice]] = {}
    for one in voices:
        by_kind.setdefault(one.kind, []).append(one)
    return next((by_kind[kind] for kind in KINDS if kind in by_kind), [])


def middle(values: Iterable[float], assumed: float) -> float:
    """What a class believes: the median; of an even number of voices the inner one that is nearer to `assumed`."""
    ranked = sorted(values)
    if not ranked:
        return assumed
    lower, upper = ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    return min(lower, upper, key=lambda value: _apart(value, assumed))


def believed(voices: Sequence[Voice], plan: Plan, layers: Mapping[str, Sequence[str]]) -> Measured:
    """What the class believes of its plan's assumptions. `layers`: of each slice, by its name."""
    rows = {row.name: row for row in plan.rows}
    remote = _heard(voices, lambda one: one.remote_s, {name: rows[name].remote_s for name in rows})
    sent = _heard(voices, lambda one: one.sent, {name: float(rows[name].up_bytes) for name in rows})
    fixed = [one.fixed_s for one in voices if one.fixed_s is not None]
    return Measured(
        link=Link(
            up_bytes_per_s=middle([one.link.up_bytes_per_s for one in voices], plan.link.up_bytes_per_s),
            down_bytes_per_s=middle([one.link.down_bytes_per_s for one in voices], plan.link.down_bytes_per_s),
            rtt_s=middle([one.link.rtt_s for one in voices], plan.link.rtt_s),
        ),
        device=tuple(
            Group(tuple(layers[name]), seconds)
            for name, seconds in _heard(voices, lambda one: one.slice_s, plan.slice_s).items()
            if name in layers
        ),
        remote=tuple(Group(_layers_of(rows[name].remote, layers), seconds) for name, seconds in remote.items()),
        sent=tuple(
            Sent(rows[name].sends, rows[name].codecs, rows[name].compress, weight) for name, weight in sent.items()
        ),
        fixed_s=min(LONGEST_TRIP_S, max(0.0, middle(fixed, 0.0))),
        devices=len(voices),
        basis=voices[0].kind if voices else "measured",
    )


def _heard(
    voices: Sequence[Voice], said: Callable[[Voice], Mapping[str, float]], assumed: Mapping[str, float]
) -> dict[str, float]:
    """By name, what the class believes of it: where most of its devices say something, and the plan knows it."""
    names = dict.fromkeys(name for one in voices for name in said(one) if name in assumed)
    heard = {name: [said(one)[name] for one in voices if name in said(one)] for name in names}
    return {name: middle(each, assumed[name]) for name, each in heard.items() if 2 * len(each) > len(voices)}


def _layers_of(slices: Iterable[str], layers: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(layer for name in slices for layer in layers.get(name, ()))


def _link(one: Told, assumed: Link) -> Link | None:
    """The link as the device saw it; None for what no link is. A downlink that is not told is the plan's."""
    down = one.down_bytes_per_s or assumed.down_bytes_per_s
    rates = (one.up_bytes_per_s, down)
    if not all(SLOWEST_BYTES_PER_S <= rate <= FASTEST_BYTES_PER_S for rate in rates):
        return None
    if not (one.remote_ok and 0.0 <= one.rtt_s <= LONGEST_TRIP_S):
        return None
    return Link(up_bytes_per_s=one.up_bytes_per_s, down_bytes_per_s=down, rtt_s=one.rtt_s)


def _slices(moments: Sequence[Moment], kind: Kind) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for moment in moments:
        window = moment.window
        if kind == "emulated" and window.late > LATE * window.requests:
            continue
        for one in window.slices:
            seconds.setdefault(one.name, []).append(one.seconds)
    return _medians(seconds)


def _crossing(moments: Sequence[Moment], plan: Plan) -> tuple[dict[str, float], dict[str, float], float | None]:
    """Seconds of each row's layers on the server, bytes of its requests, and what the server adds; of windows in which
    one row was used and the cloud always helped. Rows through a gateway tell of two servers at once, and are left
    out."""
    rows = {row.name: row for row in plan.rows if not row.is_local and not row.hops}
    layers_s: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    fixed_s: list[float] = []
    for moment in moments:
        window, row = moment.window, rows.get(moment.window.row)
        if row is None or window.switches or window.fallbacks:
            continue
        sent.setdefault(row.name, []).append(window.up_bytes / window.requests)
        phases = {one.phase: one.total_s / window.requests for one in window.phases}
        if "remote" in phases:
            layers_s.setdefault(row.name, []).append(phases["remote"])
            fixed_s.append(_around_s(phases) - row.decode_s)
    return _medians(layers_s), _medians(sent), median(fixed_s) if fixed_s else None


def _medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(each) for name, each in values.items()}


def _around_s(phases: Mapping[str, float]) -> float:
    around = ("remote_queue", "remote_decode", "remote_load", "remote_encode")
    return sum(phases.get(name, 0.0) for name in around)


def _apart(value: float, assumed: float) -> float:
    """How far a value is from what was assumed: as a ratio, where both can be one."""
    return abs(math.log(value / assumed)) if value > 0.0 and assumed > 0.0 else abs(value - assumed)
