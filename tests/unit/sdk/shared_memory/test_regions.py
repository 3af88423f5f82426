"""Shared memory on the server's side: regions by key, segments by descriptor, and their limits."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.http1.peer import Peer
from edgesplit.limits import LIMITS
from edgesplit.oip import protocol as oip
from edgesplit.oip.shared_memory import TensorRef
from edgesplit.shared_memory.regions import SEGMENT, Regions
from edgesplit.shared_memory.segment import Segment

CONTENT = bytes(range(100)) * 10


@pytest.fixture
def channel() -> Iterator[Peer]:
    """A connection over a Unix socket, from this user."""
    here, there = socket.socketpair()
    with here, there:
        own = Peer(here)
        yield own
        own.close()


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    """Keys are the files of a folder of the test's own."""
    (tmp_path / "key").write_bytes(CONTENT)
    own = Regions(tmp_path)
    yield own
    own.close()


class ForeignPeer(Peer):
    """A peer whose program belongs to another user."""

    @property
    def user(self) -> int:
        return os.getuid() + 1


def descriptors(of: Path | str) -> int:
    """How many of this process's lead there; those of others' threads come and go."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += str(of) in os.readlink(f"/proc/self/fd/{entry}")
    return count


def test_region_is_read_and_written_within_its_bounds(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """From its own offset on; status reports what was registered."""
    regions.register(channel, "r", "/key", 100, 800)
    memory = regions.view_for(channel)
    assert bytes(memory.read(TensorRef("r", 10, 5), stable=False)) == CONTENT[105:115]
    memory.write(TensorRef("r", 4, 796), [b"ab", memoryview(b"cd")])
    assert (tmp_path / "key").read_bytes()[896:900] == b"abcd"
    assert regions.status(channel, None) == [{"name": "r", "key": "/key", "offset": 100, "byte_size": 800}]
    assert regions.status(channel, "r") == regions.status(channel, None)


@pytest.mark.parametrize(("size", "offset"), [(801, 0), (1, 800), (800, 1), (2**53, 0), (0, 2**53)])
def test_access_beyond_a_region_is_refused(regions: Regions, channel: Peer, size: int, offset: int) -> None:
    """Neither by size nor by offset."""
    regions.register(channel, "r", "key", 100, 800)
    memory = regions.view_for(channel)
    for use in (lambda p: memory.read(p, stable=True), lambda p: memory.write(p, [b"x"]), memory.check):
        with pytest.raises(UsageError, match="Invalid offset"):
            use(TensorRef("r", size, offset))


@pytest.mark.parametrize("key", ["", "/", "..", "/..", ".", "a/b", "../etc/passwd", "/etc/passwd", "x\0y", "k" * 300])
def test_key_is_never_a_path(regions: Regions, channel: Peer, key: str) -> None:
    """Whatever it contains: nothing outside the folder of shared memory is opened."""
    before = descriptors("/etc/passwd")
    with pytest.raises(UsageError):
        regions.register(channel, "r", key, 0, 1)
    assert descriptors("/etc/passwd") == before


def test_only_regular_files_are_opened(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """No link, no pipe that would block, no folder."""
    (tmp_path / "link").symlink_to(tmp_path / "key")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for key in ("link", "pipe", "folder", "nothing"):
        with pytest.raises(UsageError, match="Unable to open"):
            regions.register(channel, "r", key, 0, 1)


def test_memory_of_another_user_is_not_opened(regions: Regions) -> None:
    """The agent may be allowed to open what the client is not."""
    here, there = socket.socketpair()
    with here, there, pytest.raises(UsageError, match="not this program's user's"):
        regions.register(ForeignPeer(here), "r", "key", 0, 1)


def test_users_see_only_their_own_regions(regions: Regions, channel: Peer) -> None:
    """Another user's are not listed, found, or unregistered."""
    regions.register(channel, "r", "key", 0, 10)
    here, there = socket.socketpair()
    with here, there:
        other = ForeignPeer(here)
        assert regions.status(other, None) == []
        regions.unregister(other, None)
        with pytest.raises(UsageError, match="Unable to find"):
            regions.view_for(other).check(TensorRef("r", 1))
    assert len(regions.status(channel, None)) == 1


def test_unknown_user_has_no_shared_memory(regions: Regions) -> None:
    """Over TLS, or where the kernel does not name the peer."""
    with pytest.raises(UsageError, match="on this machine"):
        regions.register(None, "r", "key", 0, 1)
    with pytest.raises(UsageError, match="on this machine"):
        regions.view_for(None).check(TensorRef("r", 1))


def test_regions_are_bounded_and_can_be_unregistered(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """In number for each user; a name serves once; unregistering closes, also a region that never existed."""
    for n in range(LIMITS.shared_regions):
        regions.register(channel, str(n), "key", 0, 1)
    with pytest.raises(UsageError, match="unregister some"):
        regions.register(channel, "more", "key", 0, 1)
    regions.unregister(channel, "0")
    with pytest.raises(UsageError, match="already in manager"):
        regions.register(channel, "1", "key", 0, 1)
    regions.unregister(channel, "never there")
    regions.unregister(channel, None)
    assert descriptors(tmp_path) == 0 and regions.status(channel, None) == []


def test_truncated_region_is_an_error(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """Its owner truncates it after it was registered: no SIGBUS, no invented bytes, and it is not extended."""
    regions.register(channel, "r", "key", 0, 1000)
    os.truncate(tmp_path / "key", 10)
    memory = regions.view_for(channel)
    with pytest.raises(UsageError, match="10 bytes now"):
        memory.read(TensorRef("r", 1000), stable=False)
    with pytest.raises(UsageError, match="10 bytes now"):
        memory.write(TensorRef("r", 1000), [b"x" * 1000])
    assert (tmp_path / "key").stat().st_size == 10
    assert bytes(memory.read(TensorRef("r", 10), stable=False)) == CONTENT[:10]


def test_unlinked_or_replaced_region_stays_open(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """As in Triton: what was opened is what counts."""
    regions.register(channel, "r", "key", 0, 1000)
    (tmp_path / "key").unlink()
    (tmp_path / "key").write_bytes(b"another")
    assert bytes(regions.view_for(channel).read(TensorRef("r", 1000), stable=False)) == CONTENT


def test_only_float_tensors_are_read_in_place(regions: Regions, channel: Peer) -> None:
    """Floating-point tensors are views of the segment; indices are copied, so that they cannot change after their
    check."""
    segment = Segment.create(4096)
    channel.attach(SEGMENT, Segment.from_descriptor(os.dup(segment.descriptor)))
    segment.write(0, [np.arange(4, dtype=np.float32).tobytes(), np.arange(4, dtype=np.int32).tobytes()])
    tensors = {"x": np.zeros(4, np.float32), "i": np.zeros(4, np.int32)}
    at = {"x": TensorRef(SEGMENT, 16), "i": TensorRef(SEGMENT, 16, 16)}
    buffers, length = oip.encode_request(
        oip.InferRequest(tensors, inputs_at=at, answer_at=TensorRef(SEGMENT, 4064, 32))
    )
    assert len(buffers[0]) == sum(map(len, buffers)), "no tensor travels in the body"
    asked = oip.decode_request(b"".join(buffers), length, regions.view_for(channel))
    assert asked.inputs["x"].tolist() == asked.inputs["i"].tolist() == [0, 1, 2, 3]
    assert asked.answer_at == TensorRef(SEGMENT, 4064, 32)
    segment.write(0, [b"\xff" * 32])
    assert np.isnan(asked.inputs["x"]).all() and asked.inputs["i"].tolist() == [0, 1, 2, 3]
    assert Segment.containing(asked.inputs["x"]) is not None and Segment.containing(asked.inputs["i"]) is None
    segment.close()


def test_arrays_outlive_their_segment(channel: Peer) -> None:
    """A worker may still read what a closed client had sent."""
    segment = Segment.create(4096)
    segment.write(0, [b"\x07" * 8])
    array = np.frombuffer(segment.memory, np.uint8, 8)
    channel.attach(SEGMENT, segment)
    channel.close()
    del segment
    assert array.tolist() == [7] * 8
    assert Segment.containing(array) is None


@pytest.mark.parametrize("kind", ["unsealed", "read only", "empty", "file", "pipe"])
def test_only_sealed_memory_is_mapped(kind: str, tmp_path: Path) -> None:
    """Anything else would let a client kill the server by SIGBUS; the descriptor is closed."""
    name = f"refused-{kind}"
    if kind == "file":
        (tmp_path / name).write_bytes(b"x" * 4096)
        passed = os.open(tmp_path / name, os.O_RDWR)
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
        passed = os.open(tmp_path / name, os.O_RDWR)
    else:
        passed = os.memfd_create(name, os.MFD_ALLOW_SEALING)
        os.ftruncate(passed, 0 if kind == "empty" else 4096)
        seals = {"unsealed": 0, "read only": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, "empty": fcntl.F_SEAL_SHRINK}
        fcntl.fcntl(passed, fcntl.F_ADD_SEALS, seals[kind])
    with pytest.raises(UsageError):
        Segment.from_descriptor(passed)
    assert descriptors(name) == 0


def test_created_segment_cannot_be_truncated() -> None:
    """Not even by its creator."""
    segment = Segment.create(8192)
    with pytest.raises(OSError):
        os.ftruncate(segment.descriptor, 100)
    segment.close()


def test_missing_segment_descriptor_is_an_error(regions: Regions, channel: Peer) -> None:
    """Naming one is an error, not a crash."""
    with pytest.raises(UsageError, match="no segment"):
        regions.view_for(channel).check(TensorRef(SEGMENT, 1))


FP32: dict[str, object] = {"name": "x", "datatype": "FP32", "shape": [4]}


@pytest.mark.parametrize("parameters", [
    {"shared_memory_region": 7, "shared_memory_byte_size": 16},
    {"shared_memory_region": "", "shared_memory_byte_size": 16},
    {"shared_memory_region": "r"},
    {"shared_memory_region": "r", "shared_memory_byte_size": -16},
    {"shared_memory_region": "r", "shared_memory_byte_size": 16.5},
    {"shared_memory_region": "r", "shared_memory_byte_size": True},
    {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": -1},
    {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 2**63},
    {"shared_memory_region": "r", "shared_memory_byte_size": 12},
    {"shared_memory_region": "r", "shared_memory_byte_size": 16, "binary_data_size": 16},
])  # fmt: skip
def test_malformed_place_is_refused(regions: Regions, channel: Peer, parameters: dict[str, object]) -> None:
    """No name, no size, a size other than the shape's, or given twice."""
    import json

    regions.register(channel, "r", "key", 0, 1000)
    body = json.dumps({"inputs": [{**FP32, "parameters": parameters}]}).encode()
    with pytest.raises(MalformedMessage):
        oip.decode_request(body, None, regions.view_for(channel))


def test_server_without_shared_memory_says_so(channel: Peer) -> None:
    """The error tells the client that this server has none."""
    import json

    place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    body = json.dumps({"inputs": [{**FP32, "parameters": place}]}).encode()
    with pytest.raises(MalformedMessage, match="not served here"):
        oip.decode_request(body, None)


def test_request_memory_is_bounded_like_a_body(regions: Regions, channel: Peer, tmp_path: Path) -> None:
    """A large region that is named by many inputs would be copied for each."""
    import json

    size = LIMITS.http_body_bytes // 2 + 4096
    with (tmp_path / "key").open("r+b") as file:
        file.truncate(size)
    regions.register(channel, "r", "key", 0, size)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    entries = [{"name": n, "datatype": "INT8", "shape": [size], "parameters": place} for n in "ab"]
    with pytest.raises(MalformedMessage, match="more than"):
        oip.decode_request(json.dumps({"inputs": entries}).encode(), None, regions.view_for(channel))


def test_outputs_are_written_to_their_place_or_refused_as_too_small(regions: Regions, channel: Peer) -> None:
    """The entry tells region, offset and the size that was used."""
    regions.register(channel, "r", "key", 0, 1000)
    memory = regions.view_for(channel)
    answer = oip.InferResponse("m", {"y": np.arange(4, dtype=np.float32)})
    buffers, length = oip.encode_response(answer, at={"y": TensorRef("r", 100, 8)}, memory=memory)
    assert length is None
    said = oip.decode_response(b"".join(buffers), None, memory)
    assert said.outputs["y"].tolist() == [0, 1, 2, 3]
    assert bytes(memory.read(TensorRef("r", 16, 8), stable=True)) == answer.outputs["y"].tobytes()
    with pytest.raises(UsageError, match="takes 16 bytes of shared memory, and 15"):
        oip.encode_response(answer, at={"y": TensorRef("r", 15)}, memory=memory)
