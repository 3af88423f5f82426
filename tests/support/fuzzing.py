"""Bytes that no correct peer would send, for every parser of network bytes: garbage, and good examples spoiled.

`EDGESPLIT_FUZZ` is how many examples a test tries (100 in `make test`, thousands in `make soak`), `EDGESPLIT_SEED` what
they are made from: a run is repeated by the seed that pytest prints at its head.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("EDGESPLIT_FUZZ", "100"))
SEED = int(os.environ["EDGESPLIT_SEED"])
LENGTHS = [0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
NESTS = [b"[", b"{", b'{"a":', b"\x91", b"\x81\xa1a", b"\xc4", b"(", b"<", b"- ", b"\x30\x80"]


def fuzzed(*strategies: st.SearchStrategy[Any], share: float = 1.0) -> Callable[[Any], Any]:
    """A test over these, with a `share` of the examples (for what takes longer), repeatable by the printed seed."""

    def decorate(test: Any) -> Any:
        chosen = settings(
            max_examples=max(5, int(EXAMPLES * share)),
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        return seed(SEED)(chosen(given(*strategies)(test)))

    return decorate


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """A good example after one to four accidents: bits flipped, cut, doubled, swapped, lengths overwritten."""
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        if not raw:
            break
        at = draw(st.integers(0, len(raw) - 1))
        kind = draw(st.sampled_from(["flip", "cut", "double", "drop", "insert", "length", "byte", "swap"]))
        if kind == "flip":
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at:]
        elif kind == "double":
            raw[at:at] = raw[at : at + draw(st.integers(1, 64))]
        elif kind == "drop":
            del raw[at : at + draw(st.integers(1, 64))]
        elif kind == "insert":
            raw[at:at] = draw(st.binary(max_size=32))
        elif kind == "length":
            form = draw(st.sampled_from(["<I", ">I", "<Q", ">Q", ">H", "<H"]))
            value = draw(st.sampled_from(LENGTHS)) % 2 ** (8 * struct.calcsize(form))
            packed = struct.pack(form, value)
            raw[at : at + len(packed)] = packed
        elif kind == "byte":
            raw[at] = draw(st.sampled_from([0, 0x0A, 0x22, 0x7F, 0x80, 0xC1, 0xDF, 0xFF]))
        else:
            other = draw(st.integers(0, len(raw) - 1))
            raw[at], raw[other] = raw[other], raw[at]
    return bytes(raw)


def spoiled(examples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Any bytes, deep nests, and each of these good examples after accidents."""
    nests = st.tuples(st.sampled_from(NESTS), st.integers(1, 20_000)).map(lambda pair: pair[0] * pair[1])
    garbage = st.one_of(st.binary(max_size=300), nests)
    return st.one_of(garbage, st.sampled_from(list(examples)).flatmap(damaged), st.sampled_from(list(examples)))


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["", "\0", "../..", "a" * 5_000, "\ud800", "NaN", "-1", "device", "\x1b[2J"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
"""Values as JSON, MessagePack and YAML can hold them, odd ones among them."""
