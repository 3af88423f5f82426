"""`Answer`: the result of one inference request, and what its outputs mean by the model's output kind."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgesplit.answers.reading import Box, Label, mask_on_picture, read_boxes, read_embedding, read_labels, read_mask
from edgesplit.client.model_interface import ModelInterface
from edgesplit.errors import UsageError
from edgesplit.input_spec import FRAME, InputSpec
from edgesplit.lazy_import import Tensor, lazy_import
from edgesplit.oip import protocol as oip
from edgesplit.oip import report
from edgesplit.output_kind import OutputKind
from edgesplit.picture_fit import Size
from edgesplit.picture_formats import RAW

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = lazy_import("PIL.Image")


@dataclass(frozen=True, slots=True)
class Source:
    """Where an answer came from: the model, and the frame that it is about."""

    interface: Callable[[], ModelInterface]
    """Asks for the model's interface, where it is not known yet."""
    frame: oip.Tensor | bytes | None = None
    """The encoded picture that was sent; None where tensors were."""

    def picture_size(self, spec: InputSpec | None) -> Size | None:
        """Width and height of the picture that was sent, from its header; None where there is none."""
        if self.frame is None or spec is None or spec.is_sound:
            return None
        if spec.media == RAW:
            return spec.width, spec.height
        with Image.open(io.BytesIO(bytes(self.frame))) as picture:
            return picture.size


@dataclass(frozen=True)
class Answer:
    """The result of one inference request. It keeps the frame that it is about."""

    outputs: Mapping[str, oip.Tensor]
    report: report.Report | None
    """How the agent produced it; None if another server answered."""
    id: str
    frame: int | None = None
    """The frame's number in a stream, from 0; None outside a stream."""
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def kind(self) -> OutputKind | None:
        """What the outputs are, as the model was pushed; None where that was not said."""
        return self.source.interface().output_kind if self.source is not None else None

    @property
    def labels(self) -> tuple[Label, ...]:
        """The five most likely classes, the likeliest first, of a model that was pushed with `--output labels` or
        `--preset imagenet`; UsageError for others."""
        return read_labels(self._interface()[0], self.outputs)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The things found, the surest first, in pixels of the picture that was sent (of a model that takes tensors: as
        parts of their width and height); UsageError unless it was pushed with `--output boxes:…` or a detector's
        preset."""
        kind, spec, size = self._interface()
        return read_boxes(kind, self.outputs, size, spec)

    @property
    def mask(self) -> Tensor:
        """The class of each pixel, int32 [height, width] of the picture that was sent, -1 where a crop did not show it
        (of a model that takes tensors: of the output). UsageError for models that give none."""
        kind, spec, size = self._interface()
        mask = read_mask(kind, self.outputs)
        return mask if size is None or spec is None else mask_on_picture(mask, size, spec)

    @property
    def embedding(self) -> Tensor:
        """The vector, float32 [n] of length 1: the product of two is their cosine. UsageError for models that give
        none."""
        return read_embedding(self._interface()[0], self.outputs)

    def _interface(self) -> tuple[OutputKind, InputSpec | None, Size | None]:
        """The model's output kind, its input spec, and the size of the picture."""
        interface = self.source.interface() if self.source is not None else ModelInterface()
        if self.source is None or interface.output_kind is None:
            raise UsageError(
                "what the model's outputs mean is not declared: read `outputs`, or push it with --output labels,"
                " boxes:LAYOUT, mask or embedding (`edgectl model push --help`)"
            )
        return interface.output_kind, interface.input_spec, self.source.picture_size(interface.input_spec)


def answer_from(
    answer: Answer, inputs: Mapping[str, oip.Tensor | bytes], interface: Callable[[], ModelInterface]
) -> Answer:
    """The answer with its source: these inputs, of the model with that interface."""
    return replace(answer, source=Source(interface, inputs.get(FRAME)))
