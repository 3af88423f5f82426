"""Emulated devices for `adapt.py` and `energy.py`: plans of networks on device profiles, and a real agent's engine
whose slices take the plan's time, behind a link that follows a recorded uplink. A library: as a script it does nothing.

The device's seconds are a roofline by the profile's rates (docs/device-profiles.md), its watts the profile's; the
radio's are those of Huang et al. (MobiSys 2012) for Wi-Fi. Boundaries travel as int8 and zstd at 7.6 : 1, frames as a
JPEG of 20 KB: measured on trained models, not on these networks. The server's seconds are a roofline with assumed
rates.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import sleep

import msgspec
import numpy as np
import paper_networks as networks
import uplink

from edgesplit.bandwidth_trace import UplinkTrace, read_uplink_trace
from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.http1.server import Request, Response, Server
from edgesplit.link_emulation import ShapedLink
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Tensor, Tensors
from edgesplit.runtime.emulated import EmulatedProgram
from edgesplit_agent.power.mode import PowerSettings
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.worker.host import InProcess
from edgesplit_partitioner import Costs, load_costs, plan
from edgesplit_partitioner.formulation.tiers import VaryingLink

TRACES = Path(__file__).parent / "traces"
DEVICES = (("alexnet", "raspberrypi4"), ("alexnet", "raspberrypi3b+"), ("vgg", "raspberrypi5"))
RTT_S, DOWN_BYTES_PER_S = 0.05, 2e6
JPEG_BYTES, ENCODING_RATIO = 20_000, 7.6
ENCODED_BYTES_PER_S = 2.2e9
"""Bytes of float32 that are encoded to int8 and zstd per second on the machine of the profile `generic-x86`."""
SERVER_FLOPS_PER_S, SERVER_BYTES_PER_S = 2e11, 2e10
MAX_LOSS = 0.005
DIGEST, MODEL = "e" * 64, "emulated"


@dataclass(frozen=True, slots=True)
class Device:
    """A network on a device profile."""

    network: str
    profile: str

    @property
    def name(self) -> str:
        """Label for tables."""
        return f"{self.network} on {self.profile}"


def devices() -> list[Device]:
    """The devices that are measured."""
    return [Device(*pair) for pair in DEVICES]


def traces(paths: list[Path]) -> list[UplinkTrace]:
    """The traces in the given files, or else those of the repository."""
    return [read_uplink_trace(path) for path in paths or sorted(TRACES.glob("*.up"))]


def plan_on(device: Device, trace: UplinkTrace) -> Plan:
    """The switching table, planned for the trace's arithmetic mean."""
    link = VaryingLink(
        up_bytes_per_s=uplink.mean_bytes_per_s(trace), down_bytes_per_s=DOWN_BYTES_PER_S, rtt_s=RTT_S, radio="wifi"
    )
    result = plan(
        costs_of(getattr(networks, device.network)(), load_profile(device.profile)),
        {"device-cloud": link},
        codecs=("raw", "int8"),
        limits={"max_loss": MAX_LOSS},
    )
    return result.table


def costs_of(net: networks.Network, profile: DeviceProfile) -> Costs:
    """Costs of the network's layers on the device and on the server."""
    rates, tensor, layers = profile.rates, "input", []
    flops_per_s = rates.dense_conv_flops_per_s.value / profile.runtime_factor.value
    for layer in net.layers:
        here_s = max(layer.flops / flops_per_s, layer.moved / rates.memory_bytes_per_s.value)
        here_s += profile.operator_overhead_s.value
        there_s = max(layer.flops / SERVER_FLOPS_PER_S, layer.moved / SERVER_BYTES_PER_S) + 5e-6
        int8 = {
            "bytes": int(layer.bytes / ENCODING_RATIO),
            "encode_s": {"device": layer.bytes / ENCODED_BYTES_PER_S * profile.zstd_slowdown.value},
            "decode_s": {"cloud": layer.bytes / ENCODED_BYTES_PER_S},
            "loss": 0.001,
        }
        layers.append(
            {
                "name": layer.name,
                "reads": [tensor],
                "writes": {f"{layer.name}:0": {"bytes": layer.bytes, "codecs": {"int8+zstd": int8}}},
                "seconds": {"device": here_s, "cloud": there_s},
                "joules": {"device": here_s * profile.active_watts.value},
                "weight_bytes": layer.weight_bytes,
            }
        )
        tensor = f"{layer.name}:0"
    return load_costs(
        {
            "model": f"{net.name.lower()}@1",
            "tiers": ["device", "cloud"],
            "inputs": {"input": {"bytes": JPEG_BYTES}},
            "outputs": [tensor],
            "layers": layers,
            "idle_watts": {"device": profile.idle_watts.value},
        }
    )


# The real engine


class _PassThrough:
    """A slice program that writes as many bytes as its boundary has."""

    def __init__(self, writes: str, size: int) -> None:
        self._made = {writes: np.zeros(size, np.uint8)}

    def run(self, tensors: Tensors) -> Mapping[str, Tensor]:
        return self._made


class EmulatedDevice:
    """The real engine on slices that take the plan's seconds, with a stand-in server that takes the plan's remote
    seconds."""

    def __init__(self, table: Plan, trace: UplinkTrace, *, hedge_part: float | None, forced: str = "") -> None:
        rows = sorted(table.rows, key=lambda row: row.device_s)
        self._rows = {row.name: row for row in rows}
        self._server = Server(self._answer)
        self._server.start()
        link = Link(up_bytes_per_s=uplink.mean_bytes_per_s(trace), down_bytes_per_s=DOWN_BYTES_PER_S, rtt_s=RTT_S)
        port = int(self._server.url.rpartition(":")[2])
        self._link = ShapedLink("127.0.0.1", port, link)
        self._link.start()
        manifest = _manifest(table, rows, forced)
        lock = threading.Lock()
        programs = {
            slice_.name: EmulatedProgram(
                _PassThrough(slice_.outputs[0].name, slice_.outputs[0].shape[0]),  # type: ignore[arg-type]
                seconds,
                lock,
            )
            for slice_, seconds in zip(manifest.slices, _slice_seconds(rows), strict=True)
        }
        release = LoadedRelease(DIGEST, manifest, plan_for(manifest, table.device_class), InProcess(programs), True)
        self.engine = Engine(
            table.device_class,
            OffloadClient(self._server.url, via=("127.0.0.1", self._link.port)),
            settings=Settings(hedge_budget=hedge_part),
            power=PowerMonitor(PowerSettings("performance"), emulated=True),
        )
        self.engine.serve(MODEL, release)
        self._link.replay_trace(trace)
        self.engine.start()
        self.inputs = {"x": np.zeros(manifest.inputs[0].shape, np.uint8)}

    def stop(self) -> None:
        """Stop the engine, the link and the server."""
        self.engine.stop()
        self._link.stop()
        self._server.stop(drain_s=0.5)

    def _answer(self, request: Request) -> Response:
        if not request.path.endswith("/infer"):
            return Response(200, {"edgesplit-seconds": "0"}, [])
        name = request.path.split("/")[3]
        row = self._rows[name.rpartition(".")[2]]
        inference = oip.decode_request(request.body, oip.header_length(request.headers))
        seconds = row.decode_s + row.remote_s
        sleep(seconds)
        outputs = {"y": np.zeros(max(1, row.down_bytes), np.uint8)}
        body, length = oip.encode_response(oip.InferResponse(model=name, outputs=outputs, id=inference.id))
        return Response(200, {oip.HEADER_LENGTH: str(length), "edgesplit-seconds": f"{seconds:.6f}"}, body)


@contextmanager
def emulated_device(
    table: Plan, trace: UplinkTrace, hedge_part: float | None, forced: str = ""
) -> Iterator[EmulatedDevice]:
    """Context manager for an emulated device that is stopped afterwards."""
    device = EmulatedDevice(table, trace, hedge_part=hedge_part, forced=forced)
    try:
        yield device
    finally:
        device.stop()


def _slice_seconds(rows: list[Row]) -> list[float]:
    """Seconds of the slices between neighbouring cuts; the all-remote row has none."""
    marks = [0.0, *(row.device_s for row in rows if row.device_s > 0)]
    return [later - sooner for sooner, later in pairwise(marks)]


def _manifest(table: Plan, rows: list[Row], forced: str) -> Manifest:
    """A release of slices between the table's cuts, whose boundaries have as many bytes as the plan says."""
    cuts = [row for row in rows if row.device_s > 0]
    sizes = {row.device_s: max(1, row.up_bytes) for row in rows if not row.is_local}
    answer = max(1, max((row.down_bytes for row in rows), default=1))
    first = TensorSpec("x", "UINT8", (sizes.get(0.0, JPEG_BYTES),))
    specs = [first]
    for place, row in enumerate(cuts):
        last = row.is_local
        specs.append(TensorSpec("y" if last else f"t{place}", "UINT8", (answer if last else sizes[row.device_s],)))
    slices = tuple(
        Slice(f"s{place}", "onnx", (f"s{place}",), (reads,), (writes,))
        for place, (reads, writes) in enumerate(pairwise(specs))
    )
    names = [slice_.name for slice_ in slices]
    placed = []
    for row in rows:
        count = sum(cut.device_s <= row.device_s for cut in cuts)
        placed.append(
            msgspec.structs.replace(
                row, device=tuple(names[:count]), remote=tuple(names[count:]), layers=(), codecs={}, compress=False,
                sends=() if row.is_local else (specs[count].name,), receives=() if row.is_local else ("y",),
            )
        )  # fmt: skip
    seconds = dict(zip(names, _slice_seconds(rows), strict=True))
    release_plan = msgspec.structs.replace(
        table, rows=tuple(placed), slice_s=seconds, required_local_layers=(), forced_row=forced
    )
    return Manifest(
        model=table.model, model_sha256="0" * 64, created="2025-06-15T00:00:00Z", input_spec=None,
        inputs=(first,), outputs=(specs[-1],), slices=slices, plans={table.device_class: release_plan},
    )  # fmt: skip
