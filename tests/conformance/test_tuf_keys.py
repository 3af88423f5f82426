"""Keys: thresholds, rotation, repeated and foreign signatures, key kinds, fast-forward and the way back from it.

The scenarios of the TUF client conformance suite through the agent's own client over a real mosquitto; clauses are of
the TUF specification 1.0.34.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from securesystemslib.signer import CryptoSigner, Signer, SSlibKey

from support.signed_repository import sample_release
from support.tuf_repository import TOP, Case, new_key

FAR = 2**31 - 1


@dataclass(frozen=True)
class Signing:
    """Which of ten keys a role lists, how many must sign, and which do."""

    keys: str
    threshold: int
    signs: str
    good: bool = True


def signers_of(ring: Sequence[Signer], which: str) -> list[Signer]:
    return [ring[int(number)] for number in which]


def set_keys(case: Case, name: str, ring: Sequence[Signer], step: Signing) -> None:
    """Let the next root name these keys for the role."""
    role = case.sim.root.roles[name]
    for keyid in list(role.keyids):
        case.sim.root.revoke_key(keyid, name)
    for signer in signers_of(ring, step.keys):
        case.sim.root.add_key(signer.public_key, name)
    role.threshold = step.threshold


@pytest.fixture(scope="module")
def ring() -> list[CryptoSigner]:
    """Ten keys."""
    return [new_key() for _ in range(10)]


ROOTS = {
    "one key follows another, both sign": [Signing("1", 1, "1"), Signing("2", 1, "12"), Signing("2", 1, "2")],
    "one key for ever": [Signing("1", 1, "1"), Signing("1", 1, "1"), Signing("1", 1, "1")],
    "signatures of strangers beside enough good ones": [Signing("1", 1, "1"), Signing("2", 1, "19283")],
    "one of three replaced, two must sign": [Signing("123", 2, "12"), Signing("124", 2, "12"), Signing("124", 2, "24")],
    "all of three replaced at once": [Signing("123", 2, "13"), Signing("456", 2, "1346"), Signing("456", 2, "56")],
    "the threshold rises": [Signing("123", 1, "3"), Signing("123", 3, "123")],
    "the threshold falls, signed as the old root asks": [Signing("123", 2, "12"), Signing("123", 1, "23")],
    "the new key alone": [Signing("1", 1, "1"), Signing("2", 1, "2", good=False)],
    "the old key alone": [Signing("1", 1, "1"), Signing("2", 1, "1", good=False)],
    "strangers alone": [Signing("1", 1, "1"), Signing("1", 1, "789", good=False)],
    "nobody": [Signing("1", 1, "1"), Signing("1", 1, "", good=False)],
    "too few of the new keys": [Signing("123", 2, "12"), Signing("145", 2, "12", good=False)],
    "too few of the old keys": [Signing("123", 2, "12"), Signing("245", 2, "45", good=False)],
    "the threshold rises and is not reached": [Signing("123", 1, "1"), Signing("123", 2, "2", good=False)],
    "the threshold falls and the old is not reached": [Signing("123", 2, "13"), Signing("123", 1, "1", good=False)],
}


@pytest.mark.parametrize("steps", ROOTS.values(), ids=ROOTS.keys())
def test_a_new_root_needs_signatures_of_old_and_new_keys(
    case: Case, ring: list[CryptoSigner], steps: list[Signing]
) -> None:
    """TUF 5.3.4: a new root is signed by a threshold of the old root's keys and by one of its own."""
    last = 1
    for number, step in enumerate(steps):
        set_keys(case, "root", ring, step)
        case.sim.signers["root"] = signers_of(ring, step.signs)
        if number == 0:  # by this root the device is made
            case.sim.put("root")
            case.bootstrap = case.sim.files["metadata/1.root.json"]
            case.restarted()
            case.refresh()
            continue
        case.sim.publish_root()
        case.sim.publish("timestamp")
        if step.good:
            last += 1
            assert case.refresh()["root"] == last
        else:
            case.refused("signed by|root")
            assert f"{last + 1}.root.json" not in case.store.proof()


def test_roots_are_followed_one_by_one_to_the_newest(case: Case) -> None:
    """TUF 5.3.3: a device that was away for twenty rotations comes along, and a gap stops it where it is."""
    case.refresh()
    for _ in range(20):
        case.sim.rotate(*TOP)
    case.sim.publish()
    assert case.refresh()["root"] == 21
    case.sim.rotate("root")
    case.sim.rotate("root")
    missing = case.sim.files.pop("metadata/22.root.json")
    assert case.refresh()["root"] == 21
    case.sim.files["metadata/22.root.json"] = missing
    assert case.refresh()["root"] == 23


def test_a_device_with_an_old_image_follows_every_root_since(case: Case) -> None:
    """TUF 5.3.3: years of rotations are followed from the root in the image; they once ended at the sixty-fifth."""
    for _ in range(70):
        case.sim.publish_root()
    assert case.refresh()["root"] == 71
    case.restarted()
    case.sim.publish_root()
    assert case.refresh()["root"] == 72


OTHERS = {
    "another key": Signing("2", 1, "2"),
    "strangers' signatures beside the good one": Signing("1", 1, "918"),
    "two of three": Signing("123", 2, "13"),
    "three of five, in any order": Signing("12345", 3, "531"),
    "only the key of before": Signing("2", 1, "0", good=False),
    "a threshold of two, and one signs": Signing("12", 2, "1", good=False),
    "a threshold of two, one signs beside strangers": Signing("12", 2, "1789", good=False),
    "nobody": Signing("1", 1, "", good=False),
}


@pytest.mark.parametrize("name", ["timestamp", "snapshot", "targets"])
@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS.keys())
def test_a_role_is_verified_with_the_keys_of_the_current_root(
    case: Case, ring: list[CryptoSigner], name: str, step: Signing
) -> None:
    """TUF 5.4.2, 5.5.3, 5.6.3: thresholds and rotation of the roles below the root; a stolen key ends with a root."""
    case.refresh()
    set_keys(case, name, [case.sim.signers[name][0], *ring[1:]], step)
    case.sim.signers[name] = signers_of([case.sim.signers[name][0], *ring[1:]], step.signs)
    case.sim.publish_root()
    case.sim.publish()
    if step.good:
        assert case.refresh()[name] == 2
    else:
        case.refused("signed by")


@pytest.mark.parametrize("name", ["timestamp", "snapshot", "targets"])
def test_a_threshold_beyond_the_number_of_keys_is_never_reached(case: Case, name: str) -> None:
    """TUF 5.4.2: a root that asks for two signatures and names one key stops the role, and nothing else is lost."""
    case.refresh()
    case.sim.root.roles[name].threshold = 2
    case.sim.publish_root()
    case.sim.publish()
    case.refused("signed by")
    case.sim.root.roles[name].threshold = 1
    case.sim.publish_root()
    case.sim.publish()
    assert case.refresh()["root"] == 3


@pytest.mark.parametrize("name", ["root", "timestamp", "snapshot", "targets"])
def test_a_repeated_signature_is_refused(case: Case, name: str) -> None:
    """TUF 4.2.1: key ids are unique in `signatures`; a file that repeats one is refused, even if it has enough."""
    case.refresh()
    if name == "root":
        case.sim.publish_root()
    case.sim.publish()
    path = case.sim.path(name)
    told = json.loads(case.sim.files[path])
    told["signatures"] *= 2
    case.sim.files[path] = json.dumps(told).encode()
    if name in ("snapshot", "targets"):
        without_hashes(case)
    case.refused("deserialize")


def without_hashes(case: Case) -> None:
    """Let the files above vouch by version alone."""
    for meta in (case.sim.snapshot.meta["targets.json"], case.sim.timestamp.snapshot_meta):
        meta.hashes = meta.length = None
    spoiled = {path: raw for path, raw in case.sim.files.items() if path.endswith((".snapshot.json", ".targets.json"))}
    for name in ("snapshot", "timestamp"):
        case.sim.put(name)
    if len(json.loads(spoiled[case.sim.path("snapshot")])["signatures"]) > 1:
        case.sim.files[case.sim.path("snapshot")] = spoiled[case.sim.path("snapshot")]


def test_one_key_under_two_names_is_one_signature(case: Case) -> None:
    """TUF 4.3: a role of threshold two whose two key ids hold the same key cannot be spoken for by who has that one."""
    case.refresh()
    signer = case.sim.signers["timestamp"][0]
    told = json.loads(case.sim.signed("root"))
    twin = "f" * 64
    told["signed"]["keys"][twin] = copy.deepcopy(told["signed"]["keys"][signer.public_key.keyid])
    told["signed"]["roles"]["timestamp"] = {"keyids": [signer.public_key.keyid, twin], "threshold": 2}
    case.sim.root = type(case.sim.root).from_dict(told["signed"])
    case.sim.publish_root()
    case.sim.publish()
    stamp = json.loads(case.sim.files["metadata/timestamp.json"])
    stamp["signatures"].append({"keyid": twin, "sig": stamp["signatures"][0]["sig"]})
    case.sim.files["metadata/timestamp.json"] = json.dumps(stamp).encode()
    case.refused("not a root that may follow")


@pytest.mark.parametrize("odd", ["", "00" * 64, "zz", "ab" * 5_000])
def test_a_bad_signature_beside_enough_good_ones_does_no_harm(case: Case, odd: str) -> None:
    """TUF 5.4.2: signatures that do not verify are not counted, whatever they look like."""
    case.refresh()
    second = new_key()
    case.sim.root.add_key(second.public_key, "timestamp")
    case.sim.publish_root()
    case.sim.publish()
    told = json.loads(case.sim.files["metadata/timestamp.json"])
    told["signatures"].append({"keyid": second.public_key.keyid, "sig": odd})
    case.sim.files["metadata/timestamp.json"] = json.dumps(told).encode()
    assert case.refresh()["timestamp"] == 2


KINDS = {
    "ed25519": CryptoSigner.generate_ed25519,
    "ecdsa": CryptoSigner.generate_ecdsa,
    "rsa": CryptoSigner.generate_rsa,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_key_that_the_specification_names_works(case: Case, kind: str) -> None:
    """TUF 4.2.2: the keys of a KMS or a token may be RSA or ECDSA; a signature made for other bytes is refused."""
    case.refresh()
    new = KINDS[kind]()
    for signer in case.sim.signers["timestamp"]:
        case.sim.root.revoke_key(signer.public_key.keyid, "timestamp")
    case.sim.signers["timestamp"] = [new]
    case.sim.root.add_key(new.public_key, "timestamp")
    case.sim.publish_root()
    case.sim.publish()
    good = case.sim.files["metadata/timestamp.json"]
    case.sim.files["metadata/timestamp.json"] = good.replace(b'"version":2', b'"version":9')
    case.refused("signed by|version|hash")
    case.sim.files["metadata/timestamp.json"] = good
    assert case.refresh()["timestamp"] == 2


@pytest.mark.parametrize(
    "change",
    [{"keytype": "unheard-of"}, {"scheme": "none"}, {"keyval": {"public": "no key"}}, {"keyval": {"public": ""}}],
)
def test_a_key_of_an_unknown_kind_signs_nothing(case: Case, change: dict[str, object]) -> None:
    """C10: a key or a scheme that the client does not know verifies no signature, and the device lives on."""
    case.refresh()
    keyid = case.sim.signers["timestamp"][0].public_key.keyid
    key = case.sim.root.keys[keyid]
    case.sim.root.keys[keyid] = SSlibKey(
        keyid, **{"keytype": key.keytype, "scheme": key.scheme, "keyval": key.keyval, **change}
    )
    case.sim.publish_root()
    case.sim.publish()
    case.refused("signed by|deserialize")
    case.sim.root.keys[keyid] = key
    case.sim.put("root")
    case.sim.publish_root()
    case.sim.publish("timestamp")
    assert case.refresh()["root"] == 3


def test_a_misleading_field_of_a_key_changes_nothing(case: Case) -> None:
    """TUF 4.2.2: `keyid_hash_algorithms`, which older drafts had, is an unknown field like others."""
    case.refresh()
    for key in case.sim.root.keys.values():
        key.unrecognized_fields["keyid_hash_algorithms"] = "md5"
    case.sim.publish_root()
    case.sim.publish()
    assert case.refresh()["root"] == 2


# Fast-forward, and the way back


@pytest.mark.parametrize(
    ("forward", "rotated"),
    [
        (("timestamp",), ("timestamp",)),
        (("snapshot", "timestamp"), ("snapshot", "timestamp")),
        (("targets", "snapshot", "timestamp"), ("targets", "snapshot", "timestamp")),
    ],
)
def test_a_fast_forwarded_role_is_recovered_by_new_keys(
    case: Case, forward: tuple[str, ...], rotated: tuple[str, ...]
) -> None:
    """TUF 5.3.11: who stole a key and counted to the end is undone by a root with new keys; nothing older slips in
    without it, and nothing older than that afterwards."""
    case.refresh()
    for name in forward:
        case.sim.role(name).version = FAR
    case.sim.link()
    assert case.refresh()[forward[0]] == FAR

    for name in forward:
        case.sim.role(name).version = 2
    digest = case.sim.add()
    case.sim.link()
    case.refused("version|Expected|older")
    case.sim.rotate(*rotated)
    case.sim.link()
    assert {case.refresh()[name] for name in forward} == {2}
    case.sim.publish()
    case.refresh()
    assert case.manifest(digest) == sample_release()[0]

    for name in forward:
        case.sim.role(name).version = 1
    case.sim.link()
    case.refused("version|Expected|older")


def test_targets_announced_far_ahead_by_a_stolen_snapshot_key_are_undone_with_that_key(case: Case) -> None:
    """TUF 5.3.11: a snapshot that names targets which were never signed blocks the device until its key is replaced."""
    case.refresh()
    case.sim.publish("snapshot", "timestamp")
    case.sim.snapshot.meta["targets.json"].version = FAR
    case.sim.snapshot.meta["targets.json"].hashes = case.sim.snapshot.meta["targets.json"].length = None
    case.sim.timestamp.snapshot_meta = type(case.sim.timestamp.snapshot_meta)(2)
    for name in ("snapshot", "timestamp"):
        case.sim.put(name)
    with pytest.raises(Exception, match="not there"):
        case.refresh()
    case.sim.publish()
    case.refused("version|Expected")
    case.sim.rotate("snapshot", "timestamp")
    case.sim.link()
    assert case.refresh()["targets"] == 2


def test_targets_that_went_ahead_by_their_own_key_need_a_new_one(case: Case) -> None:
    """Stricter than TUF 5.3.11: targets that their own key signed ahead do not go back by a new snapshot key alone."""
    case.refresh()
    case.sim.targets.version = FAR
    case.sim.publish("snapshot", "timestamp")
    case.refresh()
    case.sim.targets.version = 2
    case.sim.rotate("snapshot", "timestamp")
    case.sim.link()
    case.refused("older than")
    case.sim.rotate("targets")
    case.sim.publish("snapshot", "timestamp")
    assert case.refresh()["targets"] == 2
