"""Releases for simulated devices: signed and delivered like any other, of a model that nobody has to compute.

Two slices, three rows. The golden answer is whatever the manifest says: a simulated runtime gives it, or another where
the release is to be a bad one (`Mood`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property

import numpy as np

from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import (
    Chunk,
    Golden,
    Manifest,
    Slice,
    SliceFile,
    TensorSpec,
    encode_manifest,
    release_digest,
)

X, H, Y = (TensorSpec(name, "FP32", (1, 4)) for name in ("x", "h", "y"))
PLANNED = Link(up_bytes_per_s=2_360_000.0, down_bytes_per_s=6_870_000.0, rtt_s=0.02, name="wifi")
DEVICE_S, REMOTE_S = 0.25, 0.01
"""Of the whole model, on a device and in the cloud. Made up: no device's figures."""
BOUNDARY_BYTES, INPUT_BYTES = 30_000, 150_000


@dataclass(frozen=True, slots=True)
class Mood:
    """How a release behaves on the devices where it does not do well."""

    golden: bool = False
    """It answers golden inputs wrongly, so that it is never activated."""
    crash: bool = False
    """Its worker is lost in every request once it serves."""
    slow: float = 1.0
    """It takes so many times as long as its plan says."""
    leak_bytes: int = 0
    """Its worker grows by so much with each request..."""
    room_bytes: int = 256 * 2**20
    """...and is ended at this, with the request that it runs."""
    hungry: float = 1.0
    """Each request takes so many times the energy."""
    hotter: float = 0.0
    """The device is hotter by so many degrees while it serves."""
    drift: float = 0.0
    """Its answers are told to differ by this part from those of what ran before."""


WELL = Mood()


@dataclass(frozen=True)
class SimulatedRelease:
    """What a controller signs and delivers."""

    model: str
    """Without version."""
    version: int
    raw: bytes
    """The manifest."""
    chunks: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """The release's name."""
        return release_digest(self.raw)

    @property
    def files(self) -> set[str]:
        """SHA-256 of every chunk and of every file that devices may load of it."""
        return set(self.chunks)


def make_release(
    model: str,
    version: int,
    classes: Iterable[str],
    *,
    size: int = 2_000,
    at: float = 0.0,
    device_s: float = DEVICE_S,
    drift: float = 0.0,
) -> SimulatedRelease:
    """`size`: bytes of the second slice, new in each version; the first slice stays as it is from version to version.
    `drift`: by what part its answers differ from those of other versions."""
    dice = random.Random(f"{model}@{version}")
    parts = {
        "a": [b"the first slice of " + model.encode() + b"w" * 300],
        "b": [dice.randbytes(min(65_536, size - start)) for start in range(0, max(1, size), 65_536)],
    }
    given = np.arange(4, dtype=np.float32).reshape(1, 4)
    answer = given * np.float32(2.0 * (1.0 + drift))
    request = b"".join(oip.encode_request(oip.InferRequest({"x": given}, id=f"golden {version}"))[0])
    response = b"".join(oip.encode_response(oip.InferResponse(model, {"y": answer}, id="golden"))[0])
    chunks = {_chunk(data).sha256: data for data in (*parts["a"], *parts["b"], request, response)}
    slices = tuple(
        Slice(name, "onnx", (name,), (ends[0],), (ends[1],), (_file(parts[name]),))
        for name, ends in (("a", (X, H)), ("b", (H, Y)))
    )
    manifest = Manifest(
        model=f"{model}@{version}",
        model_sha256=hashlib.sha256(model.encode()).hexdigest(),
        created=datetime.fromtimestamp(int(at), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        input_spec=None,
        inputs=(X,),
        outputs=(Y,),
        slices=slices,
        plans={one: _plan(f"{model}@{version}", one, device_s) for one in sorted(set(classes))},
        golden=(Golden(_chunk(request), _chunk(response)),),
    )
    return SimulatedRelease(model, version, encode_manifest(manifest), chunks)


def _plan(model: str, device_class: str, device_s: float) -> Plan:
    half = device_s / 2
    rows = (
        Row(name="local", device=("a", "b"), device_s=device_s),
        Row(name="cut-1", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=BOUNDARY_BYTES,
            down_bytes=400, device_s=half, remote_s=REMOTE_S / 2),
        Row(name="remote", remote=("a", "b"), sends=("x",), receives=("y",), up_bytes=INPUT_BYTES, down_bytes=400,
            remote_s=REMOTE_S),
    )  # fmt: skip
    return Plan(model=model, device_class=device_class, rows=rows, link=PLANNED, slice_s={"a": half, "b": half})


def _chunk(data: bytes) -> Chunk:
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


def _file(pieces: list[bytes]) -> SliceFile:
    whole = b"".join(pieces)
    return SliceFile("graph.onnx", len(whole), _chunk(whole).sha256, tuple(map(_chunk, pieces)))
