"""The runtime of a simulated device: golden answers, each variant's own."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from edgesplit.errors import InferenceFailed
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import GoldenExample, chunk_of
from edgesplit.runtime import Timing
from edgesplit_agent.worker.host import SliceRun
from edgesplit_simulation.device.runtime import SimulatedHost
from edgesplit_simulation.releases import HEALTHY
from unit.agent.serving.test_cascade_answers import make_release

PICTURE = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


def test_variants_with_the_same_golden_input_have_answers_of_their_own() -> None:
    """A family's devices once found the first variant's golden answers for all of them, and refused the release."""
    chunks: dict[str, bytes] = {}
    golden = []
    for factor in (2.0, 3.0):
        request = b"".join(oip.encode_request(oip.InferRequest({"x": PICTURE}, id=f"golden {factor}"))[0])
        answer = oip.InferResponse("birds", {"y": PICTURE * np.float32(factor)}, id="golden")
        response = b"".join(oip.encode_response(answer)[0])
        golden.append(GoldenExample(chunk_of(request), chunk_of(response)))
        chunks |= {chunk_of(raw).sha256: raw for raw in (request, response)}
    made, _ = make_release()
    variants = tuple(msgspec.structs.replace(variant, golden=1) for variant in made.manifest.family)
    manifest = msgspec.structs.replace(made.manifest, golden=tuple(golden), variants=variants)
    release = SimpleNamespace(manifest=manifest, keys={})
    host = SimulatedHost(release, made.plan, frozenset(), lambda: HEALTHY, chunks.__getitem__)  # type: ignore[arg-type]

    for _ in range(2):
        for name, factor in (("small.s01", 2.0), ("large.s01", 3.0)):
            outputs = host.run(SliceRun([name], {"x": PICTURE}), Timing())
            assert np.array_equal(outputs["y"], PICTURE * np.float32(factor))
    with pytest.raises(InferenceFailed, match="golden inputs only"):
        host.run(SliceRun(["small.s01"], {"x": PICTURE + 1}), Timing())
