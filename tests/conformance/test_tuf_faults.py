"""The device's own faults on the real path: cache files spoiled, clocks ten years off, power gone between two files.

Each goes through the agent's client over a real mosquitto; tests/unit/sdk/trust/test_store.py has more cases without a
network.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.trust.verification import verify_manifest
from support.signed_repository import DAY, sample_release
from support.tuf_repository import Case

YEARS_10 = 3652.5 * DAY
CACHED = ["root.json", "root_history/1.root.json", "timestamp.json", "snapshot.json", "targets.json"]
FAULTS = ["missing", "empty", "cut", "random"]
SEED = int(os.environ["EDGESPLIT_SEED"])


def spoil(path: Path, fault: str) -> None:
    raw = path.read_bytes()
    path.unlink()  # root.json is a link, and what it points at stays as it is
    if fault == "empty":
        path.write_bytes(b"")
    elif fault == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif fault == "random":
        print(f"EDGESPLIT_SEED={SEED}")
        path.write_bytes(random.Random(SEED).randbytes(len(raw)))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CACHED)
def test_a_spoiled_cache_file_costs_one_refresh(case: Case, name: str, fault: str) -> None:
    """A5: each cached file, missing, empty, cut or random: the device takes the next release, and never an older."""
    case.sim.publish()
    case.refresh()
    spoil(case.folder / "cache" / name, fault)
    case.restarted()
    digest = case.sim.add()
    case.sim.publish()
    assert case.refresh()["targets"] == 3
    assert case.manifest(digest) == sample_release()[0]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["proof.json", "counters.json"])
def test_a_spoiled_state_file_costs_one_refresh(case: Case, name: str, fault: str) -> None:
    """A5: our own two files may be spoiled, too: the device refreshes and goes on."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    spoil(case.folder / name, fault)
    case.restarted()
    case.refresh()
    assert verify_manifest(case.manifest(digest), case.store.proof(), case.bootstrap).model == "tiny@1"


@pytest.mark.parametrize("off_s", [YEARS_10, -YEARS_10], ids=["ten years ahead", "ten years behind"])
def test_a_clock_ten_years_off_keeps_what_runs_and_comes_back(case: Case, off_s: float) -> None:
    """C7, C8: what runs is proved without a clock; a clock ahead installs nothing; set right, all goes on."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    raw, statement = case.manifest(digest), case.sim.statement(5)
    case.store.verify_statement(statement, "cam-1", for_install=True)

    case.sim.now += off_s
    case.restarted()
    try:
        case.refresh()
    except TrustError:
        assert off_s > 0
        with pytest.raises(EdgeError):
            case.manifest(digest)
    assert case.store.verify_statement(statement, "cam-1", for_install=False).counter == 5
    assert verify_manifest(raw, case.store.proof(), case.bootstrap).model == "tiny@1"

    case.sim.now -= off_s
    second = case.sim.add(2)
    case.sim.publish()
    case.refresh()
    assert case.manifest(second) == sample_release(2)[0]
    with pytest.raises(TrustError, match="older than 5"):
        case.store.verify_statement(case.sim.statement(4), "cam-1", for_install=False)


def test_a_slow_clock_accepts_no_older_metadata(case: Case) -> None:
    """A12: a device without a battery wakes in the past: expired metadata passes for fresh, older metadata does not."""
    old = dict(case.sim.files)
    case.sim.publish()
    case.refresh()
    case.sim.now -= YEARS_10
    case.restarted()
    case.sim.files, new = old, case.sim.files
    case.refused("version|older")
    case.sim.files = new
    assert case.refresh()["timestamp"] == 2


@pytest.mark.parametrize("answers", [0, 1, 2, 3])
def test_a_link_that_breaks_between_two_files_leaves_what_was(case: Case, answers: int) -> None:
    """TUF 5.3 to 5.6: the refresh ends after each of its files: what was trusted stays, and the next one completes."""
    case.refresh()
    case.sim.publish_root()
    case.sim.publish()
    paths = [case.sim.path(name) for name in ("root", "timestamp", "snapshot", "targets")]
    lost = {path: case.sim.files.pop(path) for path in paths[answers:] if "root" not in path}
    if lost:
        case.refused("not there", LinkError)
    case.sim.files.update(lost)
    case.restarted()
    assert case.refresh() == {"root": 2, "targets": 2, "snapshot": 2, "timestamp": 2}
