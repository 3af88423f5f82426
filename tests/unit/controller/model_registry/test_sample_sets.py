"""Sample sets: named by what is in them, unchanged by what comes later, read one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgesplit.errors import NotFound, UsageError
from edgesplit_controller.model_registry.sample_sets import SampleSets
from support.registry_harness import RegistryHarness, a_model, npz


@pytest.fixture
def bench(tmp_path: Path) -> RegistryHarness:
    return RegistryHarness(tmp_path)


def image(seed: int) -> bytes:
    """A sample of the small model."""
    return npz(image=np.random.default_rng(seed).random((1, 3, 16, 16), np.float32))


def test_a_set_is_named_by_its_samples_and_labels(bench: RegistryHarness) -> None:
    """In any order, and twice the same; other labels make another set, and the first stays what it was."""
    model, sets = bench.push(a_model()), SampleSets(bench.database, bench.blobs, now=lambda: 1.0)
    raw = [image(seed) for seed in range(3)]
    bench.registry.add_samples(model, tensors=raw, labels={raw[0]: 4})
    digests = [bench.blobs.put(sample) for sample in raw]

    first = sets.create(model, digests)

    assert sets.create(model, [*reversed(digests), digests[0]]) == first
    assert first.labelled == 1 and sorted(first.content) == sorted(zip(digests, [4, None, None], strict=True))
    bench.registry.add_samples(model, tensors=raw, labels={raw[1]: 2})
    second = sets.create(model, digests)
    assert second.sha256 != first.sha256 and sets.get(model, first.sha256) == first
    stored = sets.samples(model, first)
    assert len(stored) == 3 and len(stored[1:]) == 2
    read = stored[0]
    assert not isinstance(read, bytes) and read["image"].shape == (1, 3, 16, 16)


def test_a_set_of_samples_that_the_model_does_not_have_is_refused(bench: RegistryHarness) -> None:
    """And so is an empty one; an unknown set is not found."""
    model, sets = bench.push(a_model()), SampleSets(bench.database, bench.blobs, now=lambda: 1.0)
    for digests in ([], ["ab" * 32]):
        with pytest.raises(UsageError):
            sets.create(model, digests)
    with pytest.raises(NotFound):
        sets.get(model, "ab" * 32)
