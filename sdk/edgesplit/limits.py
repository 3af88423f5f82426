"""Upper bounds on everything that a peer may send or request, each defined once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that both sides enforce. Sizes in bytes, times in seconds."""

    message_bytes: int = 262_144
    """One MQTT payload other than a chunk."""
    telemetry_bytes: int = 16_384
    """One telemetry message: the controller stores thousands per device."""
    request_bytes: int = 8_192
    """One MQTT payload with a device's request."""
    remote_inference_bytes: int = 2 * 2**20
    """Body of an inference that goes through the controller, and body of its answer."""
    detail_chars: int = 4_000
    """Characters of one reason in words that a device reports."""
    models_per_device: int = 64
    """Models that one device is instructed to serve."""
    reported_models: int = 2 * models_per_device
    """Models in one report or telemetry message: until a device has stopped those that it no longer serves, it reports
    them too."""
    gateway_releases: int = 512
    """Releases that one gateway stores for the devices behind it."""
    manifest_bytes: int = 4_000_000
    metadata_bytes: int = 5_000_000
    metadata_piece_bytes: int = 65_536
    """Piece of a metadata file or manifest in one message."""
    fingerprint_bytes: int = 4_000_000
    """The fingerprint file of a model (`edgesplit.release.fingerprint`), about 30,000 operators and weights. A larger
    model gets none."""
    graph_bytes: int = 256 * 2**20
    """The graph file of a recut slice."""
    graph_parts: int = 200_000
    """Protobuf fields in one message of such a graph file."""
    chunk_bytes: int = 131_072
    bitmap_bytes: int = 6_144
    """Bitmap in a request for chunks: one bit for every chunk that a manifest has room for."""
    fetch_window_chunks: int = 256
    """Chunks in one request."""
    slice_bytes: int = 16 * 2**30
    """One file of a slice."""
    slices: int = 1_000
    """Slices of one release."""
    rows: int = 64
    """Rows of one plan."""
    variants: int = 8
    """Variants of a family: they share the rows of one plan."""
    wrapped_bytes: int = 65_536
    """Wrapped content keys of one release for one device."""
    http_header_bytes: int = 32_768
    http_body_bytes: int = 256 * 2**20
    http_bodies_bytes: int = 2**30
    """Bodies of all requests that one server receives or answers at a time, counted as they arrive."""
    http_body_share_bytes: int = 256 * 2**20
    """The part of them that one client may have: a certificate, or where there is none a user or an address. One body
    of the largest size fits."""
    http_body_step_bytes: int = 2 * 2**20
    """A body is counted at most this far ahead of what has arrived: one huge page, which its first byte may occupy."""
    http_bytes_per_s: int = 1_000
    """Minimum rate of a body; a connection that transfers more slowly is closed."""
    http_slow_bytes: int = 65_536
    """As much of a body may be transferred at that rate; the rest must be faster."""
    http_large_bytes_per_s: int = 10_000
    """Minimum rate of the rest of a large body."""
    inference_json_bytes: int = 16 * 2**20
    """JSON part of an inference body; larger tensors travel as binary data."""
    inference_tensors: int = 16_384
    """Tensors of one inference body; no row of a release sends or receives more (`edgesplit.release.manifest`)."""
    shared_regions: int = 64
    """Shared memory regions that the programs of one user may register."""
    frame_bytes: int = 64 * 2**20
    frame_pixels: int = 64_000_000
    handshake_s: float = 10.0
    idle_connection_s: float = 75.0


LIMITS = Limits()
