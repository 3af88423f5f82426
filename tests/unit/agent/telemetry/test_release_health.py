"""What a device reports of its releases' health, and what the gates of a rollout make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgesplit.errors import Busy, DeadlineExceeded, Dropped, UsageError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Birth, ModelState, Reported, Telemetry
from edgesplit.mqtt.telemetry import ReleaseHealth
from edgesplit.oip.report import Report
from edgesplit_agent.releases.golden_result import GoldenResult
from edgesplit_agent.releases.output_drift import MAX_DRIFT, Drift, drift_of, worst_drift
from edgesplit_agent.telemetry.release_health import ReleaseHealthTracker
from edgesplit_controller.fleet.devices import Devices
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.release_health import evidence_by_device
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device
from support.agent_engine import record
from support.device_fleet import new_url
from support.device_storage import MODEL, Machine, Source, Tiny

OLD, NEW = "a" * 64, "b" * 64
NOW = 1_800_000_000.0


def vector(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float32)


@pytest.mark.parametrize(
    ("before", "after", "drift"),
    [
        ({"y": vector(1, 2, 4)}, {"y": vector(1, 2, 4)}, Drift(0.0, True)),
        ({"y": vector(1, 2, 4)}, {"y": vector(1, 2, 3)}, Drift(0.25, True)),
        ({"y": vector(1, 2, 4)}, {"y": vector(4, 2, 1)}, Drift(0.75, False)),
        ({"y": vector(0, 0)}, {"y": vector(0, 1)}, Drift(MAX_DRIFT, False)),
        ({"y": vector(1, 2)}, {"y": vector(float("nan"), 2)}, Drift(MAX_DRIFT, False)),
        ({"y": vector(1, float("nan"))}, {"y": vector(1, float("nan"))}, Drift(0.0, True)),
        ({"y": vector(4)}, {"y": vector(3)}, Drift(0.25, None)),
        ({"y": np.zeros((0, 3), np.float32)}, {"y": np.zeros((0, 3), np.float32)}, Drift(0.0, True)),
        ({"y": vector(1)}, {"z": vector(1)}, None),
        ({"y": vector(1)}, {"y": vector(1, 2)}, None),
        ({"y": vector(1)}, {"y": vector(1).astype(np.float64)}, None),
        ({"y": np.array(["a"])}, {"y": np.array(["b"])}, None),
        ({}, {}, None),
    ],
)
def test_distance_between_answers(before: dict, after: dict, drift: Drift | None) -> None:  # type: ignore[type-arg]
    """Relative to the largest output, the largest possible for NaN, and none for what cannot be compared."""
    found = drift_of(before, after)
    assert (found is None) == (drift is None)
    if found is not None and drift is not None:
        assert found.largest == pytest.approx(drift.largest) and found.top_agrees == drift.top_agrees


@given(
    arrays.arrays(np.float32, (2, 3), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
    arrays.arrays(np.float32, (2, 3), elements=st.floats(width=32)),
)
def test_drift_is_finite_and_not_negative(before: np.ndarray, after: np.ndarray) -> None:
    """Whatever a model outputs; zero only where nothing differs."""
    found = drift_of({"y": before}, {"y": after})
    assert found is not None and 0.0 <= found.largest <= MAX_DRIFT
    assert (found.largest == 0.0) <= bool(np.allclose(before, after, rtol=1e-6, atol=1e-30, equal_nan=True))
    message = ReleaseHealth(model="m", release="r", drift=found.largest)
    assert messages.decode(messages.encode(message), ReleaseHealth) == message


def test_drift_is_the_worst_of_all_golden_inputs() -> None:
    """And one input with another top class marks the whole comparison."""
    assert worst_drift([]) is None
    assert worst_drift([Drift(0.1, True), Drift(0.3, None)]) == Drift(0.3, True)
    assert worst_drift([Drift(0.1, False), Drift(0.3, True)]) == Drift(0.3, False)


def report(release: str = NEW, **more: object) -> Report:
    return Report(**{"release": release, "row": "local", "latency_s": 0.01, **more})  # type: ignore[arg-type]


def test_release_health_counts_its_own_requests() -> None:
    """Not those that started under the previous release, nor applications' errors."""
    ledger = ReleaseHealthTracker()
    ledger.on_activated(MODEL, OLD, 0.0)
    ledger.finished(record(DeadlineExceeded("late"), model=MODEL, digest=OLD))
    ledger.on_activated(MODEL, NEW, 10.0, Drift(0.02, True), GoldenResult(10, 9, 10, 10))
    ledger.finished(record(report(OLD), model=MODEL, digest=OLD))
    ledger.finished(record(DeadlineExceeded("late"), model=MODEL, digest=OLD))
    weighed = {"joules": 2.0, "joules_basis": "predicted"}
    for number in range(100):
        answer = report(latency_s=number / 1000, fallback=number < 3, **weighed)
        ledger.finished(record(answer, model=MODEL, digest=NEW))
    for error in (DeadlineExceeded("late"), Busy("full"), UsageError("typo"), Dropped("stale")):
        ledger.finished(record(error, model=MODEL, digest=NEW))
    ledger.on_readings(MODEL, 5_000, 60.0)
    ledger.on_readings(MODEL, 3_000, 71.5)
    ledger.on_readings(MODEL, None, None)
    (told,) = ledger.to_telemetry(25.0)
    assert told == ReleaseHealth(
        model=MODEL, release=NEW, active_s=15.0, requests=100, failed=2, fallbacks=3, latency_p95_s=0.095,
        memory_bytes=5_000, celsius=71.5, joules=2.0, joules_basis="predicted", drift=0.02, top1_agrees=True,
        golden_ok=True, golden_labelled=10, golden_right=9, golden_compared=10, golden_agreeing=10,
    )  # fmt: skip


def test_active_release_is_always_reported() -> None:
    """After a restart of the agent a release is reported without any history; a retired one is dropped."""
    ledger = ReleaseHealthTracker()
    ledger.reconcile({MODEL: OLD}, 5.0)
    assert ledger.to_telemetry(6.0) == (ReleaseHealth(model=MODEL, release=OLD, active_s=1.0),)
    ledger.finished(record(report(OLD), model=MODEL, digest=OLD))
    ledger.reconcile({MODEL: OLD}, 7.0)
    assert ledger.to_telemetry(8.0)[0].requests == 1
    ledger.reconcile({}, 9.0)
    assert ledger.to_telemetry(9.0) == ()


def test_new_release_is_compared_with_the_running_one(tmp_path: Path) -> None:
    """At activation the golden inputs run on both: a first release has none to compare with, and a changed factor
    shows."""
    told: list[tuple[str, Drift | None, GoldenResult | None]] = []
    source = Source(tmp_path / "controller")
    one, same, other = Tiny(1), Tiny(2), Tiny(3, factor=3.0)
    source.add(one, same, other)
    machine = Machine(
        tmp_path / "device", source, on_activated=lambda model, release, drift, ok: told.append((release, drift, ok))
    ).boot()
    for wanted in (one, same, other):
        machine.offer(source.say(wanted)).settle()
    machine.stop()
    assert [release for release, _, _ in told] == [one.digest, same.digest, other.digest]
    assert all(ok for _, _, ok in told)
    first, second, third = (drift for _, drift, _ in told)
    assert first is None and second == Drift(0.0, True)
    assert third is not None and third.largest == pytest.approx(0.5)


class Fleet:
    """Devices that are there, and take in what is said in their names."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.database = Database(new_url(folder))
        self.devices = Devices(self.database, stale_after_s=10.0, now=lambda: NOW)
        with self.database.write() as session:
            for name in names:
                session.add(Device(
                    name=name, device_class="pi4", group="", labels={}, link="", certificate_serial=name,
                    public_key_sha256="", enrolled=0.0, revoked=None, counter=0, statement=None, last_seen=None,
                    birth=None, reported=None, telemetry=None,
                ))  # fmt: skip

    def say(self, name: str, *health: ReleaseHealth, sequence: int = 0, state: str = "running") -> None:
        birth = Birth(1, 0.0, "1", "pi4", False, "")
        runs = Reported(1, 1, (ModelState(MODEL, NEW, NEW, state, "golden input: no"),), report_number=1)  # type: ignore[arg-type]
        told = Telemetry(
            session=1, sequence=sequence, emulated=False, up_bytes_per_s=1.0, rtt_s=0.0, remote_usable=True, models=(),
            health=health,
        )  # fmt: skip
        self.devices.ingest([(name, birth), (name, runs), (name, told)])

    def evidence(self, *names: str, release: str = NEW) -> dict[str, Evidence]:
        with self.database.read() as session:
            return evidence_by_device(session, names, MODEL, release)


def test_evidence_comes_from_the_device_itself(tmp_path: Path) -> None:
    """The message has no field in which a device could name another."""
    fleet = Fleet(tmp_path, "good", "bad", "silent")
    fleet.say("good", ReleaseHealth(model=MODEL, release=NEW, active_s=9.0, requests=50, drift=0.1, golden_ok=True))
    fleet.say("bad", ReleaseHealth(model=MODEL, release=NEW, active_s=5.0, requests=7, failed=7))
    found = fleet.evidence("good", "bad", "silent", "stranger")
    assert found["good"] == Evidence(
        model=MODEL, release=NEW, active_s=9.0, requests=50, failed=0, fallbacks=0, drift=0.1, golden_ok=True
    )
    assert (found["bad"].requests, found["bad"].failed) == (7, 7)
    assert found["silent"] == found["stranger"] == Evidence(model=MODEL, release=NEW)


def test_evidence_of_another_release_is_ignored(tmp_path: Path) -> None:
    """A report about the previous release tells nothing of the one on trial."""
    fleet = Fleet(tmp_path, "cam")
    fleet.say("cam", ReleaseHealth(model=MODEL, release=OLD, requests=10_000))
    assert fleet.evidence("cam")["cam"] == Evidence(model=MODEL, release=NEW)
    assert fleet.evidence("cam", release=OLD)["cam"].requests == 10_000


def test_drift_is_remembered_by_the_controller(tmp_path: Path) -> None:
    """An agent that restarted no longer knows the drift; the controller does."""
    fleet = Fleet(tmp_path, "cam")
    counts = {"golden_labelled": 20, "golden_right": 19, "golden_compared": 20, "golden_agreeing": 20}
    compared = ReleaseHealth(
        model=MODEL, release=NEW, requests=9, drift=0.3, top1_agrees=False, golden_ok=True, **counts
    )
    fleet.say("cam", compared)
    fleet.say("cam", ReleaseHealth(model=MODEL, release=NEW, requests=1), sequence=1)
    found = fleet.evidence("cam")["cam"]
    assert (found.requests, found.drift, found.golden_ok) == (1, 0.3, True)
    assert (found.inaccuracy, found.disagreement) == (1.0 - 0.95, 0.0)


def test_failed_golden_inputs_are_reported_without_health(tmp_path: Path) -> None:
    """The report contains the failure, and no health of the release."""
    fleet = Fleet(tmp_path, "cam")
    fleet.say("cam", state="failed")
    assert fleet.evidence("cam")["cam"] == Evidence(model=MODEL, release=NEW, golden_ok=False)
