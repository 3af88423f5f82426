"""Turns what applications have into inputs by name: an array, a Pillow picture, an open file or a path.

Bytes, files and pictures are the frame of a model that was pushed with an input spec. An array of such a model is a
picture's pixels, or samples of sound; of any other model it is its only input. An encoded frame is made of pictures and
pixels in the format that the model was pushed for, so a model that takes JPEGs gets what a JPEG keeps of them.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from edgesplit.client.model_interface import ModelInterface
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, InputSpec
from edgesplit.lazy_import import lazy_import, np
from edgesplit.oip import protocol as oip
from edgesplit.picture_formats import RAW, encode_picture, encode_raw

if TYPE_CHECKING:
    from typing import BinaryIO

    from PIL import Image

    Frame: TypeAlias = bytes | str | os.PathLike[str] | BinaryIO | oip.Tensor | Image.Image
    Inputs: TypeAlias = Mapping[str, oip.Tensor | bytes] | Frame
else:
    Image = lazy_import("PIL.Image")
    Frame = Inputs = Any
ByName: TypeAlias = "Mapping[str, oip.Tensor | bytes]"


def is_by_name(inputs: object) -> TypeGuard[ByName]:
    """Whether inputs can be sent as they are: by name, and with a frame that is bytes or an array."""
    return isinstance(inputs, Mapping) and isinstance(
        inputs.get(FRAME, b""), bytes | bytearray | memoryview | np.ndarray
    )


def to_inputs(inputs: Inputs, interface: Callable[[], ModelInterface]) -> ByName:
    """Inputs by name, of what an application gave; `interface` is asked where the model decides what it is. UsageError
    where it cannot be an input of the model, with what can."""
    if isinstance(inputs, Mapping):
        if FRAME not in inputs or is_by_name(inputs):
            return inputs
        return {**inputs, **_named(inputs[FRAME], interface)}
    return _named(inputs, interface)


def _named(given: Any, interface: Callable[[], ModelInterface]) -> ByName:
    if isinstance(given, bytes | bytearray | memoryview):
        return {FRAME: bytes(given)}
    if isinstance(given, str | os.PathLike):
        return _of_file(Path(given), interface)
    if callable(getattr(given, "read", None)):
        content = given.read()
        if not isinstance(content, bytes):
            raise UsageError("the file was opened as text: open it with mode 'rb'")
        return {FRAME: content}
    if _is_picture(given):
        return {FRAME: _frame_of(given, interface())}
    if isinstance(given, np.ndarray | np.generic):
        return _of_array(np.asarray(given), interface())
    raise UsageError(
        f"inputs are given by name, not as one {type(given).__name__}: {{'frame': jpeg}} for a model that was pushed"
        " with --input, {NAME: array} for others; `metadata(model)['inputs']` lists the names"
    )


def _of_file(path: Path, interface: Callable[[], ModelInterface]) -> ByName:
    """The arrays of an .npz, the array of an .npy, and else the file's bytes as the frame."""
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".npz":
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        if path.suffix.lower() == ".npy":
            return _of_array(np.load(io.BytesIO(content), allow_pickle=False), interface())
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"{path}: {error}") from error
    return {FRAME: content}


def _of_array(array: oip.Tensor, interface: ModelInterface) -> ByName:
    """An array as the frame of a model with an input spec, or as the only input."""
    spec, names = interface.input_spec, interface.inputs
    if spec is None or names != (FRAME,):
        if len(names) == 1:
            return {names[0]: array}
        raise UsageError(
            f"one array was given, and the model has the inputs {', '.join(names)}: give them by name, as in"
            f" {{{', '.join(f'{name!r}: …' for name in names[:2])}}}"
        )
    if spec.is_sound and array.dtype == np.int16 and array.ndim == 1:
        return {FRAME: array.astype("<i2").tobytes()}
    if spec.is_sound:
        raise UsageError(
            f"the model takes {spec.media}: give samples as int16 [{spec.samples}], not {_described(array)}"
        )
    if array.dtype == np.uint8 and array.ndim == 1:
        return {FRAME: array}
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        raise UsageError(
            f"the model takes {spec.media}: give a picture as uint8 [height, width, 3] in RGB, as bytes of a file, or"
            f" as a path, not {_described(array)}"
        )
    from PIL import Image

    return {FRAME: _frame_of(Image.fromarray(array), interface)}


def _described(array: oip.Tensor) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _frame_of(picture: Image.Image, interface: ModelInterface) -> bytes:
    """The picture as a frame of the model."""
    spec: InputSpec | None = interface.input_spec
    if spec is None or spec.is_sound:
        takes = "tensors" if spec is None else spec.media
        raise UsageError(
            f"a picture was given, and the model takes {takes}; its inputs are {', '.join(interface.inputs)}"
        )
    if spec.media != RAW:
        return encode_picture(spec.media, picture, spec.quality)
    if picture.size != (spec.width, spec.height):
        raise UsageError(
            f"the model takes raw frames of {spec.width}x{spec.height} pixels, and the picture has"
            f" {picture.width}x{picture.height}: resize it"
        )
    return encode_raw(spec.pixels, np.asarray(picture.convert("RGB")))


def _is_picture(given: object) -> bool:
    """Whether it is a picture of Pillow, which is imported then."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(given, module.Image)
