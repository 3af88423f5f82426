"""The gate of changed answers: how audits of devices are pooled, when they exceed the bound, and how sure that is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgesplit.cascade import Cascade, ChangedShare
from edgesplit.errors import UsageError
from edgesplit.mqtt.messages import CascadeCounts, StillCounts
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest
from edgesplit_controller.fleet.audits import AnswerAudits
from edgesplit_controller.rollout.audits import (
    UNSURE,
    AuditCounts,
    audits_needed,
    check_audited,
    is_exceeded,
    pooled,
    pooled_by_kind,
)
from edgesplit_controller.rollout.gates import Evidence, judge, parse_gates
from edgesplit_controller.rollout.release_health import evidence_of_members
from edgesplit_controller.rollout.store import members_for_step, rollout_from_row
from edgesplit_controller.storage.tables.device_state import RunningRow
from edgesplit_controller.storage.tables.rollout import RolloutRow
from edgesplit_partitioner.bounds.binomial import upper_share
from support.rollout_harness import NEW, OLD, RolloutHarness

GATES = parse_gates(["changed<2%"])


def evidence(audited: int, changed: int, active_s: float = 30.0) -> Evidence:
    counts = (AuditCounts(audited, changed),) if audited else ()
    return Evidence(model="m", release="r", golden_ok=True, audits=counts, active_s=active_s)


def test_a_share_that_is_shown_to_exceed_the_bound_fails_at_once() -> None:
    """With the share and the counts."""
    verdict = judge(GATES, evidence(412, 30))
    assert (verdict.state, verdict.gate) == ("fail", "changed<2%")
    assert verdict.reason == "changed<2%: it is 7.28 %: 30 of 412 audited answers differ"


def test_a_share_that_is_not_shown_to_exceed_the_bound_passes_with_enough_audits() -> None:
    """As many as one changed answer is expected in at the bound; a single one too many of so few proves nothing."""
    assert audits_needed(0.02) == 50 and audits_needed(0.01) == 100 and audits_needed(0.3) == 4
    assert judge(GATES, evidence(412, 3)).state == "pass"
    assert judge(GATES, evidence(50, 2)).state == "pass"


def test_few_audits_are_waited_for_until_the_time_is_over() -> None:
    """Then what there is decides; without any the gate passes unjudged."""
    waiting = judge(GATES, evidence(12, 0))
    assert (waiting.state, waiting.reason) == ("wait", "12 of 50 audits for changed<2%, 570 s left")
    assert judge(GATES, evidence(0, 0)).reason == "for changed<2%, 570 s left"
    over = judge(GATES, evidence(12, 0, active_s=600.0))
    assert over.state == "pass" and not over.unjudged
    assert judge(GATES, evidence(0, 0, active_s=600.0)).unjudged == ("changed<2%",)
    assert judge(GATES, evidence(12, 9, active_s=600.0)).state == "fail"


def test_the_cascade_and_still_frames_are_each_held_to_the_bound() -> None:
    """One of them that exceeds it suffices to fail, and both need their audits to pass."""
    kept, broken, few = AuditCounts(500, 2), AuditCounts(500, 40), AuditCounts(9, 0)
    pairs = ((kept, kept), (kept, broken), (kept, few))
    verdicts = [judge(GATES, Evidence(model="m", release="r", active_s=30.0, audits=pair)) for pair in pairs]
    assert [verdict.state for verdict in verdicts] == ["pass", "fail", "wait"]


def test_a_release_at_the_bound_hardly_ever_fails_however_often_it_is_judged() -> None:
    """2,000 rollouts with a share of exactly the bound, each judged after every audit: the share that ever fails is at
    most 10 %, and at twice the bound nearly all fail."""
    rng = np.random.default_rng(7)
    print("seed 7")
    streams, audits, bound = 2_000, 1_000, 0.02

    def ever_failed(share: float) -> float:
        changed = np.cumsum(rng.random((streams, audits)) < share, axis=1)
        # by number of changed answers, the greatest number of audits at which they show a greater share
        latest = [
            next((n for n in range(audits, count - 1, -1) if is_exceeded(AuditCounts(n, count), bound)), 0)
            for count in range(1, int(changed.max()) + 1)
        ]
        most = np.array([0, *latest])
        return float((np.arange(1, audits + 1) <= most[changed]).any(axis=1).mean())

    failed = int(ever_failed(bound) * streams)
    assert failed / streams <= upper_share(int(UNSURE * streams), streams, 0.005), failed
    assert ever_failed(3 * bound) > 0.95


def test_one_device_does_not_decide_for_all() -> None:
    """It counts as four at most, whatever it claims: neither hides what the others measured nor outweighs them."""
    honest = [AuditCounts(20, 2)] * 9
    hidden = pooled([*honest, AuditCounts(2**53, 0)])
    assert hidden == AuditCounts(9 * 20 + 80, 18) and is_exceeded(hidden, 0.02)
    good = [AuditCounts(60, 0)] * 30
    accused = pooled([*good, AuditCounts(1, 1)])
    assert accused == AuditCounts(1_801, 1) and not is_exceeded(accused, 0.02)
    assert pooled([AuditCounts(0, 0)]) is None


def test_extreme_counts_are_judged() -> None:
    """The greatest that a message can state, all or none of them changed."""
    assert is_exceeded(AuditCounts(2**53, 2**53), 0.02) and not is_exceeded(AuditCounts(2**53, 0), 0.9999)


def test_changed_beyond_audited_counts_as_all() -> None:
    """A device whose counts cannot be is believed as far as they can."""
    sums = AnswerAudits(cascade=CascadeCounts(audited=3, changed=9), still=StillCounts(audited_same=8, changed=2))
    assert pooled_by_kind([sums]) == (AuditCounts(3, 3), AuditCounts(10, 2))


def test_evidence_is_of_all_devices_of_the_rollout(tmp_path: Path) -> None:
    """Those of another release, or of no rollout, do not count."""
    world = RolloutHarness(tmp_path)
    world.enrol("a", "b", "c", "elsewhere")
    number = world.deploy(NEW, ["a", "b", "c"], gates=("changed<2%",))
    world.work(times=2)

    def counted(release: str, audited: int, changed: int) -> dict[str, object]:
        return {release: {"cascade": {"audited": audited, "changed": changed}}}

    with world.database.write() as session:
        for row in session.query(RunningRow):
            row.audits = counted(OLD if row.device == "c" else NEW, 10, 1)
        rollout = rollout_from_row(session.get_one(RolloutRow, number))
        found = evidence_of_members(session, rollout, members_for_step(session, rollout, world.now))
    assert {name: one.audits for name, one in found.items()} == dict.fromkeys("abc", (AuditCounts(20, 2),))


def test_a_rollout_stops_where_its_canaries_change_too_many_answers(tmp_path: Path) -> None:
    """Each canary alone has too few audits to show it; all devices of the stage end with the gate as cause."""
    world = RolloutHarness(tmp_path)
    world.enrol(*(f"cam-{number}" for number in range(8)))
    number = world.deploy(NEW, stages=("50%", "100%"), gates=("changed<2%",))
    bad = {"audits": (AuditCounts(80, 9),), "requests": 100}
    world.evidence = {f"cam-{number}": bad for number in range(8)}
    world.settle()
    shown = world.shown(number)
    assert shown["state"] == "failed" and shown["states"]["skipped"] == 4
    assert shown["failures"][0]["kind"] == "gate changed<2%"


def manifest(cascade: Cascade | None) -> Manifest:
    link = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)
    plan = Plan(model="birds@1", device_class="pi4", rows=(Row(name="local"),), link=link, cascade=cascade)
    return Manifest(
        model="birds@1", model_sha256="0" * 64, created="", input_spec=None, inputs=(), outputs=(), slices=(),
        plans={"pi4": plan},
    )  # fmt: skip


def test_a_gate_of_changed_answers_needs_something_that_is_audited() -> None:
    """A cascade in the release, or still frames on one of the devices; the error names both."""
    promise = ChangedShare(at_most=0.02, certainty=0.9, samples=300, differing=1)
    cascade = Cascade(
        first="a", second="b", answer="class:y", score="margin", threshold=0.5, changed=promise, escalated=0.3
    )
    check_audited("changed<2%", manifest(cascade), [None])
    check_audited("changed<2%", manifest(None), [None, {"models": [{"still": {"repeated": 3}}]}])
    with pytest.raises(UsageError, match=r"no cascade .* none of these devices repeats"):
        check_audited("changed<2%", manifest(None), [None, {}, {"models": [{"model": "m", "still": None}]}])


def test_the_gate_is_written_as_a_share_below_one() -> None:
    """As other gates; what no share exceeds is refused."""
    assert parse_gates(["changed < 0.5 %"]).gates[0].below == pytest.approx(0.005)
    for text in ("changed>2%", "changed<2", "changed<100%", "changed<0%"):
        with pytest.raises(UsageError, match="changed<2%"):
            parse_gates([text])
