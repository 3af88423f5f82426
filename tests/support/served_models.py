"""A model file served by the agent's endpoint in this process: one slice, no controller, no process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from edgesplit.http1.server import Server
from edgesplit.plan import Link, Plan, Row
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_agent.releases.loaded_release import LoadedRelease, plan_for
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint
from edgesplit_agent.worker.host import InProcess
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models

CLASS = "pi4"
LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)


def loaded(raw: bytes, folder: Path, bindings: Mapping[str, int] | None = None) -> LoadedRelease:
    """The model of this file, all of it on the device."""
    model = prepare_model(raw, dict(bindings or {}))
    slices = cut_slices(model, model.graph, atoms(model.graph, []), None)
    onnx_models.write_slices(folder, slices)
    manifest = onnx_models.manifest_of(model, slices)
    row = Row(name="local", device=tuple(one.slice.name for one in slices), device_s=0.001)
    plan = Plan(model=manifest.model, device_class=CLASS, rows=(row,), link=LINK)
    manifest = msgspec.structs.replace(manifest, plans={CLASS: plan})
    programs = load_slices(manifest, lambda name: folder / name, DispatchingRuntime())
    return LoadedRelease("0" * 64, manifest, plan_for(manifest, CLASS), InProcess(programs))


@dataclass
class Served:
    """These models on localhost, and on a Unix socket where a place for it is given."""

    models: Mapping[str, LoadedRelease]
    socket: Path | None = None

    def __enter__(self) -> Served:
        self.engine = Engine(CLASS, None)
        for name, release in self.models.items():
            self.engine.serve(name, release)
        self.endpoint = Endpoint(self.engine, dict)
        check_head = self.endpoint.check_head
        self.servers = [Server(self.endpoint, check_head=check_head)]
        if self.socket is not None:
            self.servers.append(Server(self.endpoint, path=self.socket, check_head=check_head))
        for server in self.servers:
            server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self.servers:
            server.stop(0.5)
        self.engine.stop()
        self.endpoint.close()

    @property
    def host(self) -> str:
        """HOST:PORT, as Triton's clients want it."""
        return self.servers[0].url.removeprefix("http://")
