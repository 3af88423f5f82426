"""The runtime of a simulated device: nothing is computed, but the files that are loaded are verified as in the real
one.

Golden inputs get their golden answers; run times are those of the plan. A faulty release (`Behaviour`) answers wrongly,
slowly, or loses its worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgesplit.crypto.slice_encryption import decrypting_chunk_source
from edgesplit.errors import InferenceFailed, MalformedMessage
from edgesplit.file_hash import file_sha256
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan
from edgesplit.release.manifest import VARIANT_SLICE_MARK, TensorSpec
from edgesplit.release_store import StoredRelease
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.releases.loaded_release import with_header_length
from edgesplit_agent.worker.host import Host, NeededSlices, SliceRun, StartHost, WorkerLost
from edgesplit_simulation.device.sensors import WORKER_BYTES
from edgesplit_simulation.releases import Behaviour

OnFileLoaded = Callable[[str], None]
"""Called with the SHA-256 of each file that was read for loading."""


class SimulatedHost:
    """The slices of one release, loaded on one device; implements `edgesplit_agent.worker.host.Host`."""

    in_time = True
    lanes = None
    emulated = True

    def __init__(
        self, release: StoredRelease, plan: Plan, slices: frozenset[str], behaviour: Callable[[], Behaviour],
        read_chunk: _ReadChunk,
    ):  # fmt: skip
        """`behaviour` returns how the release behaves now, `read_chunk` the bytes of a chunk by SHA-256."""
        self.slices = slices
        self.leaked_bytes = 0
        """Bytes that the worker has leaked, beyond what it needs."""
        self.closed = False
        self._release = release
        self._plan = plan
        self._behaviour = behaviour
        self._read_chunk = read_chunk
        self._golden_pairs: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = []
        """Golden inputs and answers by variant, read so far: the chunk store may evict them while this host runs."""

    def run(self, job: SliceRun, timing: Timing) -> dict[str, Tensor]:
        """The golden answers to golden inputs, also where another release has the same inputs. Raises InferenceFailed
        for any other input, since nothing is computed here."""
        mood = self._behaviour()
        for name in job.order:
            timing.seconds[name] = self._plan.slice_s.get(name, 0.0) * mood.slowdown
        answer = self._golden_answer(self._variant_of(job.order), job.tensors)
        if answer is None:
            raise InferenceFailed("a simulated runtime answers golden inputs only")
        if mood.wrong_golden:
            answer = {name: np.add(value, 1) for name, value in answer.items()}
        outputs = {spec.name: _zeros(spec) for slice_ in self._release.manifest.slices for spec in slice_.outputs}
        return {**job.tensors, **outputs, **answer}

    def on_request(self) -> None:
        """Account for one request that ran these slices. Raises WorkerLost where the release crashes or exceeds its
        memory."""
        mood = self._behaviour()
        self.leaked_bytes += mood.leak_bytes
        if mood.crashes:
            raise WorkerLost("the simulated worker crashed")
        if self.leaked_bytes > mood.memory_limit_bytes:
            self.leaked_bytes = 0
            raise WorkerLost("the simulated worker exceeded its memory limit")

    @property
    def behaviour(self) -> Behaviour:
        """How the release behaves now."""
        return self._behaviour()

    @property
    def memory_bytes(self) -> int:
        """Memory of its worker, in bytes."""
        return WORKER_BYTES + self.leaked_bytes

    def status(self) -> dict[str, Any]:
        """Status for display."""
        return {"isolation": "simulated", "notes": []}

    def close(self) -> None:
        """Mark the host as closed; no process has to end."""
        self.closed = True

    def _variant_of(self, order: Sequence[str]) -> str:
        """Name of the family's variant that these slices are of; empty for one model."""
        name = order[0].partition(VARIANT_SLICE_MARK)[0] if order else ""
        return name if self._release.manifest.variant(name) is not None else ""

    def _golden_answer(self, variant: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The variant's golden answer whose request has these tensors; None without a match. Variants may have the same
        golden inputs."""
        for of, inputs, answer in self._golden_pairs:
            if of == variant and all(_same(tensors.get(name), value) for name, value in inputs.items()):
                return dict(answer)
        manifest = self._release.manifest
        chunk = decrypting_chunk_source(manifest, self._release.keys, self._read_chunk)
        for number, golden in enumerate(manifest.golden):
            if manifest.variant_of_golden(number) != variant:
                continue
            try:
                decoded = oip.decode_request(*with_header_length(chunk(golden.request.sha256)))
                if all(_same(tensors.get(name), value) for name, value in decoded.inputs.items()):
                    answer = dict(oip.decode_response(*with_header_length(chunk(golden.response.sha256))).outputs)
                    own = zip(manifest.outputs_of(variant), manifest.outputs, strict=True)
                    answer |= {name: answer[spec.name] for name, spec in own if spec.name in answer}
                    self._golden_pairs.append((variant, dict(decoded.inputs), answer))
                    return dict(answer)
            except MalformedMessage:
                continue
        return None


_ReadChunk = Callable[[str], bytes]


def simulated_hosts(
    behaviour_of: Callable[[str], Behaviour], read_chunk: _ReadChunk, on_file_loaded: OnFileLoaded
) -> StartHost:
    """A function that loads a release as a `SimulatedHost`. `behaviour_of` returns the behaviour of a release by
    digest, `read_chunk` the bytes of golden inputs and answers, `on_file_loaded` is called with the SHA-256 of every
    file loaded."""

    def start(release: StoredRelease, plan: Plan) -> Host:
        needed = NeededSlices.of(release, plan)
        for name in sorted(needed.rows):
            source = release.slice_folder(name)
            if isinstance(source, Path):
                for file in release.manifest.slice(name).files:
                    on_file_loaded(file_sha256(source / file.name))
        return SimulatedHost(release, plan, needed.rows, lambda: behaviour_of(release.digest), read_chunk)

    return start


def _same(actual: Tensor | None, expected: Tensor) -> bool:
    return actual is not None and actual.shape == expected.shape and bool(np.array_equal(actual, expected))


def _zeros(spec: TensorSpec) -> Tensor:
    return np.zeros([max(1, size) for size in spec.shape], dtype=oip.DTYPES[spec.datatype])
