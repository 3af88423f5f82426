"""A model in several files as one: an .onnx with its weights beside it, in a tar, the same for the same files.

Above 2 GB an ONNX model cannot be one file, because no protobuf message can be larger. `write` makes the bundle that is
pushed and kept; `unpack` gives its parts as views of its bytes, nothing copied. Names inside are what the model calls
its data files; nothing is ever written to disk under them.
"""

from __future__ import annotations

import io
import mmap
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import onnx

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.onnx_format import nodes

MODEL = "model.onnx"
"""The first member; the others are data files."""
MOST_FILES = 10_000
_MAGIC = slice(257, 262)

Data = bytes | mmap.mmap
"""A data file's bytes, in memory or mapped."""


def is_bundle(raw: Data) -> bool:
    """Whether these bytes are a tar, the only kind of archive that a model may come in."""
    return raw[_MAGIC] == b"ustar"


def unpack(raw: Data) -> tuple[bytes, dict[str, memoryview]]:
    """The model's own file, and its data files by the name that it calls them; ModelRefused where it is no bundle."""
    view = memoryview(raw)
    parts: dict[str, memoryview] = {}
    try:
        with tarfile.open(fileobj=_reader(raw), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= MOST_FILES or not member.isreg() or member.sparse is not None:
                    raise ModelRefused("the archive holds other things than one model and its data files")
                if member.offset_data + member.size > len(raw):
                    raise ModelRefused("the archive of model and data files was cut off")
                parts[member.name] = view[member.offset_data : member.offset_data + member.size]
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise ModelRefused(f"the archive of model and data files is damaged: {error}") from error
    if MODEL not in parts:
        raise ModelRefused(f"the archive holds no {MODEL}; push the .onnx file, or its folder, with edgectl")
    return bytes(parts.pop(MODEL)), parts


def joined(model: bytes, data: Mapping[str, Data]) -> bytes:
    """The bundle of a model and its data files."""
    target = io.BytesIO()
    write_parts(model, data, target)
    return target.getvalue()


def write_parts(model: bytes, data: Mapping[str, Data], target: BinaryIO) -> None:
    """A model as it is kept, written to `target` piece by piece: its message, or the bundle of that and its data."""
    if not data:
        target.write(model)
        return
    with tarfile.open(fileobj=target, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, content in ((MODEL, model), *sorted(data.items())):
            archive.addfile(_member(name, len(content)), _reader(content))


def _reader(content: Data) -> IO[bytes]:
    """The bytes from their beginning; mapped ones are not copied."""
    if isinstance(content, bytes):
        return io.BytesIO(content)
    content.seek(0)
    return cast("IO[bytes]", content)


def model_in(place: Path) -> Path:
    """`place`, or the one model file in the folder `place`; UsageError where there is none, or more than one."""
    if not place.is_dir():
        return place
    models = sorted(path for path in place.iterdir() if path.suffix.lower() in (".onnx", ".tflite"))
    if len(models) != 1:
        raise UsageError(f"{place} holds {len(models)} model files (.onnx, .tflite); name the one that is meant")
    return models[0]


def data_files(file: Path) -> dict[str, Path]:
    """The files beside an ONNX file that hold weights of it, by the name that it calls them; none for any other file.

    UsageError where one is missing, or lies outside of the model's folder.
    """
    names = _locations(file)
    found: dict[str, Path] = {}
    for name in sorted(names):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not name:
            raise UsageError(f"{file.name} has weights in {name[:80]!r}, which is outside of its folder")
        found[name] = file.parent / pure
        if not found[name].is_file():
            raise UsageError(f"{file.name} has weights in {name[:80]!r}, which is not beside it")
        if not found[name].resolve().is_relative_to(file.parent.resolve()):
            raise UsageError(
                f"{file.name} has weights in {name[:80]!r}, a link to outside of its folder; put the file itself there"
                " (cp -L copies what links lead to)"
            )
    return found


def write(file: Path, data: Mapping[str, Path], target: BinaryIO) -> None:
    """The bundle of these files, written to `target` piece by piece."""
    with tarfile.open(fileobj=target, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, path in ((MODEL, file), *sorted(data.items())):
            with path.open("rb") as content:
                archive.addfile(_member(name, path.stat().st_size), content)


def read(place: Path) -> bytes:
    """A model for `prepare_model`: a file's bytes, or its bundle where its weights lie beside it."""
    file = model_in(place)
    data = data_files(file)
    if not data:
        return file.read_bytes()
    target = io.BytesIO()
    write(file, data, target)
    return target.getvalue()


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Who made it, and when, is left out."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _locations(file: Path) -> set[str]:
    """What an ONNX file calls its data files; nothing for a file that is no ONNX."""
    if file.suffix.lower() != ".onnx" or file.stat().st_size >= 2**31:
        return set()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except Exception:  # protobuf's decoder raises several unrelated types; what is wrong is the push's to say
        return set()
    stored = (*nodes.stored_tensors(model.graph), *nodes.function_tensors(model))
    return {external(tensor)[0] for tensor in stored if is_external(tensor)}


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the tensor's bytes are in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data)


def external(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File, offset and length (-1: to its end) of such a tensor; ModelRefused where they make no sense."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or -1)
    except ValueError:
        offset, length = -1, -1
    if offset < 0:
        raise ModelRefused(f"the weights of {tensor.name[:80]!r} are at no place in their file")
    return entries.get("location", ""), offset, length


def point_to(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Say that the tensor's bytes are there, in place."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
