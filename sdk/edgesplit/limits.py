"""Every bound on what a peer may send or ask for, named once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that both sides keep. Sizes in bytes, times in seconds."""

    message_bytes: int = 262_144
    """One MQTT payload other than a chunk."""
    telemetry_bytes: int = 16_384
    """One telemetry message: thousands of each device are kept."""
    request_bytes: int = 8_192
    """One MQTT payload by which a device asks for something."""
    manifest_bytes: int = 4_000_000
    metadata_bytes: int = 5_000_000
    anatomy_bytes: int = 4_000_000
    """Of a model's anatomy (`edgesplit.release.fingerprint`): 30,000 operators and weights. A larger model has none."""
    graph_bytes: int = 256 * 2**20
    """Of a recut slice's graph file."""
    graph_parts: int = 200_000
    """Of one message in it."""
    chunk_bytes: int = 131_072
    bitmap_bytes: int = 6_144
    """Of a request for chunks: a bit for every chunk that a manifest has room for."""
    window_chunks: int = 256
    """In one request."""
    slice_bytes: int = 16 * 2**30
    """Of one file of a slice."""
    slices: int = 1_000
    rows: int = 64
    wrapped_bytes: int = 65_536
    """Content keys of one release for one device, wrapped."""
    http_header_bytes: int = 32_768
    http_body_bytes: int = 256 * 2**20
    http_bodies_bytes: int = 2**30
    """Of all requests that one server receives or answers at a time."""
    http_bytes_per_s: int = 1_000
    """A peer that moves a body more slowly than this is given up."""
    inference_json_bytes: int = 16 * 2**20
    """The JSON part of an inference body; tensors beyond that travel as binary data."""
    inference_tensors: int = 256
    shared_regions: int = 64
    """Shared memory regions that one user's programs may register."""
    frame_bytes: int = 64 * 2**20
    frame_pixels: int = 64_000_000
    handshake_s: float = 10.0
    idle_connection_s: float = 75.0


LIMITS = Limits()
