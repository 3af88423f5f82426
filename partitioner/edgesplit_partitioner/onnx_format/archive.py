"""The model archive: an .onnx file and its external data files in one uncompressed tar, reproducible byte for byte.

A protobuf message holds at most 2 GB, so a larger ONNX model needs external data files. `write` makes the archive that
is pushed and stored; `unpack` returns its members as views of its bytes, without a copy. Member names are the names by
which the model refers to its data files; no file is ever created on disk under these names.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

import onnx

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.ir.chunking import Data
from edgesplit_partitioner.onnx_format import nodes

MODEL_MEMBER = "model.onnx"
"""Name of the archive's first member, the .onnx file; the other members are data files."""
MAX_MEMBERS = 10_000
"""Maximum number of members of a model archive."""
_TAR_MAGIC = slice(257, 262)


def is_archive(raw: Data) -> bool:
    """Whether these bytes are a tar file, the only archive format accepted for a model."""
    return raw[_TAR_MAGIC] == b"ustar"


def unpack(raw: Data) -> tuple[bytes, dict[str, memoryview]]:
    """The bytes of the .onnx file, and views of its data files by the name that the model uses for each. ModelRefused
    where `raw` is not a model archive, is cut off or holds anything else."""
    view = memoryview(raw)
    members: dict[str, memoryview] = {}
    try:
        with tarfile.open(fileobj=_reader(raw), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number >= MAX_MEMBERS or not member.isreg() or member.sparse is not None:
                    raise ModelRefused("the archive holds other things than one model and its data files")
                if member.offset_data + member.size > len(raw):
                    raise ModelRefused("the archive of model and data files was cut off")
                members[member.name] = view[member.offset_data : member.offset_data + member.size]
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise ModelRefused(f"the archive of model and data files is damaged: {error}") from error
    if MODEL_MEMBER not in members:
        raise ModelRefused(f"the archive holds no {MODEL_MEMBER}; push the .onnx file, or its folder, with edgectl")
    return bytes(members.pop(MODEL_MEMBER)), members


def to_bytes(model: bytes, data: Mapping[str, Data]) -> bytes:
    """The archive of a model and its data files, as bytes."""
    target = io.BytesIO()
    write_stored_form(model, data, target)
    return target.getvalue()


def write_stored_form(model: bytes, data: Mapping[str, Data], target: BinaryIO) -> None:
    """Write a model in its stored form to `target`, piece by piece: the .onnx file alone, or the archive of it and its
    data files where it has any."""
    if not data:
        target.write(model)
        return
    with tarfile.open(fileobj=target, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, content in ((MODEL_MEMBER, model), *sorted(data.items())):
            archive.addfile(_member(name, len(content)), _reader(content))


def _reader(content: Data) -> IO[bytes]:
    """The bytes as a file object at offset 0; a memory map is not copied."""
    if isinstance(content, bytes):
        return io.BytesIO(content)
    content.seek(0)
    return cast("IO[bytes]", content)


def find_model(file_or_folder: Path) -> Path:
    """`place` itself, or the only model file in the folder `place`; UsageError where the folder has none or several."""
    if not file_or_folder.is_dir():
        return file_or_folder
    models = sorted(path for path in file_or_folder.iterdir() if path.suffix.lower() in (".onnx", ".tflite"))
    if len(models) != 1:
        raise UsageError(f"{file_or_folder} holds {len(models)} model files (.onnx, .tflite); name one of them")
    return models[0]


def data_files(file: Path) -> dict[str, Path]:
    """The external data files of an ONNX file, by the name that the model uses for each; empty for any other file.

    UsageError where a data file is missing, or lies outside the model's folder.
    """
    names = _data_file_names(file)
    files: dict[str, Path] = {}
    for name in sorted(names):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not name:
            raise UsageError(f"{file.name} has weights in {name[:80]!r}, which is outside of its folder")
        files[name] = file.parent / pure
        if not files[name].is_file():
            raise UsageError(f"{file.name} has weights in {name[:80]!r}, which is not beside it")
        if not files[name].resolve().is_relative_to(file.parent.resolve()):
            raise UsageError(
                f"{file.name} has weights in {name[:80]!r}, a link to outside of its folder; put the file itself there"
                " (cp -L copies what links lead to)"
            )
    return files


def write_archive(file: Path, data: Mapping[str, Path], target: BinaryIO) -> None:
    """Write the archive of these files to `target`, piece by piece."""
    with tarfile.open(fileobj=target, mode="w:", format=tarfile.GNU_FORMAT) as archive:
        for name, path in ((MODEL_MEMBER, file), *sorted(data.items())):
            with path.open("rb") as content:
                archive.addfile(_member(name, path.stat().st_size), content)


def read_model_bytes(path: Path) -> bytes:
    """The bytes that `prepare_model` takes: the model file itself, or its archive where it has external data files."""
    file = find_model(path)
    data = data_files(file)
    if not data:
        return file.read_bytes()
    target = io.BytesIO()
    write_archive(file, data, target)
    return target.getvalue()


def _member(name: str, size: int) -> tarfile.TarInfo:
    """A tar header without owner and time, so that the same files give the same archive."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _data_file_names(file: Path) -> set[str]:
    """The names by which an ONNX file refers to its data files; empty for a file that is not ONNX."""
    if file.suffix.lower() != ".onnx" or file.stat().st_size >= 2**31:
        return set()
    model = onnx.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except Exception:  # protobuf's decoder raises several unrelated types; what is wrong is the push's to say
        return set()
    stored = (*nodes.stored_tensors(model.graph), *nodes.function_tensors(model))
    return {external_location(tensor)[0] for tensor in stored if is_external(tensor)}


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the tensor's bytes lie in an external data file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data)


def external_location(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """File name, offset and length (-1: to the file's end) of an external tensor; ModelRefused where they are
    invalid."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or -1)
    except ValueError:
        offset, length = -1, -1
    if offset < 0:
        raise ModelRefused(f"the weights of {tensor.name[:80]!r} are at no place in their file")
    return entries.get("location", ""), offset, length


def set_external_location(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Make the tensor refer to its bytes in an external data file, in place."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
