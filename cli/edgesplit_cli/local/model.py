"""A model as commands take it that work on this machine: a file, or NAME@VERSION of the controller; and its samples.

The file is read by the same path as a push, so what holds for it here holds for the model that is deployed.
"""

from __future__ import annotations

import io
import wave
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import PCM16_BYTES, InputSpec, prepare
from edgesplit_cli.commands.model import MOST_SAMPLES, PICTURES, SOUNDS, TENSORS, labels_in
from edgesplit_cli.settings import connect

if TYPE_CHECKING:  # both rooms take a second to import, and most commands need neither
    from edgesplit_controller.model_registry.registry import LoadedModel
    from edgesplit_partitioner.profiling.layers import Sample

MODEL_ENDINGS = {".onnx", ".tflite"}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What was asked for, read and prepared."""

    name: str
    loaded: LoadedModel


def is_file(what: str) -> bool:
    """Whether `what` names a model file rather than a registered model."""
    return Path(what).is_file() or Path(what).suffix.lower() in MODEL_ENDINGS


def open_model(data: Path, what: str, input_text: str | None = None, bindings: Sequence[str] = ()) -> LocalModel:
    """The model file `what`, or the registered model of that name with its own input spec and bindings."""
    from edgesplit_controller.api.request_parsing import parse_bindings
    from edgesplit_controller.model_registry.registry import load_model
    from edgesplit_partitioner.onnx_format import archive

    if is_file(what):
        try:
            raw = archive.read(Path(what))
        except OSError as error:
            raise UsageError(f"cannot read {what}: {error.strerror}") from error
        bound = parse_bindings(list(bindings))
        try:
            return LocalModel(Path(what).name, load_model(raw, input_text or "", bound))
        except ModelRefused as error:
            raise ModelRefused(f"{what}: {error}") from error
    if input_text or bindings:
        raise UsageError(f"{what} was pushed with its own input spec and bindings; --input and --bind are for files")
    api = connect(data)
    shown = api.get(f"/v1/models/{quote(what)}")
    raw = api.download(f"/v1/models/{quote(shown['model'])}/file")
    return LocalModel(shown["model"], load_model(raw, shown["input"] or "", shown["bindings"]))


def read_samples(place: Path | None, spec: InputSpec | None, most: int = MOST_SAMPLES) -> list[Sample]:
    """At most `most` samples from a file or a folder: JPEG, sound (.wav, or .pcm as it travels), .npz of tensors."""
    files = sample_files(place, spec)
    if spec is not None and spec.is_sound:
        found: list[Sample] = [frame for file in files for frame in sound_frames(file, spec)]
    else:
        found = [read_sample(file, spec) for file in _spread(files, most)]
    return list(_spread(found, most))


def read_sample(file: Path, spec: InputSpec | None) -> Sample:
    """A picture, or tensors where the model has no input spec; UsageError names the file that is neither."""
    if spec is None:
        return dict(arrays_in(file))
    try:
        frame = file.read_bytes()
        prepare(spec, frame)
    except (OSError, UsageError) as error:
        raise UsageError(f"{file}: {error}") from error
    return frame


def labels_of(place: Path | None, spec: InputSpec | None, most: int = MOST_SAMPLES) -> list[int | None]:
    """The class of each sample by the folder's labels.json; None where it is not known, as of sound in frames."""
    files = [] if spec is not None and spec.is_sound else _spread(sample_files(place, spec), most)
    known = labels_in(files[0].parent) if files else {}
    return [known.get(file.name) for file in files]


def sample_files(place: Path | None, spec: InputSpec | None) -> list[Path]:
    """Those that can be samples, in order; UsageError where a folder has none."""
    if place is None:
        return []
    wanted = TENSORS if spec is None else SOUNDS if spec.is_sound else PICTURES
    files = sorted(path for path in place.iterdir() if path.suffix.lower() in wanted) if place.is_dir() else [place]
    if not files:
        takes = "tensors" if spec is None else spec.media
        raise UsageError(f"no {' or '.join(sorted(wanted))} in {place}, and the model takes {takes}")
    return files


def sound_frames(file: Path, spec: InputSpec) -> Iterator[bytes]:
    """A recording in frames of the spec's length; what is left over at its end is dropped."""
    data = file.read_bytes()
    if file.suffix.lower() == ".wav":
        try:
            with wave.open(io.BytesIO(data)) as opened:
                form = (opened.getnchannels(), opened.getsampwidth(), opened.getframerate())
                data = opened.readframes(opened.getnframes())
        except (wave.Error, EOFError) as error:
            raise UsageError(f"{file} is no WAV of plain samples: {error}") from error
        if form != (1, PCM16_BYTES, spec.rate_hz):
            raise UsageError(
                f"{file} has {form[0]} channel(s) of {8 * form[1]} bits at {form[2]} Hz;"
                f" the input spec wants 1 of 16 bits at {spec.rate_hz} Hz"
            )
    step = PCM16_BYTES * spec.samples
    if len(data) < step:
        raise UsageError(f"{file} is shorter than one frame of {spec.samples} samples")
    for start in range(0, len(data) - step + 1, step):
        yield data[start : start + step]


def arrays_in(file: Path) -> Mapping[str, Any]:
    """One array per input; `in:` before a name is left out, what begins with `out:` is not an input."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name.removeprefix("in:"): opened[name] for name in opened.files if not name.startswith("out:")}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        why = str(error).partition(". ")[0]
        raise UsageError(f"{file} is no .npz of plain arrays: {why}") from error


def _spread(items: Sequence[Any], most: int) -> Sequence[Any]:
    """At most `most` of them, evenly spread."""
    return items[:: max(1, -(-len(items) // most))]
