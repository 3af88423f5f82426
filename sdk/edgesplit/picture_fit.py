"""How a picture is brought to a tensor's size, and where a place in the tensor lies in the picture.

    stretch             to the tensor's size; the aspect ratio is not kept
    letterbox           as large as it fits with its aspect ratio, in the middle (as Ultralytics trains)
    letterbox-topleft   the same at the top left (as YOLOX trains)
    crop                resized so that its part `crop` covers the tensor, and the middle cut out (as ImageNet
                        classifiers are tested, usually with 0.875)

All resizing is bilinear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgesplit.lazy_import import Tensor, lazy_import, np

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = lazy_import("PIL.Image")

Fit = Literal["stretch", "letterbox", "letterbox-topleft", "crop"]
Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a picture lies in a tensor: x_tensor = x_picture * x_scale + left, in pixels, and so for y."""

    resized: Size
    """Size of the resized picture, of which a crop shows a part."""
    x_scale: float
    y_scale: float
    left: int
    """Negative where columns were cut off."""
    top: int

    def to_picture(self, corners: Tensor, tensor: Size) -> Tensor:
        """Corners [n, 4] (left, top, right, bottom) as parts of the tensor's size, in pixels of the picture."""
        width, height = tensor
        offset = np.array([self.left, self.top, self.left, self.top], np.float64)
        scale = np.array([self.x_scale, self.y_scale, self.x_scale, self.y_scale], np.float64)
        return (corners * [width, height, width, height] - offset) / scale


def place(fit: Fit, picture: Size, tensor: Size, crop: float = 1.0) -> Placement:
    """Where a picture of this size lies in a tensor of that size."""
    (width, height), (tensor_width, tensor_height) = picture, tensor
    if fit == "stretch":
        return Placement(tensor, tensor_width / width, tensor_height / height, 0, 0)
    if fit == "crop":
        scale = max(tensor_width / crop / width, tensor_height / crop / height)
        resized = max(tensor_width, round(width * scale)), max(tensor_height, round(height * scale))
        left, top = -((resized[0] - tensor_width) // 2), -((resized[1] - tensor_height) // 2)
        return Placement(resized, resized[0] / width, resized[1] / height, left, top)
    scale = min(tensor_width / width, tensor_height / height)
    if fit == "letterbox-topleft":
        return Placement((max(1, int(width * scale)), max(1, int(height * scale))), scale, scale, 0, 0)
    resized = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (tensor_width - resized[0]) // 2, (tensor_height - resized[1]) // 2
    return Placement(resized, scale, scale, left, top)


def fit_picture(picture: Image.Image, fit: Fit, tensor: Size, crop: float, pad: int) -> Image.Image:
    """The picture at the tensor's size; `pad` is the value of all colours outside it, 0 to 255."""
    if picture.size == tensor and (fit != "crop" or crop == 1.0):
        return picture
    placement = place(fit, picture.size, tensor, crop)
    if picture.size != placement.resized:
        picture = picture.resize(placement.resized, Image.Resampling.BILINEAR)
    if fit == "stretch":
        return picture
    if fit == "crop":
        left, top = -placement.left, -placement.top
        return picture.crop((left, top, left + tensor[0], top + tensor[1]))
    padded = Image.new(picture.mode, tensor, pad if picture.mode == "L" else (pad, pad, pad))
    padded.paste(picture, (placement.left, placement.top))
    return padded
