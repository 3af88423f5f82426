"""Where a simulated device's slices "run": nothing is computed, but what is loaded is verified as it always is.

Golden inputs are given their golden answers; the times are the plan's. A release that is to be a
bad one (`Mood`) answers wrongly, slowly, or loses its worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgesplit.crypto.slice_encryption import golden_chunks
from edgesplit.errors import InferenceFailed, MalformedMessage
from edgesplit.oip import protocol as oip
from edgesplit.plan import Plan
from edgesplit.release.manifest import TensorSpec
from edgesplit.release_store import Release
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.releases.loaded_release import with_header_length
from edgesplit_agent.worker.host import Host, Job, Needed, StartHost, WorkerLost
from edgesplit_simulation.device.sensors import WORKER_BYTES
from edgesplit_simulation.releases import Mood

Loaded = Callable[[str], None]
"""Told the SHA-256 of each file as it was read for loading."""


class SimulatedHost:
    """One release's slices, loaded on one device."""

    in_time = True
    emulated = True

    def __init__(self, release: Release, plan: Plan, slices: frozenset[str], mood: Callable[[], Mood], chunk: _Chunk):
        self.slices = slices
        self.held_bytes = 0
        """By the worker, beyond what it needs."""
        self.closed = False
        self._release = release
        self._plan = plan
        self._mood = mood
        self._chunk = chunk
        self._answered: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        """Golden inputs and answers that were read: the store does not keep them for as long as this runs."""

    def run(self, job: Job, timing: Timing) -> dict[str, Tensor]:
        """The golden answers to golden inputs, also to those of another release that are the same. InferenceFailed for
        any other: nothing is computed here."""
        mood = self._mood()
        for name in job.order:
            timing.seconds[name] = self._plan.slice_s.get(name, 0.0) * mood.slow
        known = self._golden(job.tensors)
        if known is None:
            raise InferenceFailed("a simulated runtime knows the answers to its golden inputs alone")
        answer = known
        if mood.golden:
            answer = {name: np.add(value, 1) for name, value in answer.items()}
        made = {spec.name: _zeros(spec) for one in self._release.manifest.slices for spec in one.outputs}
        return {**job.tensors, **made, **answer}

    def used(self) -> None:
        """A request ran its slices. WorkerLost where that was too much for it."""
        mood = self._mood()
        self.held_bytes += mood.leak_bytes
        if mood.crash:
            raise WorkerLost("the simulated worker crashed")
        if self.held_bytes > mood.room_bytes:
            self.held_bytes = 0
            raise WorkerLost("the simulated worker took more memory than it may")

    @property
    def slow(self) -> float:
        """How many times as long as planned it takes."""
        return self._mood().slow

    @property
    def hungry(self) -> float:
        """How many times the energy of a good one it takes."""
        return self._mood().hungry

    @property
    def hotter(self) -> float:
        """Degrees that it makes the device hotter than a good one would."""
        return self._mood().hotter

    @property
    def memory_bytes(self) -> int:
        """Of its worker."""
        return WORKER_BYTES + self.held_bytes

    def status(self) -> dict[str, Any]:
        """For people."""
        return {"isolation": "simulated", "notes": []}

    def close(self) -> None:
        """Nothing runs."""
        self.closed = True

    def _golden(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        for inputs, answer in self._answered:
            if all(_same(tensors.get(name), value) for name, value in inputs.items()):
                return dict(answer)
        manifest = self._release.manifest
        chunk = golden_chunks(manifest, self._release.keys, self._chunk)
        for golden in manifest.golden:
            try:
                asked = oip.decode_request(*with_header_length(chunk(golden.request.sha256)))
                if all(_same(tensors.get(name), value) for name, value in asked.inputs.items()):
                    answer = dict(oip.decode_response(*with_header_length(chunk(golden.response.sha256))).outputs)
                    self._answered.append((dict(asked.inputs), answer))
                    return dict(answer)
            except MalformedMessage:
                continue
        return None


_Chunk = Callable[[str], bytes]


def simulated_hosts(mood: Callable[[str], Mood], chunk: _Chunk, loaded: Loaded) -> StartHost:
    """Load releases so: `mood` by release, `chunk` gives golden inputs, `loaded` is told of every file."""

    def start(release: Release, plan: Plan) -> Host:
        needed = Needed.of(release, plan)
        for name in sorted(needed.rows):
            source = release.slice_folder(name)
            if isinstance(source, Path):
                for file in release.manifest.slice(name).files:
                    loaded(hashlib.sha256((source / file.name).read_bytes()).hexdigest())
        return SimulatedHost(release, plan, needed.rows, lambda: mood(release.digest), chunk)

    return start


def _same(given: Tensor | None, wanted: Tensor) -> bool:
    return given is not None and given.shape == wanted.shape and bool(np.array_equal(given, wanted))


def _zeros(spec: TensorSpec) -> Tensor:
    return np.zeros([max(1, size) for size in spec.shape], dtype=oip.DTYPES[spec.datatype])
