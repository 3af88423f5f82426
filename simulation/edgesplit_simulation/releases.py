"""Releases for simulated devices: signed and delivered like any other, of a model that is never computed.

Each has two slices and three plan rows. A simulated runtime returns the golden answer of the manifest, or a wrong one
where the release is faulty (`Behaviour`).
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
    GoldenExample,
    Manifest,
    Slice,
    SliceFile,
    TensorSpec,
    chunk_of,
    encode_manifest,
    release_digest,
)

X, H, Y = (TensorSpec(name, "FP32", (1, 4)) for name in ("x", "h", "y"))
PLANNED = Link(up_bytes_per_s=2_360_000.0, down_bytes_per_s=6_870_000.0, rtt_s=0.02, name="wifi")
DEVICE_S, REMOTE_S = 0.25, 0.01
"""Seconds of the whole model on a device and on the offload server; invented, not those of any device."""
BOUNDARY_BYTES, INPUT_BYTES = 30_000, 150_000


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a release behaves on the devices where it is faulty."""

    wrong_golden: bool = False
    """Golden inputs are answered wrongly, so that the release is never activated."""
    crashes: bool = False
    """Its worker is lost in every request once it serves."""
    slowdown: float = 1.0
    """Factor of its run time over its plan."""
    leak_bytes: int = 0
    """Bytes by which its worker grows with each request."""
    memory_limit_bytes: int = 256 * 2**20
    """Memory of its worker above which it is killed, with the request that it runs."""
    energy_factor: float = 1.0
    """Factor of the energy of each request."""
    extra_celsius: float = 0.0
    """Degrees Celsius that it adds to the device's temperature while it serves."""
    drift: float = 0.0
    """Reported output drift from the release that ran before, as a fraction."""


HEALTHY = Behaviour()
"""A healthy release."""


@dataclass(frozen=True)
class SimulatedRelease:
    """A signed release as the controller delivers it."""

    model: str
    """Name of the model without version."""
    version: int
    raw: bytes
    """The encoded manifest."""
    chunks: dict[str, bytes]
    """Chunks by SHA-256."""

    @cached_property
    def digest(self) -> str:
        """The release's digest."""
        return release_digest(self.raw)


def make_release(
    model: str, version: int, classes: Iterable[str], *, size: int = 2_000, at: float = 0.0,
    device_s: float = DEVICE_S, drift: float = 0.0,
) -> SimulatedRelease:  # fmt: skip
    """Make a release of the simulated model. `size` is the length in bytes of the second slice, which is new in each
    version; the first slice is the same in every version. `drift` is the fraction by which its answers differ from
    those of other versions."""
    rng = random.Random(f"{model}@{version}")
    parts = {
        "a": [b"the first slice of " + model.encode() + b"w" * 300],
        "b": [rng.randbytes(min(65_536, size - start)) for start in range(0, max(1, size), 65_536)],
    }
    golden_input = np.arange(4, dtype=np.float32).reshape(1, 4)
    answer = golden_input * np.float32(2.0 * (1.0 + drift))
    request = b"".join(oip.encode_request(oip.InferRequest({"x": golden_input}, id=f"golden {version}"))[0])
    response = b"".join(oip.encode_response(oip.InferResponse(model, {"y": answer}, id="golden"))[0])
    chunks = {chunk_of(data).sha256: data for data in (*parts["a"], *parts["b"], request, response)}
    slices = tuple(
        Slice(name, "onnx", (name,), (ends[0],), (ends[1],), (_file(parts[name]),))
        for name, ends in (("a", (X, H)), ("b", (H, Y)))
    )
    manifest = Manifest(
        model=f"{model}@{version}", model_sha256=hashlib.sha256(model.encode()).hexdigest(),
        created=datetime.fromtimestamp(int(at), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), input_spec=None,
        inputs=(X,), outputs=(Y,), slices=slices,
        plans={name: _plan(f"{model}@{version}", name, device_s) for name in sorted(set(classes))},
        golden=(GoldenExample(chunk_of(request), chunk_of(response)),),
    )  # fmt: skip
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


def _file(pieces: list[bytes]) -> SliceFile:
    whole = b"".join(pieces)
    return SliceFile("graph.onnx", len(whole), chunk_of(whole).sha256, tuple(map(chunk_of, pieces)))
