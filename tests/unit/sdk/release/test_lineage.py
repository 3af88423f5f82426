"""Lineage: written only where there is one, told in words, and bound to the release by its signature."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.errors import MalformedMessage, TrustError
from edgesplit.release.lineage import AccuracyInterval, Lineage, VariantEvidence, sentences
from edgesplit.release.manifest import decode_manifest, encode_manifest
from edgesplit.release.recut import check_recut
from edgesplit_partitioner.compression import gate
from edgesplit_partitioner.compression.recipe import Recipe
from support.agent_engine import CUT, LOCAL, manifest

EVIDENCE = VariantEvidence(
    samples=240, changed=3, changed_at_most=0.0276, right_to_wrong=2, right_to_wrong_at_most=0.0219, wrong_to_right=1,
    accuracy_base=AccuracyInterval(share=0.884, at_least=0.845, at_most=0.916),
    accuracy_variant=AccuracyInterval(share=0.88, at_least=0.84, at_most=0.913), net_loss_at_most=0.02,
)  # fmt: skip
LINEAGE = Lineage(
    base="birds@3", base_sha256="ab" * 32, answer="class:scores", samples_sha256="cd" * 32, evidence=EVIDENCE,
    allowed_accuracy_loss=0.02,
    recipe={"method": "int8", "float_layers": ["stem", "head"], "tools": {"onnxruntime": "1.23"}},
)  # fmt: skip


def test_a_manifest_has_a_lineage_only_where_there_is_one() -> None:
    """Agents of before refuse a field that they do not know; what has none is encoded as it always was."""
    plain = manifest(LOCAL)
    assert b"lineage" not in encode_manifest(plain)
    assert decode_manifest(encode_manifest(plain)) == plain
    variant = msgspec.structs.replace(plain, lineage=LINEAGE)
    assert decode_manifest(encode_manifest(variant)).lineage == LINEAGE


@pytest.mark.parametrize("field", ["base_sha256", "samples_sha256"])
def test_a_lineage_whose_digests_are_none_is_malformed(field: str) -> None:
    """As every digest in a manifest."""
    wrong = msgspec.structs.replace(LINEAGE, **{field: "x"})
    with pytest.raises(MalformedMessage):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest(LOCAL), lineage=wrong)))


def test_a_recut_may_not_bring_drop_or_change_a_lineage() -> None:
    """The planner's key signs other cuts, and not what a model is said to keep."""
    plain = manifest(LOCAL, CUT)
    variant = msgspec.structs.replace(plain, lineage=LINEAGE)
    better = msgspec.structs.replace(LINEAGE, evidence=msgspec.structs.replace(EVIDENCE, changed=0))
    changed = msgspec.structs.replace(plain, lineage=better)
    check_recut(variant, variant, None)
    for recut, base in ((variant, plain), (plain, variant), (changed, variant)):
        with pytest.raises(TrustError, match="lineage"):
            check_recut(recut, base, None)


def test_a_lineage_tells_base_method_layers_answers_and_accuracy() -> None:
    """In sentences, with how sure they are."""
    made, answers, accuracy = sentences(LINEAGE)
    assert "made from birds@3 by int8" in made and "left in float: stem, head" in made and "onnxruntime 1.23" in made
    assert answers == "at most 2.76 % of answers differ (90 % sure, 240 samples that chose nothing; 3 differed)"
    assert (
        "accuracy 88.0 % (84.0 to 91.3 %), of the base 88.4 % (84.5 to 91.6 %); at most 2 percentage points" in accuracy
    )
    unlabelled = VariantEvidence(samples=240, changed=0, changed_at_most=0.0096)
    elsewhere = sentences(msgspec.structs.replace(LINEAGE, recipe={}, evidence=unlabelled))
    assert "stands in for birds@3, made elsewhere" in elsewhere[0] and "accuracy unknown" in elsewhere[-1]


def test_what_the_gate_saw_and_a_recipe_fit_into_a_lineage() -> None:
    """Evidence and recipe of the partitioner, whatever fields they have."""
    seen = gate.weigh([True] + [False] * 99, [True] * 90 + [False] * 10, [False] + [True] * 89 + [False] * 10)
    assert seen.right_to_wrong == 1 and seen.accuracy_variant is not None
    recipe = Recipe(method="int8", format="onnx", float_layers=("stem",), tools={"onnx": "1.19"}, opset=17)
    plain = msgspec.json.decode(msgspec.json.encode(recipe))
    lineage = msgspec.structs.replace(LINEAGE, recipe=plain, evidence=seen)
    assert msgspec.json.decode(msgspec.json.encode(lineage), type=Lineage) == lineage
