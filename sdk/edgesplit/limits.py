"""Every bound on what a peer may send or ask for, named once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that both sides keep. Sizes in bytes, times in seconds."""

    message_bytes: int = 262_144
    """One MQTT payload other than a chunk."""
    request_bytes: int = 8_192
    """One MQTT payload by which a device asks for something."""
    manifest_bytes: int = 4_000_000
    metadata_bytes: int = 5_000_000
    chunk_bytes: int = 131_072
    bitmap_bytes: int = 6_144
    """Of a request for chunks: a bit for every chunk that a manifest has room for."""
    window_chunks: int = 256
    """In one request."""
    slice_bytes: int = 16 * 2**30
    """Of one file of a slice."""
    slices: int = 1_000
    rows: int = 64
    http_header_bytes: int = 32_768
    http_body_bytes: int = 256 * 2**20
    http_bytes_per_s: int = 1_000
    """A peer that moves a body more slowly than this is given up."""
    inference_json_bytes: int = 16 * 2**20
    """The JSON part of an inference body; tensors beyond that travel as binary data."""
    inference_tensors: int = 256
    frame_bytes: int = 64 * 2**20
    frame_pixels: int = 64_000_000
    handshake_s: float = 10.0
    idle_connection_s: float = 75.0


LIMITS = Limits()
