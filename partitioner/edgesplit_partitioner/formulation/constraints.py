"""Limits on a plan, and what they mean for each layer: must it run on the device, or beyond the first link?

A limit on a layer binds others, since nothing returns to the device inside the model: what a device layer depends on
runs on the device, and what depends on a remote layer runs remotely. Limits that hold one layer on both sides conflict.
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

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.plan import CUT_NAME_SEPARATOR, Fallback
from edgesplit_partitioner.arrays import Mask
from edgesplit_partitioner.costs.model import Costs, LayerCost, to_python_types


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a plan must keep. The defaults limit nothing."""

    keep_raw_input: bool = False
    """No raw tensor crosses: every layer that reads one runs on the device."""
    keep_first: Annotated[int, msgspec.Meta(ge=0)] = 0
    """So many layers, in the order of the costs, run on the device with all they depend on."""
    force: str = "auto"
    """`auto`; or `device` or `cloud`, where then all layers run; or a layer's name, which means `force_after`."""
    force_after: str = ""
    """The name of a cut: exactly this layer, or these as in `conv1 + conv7`, and all they depend on run on the device,
    the rest remotely."""
    edge_after: str = ""
    """With `force_after`: of what runs remotely exactly this layer and all it depends on run on the next tier, the rest
    beyond it."""
    fallback: Fallback = "warm"
    """`none` leaves all-local out of the table unless it is best at some bandwidth. `warm` keeps the weights of the
    whole model on the device, and `memory_bytes` counts them."""
    memory_bytes: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many bytes on the device: weights and the peak of live tensors in the order of the costs."""
    energy_joules: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many joules of the device per inference, on the planned link."""
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so many seconds from the first input byte to the last answer, on the planned link."""
    max_loss: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """At most so much output error: the losses of all codecs used add up. Without this or `max_changed` only lossless
    codecs are used."""
    max_changed: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    """At most this share of answers changes, as bounded on samples that chose nothing (`planner.changed_answers`). One
    tensor of a row may be lossy: what several do together was not measured."""

    def as_text(self) -> dict[str, str]:
        """The limits that were set, by name, as a plan's table contains them."""
        values = msgspec.to_builtins(self)
        return {name: str(value).lower() if value is True else str(value) for name, value in values.items()}

    @property
    def needs_search(self) -> bool:
        """Whether there is a limit that a minimum cut alone cannot keep."""
        sums = (self.memory_bytes, self.energy_joules, self.deadline_s, self.max_loss, self.max_changed)
        return any(most is not None for most in sums)

    @property
    def allows_loss(self) -> bool:
        """Whether lossy codecs may be used."""
        return bool(self.max_loss or self.max_changed)

    @property
    def forced(self) -> bool:
        """Whether the operator chose the cut."""
        return self.force != "auto" or bool(self.force_after)

    @property
    def force_label(self) -> str:
        """The limit that forces the cut, for messages."""
        return f"force_after={self.force_after}" if self.force_after else f"force={self.force}"


def parse_limits(given: Limits | Mapping[str, Any] | None) -> Limits:
    """Limits from a caller's values; UsageError where they cannot be read or contradict each other."""
    figures = msgspec.structs.asdict(given) if isinstance(given, Limits) else {} if given is None else given
    try:
        if not isinstance(figures, Mapping):
            raise UsageError(f"limits: give names and values, not {given!r}")
        limits = msgspec.convert(
            {str(name).replace("-", "_"): to_python_types(value) for name, value in figures.items()}, Limits
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"limits: {error} (known: {', '.join(Limits.__struct_fields__)})") from error
    endless = [name for name, value in msgspec.structs.asdict(limits).items() if value == math.inf]
    if endless:
        raise UsageError(f"limits: {endless[0]} must be a number; leave it out where there is no limit")
    if limits.force != "auto" and limits.force_after:
        raise UsageError(f"limits: give force={limits.force} or force_after={limits.force_after}, not both")
    if limits.edge_after and not limits.force_after:
        raise UsageError(f"limits: edge_after={limits.edge_after} needs force_after, the last layer on the device")
    return limits


@dataclass(frozen=True)
class DeviceRemoteSplit:
    """By layer: the limit that holds it on the device, the limit that holds it beyond the link; empty where free."""

    device: tuple[str, ...]
    remote: tuple[str, ...]

    @cached_property
    def on_device(self) -> Mask:
        """Layers that must run on the device."""
        return np.array([bool(limit) for limit in self.device], dtype=np.bool_)

    @cached_property
    def on_remote(self) -> Mask:
        """Layers that must run beyond the link."""
        return np.array([bool(limit) for limit in self.remote], dtype=np.bool_)


def split_by_limits(costs: Costs, limits: Limits, device: str, remote: str, *, force: bool = True) -> DeviceRemoteSplit:
    """Where each layer must run; InfeasibleLimits names two limits that conflict. `force=False` leaves forcing out."""
    on_device: dict[str, str] = {}
    on_remote: dict[str, str] = {}
    for layer in costs.layers:
        _hold_by_tiers(layer, device, remote, on_device, on_remote)
    for name, limit in _private(costs, limits).items():
        on_device.setdefault(name, limit)
    splits = [_closed(costs, on_device, on_remote)]
    if force and limits.forced:
        splits.append(_forced(costs, limits, remote))
    _check(costs, splits, device, remote)
    return DeviceRemoteSplit(_first(split.device for split in splits), _first(split.remote for split in splits))


def earliest_cut(costs: Costs, limits: Limits) -> tuple[str, ...]:
    """The layers that the privacy limits hold on the device, with all they depend on, in the order of the costs."""
    held = _closed(costs, _private(costs, limits), {}).device
    return tuple(layer.name for layer, limit in zip(costs.layers, held, strict=True) if limit)


def _private(costs: Costs, limits: Limits) -> dict[str, str]:
    """Layers that the privacy limits hold on the device, each with the limit that does."""
    reads_raw = (layer for layer in costs.layers if limits.keep_raw_input and not costs.raw.isdisjoint(layer.reads))
    held = {layer.name: "keep_raw_input" for layer in reads_raw}
    for layer in costs.layers[: limits.keep_first]:
        held.setdefault(layer.name, f"keep_first={limits.keep_first}")
    return held


def _hold_by_tiers(
    layer: LayerCost, device: str, remote: str, on_device: dict[str, str], on_remote: dict[str, str]
) -> None:
    """Add the layer to the side that its own tiers hold it on; InfeasibleLimits where it can run on neither."""
    allowed = layer.tiers or tuple(layer.seconds)
    if device not in allowed and remote not in allowed:
        raise InfeasibleLimits(
            f"layer {layer.name!r} runs only on {', '.join(allowed)}, and the plan has {device} and {remote}"
        )
    if device not in allowed:
        on_remote[layer.name] = f"the tiers of layer {layer.name!r} ({remote} only)"
    elif remote not in allowed:
        on_device[layer.name] = f"the tiers of layer {layer.name!r} ({device} only)"


def _closed(costs: Costs, on_device: dict[str, str], on_remote: dict[str, str]) -> DeviceRemoteSplit:
    """The limits by layer with all that follows from them; both mappings are extended."""
    if on_device:
        # Backwards: whatever a device layer reads must be made on the device, by the same limit.
        needed: dict[str, str] = {}
        for layer in reversed(costs.layers):
            limit = on_device.get(layer.name) or next((needed[name] for name in layer.writes if name in needed), "")
            if limit:
                on_device[layer.name] = limit
                needed.update(dict.fromkeys((name for name in layer.reads if name not in needed), limit))
    if on_remote:
        # Forwards: whatever reads a remotely made tensor runs remotely.
        made: dict[str, str] = {}
        for layer in costs.layers:
            limit = on_remote.get(layer.name) or next((made[name] for name in layer.reads if name in made), "")
            if limit:
                on_remote[layer.name] = limit
                made.update(dict.fromkeys(layer.writes, limit))
    names = [layer.name for layer in costs.layers]
    return DeviceRemoteSplit(
        tuple(on_device.get(name, "") for name in names), tuple(on_remote.get(name, "") for name in names)
    )


def _forced(costs: Costs, limits: Limits, remote: str) -> DeviceRemoteSplit:
    """Exactly the cut that the operator named."""
    last, label = limits.force_after or limits.force, limits.force_label
    nowhere, everywhere = ("",) * len(costs.layers), (label,) * len(costs.layers)
    if not limits.force_after and last == "device":
        return DeviceRemoteSplit(everywhere, nowhere)
    if not limits.force_after and last in ("cloud", remote):
        return DeviceRemoteSplit(nowhere, everywhere)
    here = with_dependencies(costs, last, label).tolist()
    return DeviceRemoteSplit(
        tuple(label if held else "" for held in here), tuple("" if held else label for held in here)
    )


def with_dependencies(costs: Costs, name: str, label: str) -> Mask:
    """By layer: whether it is the one of that name, or one of those that the name of a cut lists, or one that these
    depend on.

    UsageError where the model has no such layer; `label` is the limit that names it.
    """
    known = [layer.name for layer in costs.layers]
    # A layer may be called `a + b`: the whole is tried before its parts.
    names = [name] if name in known else [part.strip() for part in name.split(CUT_NAME_SEPARATOR.strip())]
    for unknown in (part for part in names if part not in known):
        near = difflib.get_close_matches(unknown, known, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"{label}: no layer is called {unknown!r}{hint}")
    return _closed(costs, dict.fromkeys(names, label), {}).on_device


def check_keep_first(costs: Costs, limits: Limits) -> None:
    """UsageError where `keep_first` exceeds the number of layers: a typing error rather than a limit."""
    if limits.keep_first > len(costs.layers):
        raise UsageError(
            f"keep_first={limits.keep_first}: {costs.model} has {len(costs.layers)} layers; force=device keeps them all"
        )


def up_to_next_tier(costs: Costs, limits: Limits, tiers: Sequence[str]) -> Mask:
    """By layer: whether `edge_after` holds it no further than the tier after the device."""
    label = f"edge_after={limits.edge_after}"
    if len(tiers) < 3:
        raise UsageError(f"limits: {label}: the plan has no tier between {tiers[0]} and {tiers[-1]}")
    return with_dependencies(costs, limits.edge_after, label)


def _first(columns: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """By layer the first limit that is not empty."""
    return tuple(next((limit for limit in limits if limit), "") for limits in zip(*columns, strict=True))


def _check(costs: Costs, splits: list[DeviceRemoteSplit], device: str, remote: str) -> None:
    """InfeasibleLimits where a layer is held on both sides."""
    for number, layer in enumerate(costs.layers):
        here = next((split.device[number] for split in splits if split.device[number]), "")
        there = next((split.remote[number] for split in splits if split.remote[number]), "")
        if here and there:
            raise InfeasibleLimits(
                f"no cut satisfies both {here} and {there}: "
                f"the first holds layer {layer.name!r} on the {device}, the second on the {remote}"
            )
