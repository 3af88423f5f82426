"""The messages between devices and controller: every part of every one is bounded."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages, remote_inference
from edgesplit.mqtt import telemetry as telemetry_module
from edgesplit.mqtt.messages import (
    Birth,
    CascadeCounts,
    ModelState,
    Reported,
    StillCounts,
    Telemetry,
    TelemetryWindow,
)
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.messaging.process_sharding import ForwardedChunks

SIZED = (
    inspect.StrType, inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType, inspect.ListType,
    inspect.SetType, inspect.FrozenSetType, inspect.VarTupleType, inspect.DictType,
)  # fmt: skip
"""Types whose values may have any length."""
UNKNOWN = (inspect.AnyType, inspect.RawType, inspect.CustomType, inspect.ExtType)
"""Types that let anything in."""


class Inner(msgspec.Struct):
    """Any text."""

    word: str


class Outer(msgspec.Struct):
    """Nothing in it is bounded."""

    one: Inner | None
    pairs: tuple[tuple[int, bytes], ...]
    named: dict[str, int]


def structs_of(module: str) -> list[type[msgspec.Struct]]:
    """The structs that a module defines."""
    values = vars(sys.modules[module]).values()
    return [
        value
        for value in values
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module
    ]


ALL = [
    *structs_of(messages.__name__), *structs_of(telemetry_module.__name__), *structs_of(remote_inference.__name__),
    Signed, Statement, ForwardedChunks,
]  # fmt: skip
"""Everything that is decoded from the broker."""


def unbounded(kind: inspect.Type, path: str, seen: tuple[type, ...] = ()) -> Iterator[str]:
    """The places below `kind` at which a value may be of any length."""
    if isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            for field in kind.fields:
                yield from unbounded(field.type, f"{path}.{field.name}", (*seen, kind.cls))
        return
    if isinstance(kind, UNKNOWN) or (isinstance(kind, SIZED) and kind.max_length is None):
        yield f"{path}: {type(kind).__name__}"
    for name in ("item_type", "key_type", "value_type", "type"):
        inner = getattr(kind, name, None)
        if isinstance(inner, inspect.Type):
            yield from unbounded(inner, f"{path}[]", seen)
    for inner in (*getattr(kind, "item_types", ()), *getattr(kind, "types", ())):
        yield from unbounded(inner, f"{path}[]", seen)


@pytest.mark.parametrize("struct", ALL, ids=lambda struct: struct.__name__)
def test_no_part_of_a_message_is_of_any_length(struct: type[msgspec.Struct]) -> None:
    """Every text, byte string, list and dict has a maximum length: one device's message of 256 KiB made the operator's
    table of devices useless."""
    assert list(unbounded(inspect.type_info(struct), struct.__name__)) == []


def test_an_unbounded_part_is_found_at_any_depth() -> None:
    """The walk above sees into unions, tuples, dicts and structs."""
    found = {place.partition(":")[0] for place in unbounded(inspect.type_info(Outer), "Outer")}
    assert {"Outer.one[].word", "Outer.pairs", "Outer.pairs[][]", "Outer.named", "Outer.named[]"} <= found


def test_the_walk_covers_every_message() -> None:
    """Each member of the union of messages."""
    assert {kind.cls for kind in inspect.type_info(messages.Message).types} <= set(ALL)  # type: ignore[attr-defined]


def _telemetry(**fields: Any) -> Telemetry:
    """Telemetry with one window that has these fields."""
    window = TelemetryWindow(model="birds", release="a" * 64, row="small:local", **fields)
    return Telemetry(
        session=1, sequence=0, emulated=False, up_bytes_per_s=1.0, rtt_s=0.1, remote_usable=True, models=(window,)
    )


def test_counts_of_cascades_and_still_frames_round_trip() -> None:
    """A threshold may be negative (entropy); what is zero is not sent."""
    counts = CascadeCounts(
        sure=70, escalated=29, unsure=1, audited=3, changed=1, threshold=-0.4, allowed=0.02, answered={"small": 71}
    )  # fmt: skip
    message = _telemetry(cascade=counts, still=StillCounts(repeated=5, allowed=0.01))
    assert messages.decode(messages.encode(message), Telemetry) == message
    assert b"unaudited" not in messages.encode(message)


@pytest.mark.parametrize(
    "message",
    [
        Birth(1, 0.0, "9" * 100_000, "raspberrypi4", False, ""),
        Birth(1, 0.0, "1", "p" * 81, False, ""),
        Birth(1, 0.0, "1", "p", False, "http://" + "h" * 400),
        Reported(1, 1, (ModelState("m" * 81, "r", "r", "running"),)),
        Reported(1, 1, (ModelState("m", "r" * 65, "r", "running"),)),
        Reported(1, 1, (ModelState("m", "r", "r", "failed", "d" * (LIMITS.detail_chars + 1)),)),
        Reported(1, 1, (ModelState("m", "r", "r", "running"),) * 1_200),
        Reported(1, 1, (), safe_mode="s" * (LIMITS.detail_chars + 1)),
        Reported(1, 1, (), gateway_models=(ModelState("m", "r", "r", "staged"),) * 600),
        _telemetry(cascade=CascadeCounts(answered={f"v{number}": 1 for number in range(9)})),
        _telemetry(cascade=CascadeCounts(answered={"v" * 81: 1})),
        _telemetry(cascade=CascadeCounts(threshold=math.inf)),
        _telemetry(cascade=CascadeCounts(sure=-1)),
        _telemetry(still=StillCounts(allowed=-0.1)),
    ],
)
def test_a_message_with_a_part_too_long_is_malformed(message: messages.Message) -> None:
    """One device with 1,200 models and a version of 100,000 letters: both fitted into one message."""
    with pytest.raises(MalformedMessage):
        messages.decode(messages.encode(message), type(message))
