"""Sends samples of a model, with their labels, to the controller: some for measurements, or all of a folder as a set by
which versions are compared."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec
from edgesplit_cli.local.model import MAX_SAMPLES, file_labels, read_sample, read_samples, sample_files, write_npz
from edgesplit_cli.progress import progress_text
from edgesplit_cli.settings import segment

MOST_IN_SET = 5_000
"""Samples of one set, as the controller bounds them."""
BATCH_SAMPLES = 64
BATCH_BYTES = 16 * 2**20
"""Samples sent in one request, and their size."""


@dataclass(frozen=True, slots=True)
class UploadedSample:
    """A sample as it is sent, and where it comes from."""

    file: Path
    content: bytes
    label: int | None

    @property
    def sha256(self) -> str:
        """The digest under which the controller stores it."""
        return hashlib.sha256(self.content).hexdigest()


@dataclass(frozen=True, slots=True)
class SampleSource:
    """A registered model's kind of samples."""

    reference: str
    spec: InputSpec | None
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, api: ControllerClient, reference: str) -> SampleSource:
        """Ask the controller for the model's input spec and inputs."""
        model = api.get(f"/v1/models/{segment(reference)}")
        spec = msgspec.convert(model["input_spec"], InputSpec | None)
        return cls(reference, spec, tuple(tensor["name"] for tensor in model.get("inputs", ())))

    def read(self, location: Path, limit: int) -> Iterator[UploadedSample]:
        """At most `limit` samples, evenly spread. Read here first: the controller would refuse one without naming its
        file."""
        if self.spec is not None and self.spec.is_sound:
            frames = read_samples(location, self.spec, limit)
            yield from (UploadedSample(location, frame, None) for frame in frames if isinstance(frame, bytes))
            return
        files = sample_files(location, self.spec)
        labelled = list(zip(files, file_labels(location, files), strict=True))
        for file, label in labelled[:: max(1, len(labelled) // limit)][:limit]:
            yield UploadedSample(file, self._content(file), label)

    def _content(self, file: Path) -> bytes:
        content = read_sample(file, self.spec, self.inputs)
        if isinstance(content, bytes):
            return content
        write_npz(archive := io.BytesIO(), content)
        return archive.getvalue()

    def body(self, batch: Sequence[UploadedSample]) -> dict[str, Any]:
        """The request with these samples."""
        kind = "tensors" if self.spec is None else "frame"
        return {
            "samples": [
                {kind: base64.b64encode(sample.content).decode()}
                | ({} if sample.label is None else {"label": sample.label})
                for sample in batch
            ]
        }


def send_samples(
    api: ControllerClient, reference: str, location: Path, *, every: bool = False, quiet: bool = False
) -> int:
    """Upload some pictures, sound or tensors, whichever the model takes, as its samples, with their labels; returns how
    many. `every`: all of them, the first that the model gets evenly spread."""
    source = SampleSource.of(api, reference)
    samples = list(source.read(location, MAX_SAMPLES))
    if every:  # some first: those that come first choose codecs, and a folder may be sorted by class
        sent = {sample.sha256 for sample in samples}
        samples += [sample for sample in source.read(location, MOST_IN_SET) if sample.sha256 not in sent]
    with progress_text(f"sending samples of {reference}", quiet=quiet):
        for batch in _batches(samples):
            api.post(f"/v1/models/{segment(reference)}/samples", source.body(batch))
    return len(samples)


def send_sample_set(api: ControllerClient, reference: str, location: Path, *, quiet: bool) -> dict[str, Any]:
    """Upload every sample of a folder with its label, as a set of the model; returns the set as the API describes it.
    UsageError for more than `MOST_IN_SET`."""
    source = SampleSource.of(api, reference)
    digests: list[str] = []
    with progress_text(f"sending samples of {reference}", quiet=quiet) as report:
        for batch in _batches(source.read(location, MOST_IN_SET + 1)):
            digests += [sample.sha256 for sample in batch]
            if len(digests) > MOST_IN_SET:
                raise UsageError(f"{location} has more than {MOST_IN_SET} samples: give fewer")
            api.post(f"/v1/models/{segment(reference)}/samples", source.body(batch))
            report(f"{len(digests)} sent")
    made: dict[str, Any] = api.post(f"/v1/models/{segment(reference)}/sample-sets", {"samples": digests})
    return made


def _batches(samples: Iterable[UploadedSample]) -> Iterator[list[UploadedSample]]:
    """The samples in groups for one request each."""
    batch: list[UploadedSample] = []
    size = 0
    for sample in samples:
        if batch and (len(batch) >= BATCH_SAMPLES or size + len(sample.content) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(sample)
        size += len(sample.content)
    if batch:
        yield batch
