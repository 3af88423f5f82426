"""Limits on a plan, and what they mean for each layer: must it run on the device, or beyond the link?

A demand on a layer binds others, since nothing returns to the device inside: what a device layer depends on runs on
the device, and what depends on a remote layer runs remotely. Demands that meet on one layer cannot both be kept.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import Fallback
from edgesplit_partitioner.costs.model import Costs, LayerCost, plain


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a plan must keep. The defaults ask for nothing."""

    keep_raw_input: bool = False
    """No raw tensor crosses: whatever reads one runs on the device."""
    keep_first: Annotated[int, msgspec.Meta(ge=0)] = 0
    """So many layers, in the order of the costs, run on the device with all they depend on."""
    force: str = "auto"
    """`auto`; or `device` or `cloud`, everything there; or a layer's name, the same as `force_after`."""
    force_after: str = ""
    """Exactly this layer and all it depends on run on the device, the rest remotely."""
    edge_after: str = ""
    """With `force_after`, of what runs remotely: exactly this layer and all it depends on run on the next tier, and the
    rest beyond it."""
    fallback: Fallback = "warm"
    """`none` leaves all-local out of the table unless it is best at some bandwidth. `warm` keeps the weights of the
    whole model on the device, and `memory_bytes` counts them."""
    memory_bytes: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many on the device: weights and the peak of live tensors in the order of the costs."""
    energy_joules: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many of the device per inference, on the planned link."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many seconds from the first input byte to the last answer, on the planned link."""
    max_loss: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so much output error: the losses of all codecs used add up. Without it only lossless codecs are."""

    def as_text(self) -> dict[str, str]:
        """Those that were set, as a plan's table carries them."""
        given = msgspec.to_builtins(self)
        return {name: str(value).lower() if value is True else str(value) for name, value in given.items()}

    @property
    def needs_search(self) -> bool:
        """Is there a limit that a minimum cut alone cannot keep?"""
        sums = (self.memory_bytes, self.energy_joules, self.deadline_s, self.max_loss)
        return any(most is not None for most in sums)

    @property
    def forced(self) -> bool:
        """The operator chose the cut."""
        return self.force != "auto" or bool(self.force_after)

    @property
    def force_label(self) -> str:
        """The forcing limit, for messages."""
        return f"force_after={self.force_after}" if self.force_after else f"force={self.force}"


def as_limits(given: Limits | Mapping[str, Any] | None) -> Limits:
    """Limits from what a caller gave; UsageError where it cannot be read."""
    figures = msgspec.structs.asdict(given) if isinstance(given, Limits) else {} if given is None else given
    try:
        if not isinstance(figures, Mapping):
            raise UsageError(f"limits: give names and values, not {given!r}")
        limits = msgspec.convert({str(name).replace("-", "_"): plain(it) for name, it in figures.items()}, Limits)
    except msgspec.ValidationError as error:
        raise UsageError(f"limits: {error} (known: {', '.join(Limits.__struct_fields__)})") from error
    endless = [name for name, it in msgspec.structs.asdict(limits).items() if it == math.inf]
    if endless:
        raise UsageError(f"limits: {endless[0]} must be a number; leave it out where there is no limit")
    if limits.force != "auto" and limits.force_after:
        raise UsageError(f"limits: give force={limits.force} or force_after={limits.force_after}, not both")
    if limits.edge_after and not limits.force_after:
        raise UsageError(f"limits: edge_after={limits.edge_after} needs force_after, the last layer on the device")
    return limits


@dataclass(frozen=True)
class Sides:
    """By layer: the demand that holds it on the device, the demand that holds it beyond the link; empty where free."""

    device: tuple[str, ...]
    remote: tuple[str, ...]

    @cached_property
    def held(self) -> npt.NDArray[np.bool_]:
        """Layers that must run on the device."""
        return np.array([bool(why) for why in self.device], dtype=np.bool_)

    @cached_property
    def sent(self) -> npt.NDArray[np.bool_]:
        """Layers that must run beyond the link."""
        return np.array([bool(why) for why in self.remote], dtype=np.bool_)

    @cached_property
    def may_end_after(self) -> npt.NDArray[np.bool_]:
        """Per layer but the last: may a cut run it and all layers before it on the device, and no other?"""
        held_later = np.cumsum(self.held[::-1])[::-1] > self.held
        sent_so_far = np.cumsum(self.sent) > 0
        allowed: npt.NDArray[np.bool_] = ~held_later & ~sent_so_far
        return allowed[:-1]

    def allow(self, on_device: npt.NDArray[np.bool_]) -> bool:
        """May this cut be?"""
        return not (self.held & ~on_device).any() and not (self.sent & on_device).any()


def sides(costs: Costs, limits: Limits, device: str, remote: str, *, force: bool = True) -> Sides:
    """Where each layer must run; InfeasibleLimits names the demands that conflict. `force=False` leaves forcing out."""
    on_device: dict[str, str] = {}
    on_remote: dict[str, str] = {}
    for layer in costs.layers:
        _tiers_demand(layer, device, remote, on_device, on_remote)
    for name, why in _private(costs, limits).items():
        on_device.setdefault(name, why)
    wanted: list[Sides] = [_closed(costs, on_device, on_remote)]
    if force and limits.forced:
        wanted.append(_forced(costs, limits, remote))
    _check(costs, wanted, device, remote)
    return Sides(_first(one.device for one in wanted), _first(one.remote for one in wanted))


def earliest_cut(costs: Costs, limits: Limits) -> tuple[str, ...]:
    """The layers that the privacy limits hold on the device, with all they depend on, in the order of the costs."""
    held = _closed(costs, _private(costs, limits), {}).device
    return tuple(layer.name for layer, why in zip(costs.layers, held, strict=True) if why)


def _private(costs: Costs, limits: Limits) -> dict[str, str]:
    """Layers that privacy holds on the device, each with the limit that does."""
    raw = (layer for layer in costs.layers if limits.keep_raw_input and not costs.raw.isdisjoint(layer.reads))
    held = {layer.name: "keep_raw_input" for layer in raw}
    for layer in costs.layers[: limits.keep_first]:
        held.setdefault(layer.name, f"keep_first={limits.keep_first}")
    return held


def _tiers_demand(
    layer: LayerCost, device: str, remote: str, on_device: dict[str, str], on_remote: dict[str, str]
) -> None:
    allowed = layer.tiers or tuple(layer.seconds)
    if device not in allowed and remote not in allowed:
        raise InfeasibleLimits(
            f"layer {layer.name!r} runs only on {', '.join(allowed)}, and the plan has {device} and {remote}"
        )
    if device not in allowed:
        on_remote[layer.name] = f"the tiers of layer {layer.name!r} ({remote} only)"
    elif remote not in allowed:
        on_device[layer.name] = f"the tiers of layer {layer.name!r} ({device} only)"


def _closed(costs: Costs, on_device: dict[str, str], on_remote: dict[str, str]) -> Sides:
    """The demands with all that follows from them."""
    if on_device:
        needed: dict[str, str] = {}
        for layer in reversed(costs.layers):
            why = on_device.get(layer.name) or next((needed[name] for name in layer.writes if name in needed), "")
            if why:
                on_device[layer.name] = why
                needed.update(dict.fromkeys((name for name in layer.reads if name not in needed), why))
    if on_remote:
        made: dict[str, str] = {}
        for layer in costs.layers:
            why = on_remote.get(layer.name) or next((made[name] for name in layer.reads if name in made), "")
            if why:
                on_remote[layer.name] = why
                made.update(dict.fromkeys(layer.writes, why))
    names = [layer.name for layer in costs.layers]
    return Sides(tuple(on_device.get(name, "") for name in names), tuple(on_remote.get(name, "") for name in names))


def _forced(costs: Costs, limits: Limits, remote: str) -> Sides:
    """Exactly the cut that the operator named."""
    last, label = limits.force_after or limits.force, limits.force_label
    nowhere, everywhere = ("",) * len(costs.layers), (label,) * len(costs.layers)
    if not limits.force_after and last == "device":
        return Sides(everywhere, nowhere)
    if not limits.force_after and last in ("cloud", remote):
        return Sides(nowhere, everywhere)
    check_layer(costs, last, limits.force_label)
    device = _closed(costs, {last: label}, {}).device
    return Sides(device, tuple("" if held else label for held in device))


def check_layer(costs: Costs, name: str, label: str) -> None:
    """UsageError where the model has no layer of that name; `label` is the limit that names it."""
    known = [layer.name for layer in costs.layers]
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"{label}: no layer is called {name!r}{hint}")


def check_first(costs: Costs, limits: Limits) -> None:
    """UsageError where more first layers shall stay than there are: the slip of a hand, not a wish."""
    if limits.keep_first > len(costs.layers):
        raise UsageError(
            f"keep_first={limits.keep_first}: {costs.model} has {len(costs.layers)} layers; force=device keeps them all"
        )


def up_to(costs: Costs, limits: Limits, tiers: Sequence[str]) -> npt.NDArray[np.bool_]:
    """By layer: does `edge_after` hold it no further than the tier after the device?"""
    label = f"edge_after={limits.edge_after}"
    if len(tiers) < 3:
        raise UsageError(f"limits: {label}: the plan has no tier between {tiers[0]} and {tiers[-1]}")
    check_layer(costs, limits.edge_after, label)
    return np.array([bool(why) for why in _closed(costs, {limits.edge_after: label}, {}).device], dtype=np.bool_)


def _first(columns: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """By layer the first demand that is not empty."""
    return tuple(next((why for why in whys if why), "") for whys in zip(*columns, strict=True))


def _check(costs: Costs, wanted: list[Sides], device: str, remote: str) -> None:
    """No layer is held on both sides."""
    for position, layer in enumerate(costs.layers):
        here = next((one.device[position] for one in wanted if one.device[position]), "")
        there = next((one.remote[position] for one in wanted if one.remote[position]), "")
        if here and there:
            raise InfeasibleLimits(
                f"no cut satisfies both {here} and {there}: "
                f"the first holds layer {layer.name!r} on the {device}, the second on the {remote}"
            )
