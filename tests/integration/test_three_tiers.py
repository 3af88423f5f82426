"""Device, gateway, cloud: real broker, controller, agents and offload servers; the whole model's bits throughout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.inputs import InputSpec, prepare
from edgesplit.links import parse_link
from edgesplit.plan import LOCAL
from edgesplit.testing.link import ShapedLink
from edgesplit_cli.demo.run import free_port
from edgesplit_cli.demo.whole import WholeModel
from harness import Agent, Cloud, eventually, frame_input, frames

AT_ONCE = parse_link("10gbit/0ms")


class Tiers:
    """A cloud, a gateway behind a link that can be cut, and one device behind the gateway."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        cloud.push_digits()
        self.whole = WholeModel(cloud.api.download("/v1/models/digits/optimised"))
        self.layers = [layer["name"] for layer in cloud.json("model", "show", "digits")["layers"]]
        self.uplink = ShapedLink("127.0.0.1", cloud.addresses["offload_port"], AT_ONCE)
        self.uplink.start()
        self.port = free_port()
        claim = cloud.folder / "gw.claim.json"
        reached = f"127.0.0.1:{self.port}"
        cloud.edgectl(
            "device", "claim", "gw", "--profile", "jetson-nano", "--gateway", reached, "--out", str(claim)
        )  # fmt: skip
        self.gateway = Agent(cloud, "gw", claim, "--gateway", reached, "--offload", f"127.0.0.1:{self.uplink.port}")
        cloud.agents.append(self.gateway)
        self.gateway.start()
        self.device = cloud.agent("cam")
        cloud.edgectl("device", "gateway", "cam", "gw")

    def deploy(self, *partition: str) -> dict[str, Any]:
        """To the device, until it runs there and lies on the gateway; the plan."""
        made = self.cloud.json("deploy", "digits", "--partition", *partition, "--to", "cam", "--wait", "60")
        eventually("the gateway keeps it", lambda: self.keeps(made["release"]))
        (plan,) = made["plans"]
        return dict(plan)

    def keeps(self, release: str) -> bool:
        kept = self.cloud.api.get("/v1/devices/gw")["kept"]
        return any(one["release"] == release for one in kept)

    def expected(self, jpeg: bytes) -> np.ndarray:
        spec = msgspec.convert(self.cloud.api.get("/v1/models/digits")["input_spec"], InputSpec)
        return self.whole.run(prepare(spec, jpeg))

    def answer(self, jpeg: bytes) -> Any:
        """One answer, which is the whole model's bit for bit."""
        found = self.device.infer("digits", frame_input(jpeg))
        assert np.array_equal(found.outputs["probabilities"], self.expected(jpeg))
        return found

    def helped(self, jpeg: bytes) -> Any:
        """An answer that the device did not finish alone."""

        def tried() -> Any:
            found = self.answer(jpeg)
            return None if found.report.fallback or found.report.row == LOCAL else found

        return eventually("an answer with the gateway's help", tried)


@pytest.fixture(scope="module")
def tiers(cloud: Cloud) -> Iterator[Tiers]:
    made = Tiers(cloud)
    yield made
    made.uplink.stop()


JPEGS = [jpeg for jpeg, _ in frames(4)]


def test_every_row_of_three_tiers_answers_as_the_whole_model(tiers: Tiers) -> None:
    """A part on each tier by one signed plan: the bits are the whole model's, and the report says who took how long."""
    third = len(tiers.layers) // 3
    plan = tiers.deploy(tiers.layers[third], "--edge-after", tiers.layers[2 * third])

    (hop,) = plan["rows"][0]["hops"]
    assert plan["tiers"] == ["device", "edge", "cloud"] and hop["tier"] == "cloud"
    assert 0 < len(hop["remote"]) < len(plan["rows"][0]["remote"])
    for jpeg in JPEGS:
        report = eventually("the cloud's help behind the gateway", lambda j=jpeg: _three(tiers, j)).report
        assert 0 < report.hop_server_s <= report.hop_s <= report.remote_s


def _three(tiers: Tiers, jpeg: bytes) -> Any:
    found = tiers.helped(jpeg)
    return found if found.report.hop_s > 0 and not found.report.hop_cause else None
