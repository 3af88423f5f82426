"""Halves that do not belong together, answers that nobody gave, words that shall make a device or a class work harder.

C4, E3 and the product's own attacks (reference: docs/security.md): what is signed together runs together, an answer is
of its request, and what devices or servers say of themselves moves nothing beyond what was signed.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from edgesplit import plan
from edgesplit.client.client import Connection, Reply
from edgesplit.errors import TrustError
from edgesplit.http1.server import Request, Response
from edgesplit.mqtt import messages
from edgesplit.oip import protocol as oip
from edgesplit.plan import Conditions, Plan
from edgesplit.release.manifest import release_digest
from edgesplit.release_store import open_release, write_release
from edgesplit.trust.identity import certificate_request, load_or_make_key
from edgesplit_agent.policy.link_estimator import FASTEST_BYTES_PER_S, SLOWEST_BYTES_PER_S, LinkEstimate
from edgesplit_controller.fleet.devices import ClaimRequest
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_offload.server import OffloadServer
from support.agent_engine import CUT, DIGEST, INPUT, LINK, LOCAL, REMOTE, eventually, world
from support.controller_parts import assembled
from support.fuzzing import fuzzed
from support.handmade_release import CUT as GOOD_NAME
from support.handmade_release import DEVICE_CLASS, MID, HandmadeRelease
from support.handmade_release import DIGEST as HANDMADE
from support.registry_harness import a_model
from support.signed_repository import TrustHarness, sample_release

PATIENCE_S = 30.0
SLOW = msgspec.structs.replace(LOCAL, device_s=1.0)
"""So that the cloud is asked though this machine is busy, and its round trips take long."""


# Halves of different releases, at each request


@pytest.fixture()
def release(tmp_path: Path) -> HandmadeRelease:
    return HandmadeRelease(tmp_path)


@pytest.fixture()
def server(release: HandmadeRelease) -> Iterator[OffloadServer]:
    running = OffloadServer(Path("unused"), b"", open_release=release.open)
    running.start()
    yield running
    running.stop(0.5)


def infer(server: OffloadServer, name: str, **inputs: np.ndarray) -> Reply:
    buffers, length = oip.encode_request(oip.InferRequest(inputs, id="i"))
    headers = {oip.HEADER_LENGTH: str(length)}
    with closing(Connection("127.0.0.1", server.port)) as connection:
        deadline = time.monotonic() + PATIENCE_S
        return connection.exchange(
            "POST", f"/v2/models/{name}/infer", deadline=deadline, headers=headers, body=[b"".join(buffers)]
        )


OTHER = "cd" * 32
NAMES = {
    "another release": oip.remote_name(OTHER, DEVICE_CLASS, "cut-1"),
    "another device class": oip.remote_name(HANDMADE, "jetson-nano", "cut-1"),
    "another row": oip.remote_name(HANDMADE, DEVICE_CLASS, "cut-9"),
    "a slice instead of a row": oip.remote_name(HANDMADE, DEVICE_CLASS, "s02-tail"),
    "a release in capitals": oip.remote_name(HANDMADE.upper(), DEVICE_CLASS, "cut-1"),
    "the first half of a digest": oip.remote_name(HANDMADE[:32], DEVICE_CLASS, "cut-1"),
    "no release": f".{DEVICE_CLASS}.cut-1",
    "the model's name": "tiny@1",
    "a folder above": f"..%2F..%2F{HANDMADE}.{DEVICE_CLASS}.cut-1",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_request_that_names_what_is_not_of_this_release_runs_nothing(
    server: OffloadServer, release: HandmadeRelease, name: str
) -> None:
    """C4: a request names release, device class and row, and only that very row of that very release answers it."""
    reply = infer(server, name, mid=MID)
    assert reply.status == 404, bytes(reply.body)
    assert not release.asked, "no slice was even opened"
    assert infer(server, GOOD_NAME, mid=MID).status == 200


@pytest.mark.parametrize(
    "inputs",
    [
        {"a": MID, "b": MID},
        {"mid": MID, "out": MID},
        {"mid": MID.astype(np.float64)},
        {"mid": np.ones((4, 1), np.float32)},
        {"mid": np.ones((1, 5), np.float32)},
        {},
    ],
)
def test_another_cuts_tensors_do_not_pass_for_this_cuts(
    server: OffloadServer, release: HandmadeRelease, inputs: dict[str, np.ndarray]
) -> None:
    """C4: a device half of another cut, or of another version of the model, sends other tensors: 400, nothing runs."""
    assert infer(server, GOOD_NAME, **inputs).status == 400
    assert not release.asked


# Halves of different releases, at activation


def test_a_slice_of_another_release_in_this_ones_place_is_not_loaded(tmp_path: Path) -> None:
    """C4: the files of version 2 under the name of version 1: digests are checked when a slice is opened."""
    made = TrustHarness(tmp_path / "world")
    folders = []
    for version in (1, 2):
        made.add(version)
        made.now += 1
        raw, chunks = sample_release(version)
        digest = release_digest(raw)
        proof = made.repository.proof(digest)
        write_release(
            tmp_path / "releases", digest, raw, proof, chunks.__getitem__, None, bootstrap_root=made.bootstrap
        )
        folders.append(digest)
    first, second = (open_release(tmp_path / "releases", digest, made.bootstrap) for digest in folders)
    target = first.slice_folder("tail")
    shutil.copy(second.slice_folder("tail") / "graph.onnx", target / "graph.onnx")
    with pytest.raises(TrustError):
        open_release(tmp_path / "releases", folders[0], made.bootstrap).slice_folder("tail")
    assert second.slice_folder("tail").is_dir()


def test_another_releases_manifest_in_this_ones_place_is_not_opened(tmp_path: Path) -> None:
    """C4: the plan and the slice list of version 2 under the digest of version 1: the folder's name is the manifest's
    SHA-256."""
    made = TrustHarness(tmp_path / "world")
    made.add(1)
    raw, chunks = sample_release(1)
    digest = release_digest(raw)
    proof = made.repository.proof(digest)
    write_release(tmp_path / "releases", digest, raw, proof, chunks.__getitem__, None, bootstrap_root=made.bootstrap)
    (manifest,) = [file for file in (tmp_path / "releases" / digest).rglob("*") if file.is_file() and (
        file.read_bytes() == raw)]  # fmt: skip
    manifest.write_bytes(sample_release(2)[0])
    with pytest.raises(TrustError):
        open_release(tmp_path / "releases", digest, made.bootstrap)


# Answers that nobody gave to this request


class Replay:
    """A server, or somebody on the way, that answers every request with the first good answer it saw."""

    def __init__(self) -> None:
        self.first: Response | None = None

    def __call__(self, request: Request, good: Response) -> Response:
        self.first = self.first or Response(good.status, good.headers, [b"".join(good.body)])
        return self.first


def test_a_replayed_answer_is_not_taken_for_a_new_request() -> None:
    """E3: a good answer of a moment ago, of the same model and shape, is refused: its id is another request's."""
    with world(SLOW, msgspec.structs.replace(CUT, device_s=0.0)) as (engine, cloud, _):
        eventually("the first look at the link", lambda: cloud.probes >= 2)
        first = engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
        replay = Replay()
        cloud.script = replay
        for number in range(3):
            given = INPUT + np.float32(number)
            answer = engine.infer("tiny", {"x": given}, deadline_s=PATIENCE_S)
            assert np.array_equal(answer.outputs["y"], (given + 1) * 2)
        assert replay.first is not None and not np.array_equal(first.outputs["y"], answer.outputs["y"])


def test_an_answer_in_another_releases_name_is_refused() -> None:
    """E3: the same row of another release, right in shape and id: the device finishes by itself."""

    def of_another_release(request: Request, good: Response) -> Response:
        body = b"".join(good.body).replace(DIGEST.encode(), b"b" * 64)
        return Response(good.status, good.headers, [body])

    with world(SLOW, msgspec.structs.replace(CUT, device_s=0.0)) as (engine, cloud, _):
        eventually("the first look at the link", lambda: cloud.probes >= 2)
        cloud.script, cloud.healthy = of_another_release, False
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
        assert answer.report.fallback and np.array_equal(answer.outputs["y"], (INPUT + 1) * 2)


# Energy exhaustion


NUMBERS = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan]))


@fuzzed(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["after_round_trip", "after_transfer", "after_timeout", "after_load_report", "after_compute"]
            ),
            NUMBERS,
        )
    )
)
def test_no_report_of_link_or_server_leads_beyond_the_signed_plan(said: list[tuple[str, float]]) -> None:
    """E10: whatever times and loads are told, the estimates stay within bounds, and the row that is taken is one of the
    signed plan, so that its dearest row is the most that a liar can cost."""
    table = Plan(model="tiny@1", device_class="pi4", rows=(LOCAL, CUT, REMOTE), link=LINK)
    meter = LinkEstimate.from_link(LINK)
    for what, value in said:
        if math.isnan(value) or (
            what in ("after_round_trip", "after_load_report", "after_compute") and math.isinf(value)
        ):
            continue  # remote.py lets no such number through, and a clock gives none
        sizes = {
            "after_transfer": (1_000, 1_000, value),
            "after_timeout": (1_000, value),
            "after_compute": (abs(value), 0.01, 0.0),
            "after_load_report": (value, 0.0),
        }
        meter = getattr(meter, what)(*sizes.get(what, (value,)))
    now = meter.conditions(remote_usable=True, now=0.0)
    assert SLOWEST_BYTES_PER_S * 0.99 <= now.link.up_bytes_per_s <= FASTEST_BYTES_PER_S * 1.01
    assert 1.0 <= now.server_load <= 1_000.0 and 0.05 <= now.device_slowdown <= 50.0
    assert plan.choose_row(table, now) in table.rows


def test_a_false_load_report_only_moves_requests_to_the_devices_own_row() -> None:
    """Energy exhaustion, and its opposite: who claims to be overloaded sends the device back to its own row, and never
    to one that is not in the plan."""
    table = Plan(
        model="tiny@1", device_class="pi4", rows=(LOCAL, msgspec.structs.replace(REMOTE, remote_s=0.01)), link=LINK
    )
    honest = Conditions(link=LINK)
    assert plan.choose_row(table, honest) == table.rows[1]
    meter = LinkEstimate.from_link(LINK)
    for _ in range(50):
        meter = meter.after_load_report(1e300, 0.0)
    assert plan.choose_row(table, meter.conditions(True, 0.0)) == LOCAL


def test_a_dead_cloud_is_probed_and_not_tried_by_each_request() -> None:
    """Energy exhaustion: a cloud that refuses everything is asked a few times and then probed, not asked each time."""
    with world(SLOW, msgspec.structs.replace(CUT, device_s=0.0)) as (engine, cloud, _):
        eventually("the first look at the link", lambda: cloud.probes >= 2)
        cloud.script, cloud.healthy = (lambda request, good: Response(500, {}, [])), False
        for _ in range(30):
            engine.infer("tiny", {"x": INPUT}, deadline_s=PATIENCE_S)
        assert engine.breaker.state == "open"
        assert len(cloud.asked) < 10


# Profile poisoning


def test_a_devices_own_claims_change_no_plan(tmp_path: Path) -> None:
    """A hostile device claims to be a thousand times as fast, and on an endless link: the plan of its class is the same
    to the last digit, for plans are made of profiles and of what the operator measured."""
    with ExitStack() as stack:
        authority = Authority(tmp_path / "keys")
        controller, delivery = assembled(tmp_path, authority, stack)
        part = controller.blobs.incoming_file()
        part.write_bytes(a_model())
        controller.push_model(part, "small", {})
        token, _ = controller.devices.claim(ClaimRequest(device="cam", device_class="raspberrypi4"))
        csr = certificate_request(load_or_make_key(tmp_path / "key"), "cam")
        controller.devices.enrol(token, csr, authority.sign_request)

        def planned() -> Any:
            return controller.plan("small", "raspberrypi4", "8mbit/40ms", PlanOptions())

        before = planned()
        fast = messages.TelemetryWindow(
            model="small@1", release="r", row="local", requests=10**6, device_s=1e-9, predicted_s=1e-9
        )
        telemetry = messages.Telemetry(
            session=1,
            sequence=1,
            emulated=False,
            up_bytes_per_s=1e14,
            rtt_s=0.0,
            remote_usable=True,
            models=(fast,) * 10,
        )
        birth = messages.Birth(1, 0.0, "1", "jetson-nano", False, "http://x")
        raw: list[tuple[messages.TopicKind, messages.Message]] = [("birth", birth), *[("telemetry", telemetry)] * 50]  # type: ignore[list-item]
        for kind, said in raw:
            delivery.on_message(messages.topic("cam", kind), messages.encode(said), None)
        while batch := delivery._received.take(500):
            controller.devices.ingest([(device, said) for device, said, _ in batch])
            if len(batch) < 500:
                break
        assert controller.devices.get("cam").telemetry["up_bytes_per_s"] == 1e14  # type: ignore[index]
        assert controller.devices.get("cam").device_class == "raspberrypi4", "a class is the claim's, not the birth's"
        assert planned() == before
