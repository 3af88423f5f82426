"""The agent as a process, killed at seeded moments of its updates, over a real broker (reference faults A1, E11)."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from edgesplit.release import manifest as release
from edgesplit.release.manifest import SliceFile
from edgesplit_agent.state.data_folder import DataFolder
from integration.test_agent import Made, Process, SmallController, chunk
from support.agent_engine import INPUT, eventually

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
KILLS = int(os.environ.get("EDGESPLIT_AGENT_KILLS", "24"))
PADDING = 24
"""Chunks that make a download long enough to be killed in."""
LINES = 30
"""What an agent logs until an update is done, or so."""
NEVER = 10**9


class Long(Made):
    """A release whose first slice is large."""

    def __init__(self, version: int, factor: float) -> None:
        super().__init__(version, factor)
        manifest = release.decode_manifest(self.raw)
        rng = random.Random(version)
        pieces = [rng.randbytes(60_000) for _ in range(PADDING)]
        self.chunks.update({chunk(piece).sha256: piece for piece in pieces})
        whole = b"".join(pieces)
        weights = SliceFile("weights.bin", len(whole), chunk(whole).sha256, tuple(map(chunk, pieces)))
        first, *others = manifest.slices
        padded = replace(first, files=(*first.files, weights))
        self.raw = release.encode_manifest(replace(manifest, slices=(padded, *others)))
        self.digest = release.release_digest(self.raw)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[SmallController]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    made = SmallController(tmp_path / "controller")
    made.start()
    yield made
    made.stop()


def test_an_agent_that_is_killed_again_and_again_gets_there(controller: SmallController, tmp_path: Path) -> None:
    """SIGKILL after a seeded number of log lines or chunks, through a first install and updates: it answers whenever it
    has something to answer by, always rightly, and the newest deployment runs in the end."""
    rng = random.Random(f"{SEED}/kills")
    print(f"seed {SEED}")
    releases = [Long(number, float(number + 1)) for number in range(1, 5)]
    right = {made.digest: (INPUT + 1) * np.float32(number + 2) for number, made in enumerate(releases)}
    agent = Process(controller, tmp_path, "--health-seconds", "0")
    try:
        for number in range(KILLS):
            if number in (0, KILLS // 3, 2 * KILLS // 3):
                controller.deploy(releases[3 * number // KILLS])
            agent.log.write_bytes(b"")
            controller.heard.clear()
            here = _chunks(agent)
            agent.spawn()
            lines, more = rng.randrange(1, LINES), rng.randrange(PADDING)
            if rng.random() < 0.6:
                more = NEVER
            else:
                lines = NEVER
            eventually(
                "it has come far enough",
                lambda n=lines, c=here + more: _far(agent, n, c) or _rests(controller),
                120,
            )
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


def _log(agent: Process) -> bytes:
    return agent.log.read_bytes()


def _far(agent: Process, lines: int, chunks: int) -> bool:
    """It has written so many lines, or has more chunks than that."""
    assert agent.child is not None and agent.child.poll() is None, _log(agent).decode()
    return _log(agent).count(b"\n") >= lines or _chunks(agent) > chunks


def _chunks(agent: Process) -> int:
    return len(list((agent.data / "chunks").glob("*/*")))


def _rests(controller: SmallController) -> bool:
    """It has said that there is nothing left to do."""
    said = controller.reported()
    return (
        said is not None
        and said.models != ()
        and all(model.state not in ("fetching", "staged", "trial") for model in said.models)
    )


def _answers_rightly(agent: Process, right: dict[str, npt.NDArray[np.float32]]) -> None:
    """Where it serves already, one answer."""
    here = DataFolder(agent.data).read_address()
    serves = b": serving" in _log(agent) or b": activated" in _log(agent)
    if serves and here is not None and agent.child is not None and here.pid == agent.child.pid:
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], right[answer.report.release])


def _tidy(data: Path) -> bool:
    left = [*(data / "releases").iterdir()]
    return len(left) == 1 and not list((data / "chunks").glob("*/*")) and not list(data.glob("*/.*.part"))
