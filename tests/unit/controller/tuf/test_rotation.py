"""Rotation, move and loss of keys: the metadata that the controller publishes, and what a device accepts."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from securesystemslib.signer import Key
from tuf.api.metadata import Metadata, Root, Targets

from edgesplit.errors import TrustError, UsageError
from edgesplit.release.manifest import Signed, release_digest
from edgesplit.trust.store import TrustStore
from edgesplit_cli.signing import sign_release_list, signatures_for
from edgesplit_controller.errors import Conflict
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey, check_root_step, next_root
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import ExternalSignature, Rotation
from edgesplit_controller.tuf.signers import sign
from support.operator_keys import Operator, died_at
from support.signed_repository import DAY, DEVICE, sample_release


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    """A controller that still has every key, with one release."""
    made = Operator(tmp_path)
    made.world.add(1)
    return made


def key_ids(operator: Operator, role: str) -> list[str]:
    return list(operator.world.repository.store.root().roles[role].keyids)


# Moving away


def test_a_device_follows_the_root_and_release_keys_to_remote_signers(operator: Operator) -> None:
    """The old root signs the new one, then its key is destroyed; releases continue with the remote key."""
    operator.device()

    operator.move_away()

    assert operator.held() == {"snapshot.pem", "timestamp.pem", "director.pem", "planner.pem"}
    digest = operator.add(2)
    store = operator.device()
    assert store.manifest(digest, operator.world.fetch) == sample_release(2)[0]
    assert {"1.root.json", "2.root.json"} <= store.proof().keys()


def test_a_controller_without_the_release_key_renews_online_metadata(operator: Operator) -> None:
    """Snapshot and timestamp are renewed; a release is refused with advice and without effect."""
    operator.move_away()
    store = operator.device()
    operator.world.now += 80 * DAY
    assert operator.world.repository.refresh_timestamp()
    operator.reopened()
    operator.world.repository.renew()

    store.refresh(operator.world.fetch)
    before = operator.files()
    with pytest.raises(Conflict, match="--sign-with"):
        operator.world.add(2)
    assert operator.files() == before
    assert operator.world.add(1) in operator.world.repository.releases()  # a release that is known needs no key


def test_a_repeated_key_change_has_no_effect(operator: Operator) -> None:
    """Repeating the command after a lost answer is safe."""
    operator.move_away()
    before = operator.files()

    assert operator.change(operator.offline())
    assert operator.files() == before


def test_a_power_cut_during_rotation_leaves_the_old_or_new_state(
    tmp_path: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: power is lost before each fsync, rename and unlink of moving root, release key and online keys: a device that
    asks then sees a whole state, and repeating the command finishes it, the old keys destroyed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted below; this power cut loses no page
    change = msgspec.structs.replace(operator.offline(), anew=("snapshot", "timestamp", "director", "planner"))
    signers = ("root-1", "root-2", "root-3", "release")
    operator.device()
    start = tmp_path / "start"
    for name in ("repository", DEVICE):
        shutil.copytree(operator.world.folder / name, start / name)

    def again() -> None:
        for name in ("repository", DEVICE):
            shutil.rmtree(operator.world.folder / name)
            shutil.copytree(start / name, operator.world.folder / name)
        operator.reopened()

    total = died_at(lambda: operator.change(change, *signers), monkeypatch, None)
    assert total > 30
    for stop_at in range(total):
        again()
        died_at(lambda: operator.change(change, *signers), monkeypatch, stop_at)

        operator.world.repository = operator.world.reopened()
        root = operator.device().proof().keys() - {"targets.json"}
        assert root in ({"1.root.json"}, {"1.root.json", "2.root.json"}), stop_at

        operator.rotation = Rotation(operator.world.repository)
        assert operator.versions()["root"] == 2 or operator.change(change, *signers), stop_at
        digest = operator.add(2)
        assert operator.device().manifest(digest, operator.world.fetch) == sample_release(2)[0]
        assert len(operator.held()) == 4 and not {"root.pem", "targets.pem"} & operator.held(), stop_at


def test_a_power_cut_while_replacing_a_lost_release_key_is_repaired(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lost key cannot sign any more: wherever the power is lost, the next start has a consistent state."""
    operator.move_away()
    operator.device()
    change = KeyChange(release_key=operator.key("found"))
    start = Path(shutil.copytree(operator.world.folder / "repository", tmp_path / "start"))
    total = died_at(lambda: operator.change(change, "root-1", "root-2", "found"), monkeypatch, None)
    for stop_at in range(total):
        shutil.rmtree(operator.world.folder / "repository")
        shutil.copytree(start, operator.world.folder / "repository")
        operator.reopened()
        died_at(lambda: operator.change(change, "root-1", "root-2", "found"), monkeypatch, stop_at)

        operator.reopened()
        operator.device(f"cam-{stop_at}")
        assert operator.versions()["root"] == 3 or operator.change(change, "root-1", "root-2", "found")
        digest = operator.add(2, "found")
        assert operator.device(f"cam-{stop_at}").manifest(digest, operator.world.fetch) == sample_release(2)[0]


def test_a_controller_without_metadata_creates_no_second_root(operator: Operator) -> None:
    """The root key is remote and its metadata is gone: the error advises to restore it, and no key is created."""
    operator.move_away()
    shutil.rmtree(operator.world.folder / "repository" / "metadata")

    with pytest.raises(UsageError, match="restore"):
        operator.world.reopened()
    assert "root.pem" not in operator.held()


# Signatures


def test_a_root_below_its_signature_threshold_is_not_published(operator: Operator) -> None:
    """Two of three must sign: after one nothing changes and the missing number is reported; the second completes it."""
    operator.move_away()
    before = operator.files()
    change = KeyChange(anew=("timestamp",))

    assert not operator.change(change, "root-1")
    assert operator.files() == before
    waiting = operator.rotation.pending_change()
    assert waiting is not None
    assert [(missing.whose, missing.count, len(missing.keyids)) for missing in operator.rotation.missing(waiting)] == [
        ("the root", 1, 2)
    ]
    operator.reopened()
    assert not operator.sign("root-1")

    assert operator.sign("root-3")
    operator.device()
    assert operator.versions()["root"] == 3


def test_invalid_signatures_are_refused_without_effect(operator: Operator) -> None:
    """A key of no role, a signature over other bytes, a signature under another key's id: each is named."""
    operator.move_away()
    operator.change(KeyChange(anew=("snapshot",)))
    before, pending = operator.files(), operator.rotation.pending_change()
    asked = operator.rotation.to_sign()
    good = signatures_for(asked, None, [operator.uri("root-1")])["root"][0]
    other = operator.key("root-2").keyid
    for forged, why in (
        (ExternalSignature("0" * 64, good["sig"]), "is no root key"),
        (ExternalSignature(other, good["sig"]), "does not match"),
        (ExternalSignature(good["keyid"], "00" * 64), "does not match"),
    ):
        with pytest.raises(TrustError, match=why):
            operator.rotation.add_signatures([forged], [])
    with pytest.raises(TrustError, match="not a key that this change needs"):
        operator.sign("stranger")
    with pytest.raises(UsageError, match="no new list"):
        operator.rotation.add_signatures([], [ExternalSignature(good["keyid"], good["sig"])])

    assert operator.files() == before and operator.rotation.pending_change() == pending


def test_one_key_change_is_pending_and_dropping_it_destroys_its_keys(operator: Operator) -> None:
    """A second change is refused; dropping the first leaves the keys as they were, and the next can begin."""
    operator.move_away()
    before = operator.files(), operator.held()
    operator.change(KeyChange(anew=("snapshot", "director")))
    assert len(operator.held()) == 6
    with pytest.raises(Conflict, match="keys drop"):
        operator.change(KeyChange(anew=("timestamp",)))

    operator.rotation.drop()

    assert (operator.files(), operator.held()) == before
    with pytest.raises(UsageError, match="no change"):
        operator.sign("root-1")
    assert operator.change(KeyChange(anew=("timestamp",)), "root-1", "root-2")


def test_a_release_during_a_release_key_change_is_kept(operator: Operator) -> None:
    """The list of releases grew while the change was pending: the signature is void, the next one covers all."""
    operator.move_away()
    change = KeyChange(release_key=operator.key("next-release"))
    assert not operator.change(change, "root-1", "next-release", "release")
    stale = operator.rotation.to_sign()
    digest = operator.add(2)

    assert digest not in stale["next_targets"] and digest in operator.rotation.to_sign()["next_targets"]
    assert not operator.sign("root-2")
    assert operator.sign("next-release", "release")

    store = operator.device()
    assert store.manifest(digest, operator.world.fetch) == sample_release(2)[0]
    with pytest.raises(TrustError, match="not the release key"):
        operator.add(3, "release")
    operator.add(3, "next-release")


# Changes


@pytest.mark.parametrize(
    "roles", [("root",), ("targets",), ("snapshot",), ("timestamp",), ("director",), ("planner",), ()]
)
def test_a_controller_holding_the_root_rotates_keys_itself(operator: Operator, roles: tuple[str, ...]) -> None:
    """Also before any ceremony: the role gets a new key, the old one is destroyed, old and new devices follow."""
    operator.device()
    before = operator.held()

    assert operator.change(KeyChange(anew=roles))

    assert {f"{role}.pem" for role in roles} == before - operator.held() and len(operator.held()) == len(before)
    digest = operator.world.add(2)
    for name in (DEVICE, "cam-2"):
        assert operator.device(name).manifest(digest, operator.world.fetch) == sample_release(2)[0]


def test_statements_stay_valid_through_a_director_key_change(operator: Operator) -> None:
    """Statements made while the change is pending verify before and after; the old key's later ones do not."""
    operator.move_away()
    store = operator.device()
    old = operator.world.state(counter=5)
    assert not operator.change(KeyChange(anew=("director",)))
    between = operator.world.state(counter=6)
    assert store.verify_statement(between, DEVICE, for_install=True).counter == 6

    assert operator.sign("release")

    store.refresh(operator.world.fetch)
    assert store.verify_statement(between, DEVICE, for_install=True).counter == 6
    with pytest.raises(TrustError, match="not the director's"):
        store.verify_statement(old, DEVICE, for_install=True)
    now = operator.world.state(counter=7)
    assert len(msgspec.msgpack.decode(now, type=Signed).signatures) == 1
    assert store.verify_statement(now, DEVICE, for_install=True).counter == 7


def test_the_root_replaces_a_lost_release_key(operator: Operator) -> None:
    """The root names another key, which signs the same list of releases."""
    operator.move_away()
    operator.add(2)
    store = operator.device()
    (operator.folder / "release.pem").unlink()

    assert operator.change(KeyChange(release_key=operator.key("found")), "root-1", "root-2", "found")

    digest = operator.add(3, "found")
    store.refresh(operator.world.fetch)
    assert len(operator.world.repository.releases()) == 3
    assert store.manifest(digest, operator.world.fetch) == sample_release(3)[0]


def test_the_release_key_can_return_to_the_controller(operator: Operator) -> None:
    """The root assigns the role to the controller again, and it signs by itself."""
    operator.move_away()

    assert operator.change(KeyChange(anew=("targets",)), "root-2", "root-3")

    digest = operator.world.add(2)
    assert operator.device().manifest(digest, operator.world.fetch) == sample_release(2)[0]


def test_devices_recover_from_versions_counted_ahead_by_stolen_keys(operator: Operator) -> None:
    """C6: stolen online keys published versions years ahead; new keys start at the clock, and devices recover."""
    operator.move_away()
    here = operator.world.now
    operator.device()
    operator.world.now = here + 5 * 365 * DAY
    operator.world.repository.refresh_timestamp()
    operator.world.now = here + 60
    operator.device()  # it has seen the thief's versions
    assert operator.versions()["snapshot"] > here + DAY

    assert operator.change(KeyChange(anew=("snapshot", "timestamp")), "root-1", "root-2")

    assert max(operator.versions()[role] for role in ("snapshot", "timestamp")) <= here + DAY
    digest = operator.add(2)
    assert operator.device().manifest(digest, operator.world.fetch) == sample_release(2)[0]
    assert operator.device("cam-2").manifest(digest, operator.world.fetch) == sample_release(2)[0]


def _swollen(key: PublicKey) -> PublicKey:
    """With so much beside it that no device would take a root that names it."""
    return PublicKey(key.keyid, {**key.public, "remark": "x" * 200_000})


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (lambda op: KeyChange(threshold=2), "threshold of 2 with 1"),
        (lambda op: KeyChange((op.key("a"), op.key("b")), 3), "threshold of 3 with 2"),
        (lambda op: KeyChange((op.key("a"), op.key("a")), 1), "repeat"),
        (lambda op: KeyChange((op.key("a"),), 1, op.key("a")), "two roles"),
        (lambda op: KeyChange(release_key=PublicKey("x", {"keytype": "rot13"})), "not a public key"),
        (
            lambda op: KeyChange(
                release_key=PublicKey("x", {"keytype": "pgp", "scheme": "p", "keyval": {"public": "0"}})
            ),
            "pgp",
        ),
        (lambda op: KeyChange(release_key=_swollen(op.key("a"))), "would not take"),
        (lambda op: KeyChange(anew=("mirrors",)), "mirrors"),
        (lambda op: KeyChange(anew=("snapshot", "snapshot")), "once"),
        (lambda op: KeyChange((op.key("a"),), 1, None, ("root",)), "not both"),
        (lambda op: KeyChange(release_key=op.key("a"), anew=("targets",)), "not both"),
    ],
)
def test_an_impossible_root_change_is_refused(
    operator: Operator, wish: Callable[[Operator], KeyChange], why: str
) -> None:
    """No key is created, no change is pending, and the error gives the reason."""
    before = operator.files(), operator.held()

    with pytest.raises(UsageError, match=why):
        operator.change(wish(operator))

    assert (operator.files(), operator.held()) == before and operator.rotation.pending_change() is None


# What an operator checks before signing


def _edited(operator: Operator, edit: Callable[[Root, Key], None]) -> tuple[Root, Root, KeyChange]:
    """The present root, a next one as a hostile controller would have it, and the change that was asked for."""
    change = operator.offline()
    root = operator.world.repository.store.root()
    following = next_root(root, change, {}, operator.world.repository.signer.expiry("root"))
    edit(following, operator.key("thief").to_key())
    return root, following, change


def _set_version(root: Root, version: int) -> None:
    root.version = version


def _move_end(role: Root | Targets, days: int) -> None:
    role.expires += timedelta(days=days)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda root, thief: _set_version(root, 3), id="skips a version"),
        pytest.param(lambda root, thief: _set_version(root, 1), id="does not grow"),
        pytest.param(lambda root, thief: root.add_key(thief, "root"), id="one more root key"),
        pytest.param(lambda root, thief: root.add_key(thief, "targets"), id="one more release key"),
        pytest.param(lambda root, thief: root.add_key(thief, "timestamp"), id="one more online key"),
        pytest.param(
            lambda root, thief: root.revoke_key(root.roles["snapshot"].keyids[0], "snapshot"), id="no snapshot"
        ),
        pytest.param(lambda root, thief: setattr(root.roles["root"], "threshold", 1), id="lower threshold"),
        pytest.param(lambda root, thief: setattr(root, "consistent_snapshot", False), id="another form"),
        pytest.param(lambda root, thief: _move_end(root, 36_500), id="lives for ever"),
        pytest.param(lambda root, thief: _move_end(root, -3_700), id="dead already"),
    ],
)
def test_a_root_that_differs_from_the_request_is_not_signed(
    operator: Operator, edit: Callable[[Root, Key], None]
) -> None:
    """A hostile controller prepares another root than the operator requested: nothing is signed."""
    root, following, change = _edited(operator, lambda *_: None)
    check_root_step(root, following, change, time.time())

    root, following, change = _edited(operator, edit)
    with pytest.raises(TrustError):
        check_root_step(root, following, change, time.time())


def test_a_key_change_that_differs_from_the_request_is_not_signed(operator: Operator) -> None:
    """The controller answers with another change, with a director of its own choice, or with nonsense."""
    operator.move_away()
    asked = KeyChange(anew=("timestamp", "director"))
    operator.change(asked)
    answer = operator.rotation.to_sign()
    thief = msgspec.to_builtins(operator.key("thief"))
    uris = [operator.uri("root-1")]
    assert signatures_for(answer, asked, uris)["root"]

    for forged, why in (
        ({"change": {**answer["change"], "anew": ["director"]}}, "another change"),
        ({"change": 7}, "cannot be read"),
        ({"delegates": {}}, "not to change"),
        ({"delegates": {**answer["delegates"], "planner": thief}}, "not to change"),
        ({"delegates": {"director": thief}}, "not the published one"),
        ({"next_root": answer["next_targets"]}, "not root"),
        ({"next_targets": "]"}, "no metadata"),
    ):
        with pytest.raises(TrustError, match=why):
            signatures_for({**answer, **forged}, asked, uris)


def test_a_new_online_key_that_is_another_roles_key_is_not_signed(operator: Operator) -> None:
    """The controller presents the present snapshot key as the new timestamp key."""
    root = operator.world.repository.store.root()
    change = KeyChange(anew=("timestamp",))
    following = Root.from_dict(root.to_dict())
    following.version += 1
    with pytest.raises(TrustError, match="calls a key new"):
        check_root_step(root, following, change, time.time())


def _drop_release(targets: Targets) -> None:
    targets.targets.pop(sorted(targets.targets)[0])


def _swap_director(targets: Targets, thief: Key) -> None:
    assert targets.delegations is not None and targets.delegations.roles is not None
    targets.delegations.roles["director"].keyids[:] = [thief.keyid]
    targets.delegations.keys[thief.keyid] = thief


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda targets, thief: _drop_release(targets), id="a release is gone"),
        pytest.param(lambda targets, thief: _swap_director(targets, thief), id="another director"),
        pytest.param(
            lambda targets, thief: targets.targets.update({"releases/x.json": next(iter(targets.targets.values()))}),
            id="one more target",
        ),
        pytest.param(lambda targets, thief: setattr(targets, "version", 2**31), id="counts ahead"),
        pytest.param(lambda targets, thief: setattr(targets, "version", 1), id="goes back"),
        pytest.param(lambda targets, thief: _move_end(targets, 36_500), id="lives for ever"),
        pytest.param(lambda targets, thief: targets.unrecognized_fields.update(x=1), id="a field more"),
    ],
)
def test_targets_with_unrequested_changes_are_not_signed(
    operator: Operator, edit: Callable[[Targets, Key], None]
) -> None:
    """A hostile controller adds something to the metadata that the release key is to sign: the operator's machine
    refuses, and so does an honest controller when a release key signed it all the same."""
    operator.move_away()
    raw = sample_release(2)[0]
    answer = operator.prepared(raw)
    metadata = Metadata[Targets].from_bytes(str(answer["next_targets"]).encode())
    edit(metadata.signed, operator.key("thief").to_key())
    forged = metadata.to_bytes().decode()
    before = operator.files()

    with pytest.raises(TrustError):
        sign_release_list({**answer, "next_targets": forged}, [operator.uri("release")])

    _sign_blindly(metadata, operator)
    with pytest.raises((TrustError, Conflict)):
        operator.world.repository.add_signed(metadata.to_bytes(), [raw])
    assert operator.files() == before


def _sign_blindly(metadata: Metadata[Targets], operator: Operator) -> None:
    key = operator.key("release")
    signature = sign(operator.uri("release"), metadata.signed_bytes, {key.keyid: key.to_key()})
    assert signature is not None
    metadata.signatures[key.keyid] = signature


def test_only_the_displayed_manifest_is_signed(operator: Operator) -> None:
    """The received manifest differs from the release's digest."""
    operator.move_away()
    answer = operator.prepared(sample_release(2)[0])
    with pytest.raises(TrustError, match="not that of the release"):
        sign_release_list({**answer, "manifests": [sample_release(3)[0].decode()]}, [operator.uri("release")])


def test_targets_without_an_earlier_signature_of_this_key_are_not_signed(operator: Operator) -> None:
    """A controller that forges a root and a list of releases gets no signature of the real release key."""
    operator.move_away()
    answer = operator.prepared(sample_release(2)[0])
    fake = Operator(operator.world.folder / "fake")
    fake.folder = operator.folder
    assert fake.change(KeyChange(release_key=operator.key("release")), "release")
    pretended = fake.prepared(sample_release(2)[0])
    unsigned_list = Metadata[Targets].from_bytes(str(pretended["targets"]).encode())
    unsigned_list.signatures.clear()

    with pytest.raises(TrustError, match="not signed by the release key"):
        sign_release_list({**pretended, "targets": unsigned_list.to_bytes().decode()}, [operator.uri("release")])
    sign_release_list(answer, [operator.uri("release")])


def test_unsigned_or_outdated_targets_are_not_published(operator: Operator) -> None:
    """Unsigned, signed by another key, prepared before another was published: refused, with advice."""
    operator.move_away()
    raw = sample_release(2)[0]
    answer = operator.prepared(raw)
    before = operator.files()
    with pytest.raises(TrustError, match="edgectl keys show"):
        operator.world.repository.add_signed(str(answer["next_targets"]).encode(), [raw])
    with pytest.raises(TrustError, match="is not the release key"):
        sign_release_list(answer, [operator.uri("stranger")])
    with pytest.raises(TrustError, match="no metadata"):
        operator.world.repository.add_signed(b"{", [raw])
    assert operator.files() == before

    signed = sign_release_list(answer, [operator.uri("release")])
    operator.world.now += 10
    operator.renew()
    with pytest.raises(Conflict, match="meanwhile"):
        operator.world.repository.add_signed(signed.encode(), [raw])
    assert release_digest(raw) not in operator.world.repository.releases()


# What grows old


def notices(operator: Operator) -> str:
    return "\n".join(operator.rotation.view()["notices"])


def test_expiry_of_operator_signed_metadata_is_reported_early(operator: Operator) -> None:
    """The list of releases nears its expiry and its key is remote: reported 90 days before, resolved by `keys
    renew`."""
    assert "keys init" in notices(operator)
    operator.move_away()
    assert notices(operator) == ""
    operator.world.now += 300 * DAY
    operator.world.repository.refresh_timestamp()
    assert "edgectl keys renew targets --sign-with URI" in notices(operator)
    operator.world.now -= 300 * DAY - 60

    operator.renew()

    assert notices(operator) == ""
    operator.change(KeyChange(anew=("timestamp",)))
    assert "edgectl keys sign" in notices(operator)


def test_a_local_root_is_renewed_and_a_remote_one_reported(operator: Operator) -> None:
    """Ten years pass: the controller renews a root that it holds, and reports a remote one a year before its expiry."""
    assert not operator.rotation.renew_held_root()
    operator.world.now += 3400 * DAY
    operator.world.repository.renew()
    assert operator.rotation.renew_held_root() and operator.versions()["root"] == 2
    operator.device()


def test_an_expiring_offline_root_is_reported_and_renewed(operator: Operator) -> None:
    """The controller cannot renew it and reports it; `keys renew root` with enough keys does."""
    operator.move_away()
    operator.world.now += 3400 * DAY
    operator.world.repository.renew()
    assert not operator.rotation.renew_held_root()
    assert "keys renew root --sign-with URI --sign-with URI" in notices(operator)
    operator.world.now -= 3400 * DAY
    assert operator.change(KeyChange(), "root-1", "root-3") and operator.versions()["root"] == 3


def test_after_a_restore_the_operator_signs_the_targets_again(operator: Operator) -> None:
    """Releases were made after the backup: snapshot and timestamp follow the clock, the list needs its key."""
    operator.move_away()
    backup = operator.world.backup()
    operator.world.now += 60
    operator.add(2)
    store = operator.device()

    operator.world.restore(backup)
    operator.reopened()
    operator.world.now += 60
    operator.world.repository.renew()
    with pytest.raises(TrustError):
        store.refresh(operator.world.fetch)

    operator.world.now += 60
    operator.renew()
    store.refresh(operator.world.fetch)


def test_a_backup_from_before_an_online_key_change_is_repaired(operator: Operator) -> None:
    """The newest root, kept beside the operator's keys, is put into an old backup, which lacks the keys that it names:
    the controller starts, says so, and new keys by the root's signatures bring every device back."""
    operator.move_away()
    backup = operator.world.backup()
    operator.world.now += 60
    roles = ("snapshot", "timestamp", "director")
    assert operator.change(KeyChange(anew=roles), "root-1", "root-2", "release")
    store = operator.device()
    newest = operator.world.repository.root_bytes

    (backup / "metadata" / "3.root.json").write_bytes(newest)
    operator.world.now += 60
    operator.world.restore(backup)
    operator.reopened()
    operator.world.repository.renew()
    assert "edgectl keys rotate snapshot timestamp" in notices(operator)
    assert operator.change(KeyChange(anew=("snapshot", "timestamp")), "root-2", "root-3")

    assert notices(operator) == ""
    digest = operator.add(2)
    store.refresh(operator.world.fetch)
    assert store.manifest(digest, operator.world.fetch) == sample_release(2)[0]
    assert store.verify_statement(operator.world.state(counter=9), DEVICE, for_install=True).counter == 9


def test_show_lists_the_location_of_each_key(operator: Operator) -> None:
    """Role by role: ids, local or remote, threshold, version and expiry."""
    operator.move_away()
    roles = {role["role"]: role for role in operator.rotation.view()["roles"]}

    assert [key["on_controller"] for key in roles["root"]["keys"]] == [False] * 3 and roles["root"]["threshold"] == 2
    assert [key["on_controller"] for key in roles["targets"]["keys"]] == [False]
    assert all(roles[name]["keys"][0]["on_controller"] for name in ("snapshot", "timestamp", "director"))
    assert roles["root"]["version"] == 2 and roles["targets"]["expires"] > operator.world.now
    assert roles["root"]["keys"][0]["keyid"] in key_ids(operator, "root")


def test_a_pending_key_change_is_shared_between_processes(operator: Operator) -> None:
    """Nothing is kept in memory: a second controller on the folder continues the change."""
    operator.move_away()
    operator.change(KeyChange(anew=("timestamp",)), "root-1")
    other = Rotation(Repository(operator.world.folder / "repository", now=operator.world.clock))
    assert other.pending_change() == operator.rotation.pending_change()


def test_a_new_device_starts_with_the_newest_root(operator: Operator) -> None:
    """A claim after a change carries it: the device trusts it without having seen the keys before."""
    operator.move_away()
    digest = operator.add(2)
    newest = operator.world.repository.root_bytes
    late = TrustStore(operator.world.folder / "late", newest, now=operator.world.clock)
    late.refresh(operator.world.fetch)

    assert late.manifest(digest, operator.world.fetch) == sample_release(2)[0]
    assert "1.root.json" not in late.proof()
