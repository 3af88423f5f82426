"""A gateway's server and the next tier: two real servers of one release, and a proxy between them for faults."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from edgesplit.client.client import Connection
from edgesplit.http1.server import error_response
from edgesplit.offload_client.pool import HOP_CAUSE_HEADER, HOP_HEADER, HOP_SERVER_HEADER
from edgesplit.oip import protocol as oip
from edgesplit.release.manifest import TensorSpec
from edgesplit_offload.inference.gateway_relay import (
    FALLBACK_FACTOR,
    MARGIN_S,
    MIN_TIMEOUT_S,
    SMOOTHING,
    USUAL_FACTOR,
    Durations,
    timeout_s,
)
from support.agent_engine import eventually
from support.two_tier_servers import (
    HEAD,
    OUT,
    PATIENCE_S,
    SPOILT,
    TAIL,
    A,
    B,
    GatewayHarness,
    Tier,
    model,
    outputs,
    request_for,
    sent,
)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[GatewayHarness]:
    made = GatewayHarness(tmp_path)
    yield made
    made.stop()


def test_each_tier_runs_its_own_slices(harness: GatewayHarness) -> None:
    """The gateway asks for what is left, by a name of its own, and joins the answers; it says how long that took."""
    reply = harness.ask("split")
    assert outputs(reply) == {"out": OUT, "same": (A + B).ravel().tolist()}
    assert (dict(harness.here.asked), dict(harness.there.asked)) == ({HEAD: 1}, {TAIL: 1})
    assert [one.path for one in harness.proxy.requests] == [f"/v2/models/{model('split~1')}/infer"]
    hop_s, server_s = float(reply.headers[HOP_HEADER]), float(reply.headers[HOP_SERVER_HEADER])
    assert 0 < server_s <= hop_s <= float(reply.headers["edgesplit-seconds"])


def test_a_row_may_end_at_the_gateway_or_pass_through_it(harness: GatewayHarness) -> None:
    """Nothing is asked of the cloud for the one; for the other the gateway loads nothing."""
    assert outputs(harness.ask("edge"))["out"] == OUT
    assert not harness.proxy.requests
    harness.here.asked.clear()
    assert outputs(harness.ask("cloud"))["out"] == OUT
    assert not harness.here.asked and harness.there.asked == {HEAD: 1, TAIL: 1}


def test_a_tensor_is_encoded_anew_at_each_link(harness: GatewayHarness) -> None:
    """Raw floats from the device; eight bits, compressed, from the gateway to the cloud."""
    got = outputs(harness.ask("lossy"))["out"]
    assert sent(harness.proxy.requests[0])["mid"].dtype == np.uint8
    assert np.allclose(got, OUT, rtol=0.02)


@pytest.mark.parametrize("what", SPOILT)
def test_an_invalid_response_of_the_cloud_makes_the_gateway_finish_itself(harness: GatewayHarness, what: str) -> None:
    """Wrong release, cut, id, tensor or shape, an error, garbage: the gateway runs the rest and reports the cause."""
    script, cause = SPOILT[what]
    harness.proxy.script = script
    assert harness.cause() == cause
    assert harness.here.asked == {HEAD: 1, TAIL: 1}


def test_the_breaker_opens_while_the_cloud_is_gone_and_closes_when_it_is_back(harness: GatewayHarness) -> None:
    """After one refused connection no request tries the cloud; a ping finds it again."""
    assert harness.cause() == ""
    harness.proxy.go()
    eventually("it is noticed", lambda: harness.cause() in ("refused", "link"))
    eventually("it is left alone", lambda: harness.cause() == "open")
    harness.proxy.come_back()
    eventually("its help again", lambda: harness.cause() == "", PATIENCE_S)


def test_the_gateway_finishes_before_the_deadline_when_the_cloud_is_late(harness: GatewayHarness) -> None:
    """It waits half of the time that is left while nothing is known, then cancels its request: the connection
    closes."""
    harness.proxy.script = harness.proxy.hold
    reply = harness.ask("split", timeout_s=6.0)
    assert outputs(reply)["out"] == OUT and reply.headers[HOP_CAUSE_HEADER] == "timeout"
    eventually("the cloud's side sees that nobody waits", harness.proxy.requests[0].is_closed)


def test_a_request_to_the_cloud_is_cancelled_when_its_device_disconnects(harness: GatewayHarness) -> None:
    """The device's connection closes: the gateway closes the one to the cloud."""
    harness.proxy.script = harness.proxy.hold
    body, headers = request_for(PATIENCE_S)
    lines = [f"POST /v2/models/{model('split')}/infer HTTP/1.1", "host: gw", f"content-length: {len(body)}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""])
    with socket.create_connection(("127.0.0.1", harness.gateway.port)) as device:
        device.sendall(head.encode() + body)
        assert harness.proxy.held.wait(PATIENCE_S)
    eventually("the cloud's side sees that nobody waits", harness.proxy.requests[0].is_closed)


def test_a_request_is_relayed_unchanged_where_the_gateway_lacks_its_slices(harness: GatewayHarness) -> None:
    """For a release that the gateway does not have yet, for a plan without a gateway, and for spoilt slices, the cloud
    gets the device's own request, byte for byte."""
    harness.here.is_here = False
    of_trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    reply = harness.ask("split", zstd=True, traceparent=of_trace)
    assert outputs(reply)["out"] == OUT
    assert bytes(harness.proxy.requests[0].body) == request_for(PATIENCE_S, zstd=True)[0]
    assert harness.proxy.requests[0].path == f"/v2/models/{model('split')}/infer"
    assert harness.proxy.requests[0].headers["traceparent"] == of_trace
    assert 0 < float(reply.headers[HOP_SERVER_HEADER]) <= float(reply.headers[HOP_HEADER])

    harness.here.is_here, harness.here.spoilt = True, {HEAD}
    assert outputs(harness.ask("split"))["out"] == OUT
    assert harness.proxy.requests[1].path == f"/v2/models/{model('split')}/infer" and not harness.here.asked


def test_a_plan_without_a_gateway_runs_in_the_cloud_alone(tmp_path: Path) -> None:
    """Its remote slices belong to the cloud by the plan, even if the gateway has them too."""
    harness = GatewayHarness(tmp_path)
    harness.here = Tier(tmp_path / "two", tiers=())
    harness.gateway.stop(1.0)
    harness.gateway = harness.start_gateway()
    try:
        assert outputs(harness.ask("edge"))["out"] == OUT
        assert not harness.here.asked and [one.path for one in harness.proxy.requests] == [
            f"/v2/models/{model('edge')}/infer"
        ]
    finally:
        harness.stop()


def test_errors_of_a_relayed_request_reach_the_device(harness: GatewayHarness) -> None:
    """An unknown row is 404 from the cloud; with the cloud gone it is 502, or 503 once the breaker is open."""
    harness.here.is_here = False
    assert harness.ask("nothing").status == 404
    harness.proxy.go()
    eventually("502, or 503 once it is left alone", lambda: harness.ask("split").status in (502, 503))


def test_the_error_names_both_causes_where_neither_cloud_nor_gateway_can_finish(harness: GatewayHarness) -> None:
    """The gateway's own part runs; the rest can run nowhere."""
    harness.here.spoilt = {TAIL}
    harness.proxy.script = lambda request, good: error_response(500, "broken")
    reply = harness.ask("split")
    assert reply.status == 502
    assert all(word in bytes(reply.body).decode() for word in ("broken", TAIL))


@pytest.mark.parametrize(
    ("left_s", "known", "expected"),
    [
        (2.0, Durations(), 1.0),
        (2.0, Durations(fallback_s=0.5), 2.0 - 0.5 * FALLBACK_FACTOR - MARGIN_S),
        (0.1, Durations(fallback_s=0.5), 0.0),
        (-1.0, Durations(fallback_s=0.1), 0.0),
        (20.0, Durations(remote_s=0.01), MIN_TIMEOUT_S),
        (20.0, Durations(remote_s=1.0), USUAL_FACTOR),
        (2.0, Durations(fallback_s=0.5, remote_s=1.0), 2.0 - 0.5 * FALLBACK_FACTOR - MARGIN_S),
        (20.0, Durations().updated(there_s=1.0).updated(there_s=2.0), USUAL_FACTOR * (1.0 + SMOOTHING)),
        (20.0, Durations().updated(there_s=1.0).updated(alone_s=9.0), USUAL_FACTOR),
    ],
)
def test_the_clouds_timeout_leaves_time_to_finish_on_the_gateway(
    left_s: float, known: Durations, expected: float
) -> None:
    """By what the remote half took here lately (half of the time left while that is unknown), and not more than a few
    times what the cloud usually takes."""
    assert timeout_s(left_s, known) == pytest.approx(expected)


def test_tensors_between_tiers_are_checked_against_the_manifest(harness: GatewayHarness) -> None:
    """A tensor of another shape is refused by the cloud."""
    spec = TensorSpec("mid", "FP32", (1, 4))
    request = oip.InferRequest({"mid": np.zeros((2, 4), np.float32)})
    body, length = oip.encode_request(request)
    with closing(Connection("127.0.0.1", harness.cloud.port)) as connection:
        reply = connection.exchange(
            "POST", f"/v2/models/{model('split~1')}/infer", deadline=monotonic() + PATIENCE_S,
            headers={oip.HEADER_LENGTH: str(length)}, body=[b"".join(body)],
        )  # fmt: skip
    assert reply.status == 400 and str(list(spec.shape)) in bytes(reply.body).decode()
