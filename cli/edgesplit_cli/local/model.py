"""A model for commands that compute on this machine: a file, or NAME@VERSION of the controller; and its samples.

The file is loaded by the same code as a push, so that results here hold for the deployed model.
"""

from __future__ import annotations

import io
import wave
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import msgspec
import numpy as np
import numpy.typing as npt

from edgesplit.errors import ModelRefused, UsageError
from edgesplit.input_spec import PCM16_BYTES, InputSpec, prepare, range_warning
from edgesplit.picture_formats import JPEG, PNG, RAW, WEBP
from edgesplit_cli.settings import connect, segment

if TYPE_CHECKING:  # these packages take a second to import, and most commands need neither
    from edgesplit_controller.model_registry.registry import LoadedModel
    from edgesplit_partitioner.profiling.layers import Sample

MODEL_ENDINGS = {".onnx", ".tflite"}

PICTURES = {JPEG: {".jpg", ".jpeg"}, PNG: {".png"}, WEBP: {".webp"}, RAW: {".raw", ".rgb", ".bgr", ".gray", ".yuv"}}
"""Endings of files by what arrives."""
ALL_PICTURES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
"""Endings of pictures, also of those that are not decoded, for errors."""
TENSORS = {".npz", ".npy"}
SOUNDS = {".wav", ".pcm", ".raw"}
LABELS = "labels.json"
"""File of classes by file name in a folder of samples."""
MAX_SAMPLES = 32
"""Samples that are used of a folder, evenly spread."""
MOST_SAMPLES = 5_000
"""Samples of a folder where all are used."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that was read and prepared."""

    name: str
    loaded: LoadedModel


def is_file(what: str) -> bool:
    """True where `what` names a model file rather than a registered model."""
    return Path(what).is_file() or Path(what).suffix.lower() in MODEL_ENDINGS


def open_model(data: Path, what: str, input_text: str | None = None, bindings: Sequence[str] = ()) -> LocalModel:
    """The model file `what`, or the registered model of that name with its own input spec and bindings."""
    from edgesplit_controller.api.request_parsing import parse_bindings
    from edgesplit_controller.model_registry.registry import load_model
    from edgesplit_partitioner.onnx_format import archive

    if is_file(what):
        try:
            raw = archive.read_model_bytes(Path(what))
        except OSError as error:
            raise UsageError(f"cannot read {what}: {error.strerror}") from error
        parsed_bindings = parse_bindings(list(bindings))
        try:
            loaded = load_model(raw, input_text or "", parsed_bindings)
        except ModelRefused as error:
            raise ModelRefused(f"{what}: {error}") from error
        warn_of_range(loaded.spec)
        return LocalModel(Path(what).name, loaded)
    if input_text or bindings:
        raise UsageError(f"{what} was pushed with its own input spec and bindings; --input and --bind are for files")
    api = connect(data)
    registered = api.get(f"/v1/models/{segment(what)}")
    if registered.get("family"):
        variants = [variant["model"] for variant in registered["family"]["variants"]]
        raise UsageError(f"{registered['model']} is a family: name one of its variants, {' or '.join(variants)}")
    raw = api.download(f"/v1/models/{segment(registered['model'])}/file")
    return LocalModel(registered["model"], load_model(raw, registered["input"] or "", registered["bindings"]))


def warn_of_range(spec: InputSpec | None) -> None:
    """Print a warning where the spec gives the model unusual values."""
    if spec is not None and (warning := range_warning(spec)):
        click.echo(f"warning: {warning}", err=True)


def read_samples(
    location: Path | None, spec: InputSpec | None, limit: int = MAX_SAMPLES, *, inputs: Sequence[str] = ()
) -> list[Sample]:
    """At most `limit` samples from a file or a folder: pictures, sound (.wav, or raw .pcm), tensors (.npz, or .npy
    where the model has one of `inputs`)."""
    files = sample_files(location, spec)
    if spec is not None and spec.is_sound:
        samples: list[Sample] = [frame for file in files for frame in sound_frames(file, spec)]
    else:
        samples = [read_sample(file, spec, inputs) for file in _spread(files, limit)]
    return list(_spread(samples, limit))


def read_sample(file: Path, spec: InputSpec | None, inputs: Sequence[str] = ()) -> Sample:
    """A picture, or tensors where the model has no input spec; UsageError names a file that is neither."""
    if spec is None:
        return read_tensors(file, inputs)
    try:
        frame = file.read_bytes()
        prepare(spec, frame)
    except (OSError, UsageError) as error:
        raise UsageError(f"{file}: {error}") from error
    return frame


def sample_labels(location: Path | None, spec: InputSpec | None, limit: int = MAX_SAMPLES) -> list[int | None]:
    """The class of each sample (`file_labels`); None where it is not known. Empty for sound, which is cut into
    frames."""
    files = [] if spec is not None and spec.is_sound else _spread(sample_files(location, spec), limit)
    return [] if location is None else file_labels(location, files)


def sample_files(location: Path | None, spec: InputSpec | None) -> list[Path]:
    """The files that can be samples, sorted, those in sub-folders named by a class last; UsageError where a folder has
    none."""
    if location is None:
        return []
    endings = TENSORS if spec is None else SOUNDS if spec.is_sound else PICTURES[spec.media]
    files = [location]
    if location.is_dir():
        folders = [location, *sorted(path for path in location.iterdir() if path.is_dir() and _is_class(path.name))]
        files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix.lower() in endings]
    if not files:
        input_kind = "tensors" if spec is None else spec.media
        raise UsageError(f"no {' or '.join(sorted(endings))} in {location}, and the model takes {input_kind}")
    return files


def sound_frames(file: Path, spec: InputSpec) -> Iterator[bytes]:
    """A recording in frames of the spec's length; an incomplete last frame is dropped."""
    data = file.read_bytes()
    if file.suffix.lower() == ".wav":
        try:
            with wave.open(io.BytesIO(data)) as opened:
                parameters = (opened.getnchannels(), opened.getsampwidth(), opened.getframerate())
                data = opened.readframes(opened.getnframes())
        except (wave.Error, EOFError) as error:
            raise UsageError(f"{file} is not a valid WAV file: {error}") from error
        if parameters != (1, PCM16_BYTES, spec.rate_hz):
            raise UsageError(
                f"{file} has {parameters[0]} channel(s) of {8 * parameters[1]} bits at {parameters[2]} Hz;"
                f" the input spec requires 1 of 16 bits at {spec.rate_hz} Hz"
            )
    step = PCM16_BYTES * spec.samples
    if len(data) < step:
        raise UsageError(f"{file} is shorter than one frame of {spec.samples} samples")
    for start in range(0, len(data) - step + 1, step):
        yield data[start : start + step]


def read_tensors(file: Path, inputs: Sequence[str] = ()) -> dict[str, Any]:
    """The arrays of an .npz by name, or the one of an .npy under the only name in `inputs`; UsageError for anything
    else, such as a picture for a model that was pushed without an input spec."""
    if file.suffix.lower() in ALL_PICTURES | SOUNDS:
        raise UsageError(
            f"{file}: the model takes tensors (.npz, .npy), because it was pushed without --input; push it again with"
            " it to give it pictures or sound (`edgectl model push --help`)"
        )
    if file.suffix.lower() != ".npy":
        return dict(read_npz(file))
    if len(inputs) != 1:
        raise UsageError(f"{file} is one array, and the model has the inputs {list(inputs)}: give an .npz with each")
    return {inputs[0]: read_npy(file)}


def read_npz(file: Path) -> Mapping[str, Any]:
    """One array per input of an .npz; a prefix `in:` is removed, and names with the prefix `out:` are skipped."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name.removeprefix("in:"): opened[name] for name in opened.files if not name.startswith("out:")}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file} is not a valid .npz file of arrays: {_why_not_arrays(error)}") from error


def _why_not_arrays(error: Exception) -> str:
    """numpy takes every file without its own first bytes for a pickle, whatever it is."""
    reason = str(error).partition(". ")[0]
    return "its content is of another kind" if "pickled" in reason and "Object arrays" not in reason else reason


def read_npy(file: Path) -> npt.NDArray[Any]:
    """The array of an .npy; UsageError where it does not hold one array of plain numbers."""
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{file} is not a valid .npy file of numbers: {_why_not_arrays(error)}") from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{file} holds several arrays: name it .npz")
    return array


def write_npz(file: Path | IO[bytes], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one array per tensor, under its name whatever it is, as `read_npz` reads them; UsageError for text.

    Not `np.savez`: a tensor may be called `file`, which is its first parameter, and numpy 1 writes `allow_pickle` as an
    array.
    """
    text = [name for name, value in tensors.items() if value.dtype.hasobject]
    if text:
        raise UsageError(f"an .npz has tensors of numbers, and {text[0]!r} is text: use --json")
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(value), allow_pickle=False)


def _spread(items: Sequence[Any], limit: int) -> Sequence[Any]:
    """At most `limit` items, evenly spread."""
    return items[:: max(1, -(-len(items) // limit))]


def file_labels(location: Path, files: Sequence[Path]) -> list[int | None]:
    """The class of each of these `sample_files`: the sub-folder's name, or what labels.json says of the file; None
    where neither does."""
    folder = location if location.is_dir() else location.parent
    known = read_labels(folder)
    return [known.get(file.name) if file.parent == folder else int(file.parent.name) for file in files]


def _is_class(name: str) -> bool:
    return name.isascii() and name.isdigit()


def read_labels(folder: Path) -> dict[str, int]:
    """Class by file name, from the folder's labels.json; empty where there is no such file."""
    try:
        return msgspec.json.decode((folder / LABELS).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f'{folder / LABELS}: {error}; it should be classes by file name, {{"a.jpg": 3}}') from error
