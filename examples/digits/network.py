"""The network: a narrow, sparse point early, then the bulk of the compute with another one halfway.

Built to be worth splitting. Everything up to `narrow1` is cheap; the trunks run at 32x32, where a weight is
used 1,024 times, so that much compute fits in less than 1 MB of weights. No skip connection crosses a narrow
point.
How it is trained is train.py's business.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor, nn

FRAME_PX = 128
"""Width and height of the frames that the exported model reads."""
CLASSES = 10
EARLY_CHANNELS = (16, 32)
NARROW_CHANNELS = (8, 4, 16)
"""At 32x32, 32x32 and 16x16: 32, 16 and 16 KiB of float32, mostly zeros."""
TRUNK_CHANNELS = 48
TRUNK_BLOCKS = (6, 7)
STUDENT_CHANNELS = (8, 24, 32, 64, 64, 80, 80)
"""After the stem and after each pointwise convolution of the student."""
STUDENT_STRIDES = (2, 1, 2, 1, 2, 1)


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels inside the blocks, which no other block reads: those that pruning may take away."""

    early: int = 96
    trunk: int = 144
    head: int = 96


WHOLE = Widths()


def conv(read: int, write: int, *, size: int = 1, stride: int = 1, groups: int = 1) -> OrderedDict[str, nn.Module]:
    """A convolution and its batch normalisation, which the export folds into one."""
    convolution = nn.Conv2d(read, write, size, stride, padding=size // 2, groups=groups, bias=False)
    return OrderedDict(conv=convolution, norm=nn.BatchNorm2d(write))


def linear(read: int, write: int) -> nn.Sequential:
    """A pointwise convolution without activation: the end of a residual branch."""
    return nn.Sequential(conv(read, write))


def dense(read: int, write: int, *, size: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution over all channels (pointwise unless `size` says otherwise), then ReLU."""
    return nn.Sequential(OrderedDict(**conv(read, write, size=size, stride=stride), relu=nn.ReLU()))


def depthwise(channels: int, *, stride: int = 1) -> nn.Sequential:
    """A 3x3 convolution of each channel alone, then ReLU."""
    return nn.Sequential(
        OrderedDict(**conv(channels, channels, size=3, stride=stride, groups=channels), relu=nn.ReLU())
    )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project, add (MobileNetV2, section 3.3). Starts as the identity."""

    def __init__(self, channels: int, expanded: int) -> None:
        super().__init__()
        self.expand = dense(channels, expanded)
        self.filter = depthwise(expanded)
        self.project = linear(expanded, channels)
        nn.init.zeros_(self.project.get_submodule("norm").get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.project(self.filter(self.expand(x)))
        return out


def trunk(blocks: int, expanded: int) -> nn.Sequential:
    """Blocks of equal shape, one after the other."""
    return nn.Sequential(*(InvertedResidual(TRUNK_CHANNELS, expanded) for _ in range(blocks)))


class DigitFinder(nn.Module):
    """One handwritten digit, somewhere in an RGB frame scaled to 0..1: which one is it?"""

    def __init__(self, widths: Widths = WHOLE) -> None:
        super().__init__()
        first, second = EARLY_CHANNELS
        self.early = nn.Sequential(
            OrderedDict(
                stem=dense(3, first, size=3, stride=2),
                filter1=depthwise(first),
                mix1=dense(first, second),
                filter2=depthwise(second, stride=2),
                block=InvertedResidual(second, widths.early),
            )
        )
        self.narrow1 = dense(second, NARROW_CHANNELS[0])
        self.widen1 = dense(NARROW_CHANNELS[0], TRUNK_CHANNELS)
        self.trunk1 = trunk(TRUNK_BLOCKS[0], widths.trunk)
        self.narrow2 = dense(TRUNK_CHANNELS, NARROW_CHANNELS[1])
        self.widen2 = dense(NARROW_CHANNELS[1], TRUNK_CHANNELS)
        self.trunk2 = trunk(TRUNK_BLOCKS[1], widths.trunk)
        self.shrink = depthwise(TRUNK_CHANNELS, stride=2)
        self.narrow3 = dense(TRUNK_CHANNELS, NARROW_CHANNELS[2])
        self.head = nn.Sequential(
            OrderedDict(
                widen=dense(NARROW_CHANNELS[2], widths.head),
                filter=depthwise(widths.head, stride=2),
                mix=dense(widths.head, widths.head),
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classify = nn.Linear(widths.head, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Logits; the export puts a softmax behind them."""
        return self.watch(image)[0]

    def watch(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and what went through each narrow point."""
        first = self.narrow1(self.early(image))
        second = self.narrow2(self.trunk1(self.widen1(first)))
        third = self.narrow3(self.shrink(self.trunk2(self.widen2(second))))
        logits = self.classify(self.flatten(self.pool(self.head(third))))
        return logits, [first, second, third]


class Student(nn.Module):
    """The same task for a fortieth of the work: separable convolutions that shrink the frame at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = dense(3, STUDENT_CHANNELS[0], size=3, stride=2)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(OrderedDict(filter=depthwise(read, stride=stride), mix=dense(read, write)))
                for read, write, stride in zip(
                    STUDENT_CHANNELS[:-1], STUDENT_CHANNELS[1:], STUDENT_STRIDES, strict=True
                )
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classify = nn.Linear(STUDENT_CHANNELS[-1], CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Logits; the export puts a softmax behind them."""
        logits: Tensor = self.classify(self.flatten(self.pool(self.blocks(self.stem(image)))))
        return logits
