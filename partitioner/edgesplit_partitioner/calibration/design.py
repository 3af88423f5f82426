"""The microbenchmarks of the calibration for each engine: models to time, and the work that their times are fitted to.

Points are single operators, several copies in a model; networks are small whole models.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Literal, Protocol

import onnx

from edgesplit.runtime.options import EngineOptions
from edgesplit_partitioner.calibration import operator_grid
from edgesplit_partitioner.calibration.networks import calibration_networks
from edgesplit_partitioner.costs.fused_operators import separate_operators
from edgesplit_partitioner.ir.graph import OperatorWork
from edgesplit_partitioner.onnx_format import nodes

Engine = Literal["onnxruntime", "litert"]

EMPTY_POINT = operator_grid.Point("Relu", ((1, 16),))
"""Built with no copies of the operator: the cost of a run that computes nothing."""


class Design(Protocol):
    """Microbenchmarks of one engine; points and networks are known by their index."""

    @property
    def point_count(self) -> int:
        """Number of points."""
        ...

    @property
    def network_count(self) -> int:
        """Number of networks."""
        ...

    def point_model(self, index: int, copies: int) -> bytes:
        """The point as a model file with so many copies of its operator."""
        ...

    def copies(self, index: int) -> int:
        """Number of copies of the point's operator to time together, at least 2."""
        ...

    def network_model(self, index: int) -> bytes:
        """The network as a model file."""
        ...

    def small_models(self) -> tuple[bytes, bytes, bytes]:
        """A model that computes nothing, and two whose times differ by the cost of inputs and outputs (many, few)."""
        ...

    def is_fusible(self, index: int) -> bool:
        """Whether an optimiser leaves the copies of the point's operator as they are."""
        ...

    def point_work(self, index: int) -> OperatorWork:
        """The work of the point's operator."""
        ...

    def network_works(self, index: int, *, fused: bool) -> list[OperatorWork]:
        """The work of the network's operators; with `fused` of those that still run by themselves."""
        ...

    def weight_bytes(self, index: int) -> float:
        """Bytes of the network's weights."""
        ...

    def datatype(self, index: int) -> str:
        """Datatype of the network's weights, as in families after the slash; empty where families have none."""
        ...


class OnnxDesign:
    """Microbenchmarks of onnxruntime."""

    def __init__(self) -> None:
        self._points = operator_grid.grid()
        self.point_count, self.network_count = len(self._points), len(calibration_networks())

    def point_model(self, index: int, copies: int) -> bytes:
        """The point as a model file."""
        return operator_grid.build(self._points[index], copies)

    def copies(self, index: int) -> int:
        """Number of copies to time together."""
        return operator_grid.copies_of(self._points[index])

    def network_model(self, index: int) -> bytes:
        """The network as a model file."""
        return calibration_networks()[index]

    def small_models(self) -> tuple[bytes, bytes, bytes]:
        """An empty model, and two with many and with few tensors."""
        return operator_grid.build(EMPTY_POINT, 0), operator_grid.port_model(True), operator_grid.port_model(False)

    def is_fusible(self, index: int) -> bool:
        """Only copies that have weights of their own differ, and stay."""
        return bool(self._points[index].weights)

    def point_work(self, index: int) -> OperatorWork:
        """The work of the point's operator."""
        return operator_grid.point_work(self._points[index])

    def network_works(self, index: int, *, fused: bool) -> list[OperatorWork]:
        """The work of the network's operators."""
        works = operator_grid.model_work(onnx.load_model_from_string(calibration_networks()[index]))
        return list(separate_operators(works)) if fused else works

    def weight_bytes(self, index: int) -> float:
        """Bytes of the network's initializers."""
        model = onnx.load_model_from_string(calibration_networks()[index])
        return float(sum(nodes.tensor_bytes(weight) for weight in model.graph.initializer))

    def datatype(self, index: int) -> str:
        """Families have no datatype."""
        return ""


class LiteRtDesign:
    """Microbenchmarks of LiteRT, whose files are fused already."""

    def __init__(self) -> None:
        from edgesplit_partitioner.calibration import litert_grid  # LiteRT is an extra

        self._grid = litert_grid
        self.point_count, self.network_count = len(litert_grid.points()), len(litert_grid.networks())

    def point_model(self, index: int, copies: int) -> bytes:
        """The point as a model file."""
        built = self._grid.build_point(*self._grid.points()[index], copies)
        assert built is not None
        return built[0].file(built[1])

    def copies(self, index: int) -> int:
        """Number of copies to time together."""
        return operator_grid.copies_of(self._grid.points()[index][0])

    def network_model(self, index: int) -> bytes:
        """The network as a model file."""
        network, output = self._grid.networks()[index]
        return network.file([output])

    def small_models(self) -> tuple[bytes, bytes, bytes]:
        """An empty model, and two with many and with few tensors."""
        return self._grid.empty_model(), self._grid.port_model(True), self._grid.port_model(False)

    def is_fusible(self, index: int) -> bool:
        """LiteRT has no options to optimise by."""
        return True

    def point_work(self, index: int) -> OperatorWork:
        """The work of the point's operator."""
        built = self._grid.build_point(*self._grid.points()[index], 1)
        assert built is not None
        return built[0].works()[0]

    def network_works(self, index: int, *, fused: bool) -> list[OperatorWork]:
        """The work of the network's operators."""
        return self._grid.networks()[index][0].works()

    def weight_bytes(self, index: int) -> float:
        """Bytes of the network's weights."""
        return self._grid.networks()[index][0].weight_bytes

    def datatype(self, index: int) -> str:
        """Datatype of the network's weights."""
        return self._grid.networks()[index][0].datatype.lower()


@cache
def design_of(engine: Engine) -> Design:
    """The microbenchmarks of an engine; ImportError where LiteRT is not installed."""
    return OnnxDesign() if engine == "onnxruntime" else LiteRtDesign()


def has_spinning_pool(engine: Engine, setup: EngineOptions) -> bool:
    """Whether idle threads wait for work on their core, so that sessions beside each other cannot be timed: those of
    onnxruntime where asked to, those of LiteRT always (XNNPACK's pthreadpool, ruy's pool)."""
    return setup.spinning or (engine == "litert" and setup.threads > 1)


def runtime_name(engine: Engine = "onnxruntime") -> str:
    """Name and version of the runtime that executes the grid."""
    if engine == "litert":
        return f"LiteRT {version('ai-edge-litert')}"
    return f"onnxruntime {version('onnxruntime')}"
