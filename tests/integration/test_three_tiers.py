"""Device, gateway, cloud: real broker, controller, agents and offload servers; the whole model's bits throughout."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from edgesplit.identifiers import gateway_host
from edgesplit.input_spec import InputSpec, prepare
from edgesplit.link_emulation import ShapedLink
from edgesplit.links import parse_link
from edgesplit.plan import LOCAL
from edgesplit.trust.identity import Credentials
from edgesplit_cli.demo.reference_model import WholeModel
from edgesplit_cli.demo.run import free_port
from support.edgesplit_processes import Agent, Cloud, eventually, frame_input, frames

AT_ONCE = parse_link("10gbit/0ms")
JPEGS = [jpeg for jpeg, _ in frames(3)]


class Tiers:
    """A cloud, a gateway behind a link that can be cut, and one device, which is not led through the gateway yet."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        cloud.push_digits()
        self.whole = WholeModel(cloud.api.download("/v1/models/digits/optimised"))
        self.spec = msgspec.convert(cloud.api.get("/v1/models/digits")["input_spec"], InputSpec)
        self.layers = [layer["name"] for layer in cloud.json("model", "show", "digits")["layers"]]
        self.uplink = ShapedLink("127.0.0.1", cloud.addresses["offload_port"], AT_ONCE)
        self.uplink.start()
        self.port = free_port()
        claim, reached = cloud.folder / "gw.claim.json", f"127.0.0.1:{self.port}"
        claimed = ("gw", "--profile", "jetson-nano", "--link", "lte", "--gateway", reached, "--out", str(claim))
        cloud.edgectl("device", "claim", *claimed)
        options = ("--gateway", reached, "--offload", f"127.0.0.1:{self.uplink.port}")
        self.gateway = Agent(cloud, "gw", claim, *options)
        cloud.agents.append(self.gateway)
        self.gateway.start()
        self.device = cloud.agent("cam", "raspberrypi4", "--mode", "exact")
        self._deployed: tuple[tuple[str, ...], dict[str, Any]] = ((), {})
        self._led = "none"

    def lead(self, gateway: str, *options: str) -> None:
        """Lead the device there; nothing is done where it is led there. What is deployed next is planned for that."""
        if gateway != self._led:
            self.cloud.edgectl("device", "gateway", "cam", gateway, *options)
            self._led, self._deployed = gateway, ((), {})

    def deploy(self, *partition: str) -> dict[str, Any]:
        """To the device, until it runs there; nothing is done where it does."""
        if partition != self._deployed[0]:
            options = ("--to", "cam", "--wait", "60")
            self._deployed = partition, self.cloud.json("deploy", "digits", "--partition", *partition, *options)
        return self._deployed[1]

    def deploy_on_three(self) -> dict[str, Any]:
        """A part on each tier, encrypted, until it runs on the device and lies on the gateway."""
        self.lead("gw")
        third = len(self.layers) // 3
        made = self.deploy(self.layers[third], "--edge-after", self.layers[2 * third], "--encrypt")
        eventually("the gateway keeps it", lambda: made["release"] in self.kept)
        return made

    @contextmanager
    def gateway_killed(self) -> Iterator[None]:
        """SIGKILL; started again afterwards, by its own folder alone."""
        self.gateway.process.kill()
        try:
            yield
        finally:
            self.gateway.start()

    @property
    def kept(self) -> set[str]:
        """Releases that the gateway says it has for others."""
        return {one["release"] for one in self.cloud.api.get("/v1/devices/gw")["gateway_models"]} - {""}

    def expected(self, jpeg: bytes) -> npt.NDArray[Any]:
        return self.whole.run(prepare(self.spec, jpeg))

    def answer(self, jpeg: bytes) -> Any:
        """One answer, which is the whole model's bit for bit."""
        found = self.device.infer("digits", frame_input(jpeg))
        assert np.array_equal(found.outputs["probabilities"], self.expected(jpeg))
        return found.report

    def helped(self, jpeg: bytes = JPEGS[0]) -> Any:
        """The report of an answer that the device did not finish alone."""

        def tried() -> Any:
            report = self.answer(jpeg)
            return None if report.fallback or report.row == LOCAL else report

        return eventually("an answer with another tier's help", tried)

    def helped_by_both(self, jpeg: bytes = JPEGS[0]) -> Any:
        """The report of an answer that the cloud has a part in, behind the gateway."""

        def tried() -> Any:
            report = self.helped(jpeg)
            return report if report.next_tier_server_s > 0 and not report.next_tier_cause else None

        return eventually("the cloud's help behind the gateway", tried)

    def ask_gateway(self, path: str, device: Agent) -> tuple[int, str]:
        """A request with that device's certificate, straight to the gateway's server: status and error."""
        connection = self.connected(device, gateway_host("gw"))
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body)["error"] if body else ""
        finally:
            connection.close()

    def connected(self, device: Agent, name: str) -> http.client.HTTPConnection:
        """To the gateway's server, which must be of that name."""
        own = Credentials(*(device.data / "identity" / f"{one}.pem" for one in ("key", "certificate", "ca")))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.connect()
        try:
            connection.sock = own.client_context().wrap_socket(connection.sock, server_hostname=name)
        except ssl.SSLError:
            connection.close()
            raise
        return connection


@pytest.fixture(scope="module")
def tiers(cloud: Cloud) -> Iterator[Tiers]:
    made = Tiers(cloud)
    yield made
    made.uplink.stop()


def test_a_plan_of_two_tiers_is_relayed_by_a_gateway(tiers: Tiers) -> None:
    """A release that was made before there was a gateway: led through one, the device gets the cloud's help as before,
    and the gateway fetches nothing of it."""
    tiers.lead("none")
    made = tiers.deploy("cloud")
    assert not made["plans"][0].get("tiers") and tiers.helped().next_tier_s == 0

    tiers.lead("gw", "--link", "wifi")

    report = tiers.helped_by_both()
    assert report.release == made["release"] and 0 < report.next_tier_server_s <= report.next_tier_s <= report.remote_s
    assert tiers.kept == set()
    shown = {one["name"]: one.get("gateway") for one in tiers.cloud.json("device", "list")}
    assert shown == {"cam": "gw", "gw": None}


def test_a_part_on_each_tier_answers_as_the_whole_model(tiers: Tiers) -> None:
    """One signed plan over three tiers: the gateway fetches the far slices, is given their keys, and asks the cloud for
    the rest of them; the report says who took how long."""
    made = tiers.deploy_on_three()

    assert made["encrypted"]
    (plan,) = made["plans"]
    (hop,) = plan["rows"][0]["hops"]
    assert plan["tiers"] == ["device", "edge", "cloud"] and hop["tier"] == "cloud"
    assert 0 < len(hop["remote"]) < len(plan["rows"][0]["remote"])
    assert plan["link"]["name"] == "wifi"
    far = {path.name for path in (tiers.gateway.data / "releases" / made["release"] / "slices").iterdir()}
    assert far == set(plan["rows"][0]["remote"])
    for jpeg in JPEGS:
        report = tiers.helped_by_both(jpeg)
        assert 0 < report.next_tier_server_s <= report.next_tier_s <= report.remote_s


def test_the_gateway_finishes_while_the_cloud_is_cut_off(tiers: Tiers) -> None:
    """It has the far slices too: the device gets its help all the same, and hears why. Back, the cloud helps again."""
    tiers.deploy_on_three()
    tiers.helped_by_both()

    tiers.uplink.cut()

    def alone() -> Any:
        report = tiers.helped()
        return report if report.next_tier_cause else None

    report = eventually("the gateway's own answer", alone)
    assert report.next_tier_server_s == 0 and report.remote_s > 0
    tiers.uplink.restore()
    tiers.helped_by_both()


def test_spoilt_slices_on_the_gateway_are_never_run(tiers: Tiers) -> None:
    """A file that is not what was signed: the gateway's server refuses it and relays the request, until the agent has
    repaired it. No answer is another than the whole model's."""
    made = tiers.deploy_on_three()
    tiers.helped_by_both()
    slices = tiers.gateway.data / "releases" / made["release"] / "slices"
    with tiers.gateway_killed():
        for file in slices.rglob("graph.onnx"):
            file.write_bytes(b"\0" * file.stat().st_size)
        tiers.answer(JPEGS[0])

    tiers.helped_by_both()
    eventually("the slices are whole again", lambda: all(any(f.read_bytes()) for f in slices.rglob("graph.onnx")))


def test_a_killed_gateway_leaves_the_device_answering(tiers: Tiers) -> None:
    """SIGKILL: its server goes with it, the device finishes alone; started again, without anything said, it helps."""
    tiers.deploy_on_three()
    tiers.helped_by_both()

    def alone(jpeg: bytes) -> bool:
        report = tiers.answer(jpeg)
        return bool(report.fallback or report.row == LOCAL) and report.next_tier_s == 0

    with tiers.gateway_killed():
        eventually("its server has gone too, and the device is alone", lambda: all(map(alone, JPEGS)))

    tiers.helped_by_both()


def test_all_on_the_gateway_needs_no_cloud(tiers: Tiers) -> None:
    """`--partition edge`: its server finishes what the device sends; what it kept before goes."""
    tiers.lead("gw")
    made = tiers.deploy("edge")
    eventually("the gateway keeps this one and no other", lambda: tiers.kept == {made["release"]})
    tiers.uplink.cut()
    try:
        assert all(tiers.helped(jpeg).next_tier_s == 0 for jpeg in JPEGS)
    finally:
        tiers.uplink.restore()


def test_the_gateways_server_lets_in_devices_that_are_not_revoked(tiers: Tiers) -> None:
    """By the controller's list, which the gateway fetches: a device that is revoked meanwhile hears 403, on a
    certificate that TLS still takes. A release that no tier has is not found, through the relay too."""
    other = tiers.cloud.agent("other")
    assert tiers.ask_gateway("/v2/health/ready", other) == (200, "")
    assert tiers.ask_gateway(f"/v2/models/{'0' * 64}.raspberrypi4.remote/ready", other)[0] == 404
    with pytest.raises(ssl.SSLCertVerificationError):
        tiers.connected(other, "127.0.0.1")

    tiers.cloud.edgectl("device", "revoke", "other", "--yes")

    told = eventually("a refusal", lambda: _refusal(tiers.ask_gateway("/v2/health/ready", other)))
    assert "revoked" in told


def _refusal(answer: tuple[int, str]) -> str:
    return answer[1] if answer[0] == 403 else ""


def test_only_a_gateway_gets_a_server_certificate(tiers: Tiers) -> None:
    """A device that was not claimed as a gateway may not serve others, whatever its command line says."""
    port = free_port()
    upstart = tiers.cloud.agent("upstart", "raspberrypi4", "--gateway", f"127.0.0.1:{port}")
    log = tiers.cloud.folder / "upstart.log"
    eventually("its log says why", lambda: "upstart is no gateway" in log.read_text(errors="replace"))
    assert not (upstart.data / "gateway" / "certificate.pem").exists()


def test_a_device_can_be_pointed_back_to_the_cloud(tiers: Tiers) -> None:
    """`device gateway NAME none`: it asks the cloud itself, for the same release; the gateway forgets what it kept."""
    made = tiers.deploy_on_three()
    tiers.helped_by_both()

    tiers.lead("none")

    def direct() -> Any:
        report = tiers.helped()
        return report if report.next_tier_s == 0 and not report.next_tier_cause else None

    assert eventually("the cloud's help without a gateway", direct).release == made["release"]
    eventually("the gateway keeps nothing", lambda: not tiers.kept)
