"""Another cut of a released model, signed by the planner: over real mosquitto, by a real agent and a real offload
server; and what they do when the planner's key was stolen."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import TrustError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import DesiredRelease
from support import onnx_models as tiny
from support.agent_engine import eventually
from support.recut_repository import CLASS, CutRelease, RecutHarness, build_release, fingerprint_for, plant
from support.small_controller import AgentProcess, SmallController

FEEDS = tiny.feeds_of(tiny.prepared("chain"))
WHOLE = tiny.run_whole(tiny.prepared("chain").raw, FEEDS)
LAYERS = [layer.name for layer in tiny.prepared("chain").graph.layers]
KEPT: dict[str, Any] = {"required_local_layers": LAYERS[:1]}


def golden() -> tuple[bytes, bytes]:
    """A request, and what the whole model answers."""
    request = b"".join(oip.encode_request(oip.InferRequest(FEEDS, id="golden"))[0])
    response = b"".join(oip.encode_response(oip.InferResponse("tiny", WHOLE, id="golden"))[0])
    return request, response


def cut(*after: int, recut_of: str = "", **plan: Any) -> CutRelease:
    """The chain model cut after so many layers, the first of these cuts forced."""
    sets = [LAYERS[:count] for count in after]
    return build_release("chain", *sets, recut_of=recut_of, golden=golden(), **{**KEPT, **plan}).with_plan(
        forced_row="cut-1"
    )


class RecutController(SmallController):
    """A controller with a planner, and with an attacker who has the planner's key."""

    def deploy_base(self) -> CutRelease:
        base = cut(2)
        self.repository.add_fingerprint(RecutHarness.encoded(fingerprint_for("chain")))
        self.deploy(base)
        return base

    def replan(self, recut: CutRelease) -> None:
        """Sign it as a recut, give the offload server its half, and state it, as the controller does."""
        self.repository.add_recut(recut.raw)
        self.store_remote_half(recut)
        self.state_recut(recut)

    def replan_with_stolen_keys(self, recut: CutRelease) -> None:
        """State it as an attacker can who has the online keys and the offload server's folder."""
        RecutHarness.sign_by_planner(self.repository, self.folder / "repository", recut.raw)
        plant(self.folder / "offload", recut, self.repository.proof(recut.digest))
        self.state_recut(recut)

    def state_recut(self, recut: CutRelease) -> None:
        self.releases[recut.digest] = recut
        self.state(DesiredRelease("tiny", recut.digest))


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecutController]:
    with RecutController(tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture
def agent(controller: RecutController, tmp_path: Path) -> Iterator[AgentProcess]:
    controller.received.clear()
    with AgentProcess(controller, tmp_path) as process:
        yield process


def is_offloading(agent: AgentProcess, release: CutRelease, row: str) -> bool:
    """The agent answers by this release with the cloud's help, as the whole model does."""
    answer = agent.client.infer("tiny", FEEDS, deadline_s=20)
    assert np.allclose(answer.outputs["probabilities"], WHOLE["probabilities"], rtol=1e-4, atol=1e-6)
    return (answer.report.release, answer.report.row, answer.report.fallback) == (release.digest, row, False)


def test_a_recut_replaces_its_base_on_both_sides_and_survives_a_restart(
    controller: RecutController, agent: AgentProcess
) -> None:
    """Fetched, checked, staged, tried and activated like a release; the weights that are here are not fetched again;
    and after a restart without a network it is proven and loaded anew."""
    base = controller.deploy_base()
    agent.start()
    eventually("the base runs", lambda: agent.is_running(base), 60)
    eventually("the base answers", lambda: is_offloading(agent, base, "cut-1"), 60)
    controller.chunks_sent.clear()

    recut = cut(4, recut_of=base.digest)
    controller.replan(recut)
    eventually("the recut runs", lambda: agent.is_running(recut), 60)
    eventually("the recut answers", lambda: is_offloading(agent, recut, "cut-1"), 60)
    weights = {piece.sha256 for cut_ in base.cut for file in cut_.slice.files[1:] for piece in file.chunks}
    assert weights and not weights.intersection(controller.chunks_sent)

    agent.end(signal.SIGKILL)
    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.client.infer("tiny", FEEDS, deadline_s=20)
    assert answer.report.release == recut.digest
    assert np.allclose(answer.outputs["probabilities"], WHOLE["probabilities"], rtol=1e-4, atol=1e-6)


def test_stolen_online_keys_change_no_device(controller: RecutController, agent: AgentProcess) -> None:
    """Planner, director, snapshot and timestamp in one hand: another model, a privacy limit less, another operator.
    Each is reported as failed with its reason; what ran goes on; the offload server loads none of it."""
    base = controller.deploy_base()
    agent.start()
    eventually("the base runs", lambda: agent.is_running(base), 60)
    honest = cut(4, recut_of=base.digest)

    for stolen, reason in (
        (honest.with_(model="tiny@2"), "change the release's model"),
        (cut(1, recut_of=base.digest, private_tensors=()), "'image' leave the device"),
        (cut(1, recut_of=base.digest, required_local_layers=()), "run elsewhere"),
        (honest.with_graph(1, lambda model: model.graph.node.pop()), "other operators"),
    ):
        controller.replan_with_stolen_keys(stolen)
        eventually(
            f"it failed: {reason}",
            lambda stolen=stolen, reason=reason: controller.has_reported(stolen, "failed", reason),
            60,
        )
        assert agent.client.infer("tiny", FEEDS, deadline_s=20).report.release == base.digest
        far = oip.remote_name(stolen.digest, CLASS, "cut-1")
        with pytest.raises(TrustError, match=reason):
            controller.offload.models.model(far).half.load()

    controller.replan(honest)
    eventually("an honest recut runs", lambda: agent.is_running(honest), 60)
