"""The agent as a process, killed at seeded moments of its updates, over a real broker (reference faults A1, E11)."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agent_world import EXPECTED, INPUT, eventually
from edgesplit import oip, release
from edgesplit.errors import EdgeError
from edgesplit.release import Chunk, Manifest, SliceFile
from integration.test_agent import Made, Process, SmallController, chunk

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
KILLS = int(os.environ.get("EDGESPLIT_AGENT_KILLS", "24"))
PADDING = 24
"""Chunks that make a download long enough to be killed in."""
LINES = 60
"""What an agent logs until an update is done, or so."""


class Long(Made):
    """A release whose first slice is large."""

    def __init__(self, version: int, factor: float) -> None:
        super().__init__(version, factor)
        manifest = release.decode_manifest(self.raw)
        rng = random.Random(version)
        first = manifest.slices[0]
        pieces = [rng.randbytes(60_000) for _ in range(PADDING)]
        self.chunks.update({chunk(piece).sha256: piece for piece in pieces})
        weights = SliceFile(
            "weights.bin", sum(map(len, pieces)), chunk(b"".join(pieces)).sha256, tuple(map(_of, pieces))
        )
        padded = type(first)(**{**_fields(first), "files": (*first.files, weights)})
        whole: Manifest = type(manifest)(**{**_fields(manifest), "slices": (padded, *manifest.slices[1:])})
        self.raw = release.encode_manifest(whole)
        self.digest = release.release_digest(self.raw)


def _of(piece: bytes) -> Chunk:
    return chunk(piece)


def _fields(one: object) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}  # type: ignore[attr-defined]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[SmallController]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    made = SmallController(tmp_path / "controller")
    made.start()
    yield made
    made.stop()


def test_an_agent_that_is_killed_again_and_again_gets_there(controller: SmallController, tmp_path: Path) -> None:
    """SIGKILL after a seeded number of log lines, through a first install and updates: it answers whenever it has
    something to answer by, always rightly, and the newest deployment runs in the end."""
    rng = random.Random(f"{SEED}/kills")
    print(f"seed {SEED}")
    releases = [Long(number, float(number + 1)) for number in range(1, 5)]
    right = {made.digest: (INPUT + 1) * np.float32(number + 2) for number, made in enumerate(releases)}
    agent = Process(controller, tmp_path, "--health-seconds", "0", "--fetch-rate", "40mbit")
    try:
        for number in range(KILLS):
            if number % (KILLS // 3 or 1) == 0 and number // (KILLS // 3 or 1) < 3:
                controller.deploy(releases[number // (KILLS // 3 or 1)])
            agent.log.write_bytes(b"")
            agent.spawn()
            lines = rng.randrange(1, LINES)
            eventually("it has come far enough", lambda n=lines: _far(agent, n) or _settled(agent, releases), 120)
            _answers_rightly(agent, right)
            agent.end(signal.SIGKILL)
        controller.deploy(releases[3])
        agent.start()
        eventually("the newest runs", lambda: agent.runs(releases[3]), 120)
        answer = agent.infer()
        assert answer.report.release == releases[3].digest
        assert np.array_equal(answer.outputs["y"], right[releases[3].digest])
        eventually("it has tidied up", lambda: _tidy(agent.data), 60)
        assert agent.end() == 0
    finally:
        if agent.child is not None:
            agent.end(signal.SIGKILL)


def _far(agent: Process, lines: int) -> bool:
    return agent.log.read_bytes().count(b"\n") >= lines


def _settled(agent: Process, releases: list[Long]) -> bool:
    return b"is committed" in agent.log.read_bytes() or any(agent.runs(made) for made in releases)


def _answers_rightly(agent: Process, right: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    """Where it serves already, one answer."""
    try:
        answer = agent.infer(deadline_s=10)
    except (EdgeError, AssertionError, OSError):
        return  # it serves nothing yet
    assert np.array_equal(answer.outputs["y"], right[answer.report.release])


def _tidy(data: Path) -> bool:
    left = [path for path in (data / "releases").iterdir()]
    return len(left) == 1 and not list((data / "chunks").glob("*/*")) and not list(data.glob("*/.*.part"))


assert EXPECTED is not None and oip.HEADER_LENGTH
