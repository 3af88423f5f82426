"""The rules over time by which a device trusts metadata, without a file or a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import Expired, LinkError, TrustError
from edgesplit.trust.metadata_set import RollbackRecord, TrustedMetadata, VersionMark
from edgesplit.trust.verification import TARGETS_FILE, root_file
from support.signed_repository import DEVICE, START, TrustHarness

SEEN = RollbackRecord({"root": VersionMark(5, ("a",)), "timestamp": VersionMark(5, ("a", "b"))})


@pytest.mark.parametrize(
    ("role", "mark", "is_refused"),
    [
        ("timestamp", VersionMark(5, ("a", "b")), False),
        ("timestamp", VersionMark(6, ("a", "b")), False),
        ("timestamp", VersionMark(4, ("b", "a")), True),
        ("timestamp", VersionMark(4, ("a",)), False),  # TUF 5.3.11: new keys start a new count
        ("root", VersionMark(4, ("a",)), True),
        ("root", VersionMark(4, ("z",)), True),  # TUF 5.3.5: root versions never fall, whatever their keys
        ("root", VersionMark(6, ("z",)), False),
        ("snapshot", VersionMark(1, ("a",)), False),  # never seen before
    ],
)
def test_version_falls_only_under_new_keys_and_a_root_never(role: str, mark: VersionMark, is_refused: bool) -> None:
    if not is_refused:
        SEEN.refuse_rollback({role: mark})
        return
    with pytest.raises(TrustError, match="older than 5"):
        SEEN.refuse_rollback({role: mark})


def refreshed(harness: TrustHarness) -> TrustedMetadata:
    """What a device gets from the repository, straight from its files."""
    repository = harness.repository
    listed = repository.store.targets().version
    proof = {root_file(1): repository.root_bytes, TARGETS_FILE: repository.read(f"metadata/{listed}.{TARGETS_FILE}")}
    snapshot = max((harness.folder / "repository" / "metadata").glob("*.snapshot.json"))
    timestamp = repository.read("metadata/timestamp.json")
    return TrustedMetadata.from_refresh(proof, timestamp, snapshot.read_bytes(), harness.bootstrap)


def test_stored_metadata_installs_nothing_before_a_refresh(tmp_path: Path) -> None:
    """Metadata of an earlier process is not evidence that it is still the newest (freeze attack)."""
    fresh = refreshed(TrustHarness(tmp_path))
    stored = TrustedMetadata.from_proof(fresh.proof, fresh.proof[root_file(1)])

    fresh.require_fresh(START)
    assert fresh.expires_at is not None
    with pytest.raises(Expired):
        fresh.require_fresh(fresh.expires_at)
    assert stored.chain.targets == fresh.chain.targets
    with pytest.raises(LinkError, match="refresh before installing"):
        stored.require_fresh(START)


def test_statement_raises_the_record_and_older_ones_are_refused(tmp_path: Path) -> None:
    """The record that must be durable contains the counter; by that record an older statement is refused."""
    harness = TrustHarness(tmp_path)
    trusted = refreshed(harness)

    statement, record = RollbackRecord().accept_statement(
        harness.state(counter=7), DEVICE, trusted, START, for_install=True
    )

    assert statement.counter == 7 and record.statements[DEVICE].version == 7
    record.accept_statement(harness.state(counter=7), DEVICE, trusted, START, for_install=True)
    with pytest.raises(TrustError, match="older than 7"):
        record.accept_statement(harness.state(counter=6), DEVICE, trusted, START, for_install=False)
