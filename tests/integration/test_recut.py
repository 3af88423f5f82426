"""Another cut of a released model, signed by the planner: over real mosquitto, by a real agent and a real offload
server; and what they do when the planner's key was stolen."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit.errors import TrustError
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import DesiredRelease, Statement
from edgesplit.release_store import write_release
from integration.test_agent import DEVICE, Process, SmallController
from support import onnx_models as tiny
from support.agent_engine import eventually
from support.recut_repository import CLASS, Made, RecutHarness, fingerprint_for, made, plant

FEEDS = tiny.feeds_of(tiny.prepared("chain"))
WHOLE = tiny.run_whole(tiny.prepared("chain").raw, FEEDS)
LAYERS = [layer.name for layer in tiny.prepared("chain").graph.layers]
KEPT: dict[str, Any] = {"required_local_layers": LAYERS[:1]}


def golden() -> tuple[bytes, bytes]:
    """A request, and what the whole model answers."""
    request = b"".join(oip.encode_request(oip.InferRequest(FEEDS, id="golden"))[0])
    response = b"".join(oip.encode_response(oip.InferResponse("tiny", WHOLE, id="golden"))[0])
    return request, response


def cut(*after: int, recut_of: str = "", **plan: Any) -> Made:
    """The chain model cut after so many layers, the first of these cuts forced."""
    sets = [LAYERS[:count] for count in after]
    return made("chain", *sets, recut_of=recut_of, golden=golden(), **{**KEPT, **plan}).with_plan(forced_row="cut-1")


class Controller(SmallController):
    """With a planner, and a thief who has its key."""

    def first(self) -> Made:
        base = cut(2)
        self.repository.add_fingerprint(RecutHarness.encoded(fingerprint_for("chain")))
        self.deploy(base)  # type: ignore[arg-type]
        return base

    def replan(self, one: Made) -> None:
        """As the controller does: sign it as a recut, give the offload server its half, and state it."""
        self.repository.add_recut(one.raw)
        write_release(
            self.folder / "offload", one.digest, one.raw, self.repository.proof(one.digest), one.chunks.__getitem__,
            bootstrap_root=self.repository.root_bytes,
        )  # fmt: skip
        self.state(one)

    def steal(self, one: Made) -> None:
        """As a thief does, who has the online keys and the offload server's folder."""
        RecutHarness.sign_by_planner(self.repository, self.folder / "repository", one.raw)
        plant(self.folder / "offload", one, self.repository.proof(one.digest))
        self.state(one)

    def state(self, one: Made) -> None:
        self.made[one.digest] = one  # type: ignore[assignment]
        self.counter = max(self.counter + 1, int(time.time()))
        self.statement = self.repository.sign_statement(
            Statement(
                device=DEVICE,
                releases=(DesiredRelease("tiny", one.digest),),
                counter=self.counter,
                expires=int(time.time()) + 3600,
            )
        )
        self.delivery.publish_statements([DEVICE])

    def failed(self, one: Made, reason: str) -> bool:
        said = self.reported()
        return said is not None and any(
            model.desired_release == one.digest and model.state == "failed" and reason in model.detail
            for model in said.models
        )


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    running = Controller(tmp_path_factory.mktemp("controller"))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def agent(controller: Controller, tmp_path: Path) -> Iterator[Process]:
    process = Process(controller, tmp_path)
    controller.heard.clear()
    yield process
    if process.child is not None:
        process.end(signal.SIGKILL)


def answers(agent: Process, one: Made, after: str) -> bool:
    """The agent answers by this release with the cloud's help, as the whole model does."""
    answer = agent.client.infer("tiny", FEEDS, deadline_s=20)
    assert np.allclose(answer.outputs["probabilities"], WHOLE["probabilities"], rtol=1e-4, atol=1e-6)
    return (answer.report.release, answer.report.row, answer.report.fallback) == (one.digest, after, False)


def test_a_recut_replaces_its_base_on_both_sides_and_survives_a_restart(controller: Controller, agent: Process) -> None:
    """Fetched, checked, staged, tried and activated like a release; the weights that are here are not fetched again;
    and after a restart without a network it is proven and loaded anew."""
    base = controller.first()
    agent.start()
    eventually("the base runs", lambda: agent.runs(base), 60)  # type: ignore[arg-type]
    eventually("the base answers", lambda: answers(agent, base, "cut-1"), 60)
    controller.chunks_sent.clear()

    one = cut(4, recut_of=base.digest)
    controller.replan(one)
    eventually("the recut runs", lambda: agent.runs(one), 60)  # type: ignore[arg-type]
    eventually("the recut answers", lambda: answers(agent, one, "cut-1"), 60)
    weights = {piece.sha256 for cut_ in base.cut for file in cut_.slice.files[1:] for piece in file.chunks}
    assert weights and not weights.intersection(controller.chunks_sent)

    agent.end(signal.SIGKILL)
    agent.extra = ("--broker", "127.0.0.1:9", "--offload", "127.0.0.1:9")
    agent.start()
    answer = agent.client.infer("tiny", FEEDS, deadline_s=20)
    assert answer.report.release == one.digest
    assert np.allclose(answer.outputs["probabilities"], WHOLE["probabilities"], rtol=1e-4, atol=1e-6)


def test_a_thief_of_the_online_keys_changes_no_device(controller: Controller, agent: Process) -> None:
    """Planner, director, snapshot and timestamp in one hand: another model, a privacy limit less, a node of his own.
    Each is reported as failed with its reason; what ran goes on; the offload server loads none of it."""
    base = controller.first()
    agent.start()
    eventually("the base runs", lambda: agent.runs(base), 60)  # type: ignore[arg-type]
    honest = cut(4, recut_of=base.digest)

    for stolen, reason in (
        (honest.with_(model="tiny@2"), "change the release's model"),
        (cut(1, recut_of=base.digest, private_tensors=()), "'image' leave the device"),
        (cut(1, recut_of=base.digest, required_local_layers=()), "run elsewhere"),
        (honest.with_graph(1, lambda model: model.graph.node.pop()), "other operators"),
    ):
        controller.steal(stolen)
        eventually(f"it failed: {reason}", lambda one=stolen, why=reason: controller.failed(one, why), 60)
        assert agent.client.infer("tiny", FEEDS, deadline_s=20).report.release == base.digest
        far = oip.remote_name(stolen.digest, CLASS, "cut-1")
        with pytest.raises(TrustError, match=reason):
            controller.offload._models.model(far).half.load()

    controller.replan(honest)
    eventually("an honest recut runs", lambda: agent.runs(honest), 60)  # type: ignore[arg-type]
