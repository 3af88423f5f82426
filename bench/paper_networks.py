"""The eight networks of the Neurosurgeon paper (Kang et al., ASPLOS 2017) as layer tables, from their own papers.

Operations, weights and sizes are computed here from the shapes that the sources give: 2 per multiply-add, 4 bytes per
float between layers, one byte per pixel of an image that is sent. Nothing was taken from the paper's own tables.

  IMC  AlexNet     Krizhevsky et al., NIPS 2012, two towers as groups; 227x227 as in Caffe's bvlc_alexnet
  VGG  VGG-19      Simonyan and Zisserman, ICLR 2015, configuration E
  FACE DeepFace    Taigman et al., CVPR 2014, section 3.2; L4 to L6 are locally connected; 4,030 identities
  DIG  LeNet       Caffe's examples/mnist/lenet; 100 digits in one request
  ASR  Kaldi DNN   Karel's nnet1 recipe: 440 inputs, 6 hidden layers of 2,048, 3,482 states; 548 frames in one request,
                   of which the best state travels back and not 7.6 MB of probabilities
  POS, NER, CHK    SENNA: Collobert et al., JMLR 12 (2011), window network: 5 words, 50 features and 5 per further
                   feature, 300 hidden units; 45, 17 and 42 tags; a sentence of 28 words
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

FLOAT_BYTES = 4
"""Bytes of a float."""


@dataclass(frozen=True, slots=True)
class PaperLayer:
    """One layer: `bytes` is the size of its output, `moved` the bytes that it reads and writes, weights included."""

    name: str
    kind: str
    """`conv`, `gemm` or `memory`: what bounds it."""
    flops: float
    weight_bytes: int
    bytes: int
    moved: float


@dataclass
class Network:
    """A chain of layers under construction: `shape` is channels, height and width of the last layer's output."""

    name: str
    title: str
    shape: tuple[int, int, int]
    batch: int = 1
    pixel_bytes: int = FLOAT_BYTES
    layers: list[PaperLayer] = field(default_factory=list)

    def __post_init__(self) -> None:
        channels, height, width = self.shape
        self.input_bytes = self.batch * channels * height * width * self.pixel_bytes

    def conv(self, name: str, filters: int, size: int, stride: int = 1, pad: int = 0, groups: int = 1) -> None:
        """Append a convolution."""
        channels, height, width = self.shape
        out = filters, (height + 2 * pad - size) // stride + 1, (width + 2 * pad - size) // stride + 1
        weights = filters * (channels // groups) * size * size
        self._add(name, "conv", 2.0 * weights * out[1] * out[2], weights + filters, out)

    def local(self, name: str, filters: int, size: int, stride: int = 1) -> None:
        """Append a convolution with separate weights at every position, which are as much to read as to compute."""
        channels, height, width = self.shape
        out = filters, (height - size) // stride + 1, (width - size) // stride + 1
        weights = filters * channels * size * size * out[1] * out[2]
        self._add(name, "gemm", 2.0 * weights, weights, out)

    def fc(self, name: str, outputs: int) -> None:
        """Append a fully connected layer."""
        inputs = self._elements(self.shape)
        self._add(name, "gemm", 2.0 * inputs * outputs, inputs * outputs + outputs, (outputs, 1, 1))

    def pool(self, name: str, size: int = 2, stride: int = 2) -> None:
        """Append maximum pooling; the last window is cut off where Caffe lets it hang over the edge."""
        channels, height, width = self.shape
        out = channels, -(-(height - size) // stride) + 1, -(-(width - size) // stride) + 1
        self._add(name, "memory", float(size * size * self._elements(out)), 0, out)

    def elementwise(self, name: str, operations: float = 1.0) -> None:
        """Append an activation, normalisation or softmax with so many operations per element."""
        self._add(name, "memory", operations * self._elements(self.shape), 0, self.shape)

    def argmax(self) -> None:
        """Append an argmax, which writes one number per item."""
        self._add("argmax", "memory", float(self._elements(self.shape)), 0, (1, 1, 1))

    def _add(self, name: str, kind: str, flops: float, weights: int, out: tuple[int, int, int]) -> None:
        moved = FLOAT_BYTES * (weights + self.batch * (self._elements(self.shape) + self._elements(out)))
        written = FLOAT_BYTES * self.batch * self._elements(out)
        self.layers.append(PaperLayer(name, kind, flops * self.batch, FLOAT_BYTES * weights, written, moved))
        self.shape = out

    @staticmethod
    def _elements(shape: tuple[int, int, int]) -> int:
        return shape[0] * shape[1] * shape[2]


def alexnet() -> Network:
    """AlexNet (IMC)."""
    net = Network("IMC", "AlexNet", (3, 227, 227), pixel_bytes=1)
    for number, (filters, size, stride, pad, groups) in enumerate(
        [(96, 11, 4, 0, 1), (256, 5, 1, 2, 2), (384, 3, 1, 1, 1), (384, 3, 1, 1, 2), (256, 3, 1, 1, 2)], start=1
    ):
        net.conv(f"conv{number}", filters, size, stride, pad, groups)
        net.elementwise(f"relu{number}")
        if number <= 2:
            net.elementwise(f"norm{number}", 15)
        if number in (1, 2, 5):
            net.pool(f"pool{number}", 3, 2)
    _classifier(net, (4096, 4096), 1000)
    return net


def vgg() -> Network:
    """VGG-19 (VGG)."""
    net = Network("VGG", "VGG-19", (3, 224, 224), pixel_bytes=1)
    for block, (count, filters) in enumerate([(2, 64), (2, 128), (4, 256), (4, 512), (4, 512)], start=1):
        for number in range(1, count + 1):
            net.conv(f"conv{block}_{number}", filters, 3, pad=1)
            net.elementwise(f"relu{block}_{number}")
        net.pool(f"pool{block}")
    _classifier(net, (4096, 4096), 1000)
    return net


def _classifier(net: Network, hidden: tuple[int, ...], classes: int) -> None:
    for number, outputs in enumerate(hidden, start=6):
        net.fc(f"fc{number}", outputs)
        net.elementwise(f"relu{number}")
        net.elementwise(f"drop{number}", 0)
    net.fc(f"fc{6 + len(hidden)}", classes)
    net.elementwise("softmax", 5)
    net.argmax()


def deepface() -> Network:
    """DeepFace (FACE)."""
    net = Network("FACE", "DeepFace", (3, 152, 152), pixel_bytes=1)
    net.conv("c1", 32, 11)
    net.pool("m2", 3, 2)
    net.conv("c3", 16, 9)
    net.local("l4", 16, 9)
    net.local("l5", 16, 7, 2)
    net.local("l6", 16, 5)
    net.fc("f7", 4096)
    net.fc("f8", 4030)
    net.elementwise("softmax", 5)
    net.argmax()
    return net


def lenet() -> Network:
    """LeNet (DIG)."""
    net = Network("DIG", "LeNet", (1, 28, 28), batch=100)
    net.conv("conv1", 20, 5)
    net.pool("pool1")
    net.conv("conv2", 50, 5)
    net.pool("pool2")
    net.fc("ip1", 500)
    net.elementwise("relu1")
    net.fc("ip2", 10)
    net.elementwise("softmax", 5)
    net.argmax()
    return net


def kaldi() -> Network:
    """Kaldi's DNN (ASR)."""
    net = Network("ASR", "Kaldi DNN", (440, 1, 1), batch=548)
    for number in range(1, 7):
        net.fc(f"fc{number}", 2048)
        net.elementwise(f"sigmoid{number}", 4)
    net.fc("fc7", 3482)
    net.argmax()
    return net


def senna(name: str, extra_features: int, tags: int) -> Network:
    """SENNA (POS, NER and CHK): word and capital letters, and `extra_features` features of 5 for each of 5 words."""
    net = Network(name, "SENNA", (5 * (50 + 5 + 5 * extra_features), 1, 1), batch=28)
    net.fc("fc1", 300)
    net.elementwise("hardtanh")
    net.fc("fc3", tags)
    return net


NETWORKS: tuple[Callable[[], Network], ...] = (
    alexnet,
    vgg,
    deepface,
    lenet,
    kaldi,
    lambda: senna("POS", 1, 45),
    lambda: senna("NER", 4, 17),
    lambda: senna("CHK", 1, 42),
)
