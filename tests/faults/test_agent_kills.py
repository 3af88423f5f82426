"""The agent as a process, killed at seeded moments of its updates, over a real broker (reference faults A1, E11)."""

from __future__ import annotations

import os
import random
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
from support.agent_engine import INPUT, eventually
from support.small_controller import AgentProcess, SmallController, TinyRelease, chunk_of

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
KILLS = int(os.environ.get("EDGESPLIT_AGENT_KILLS", "24"))
PADDING = 24
"""Chunks that make a download long enough to be killed in."""
LINES = 30
"""What an agent logs until an update is done, or so."""
NEVER = 10**9


class LargeRelease(TinyRelease):
    """A release whose first slice is large."""

    def __init__(self, version: int, factor: float) -> None:
        super().__init__(version, factor)
        manifest = release.decode_manifest(self.raw)
        rng = random.Random(version)
        pieces = [rng.randbytes(60_000) for _ in range(PADDING)]
        self.chunks.update({chunk_of(piece).sha256: piece for piece in pieces})
        whole = b"".join(pieces)
        weights = SliceFile("weights.bin", len(whole), chunk_of(whole).sha256, tuple(map(chunk_of, pieces)))
        first, *others = manifest.slices
        padded = replace(first, files=(*first.files, weights))
        self.raw = release.encode_manifest(replace(manifest, slices=(padded, *others)))
        self.digest = release.release_digest(self.raw)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[SmallController]:
    with SmallController(tmp_path / "controller") as running:
        yield running


def test_updates_complete_although_the_agent_is_killed_again_and_again(
    controller: SmallController, tmp_path: Path
) -> None:
    """SIGKILL after a seeded number of log lines or chunks, through a first install and updates: it answers whenever it
    has something to answer by, always rightly, and the newest deployment runs in the end."""
    rng = random.Random(f"{SEED}/kills")
    print(f"seed {SEED}")
    releases = [LargeRelease(number, float(number + 1)) for number in range(1, 5)]
    right = {update.digest: (INPUT + 1) * np.float32(number + 2) for number, update in enumerate(releases)}
    agent = AgentProcess(controller, tmp_path, "--health-seconds", "0")
    try:
        for number in range(KILLS):
            if number in (0, KILLS // 3, 2 * KILLS // 3):
                controller.deploy(releases[3 * number // KILLS])
            agent.log.write_bytes(b"")
            controller.received.clear()
            here = _chunks(agent)
            agent.spawn()
            lines, more = rng.randrange(1, LINES), rng.randrange(PADDING)
            if rng.random() < 0.6:
                more = NEVER
            else:
                lines = NEVER
            eventually(
                "it has come far enough",
                lambda n=lines, c=here + more: _far(agent, n, c) or _has_converged(controller),
                120,
            )
            _answers_rightly(agent, right)
            agent.end(signal.SIGKILL)
        controller.deploy(releases[3])
        agent.start()
        eventually("the newest runs", lambda: agent.is_running(releases[3]), 120)
        answer = agent.infer()
        assert answer.report.release == releases[3].digest
        assert np.array_equal(answer.outputs["y"], right[releases[3].digest])
        eventually("it has tidied up", lambda: _tidy(agent.data), 60)
        assert agent.end() == 0
    finally:
        if agent.child is not None:
            agent.end(signal.SIGKILL)


def _log(agent: AgentProcess) -> bytes:
    return agent.log.read_bytes()


def _far(agent: AgentProcess, lines: int, chunks: int) -> bool:
    """It has written so many lines, or has more chunks than that."""
    assert agent.child is not None and agent.child.poll() is None, _log(agent).decode()
    return _log(agent).count(b"\n") >= lines or _chunks(agent) > chunks


def _chunks(agent: AgentProcess) -> int:
    return len(list((agent.data / "chunks").glob("*/*")))


def _has_converged(controller: SmallController) -> bool:
    """It has reported a state in which no update is in progress."""
    models = controller.reported_models()
    return models != () and all(model.state not in ("fetching", "staged", "trial") for model in models)


def _answers_rightly(agent: AgentProcess, right: dict[str, npt.NDArray[np.float32]]) -> None:
    """Where it serves already, one answer."""
    here = DataFolder(agent.data).read_address()
    serves = b": serving" in _log(agent) or b": activated" in _log(agent)
    if serves and here is not None and agent.child is not None and here.pid == agent.child.pid:
        answer = agent.infer()
        assert np.array_equal(answer.outputs["y"], right[answer.report.release])


def _tidy(data: Path) -> bool:
    left = [*(data / "releases").iterdir()]
    return len(left) == 1 and not list((data / "chunks").glob("*/*")) and not list(data.glob("*/.*.part"))
