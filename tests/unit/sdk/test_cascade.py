"""The cascade of a plan: its round trip through a signed manifest, and the manifests that are refused."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.cascade import Cascade, ChangedShare
from edgesplit.errors import MalformedMessage
from edgesplit.plan import Plan, Row
from edgesplit.release.manifest import Manifest, ReleaseVariant, Slice, decode_manifest, encode_manifest
from support.agent_engine import CLASS, LINK, LOCAL, X, Y, manifest

SMALL = Row(name="small:local", device=("small.s01",), variant="small", accuracy=0.6)
LARGE = Row(
    name="large:remote", remote=("large.s01",), sends=("x",), receives=("y",), variant="large", accuracy=0.9
)  # fmt: skip
PROMISE = ChangedShare(at_most=0.02, certainty=0.9, samples=300, differing=1)
CASCADE = Cascade(
    first="small", second="large", answer="class:y", score="probability", threshold=0.8, changed=PROMISE, escalated=0.4
)


def release(cascade: Cascade | None) -> Manifest:
    """A family with a small variant on the device and a large one in the cloud."""
    plan = Plan(model="birds@1", device_class=CLASS, rows=(LARGE, SMALL), link=LINK, cascade=cascade)
    variants = tuple(
        ReleaseVariant(
            name=row.variant, model=f"{row.variant}@1", model_sha256="1" * 64, accuracy=row.accuracy or 0.0,
            least_accuracy=0.5, samples=100, outputs=("y",),
        )
        for row in (SMALL, LARGE)
    )  # fmt: skip
    slices = tuple(Slice(f"{name}.s01", "onnx", (f"{name}:a",), (X,), (Y,)) for name in ("small", "large"))
    return Manifest(
        model="birds@1", model_sha256="0" * 64, created="2026-01-01T00:00:00Z", input_spec=None, inputs=(X,),
        outputs=(Y,), slices=slices, plans={CLASS: plan}, variants=variants,
    )  # fmt: skip


def test_a_cascade_is_signed_with_its_plan() -> None:
    """It comes back as it was; a plan without one has the bytes that it always had."""
    assert decode_manifest(encode_manifest(release(CASCADE))).plans[CLASS].cascade == CASCADE
    assert b"cascade" not in encode_manifest(release(None))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"first": "tiny"}, "no two variants"),
        ({"second": "huge"}, "no two variants"),
        ({"second": "small"}, "no two variants"),
        ({"first": "large", "second": "small"}, "cannot answer first"),
        ({"escalated": 1.5}, "not between 0 and 1"),
        ({"audit_share": -0.1}, "not between 0 and 1"),
        ({"changed": msgspec.structs.replace(PROMISE, at_most=0.0)}, "lie between 0 and 1"),
        ({"changed": msgspec.structs.replace(PROMISE, certainty=1.0)}, "lie between 0 and 1"),
        ({"changed": msgspec.structs.replace(PROMISE, differing=301)}, "301 of 300 samples differ"),
        ({"score": "output"}, "only the score `output` has one"),
        ({"score_output": "sure"}, "only the score `output` has one"),
    ],
)
def test_a_cascade_that_no_device_could_keep_is_refused(changes: dict[str, object], problem: str) -> None:
    """When the release is made, and by each device."""
    with pytest.raises(MalformedMessage, match=problem):
        decode_manifest(encode_manifest(release(msgspec.structs.replace(CASCADE, **changes))))


def test_a_threshold_is_a_finite_number() -> None:
    """That telemetry can carry: JSON has no infinity, but 1e999 might be read as one."""
    for number in (b"1e999", b"1e16", b"-1e16"):
        raw = encode_manifest(release(CASCADE)).replace(b'"threshold":0.8', b'"threshold":' + number)
        assert number in raw
        with pytest.raises(MalformedMessage, match="manifest"):
            decode_manifest(raw)


def test_one_model_has_no_cascade() -> None:
    """There are no variants that it could be of."""
    plain = manifest(LOCAL)
    plan = msgspec.structs.replace(plain.plans[CLASS], cascade=CASCADE)
    with pytest.raises(MalformedMessage, match="no two variants"):
        decode_manifest(encode_manifest(msgspec.structs.replace(plain, plans={CLASS: plan})))


def test_all_variants_of_a_family_answer_alike() -> None:
    """By boxes in one form, whatever outputs they are decoded from, or none does. It is written only for them."""
    family = release(None)
    boxes = [
        msgspec.structs.replace(variant, answer="boxes:ssd:0.5", outputs=("b", "c", "s", "n"))
        for variant in family.family
    ]
    both = msgspec.structs.replace(family, variants=tuple(boxes))
    assert decode_manifest(encode_manifest(both)).family == tuple(boxes)
    with pytest.raises(MalformedMessage, match="some variants of the family answer by boxes"):
        decode_manifest(encode_manifest(msgspec.structs.replace(family, variants=(boxes[0], family.family[1]))))
    assert b'"answer"' not in encode_manifest(family)
