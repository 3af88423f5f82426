"""What golden inputs show of a release's answers, as counts for rollout gates."""

from __future__ import annotations

import msgspec
import numpy as np

from edgesplit.release.manifest import Chunk, GoldenExample, TensorSpec, decode_manifest, encode_manifest
from edgesplit_agent.releases.golden_result import GoldenResult, golden_result
from support.agent_engine import LOCAL, manifest

SCORES = (TensorSpec("scores", "FP32", (1, 4)),)
CHUNK = Chunk("ab" * 32, 4)
PLAIN = GoldenExample(CHUNK, CHUNK)


def answered(label: int) -> dict[str, np.ndarray]:
    """Outputs whose class is this one."""
    return {"scores": np.eye(4, dtype=np.float32)[label][np.newaxis]}


def test_answers_are_counted_by_label_and_by_the_bases_answer() -> None:
    """Each where it is known; golden inputs without either count for neither."""
    goldens = [
        PLAIN, msgspec.structs.replace(PLAIN, label=1), msgspec.structs.replace(PLAIN, label=2, answer=3),
        msgspec.structs.replace(PLAIN, answer=0),
    ]  # fmt: skip
    answers = [answered(0), answered(1), answered(3), answered(2)]
    assert golden_result(goldens, answers, SCORES) == GoldenResult(labelled=2, right=1, compared=2, agreeing=1)
    boxes = (TensorSpec("boxes", "FP32", (1, 10, 4)), *SCORES)
    assert golden_result(goldens, answers, boxes) == GoldenResult()


def test_labels_of_golden_inputs_are_written_only_where_there_are_some() -> None:
    """Agents of before refuse a field that they do not know."""
    plain = msgspec.structs.replace(manifest(LOCAL), golden=(PLAIN,))
    assert b"label" not in encode_manifest(plain) and decode_manifest(encode_manifest(plain)) == plain
    labelled = msgspec.structs.replace(plain, golden=(msgspec.structs.replace(PLAIN, label=3, answer=0),))
    assert decode_manifest(encode_manifest(labelled)).golden == labelled.golden
