"""The TUF client scenarios (init, refresh, download) through the agent's own client over a real mosquitto.

Clauses are of the TUF specification 1.0.34; docs/conformance.md sets each test beside its scenario. What a device
trusts is read where it matters: in its durable record, and in the proof it would verify a release by offline.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tuf.api.metadata import MetaFile, TargetFile, Targets

from edgesplit.errors import EdgeError, LinkError, TrustError
from edgesplit.limits import LIMITS
from edgesplit.mqtt.messages import FetchMetadata, FetchReply
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import DIRECTOR, TARGETS_FILE, target_path, verify_manifest
from edgesplit_controller.messaging.delivery import pieces
from support.signed_repository import DAY, sample_release
from support.tuf_repository import Case, TufHarness, new_key

FIRST = dict.fromkeys(("root", "targets", "snapshot", "timestamp"), 1)
SECOND = {**FIRST, "targets": 2, "snapshot": 2, "timestamp": 2}


# Init


def test_a_first_refresh_asks_in_the_order_of_the_specification(case: Case) -> None:
    """TUF 5.3 to 5.6: next root, timestamp, the snapshot it names, the targets that names; each once."""
    assert case.refresh() == FIRST
    assert case.sim.asked == [
        "metadata/2.root.json",
        "metadata/timestamp.json",
        "metadata/1.snapshot.json",
        "metadata/1.targets.json",
    ]


def without_signatures(raw: bytes) -> bytes:
    return json.dumps({**json.loads(raw), "signatures": []}).encode()


def of_another_kind(raw: bytes) -> bytes:
    return raw.replace(b'"_type": "root"', b'"_type": "targets"').replace(b'"_type":"root"', b'"_type":"targets"')


@pytest.mark.parametrize("spoil", [without_signatures, of_another_kind, lambda raw: raw[:-9], lambda raw: b""])
def test_a_bad_first_root_is_refused_before_anything_is_asked(
    case: Case, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    """TUF 5.2: a device that comes with an unsigned, foreign or broken root does not even begin."""
    with pytest.raises(TrustError, match="bootstrap root"):
        TrustStore(tmp_path / "other", spoil(case.bootstrap))
    assert case.sim.asked == []


def test_a_release_is_refused_before_the_first_refresh(case: Case) -> None:
    """TUF 5.7: targets are looked up only in metadata that this process has refreshed."""
    digest = case.sim.add()
    case.sim.publish()
    with pytest.raises(LinkError, match="refresh"):
        case.manifest(digest)
    assert case.refresh() == SECOND
    assert case.manifest(digest) == sample_release()[0]


# Refresh: what is new


def test_a_refresh_fetches_only_what_is_new(case: Case) -> None:
    """TUF 5.4.3 to 5.6.6: a timestamp alone; then targets, too; and with nothing new only two files are asked for."""
    case.refresh()
    case.sim.publish("timestamp")
    assert case.refresh() == {**FIRST, "timestamp": 2}
    case.sim.publish()
    assert case.refresh() == {**SECOND, "timestamp": 3}
    case.sim.asked.clear()
    assert case.refresh() == {**SECOND, "timestamp": 3}
    assert case.sim.asked == ["metadata/2.root.json", "metadata/timestamp.json"]


def test_a_timestamp_of_the_same_version_changes_nothing(case: Case) -> None:
    """TUF 5.4.3.1: other content under a version that was seen is not taken, however well it is signed."""
    case.refresh()
    digest = case.sim.add()
    case.sim.publish("targets", "snapshot")
    assert case.refresh() == FIRST
    with pytest.raises(TrustError, match="not one that the release key signed"):
        case.manifest(digest)


def test_metadata_is_stored_byte_for_byte(case: Case) -> None:
    """TUF 4.2: the device's proof holds the bytes as they came, whatever their spelling."""
    odd = json.dumps(json.loads(case.sim.files["metadata/1.targets.json"]), indent=7).encode()
    case.sim.files["metadata/1.targets.json"] = odd
    case.sim.snapshot.meta[TARGETS_FILE] = MetaFile.from_data(1, odd, ["sha256"])
    case.sim.timestamp.snapshot_meta = MetaFile.from_data(1, case.sim.put("snapshot"), ["sha256"])
    case.sim.put("timestamp")
    case.refresh()
    assert case.store.proof()[TARGETS_FILE] == odd


@pytest.mark.parametrize("name", ["root", "timestamp", "snapshot", "targets"])
def test_unknown_fields_are_signed_and_ignored(case: Case, name: str) -> None:
    """TUF 4.1: metadata of a later minor version is taken, and its unknown fields count for the signature."""
    case.sim.role(name).unrecognized_fields["x-later"] = {"deep": [1, "two", None]}
    if name == "root":
        case.sim.publish_root()
    case.sim.publish()
    assert case.refresh() == {**SECOND, "root": 2 if name == "root" else 1}


def test_lengths_and_hashes_of_metadata_may_be_left_out(case: Case) -> None:
    """TUF 4.4: both are optional for snapshot and targets; versions and signatures then carry the weight."""
    case.sim.publish()
    case.sim.snapshot.meta[TARGETS_FILE] = MetaFile(2)
    case.sim.timestamp.snapshot_meta = MetaFile(2)
    for name in ("snapshot", "timestamp"):
        case.sim.put(name)
    assert case.refresh() == SECOND


# Refresh: what must not be believed


def unsigned(case: Case, name: str) -> None:
    case.sim.put(name, [])


def signed_by_a_stranger(case: Case, name: str) -> None:
    case.sim.put(name, [new_key()])


def signed_by_the_director(case: Case, name: str) -> None:
    case.sim.put(name, case.sim.signers[DIRECTOR])


def with_its_version_changed(case: Case, name: str) -> None:
    path = case.sim.path(name)
    version = case.sim.role(name).version
    raw = case.sim.files[path].replace(f'"version":{version}'.encode(), f'"version":{version + 1}'.encode())
    assert raw != case.sim.files[path]
    case.sim.files[path] = raw


def of_another_role(case: Case, name: str) -> None:
    other = "snapshot" if name != "snapshot" else "targets"
    case.sim.files[case.sim.path(name)] = case.sim.signed(name, of=case.sim.role(other))


def cut_short(case: Case, name: str) -> None:
    case.sim.files[case.sim.path(name)] = case.sim.files[case.sim.path(name)][:-20]


def empty(case: Case, name: str) -> None:
    case.sim.files[case.sim.path(name)] = b""


def deep(case: Case, name: str) -> None:
    case.sim.files[case.sim.path(name)] = b"[" * 10_000


@pytest.mark.parametrize("name", ["root", "timestamp", "snapshot", "targets"])
@pytest.mark.parametrize(
    "spoil",
    [
        unsigned, signed_by_a_stranger, signed_by_the_director, with_its_version_changed, of_another_role, cut_short,
        empty, deep,
    ],
)  # fmt: skip
@pytest.mark.parametrize("linked", [True, False], ids=["hash-fits", "hash-differs"])
def test_spoiled_metadata_of_any_role_is_refused(
    case: Case, name: str, spoil: Callable[[Case, str], None], linked: bool
) -> None:
    """TUF 5.3.4, 5.4.2, 5.5.3, 5.6.3: each role's own keys must have signed each file, also where the hashes of
    those above were made to fit; and with the next true files the device goes on."""
    case.refresh()
    if name == "root":
        case.sim.publish_root()
    case.sim.publish()
    good = dict(case.sim.files)
    spoil(case, name)
    if linked:
        relink(case, name)
    case.refused("metadata|unsigned|signed by|version|not")
    case.sim.files = good
    case.sim.publish()  # where the keys above were stolen, too, the device has seen their second version
    assert case.refresh() == {"targets": 3, "snapshot": 3, "timestamp": 3, "root": 2 if name == "root" else 1}


def relink(case: Case, name: str) -> None:
    """Let the roles above vouch for the bytes that are served for `name`: their keys are the attacker's, too."""
    sim = case.sim
    raw = sim.files[sim.path(name)]
    if name == "targets":
        sim.snapshot.meta[TARGETS_FILE] = MetaFile.from_data(sim.targets.version, raw, ["sha256"])
        raw = sim.put("snapshot")
    if name in ("targets", "snapshot"):
        sim.timestamp.snapshot_meta = MetaFile.from_data(sim.snapshot.version, raw, ["sha256"])
        sim.put("timestamp")


@pytest.mark.parametrize(
    ("name", "served_as", "says"), [("root", 2, 3), ("root", 2, 1), ("snapshot", 2, 3), ("targets", 2, 3)]
)
def test_a_version_that_is_not_the_one_asked_for_is_refused(case: Case, name: str, served_as: int, says: int) -> None:
    """TUF 5.3.5, 5.5.4, 5.6.4: roots come one by one, and each file has the version that led to it."""
    case.refresh()
    case.sim.publish()
    case.sim.role(name).version = says
    case.sim.files[case.sim.path(name, served_as)] = case.sim.signed(name)
    case.sim.role(name).version = served_as
    relink(case, name)
    case.refused("version|Expected")


@pytest.mark.parametrize("name", ["snapshot", "targets"])
@pytest.mark.parametrize("what", ["hash", "longer", "shorter"])
def test_metadata_of_another_hash_or_length_is_refused(case: Case, name: str, what: str) -> None:
    """TUF 5.5.2, 5.6.2 (mix-and-match): a file well signed, of the right version, that the file above did not mean."""
    case.refresh()
    case.sim.publish()
    path = case.sim.path(name)
    if what == "hash":
        case.sim.role(name).unrecognized_fields["x-other"] = "twin"
        case.sim.files[path] = case.sim.signed(name)
    else:
        raw = case.sim.files[path]
        case.sim.files[path] = raw + b" " * 40 if what == "longer" else raw[:-1]
    case.refused("hash|length|larger|at most")


@pytest.mark.parametrize("name", ["timestamp", "snapshot", "targets"])
def test_a_missing_file_is_a_link_error_and_retried(case: Case, name: str) -> None:
    """TUF 5.4.1, 5.5.1, 5.6.1: what is announced and not there is a fault of the link: tried again, nothing lost."""
    case.refresh()
    case.sim.publish()
    raw = case.sim.files.pop(case.sim.path(name))
    case.refused("not there", LinkError)
    case.sim.files[case.sim.path(name)] = raw
    assert case.refresh() == SECOND


# Rollback, and removal


def test_a_timestamp_does_not_go_back(case: Case) -> None:
    """TUF 5.4.3.1: an older timestamp, once signed by the same key, is refused."""
    old = case.sim.files["metadata/timestamp.json"]
    case.sim.publish()
    case.refresh()
    case.sim.files["metadata/timestamp.json"] = old
    case.refused("timestamp|version")


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("name", ["snapshot", "targets"])
def test_a_newer_timestamp_cannot_bring_an_older_file_back(case: Case, name: str, hashed: bool) -> None:
    """TUF 5.4.3.2, 5.5.5: rollback of snapshot or targets under fresh metadata above, with hashes and without."""
    case.sim.publish()
    case.refresh()
    for later in ("targets", "snapshot", "timestamp"):
        case.sim.role(later).version += 1
    case.sim.role(name).version = 1
    case.sim.link()
    if not hashed:
        case.sim.snapshot.meta[TARGETS_FILE] = MetaFile(case.sim.targets.version)
        case.sim.put("snapshot")
        case.sim.timestamp.snapshot_meta = MetaFile(case.sim.snapshot.version)
        case.sim.put("timestamp")
    case.refused("version|Expected")


def test_a_role_does_not_vanish_from_the_snapshot(case: Case) -> None:
    """TUF 5.5.5: what the trusted snapshot lists, the next one lists, too."""
    case.sim.snapshot.meta["delegated.json"] = MetaFile(1)
    case.sim.publish()
    case.refresh()
    del case.sim.snapshot.meta["delegated.json"]
    case.sim.publish("snapshot", "timestamp")
    case.refused("delegated")


@pytest.mark.parametrize("lost", [["timestamp.json"], ["timestamp.json", "snapshot.json"], ["."]])
def test_old_metadata_replayed_to_a_device_that_lost_its_cache_is_refused(case: Case, lost: list[str]) -> None:
    """A6: the repository of yesterday, well signed and not expired, moves no device back: its own record remembers."""
    yesterday = dict(case.sim.files)
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    today, case.sim.files = case.sim.files, yesterday
    for name in lost:
        for file in [case.folder / "cache" / name] if name != "." else (case.folder / "cache").rglob("*"):
            if not file.is_dir():
                file.unlink()
    case.restarted()
    case.refused("older than 2|version 1, got 2|version 2, got 1|must be >= 2")
    case.sim.files = today
    assert case.refresh() == SECOND
    assert case.manifest(digest) == sample_release()[0]


# Expiry (freeze)


@pytest.mark.parametrize("name", ["root", "timestamp", "snapshot", "targets"])
def test_expired_metadata_installs_nothing_and_loses_nothing(case: Case, name: str) -> None:
    """TUF 5.3.10, 5.4.4, 5.5.6, 5.6.5: a role that has expired is not taken; what was trusted stays; fresh metadata
    mends it."""
    case.refresh()
    digest = case.sim.add()
    case.sim.role(name).expires = case.sim.after(-1)
    if name == "root":
        case.sim.publish_root()
    case.sim.publish()
    case.refused("expired")
    case.sim.role(name).expires = case.sim.after(1)
    if name == "root":
        case.sim.publish_root()
    case.sim.publish()
    case.refresh()
    assert case.manifest(digest) == sample_release()[0]


@pytest.mark.parametrize(("name", "days"), [("timestamp", 8), ("snapshot", 91), ("targets", 366), ("root", 3651)])
def test_expired_trusted_metadata_is_still_compared_and_renewed(case: Case, name: str, days: float) -> None:
    """TUF 5.3.10, 5.4.4: trusted metadata that has expired since is still what a newer one is compared with."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    case.sim.now += days * DAY
    case.refused("expired")
    with pytest.raises(TrustError, match="expired"):
        case.manifest(digest)
    for role in ("root", "targets", "snapshot", "timestamp"):
        case.sim.role(role).expires = case.sim.after(30)
    case.sim.publish_root()
    case.sim.publish()
    assert case.refresh()["targets"] == 3
    assert case.manifest(digest) == sample_release()[0]


def test_a_frozen_repository_is_noticed_when_its_timestamp_expires(case: Case) -> None:
    """TUF 5.4.4 (freeze): who keeps answering with the same good files can do so for a timestamp's life, no longer."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    case.sim.now += 6.9 * DAY
    case.refresh()
    case.sim.now += 0.2 * DAY
    case.refused("expired")
    with pytest.raises(TrustError, match="nothing is installed"):
        case.manifest(digest)


# Endless data, slow data, and answers that are none


def test_endless_metadata_is_refused(case: Case) -> None:
    """TUF 5.3.3, 5.4.1 (endless data): a length beyond what is allowed ends the fetch at its first message."""
    case.refresh()
    case.sim.publish()
    huge = LIMITS.metadata_bytes + 1
    case.sim.answer = lambda wish: [FetchReply(wish.path, 0, huge, b"x" * 60_000)]
    case.refused("at most")


def padded(case: Case, wish: FetchMetadata, most: int) -> list[FetchReply]:
    raw = case.sim.files.get(wish.path)
    return pieces(wish.path, raw + b" " * most if raw else None)


@pytest.mark.parametrize(("role", "most"), [("timestamp", 16_384), ("2.snapshot", 2_000_000), ("2.root", 512_000)])
def test_each_role_has_its_own_greatest_length(case: Case, role: str, most: int) -> None:
    """TUF 5.3.3, 5.4.1, 5.5.1: good metadata followed by blanks up to more than the role's bound is not taken."""
    case.refresh()
    case.sim.publish_root()
    case.sim.publish()
    case.sim.answer = lambda wish: padded(case, wish, most if role in wish.path else 0)
    case.refused("at most")


def spoiled_pieces(kind: str) -> Callable[[str, bytes], list[FetchReply]]:
    """Wrong ways to send a file of which nothing may be believed."""

    def send(path: str, raw: bytes) -> list[FetchReply]:
        whole = FetchReply(path, 0, len(raw), raw)
        wrong = {
            "other path": [FetchReply("metadata/other.json", 0, len(raw), raw)],
            "beyond the end": [FetchReply(path, 1, len(raw), raw)],
            "before the start": [FetchReply(path, -1, len(raw), raw)],
            "longer than said": [FetchReply(path, 0, len(raw) - 1, raw)],
            "a hole": [FetchReply(path, 0, len(raw), raw[:5]), FetchReply(path, 9, len(raw), raw[9:])],
            "nothing, often": [FetchReply(path, at, len(raw), b"") for at in range(len(raw))],
            "overlaps": [FetchReply(path, at, len(raw), raw[at : at + 2]) for at in range(len(raw) - 1)],
        }[kind]
        return [*wrong, whole] if kind in ("nothing, often", "overlaps") else wrong

    return send


@pytest.mark.parametrize("kind", ["other path", "beyond the end", "before the start", "longer than said", "a hole"])
def test_invalid_pieces_of_a_file_are_requested_again(tuf_world: TufHarness, tmp_path: Path, kind: str) -> None:
    """A wrong answer is none: the device asks as often as it is patient, says that the link failed, and recovers."""
    case = tuf_world.case(tmp_path, (0.2, 0.2))
    case.sim.answer = lambda wish: spoiled_pieces(kind)(wish.path, case.sim.files.get(wish.path, b"x" * 20))
    case.refused("no response from the controller", LinkError)
    assert case.sim.asked == ["metadata/2.root.json"] * 2
    again = tuf_world.case(tmp_path / "again")
    assert again.refresh() == FIRST


@pytest.mark.parametrize("kind", ["nothing, often", "overlaps"])
def test_empty_and_overlapping_pieces_are_ignored(case: Case, kind: str) -> None:
    """Empty and overlapping pieces are not collected, so they cost no memory; the whole file after them is taken."""
    send = spoiled_pieces(kind)

    def answer(wish: FetchMetadata) -> list[FetchReply]:
        raw = case.sim.files.get(wish.path)
        return pieces(wish.path, None) if raw is None else send(wish.path, raw)

    case.sim.answer = answer
    assert case.refresh() == FIRST


def test_no_answer_is_a_link_error(tuf_world: TufHarness, tmp_path: Path) -> None:
    """TUF 5.4.1: no answer at all is a LinkError, nothing is lost, and the next refresh goes on."""
    case = tuf_world.case(tmp_path, (0.2, 0.2))
    case.sim.answer = lambda wish: None
    case.refused("no response from the controller", LinkError)


# Download: the manifest of a release, by which all its chunks are known


def test_a_release_is_fetched_byte_for_byte_and_verified_offline(case: Case) -> None:
    """TUF 5.7.2 to 5.7.4: a target in a folder of the repository, over MQTT, byte for byte."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    raw = case.manifest(digest)
    assert raw == sample_release()[0]
    assert verify_manifest(raw, case.store.proof(), case.bootstrap).model == "tiny@1"


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[::-1], lambda raw: raw[:-1], lambda raw: raw + b" ", lambda raw: b""]
)
def test_a_target_that_was_replaced_is_refused(case: Case, spoil: Callable[[bytes], bytes]) -> None:
    """TUF 5.7.4: the length and the hash in signed targets decide, also for what was downloaded before."""
    digest = case.sim.add()
    case.sim.publish()
    case.refresh()
    good = case.manifest(digest)
    case.sim.files[f"targets/{target_path(digest)}"] = spoil(good)
    with pytest.raises(TrustError):
        case.manifest(digest)
    case.sim.files[f"targets/{target_path(digest)}"] = good
    assert case.manifest(digest) == good


def test_every_release_is_fetchable_once_it_is_published(case: Case) -> None:
    """TUF 5.7: ten releases, each only after its targets were refreshed."""
    case.refresh()
    for version in range(1, 11):
        digest = case.sim.add(version)
        case.sim.publish()
        with pytest.raises(TrustError, match="not one that the release key signed"):
            case.manifest(digest)
        case.refresh()
        assert case.manifest(digest) == sample_release(version)[0]


@pytest.mark.parametrize("algorithm", ["sha256", "sha384", "sha512", "blake2b-256"])
def test_the_hashes_of_a_target_may_be_of_any_known_kind(case: Case, algorithm: str) -> None:
    """TUF 4.5: known hash algorithms are checked; the release's own SHA-256 besides."""
    raw, digest = sample_release()[0], case.sim.add()
    case.sim.targets.targets[target_path(digest)] = TargetFile.from_data(target_path(digest), raw, [algorithm])
    case.sim.publish()
    case.refresh()
    assert case.manifest(digest) == raw


def test_a_target_with_only_unknown_hash_kinds_is_refused(case: Case) -> None:
    """TUF 5.7.4: a target that cannot be checked is not taken."""
    raw, digest = sample_release()[0], case.sim.add()
    hashes = {"crc-of-my-own": hashlib.sha256(raw).hexdigest()}
    case.sim.targets.targets[target_path(digest)] = TargetFile(len(raw), hashes, target_path(digest))
    case.sim.publish()
    case.refresh()
    with pytest.raises(TrustError):
        case.manifest(digest)


def test_a_targets_entry_for_other_bytes_does_not_stand_for_a_release(case: Case) -> None:
    """Our own: a release's name is its SHA-256, so that not even the release key can give one name two contents."""
    other, digest = sample_release(2)[0], case.sim.add()
    case.sim.targets.targets[target_path(digest)] = TargetFile.from_data(target_path(digest), other, ["sha256"])
    case.sim.files[f"targets/{target_path(digest)}"] = other
    case.sim.publish()
    case.refresh()
    with pytest.raises(TrustError, match="SHA-256"):
        case.manifest(digest)


ODD_NAMES = [
    "../../escape",
    "/etc/passwd",
    "a\0b",
    "..",
    ".",
    "",
    "%2e%2e/up",
    "a" * 5_000,
    "C:\\x",
    "ünïcödé",
    "A/b?c#d",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_with_path_traversal_are_never_fetched_or_written(case: Case, name: str) -> None:
    """TUF 5.7, 4.5 (path traversal): names of targets and files in signed metadata lead nowhere on the device."""
    case.sim.targets.targets[name] = TargetFile(1, {"sha256": "0" * 64}, name)
    case.sim.snapshot.meta[f"{name}.json"] = MetaFile(1)
    case.sim.publish()
    before = {path for path in case.folder.parent.rglob("*") if not path.is_relative_to(case.folder)}
    assert case.refresh() == SECOND
    assert len(case.sim.asked) == 4
    assert {path for path in case.folder.parent.rglob("*") if not path.is_relative_to(case.folder)} == before
    with pytest.raises(EdgeError):
        case.manifest(name)
    assert len(case.sim.asked) == 4


# Delegations, as far as a device uses them: the director, whose statements name what one device runs


def test_the_directors_delegation_is_read_from_current_targets(case: Case) -> None:
    """The check that upstream's client fails (a cached role verified against its current delegator): a director whose
    key the targets no longer name is not obeyed, though it was a moment ago, nor after a restart."""
    case.refresh()
    old = case.sim.signers[DIRECTOR]
    assert case.store.verify_statement(case.sim.statement(5), "cam-1", for_install=True).counter == 5
    with_another_director(case)
    case.sim.publish()
    case.refresh()
    for store in (case.store, case.restarted()):
        with pytest.raises(TrustError, match="not the director's"):
            store.verify_statement(case.sim.statement(6, old), "cam-1", for_install=False)
        assert store.verify_statement(case.sim.statement(1), "cam-1", for_install=False).counter == 1


def with_another_director(case: Case, threshold: int = 1, count: int = 1) -> None:
    """New keys for the director, in the targets that are published next."""
    delegations = case.sim.targets.delegations
    assert delegations is not None and delegations.roles is not None
    case.sim.signers[DIRECTOR] = [new_key() for _ in range(count)]
    delegations.keys = {one.public_key.keyid: one.public_key for one in case.sim.signers[DIRECTOR]}
    delegations.roles[DIRECTOR].keyids = list(delegations.keys)
    delegations.roles[DIRECTOR].threshold = threshold


def test_a_director_of_several_keys_needs_as_many_as_the_targets_say(case: Case) -> None:
    """TUF 5.6.3, for statements: two of three keys sign, one alone does not, nor one twice."""
    with_another_director(case, threshold=2, count=3)
    case.sim.publish()
    case.refresh()
    one, two, three = case.sim.signers[DIRECTOR]
    for few in ([one], [one, one], [one, new_key()]):
        with pytest.raises(TrustError):
            case.store.verify_statement(case.sim.statement(5, few), "cam-1", for_install=True)
    assert case.store.verify_statement(case.sim.statement(6, [three, two]), "cam-1", for_install=True).counter == 6


def test_statements_are_refused_where_targets_name_no_director(case: Case) -> None:
    """A director that the targets do not name has no say; what was trusted before is kept by who holds it."""
    case.refresh()
    case.sim.targets = Targets(1, expires=case.sim.after(300))
    case.sim.publish()
    case.refresh()
    with pytest.raises(TrustError, match="no director"):
        case.store.verify_statement(case.sim.statement(5), "cam-1", for_install=False)
