"""A real engine and a real offload server, and between them a wire that breaks, lies, stalls, crawls and flaps.

The claim of all of them: every accepted request is answered once, and rightly, or fails with a typed error; and nothing
is held for it afterwards.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgesplit.errors import DeadlineExceeded, LinkError
from edgesplit.link_emulation import ShapedLink
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip import protocol as oip
from edgesplit.oip.options import InferOptions
from edgesplit.plan import Link
from edgesplit_agent.offload.target import TargetTimeouts
from edgesplit_agent.serving.engine import Answer
from support.agent_engine import eventually
from support.fault_proxy import OUT, A, B, Fault, How, OffloadHarness, offload_world
from support.handmade_release import DEVICE_CLASS, DIGEST

LONG_S = 60.0
AT_ONCE = InferOptions(hedge="always")
"""The tail runs beside the cloud from the start: no test waits for patience to end."""
VARIES = 64
"""Bytes by which one exchange may be shorter than another: times are written in it."""
HOWS: tuple[How, ...] = ("close", "reset", "silence")


def ask(harness: OffloadHarness, wishes: InferOptions = AT_ONCE, deadline_s: float = LONG_S, **more: str) -> Answer:
    answer = harness.engine.infer("handmade", {"a": A, "b": B}, deadline_s=deadline_s, options=wishes, **more)
    assert np.array_equal(answer.outputs["out"], OUT)
    return answer


PATIENT = TargetTimeouts(overdue_s=1e6, doubt_s=30.0)
"""With these a cloud that is silent because a test wants it so is not taken for dead."""


def sizes(harness: OffloadHarness) -> tuple[int, int]:
    """Bytes of one request and its response on a connection of their own."""
    harness.anew()
    assert not ask(harness, InferOptions(hedge="never")).report.fallback
    return len(harness.wire.last.sent), len(harness.wire.last.received)


# Broken after each byte


@pytest.mark.parametrize("how", HOWS)
def test_a_connection_broken_after_any_byte_causes_a_fallback(tmp_path: Path, how: How) -> None:
    """E1, before, during and after each byte of a request and of its response: closed, reset, or silent from there."""
    with offload_world(tmp_path, "local", "cut-1", timeouts=PATIENT) as harness:
        up, down = sizes(harness)
        every = 1 if how == "close" or "EDGESPLIT_SOAK_S" in os.environ else 7
        faults = [Fault(up=place, how=how) for place in range(0, up + 1, every)]
        faults += [Fault(down=place, how=how) for place in range(0, down + 1, every)]
        wishes = AT_ONCE if how == "silence" else InferOptions(hedge="never")
        for number, fault in enumerate(faults):
            harness.anew(fault)
            report = ask(harness, wishes, request_id=f"{how}-{number}").report
            cut_off = (up if fault.down is None else down) - (fault.up or fault.down or 0)
            broken = cut_off > VARIES
            if broken:
                assert report.fallback and report.cause in ("link", "timeout", "server"), (fault, report)
        harness.settles()
        assert (
            not harness.engine.own_target.in_flight
            and len(harness.engine.idempotency._executions) <= harness.engine.idempotency._entries
        )
        harness.anew()
        assert not ask(harness, InferOptions(hedge="never")).report.fallback


@pytest.mark.parametrize("how", HOWS)
def test_a_broken_connection_without_a_fallback_is_a_typed_error(tmp_path: Path, how: How) -> None:
    """The plan has no local row: each position is an error that says so, in time, and the next request is answered."""
    with offload_world(tmp_path, "cut-1", timeouts=PATIENT) as harness:
        up, down = sizes(harness)
        places = random.Random(os.environ["EDGESPLIT_SEED"]).sample(
            range(up + down - VARIES), 4 if how == "silence" else 40
        )
        for place in places:
            harness.anew(Fault(up=place, how=how) if place < up else Fault(down=place - up, how=how))
            with pytest.raises(DeadlineExceeded if how == "silence" else LinkError):
                ask(harness, deadline_s=0.3 if how == "silence" else LONG_S)
        harness.settles()
        harness.anew()
        assert not ask(harness).report.fallback


def test_a_connection_broken_inside_tls_causes_a_fallback(tmp_path: Path) -> None:
    """Handshake, request and response as records: closed after a sample of all their bytes."""
    from edgesplit_controller.pki.authority import Authority

    authority = Authority(tmp_path / "authority")
    server = authority.issue_server("offload", ["127.0.0.1"]).server_context()
    device = authority.issue_client("camera-1").client_context()
    with offload_world(
        tmp_path / "release", "local", "cut-1", server_tls=server, client_tls=device, timeouts=PATIENT
    ) as harness:
        up, down = sizes(harness)
        for place in range(0, up + down - VARIES, 41):
            harness.anew(Fault(up=place) if place < up else Fault(down=place - up))
            assert ask(harness, InferOptions(hedge="never")).report.fallback
        harness.settles()
        harness.anew()
        assert not ask(harness, InferOptions(hedge="never")).report.fallback


def test_a_connection_that_breaks_on_its_second_request_is_replaced(tmp_path: Path) -> None:
    """A kept connection that ends under a request may be the idle one's fault: the request goes once more, on a new
    one, and is answered by the cloud."""
    with offload_world(tmp_path, "local", "cut-1") as harness:
        up, _ = sizes(harness)
        for place in (up, up + 1, up + up // 2):
            harness.anew(Fault(up=place))
            ask(harness, InferOptions(hedge="never"))
            harness.wire.fault = Fault()
            assert not ask(harness, InferOptions(hedge="never")).report.fallback


# Answers that are none


def _of(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def rewrite(response: bytes) -> bytes:
        assert old in response, (old, response)
        return response.replace(old, new)

    return rewrite


def _head(response: bytes) -> int:
    return response.index(b"\r\n\r\n") + 4


LIES: dict[str, Callable[[bytes], bytes]] = {
    "another release": _of(DIGEST[:8].encode(), b"cdcdcdcd"),
    "another row": _of(b".cut-1", b".cut-2"),
    "another class": _of(DEVICE_CLASS.encode(), DEVICE_CLASS.encode()[::-1]),
    "another id": _of(b"~", b"-"),
    "another shape": _of(b"[1,4]", b"[4,1]"),
    "another type": _of(b"FP32", b"INT8"),
    "an output twice": _of(b'"same"', b'"out" '),
    "one tensor's length too much": _of(b'"binary_data_size":16', b'"binary_data_size":17'),
    "a length beyond the body": lambda r: r.replace(b"ontent-length: ", b"ontent-length: 9"),
    "a length of nothing": lambda r: r.replace(b"ontent-length: ", b"ontent-length: x"),
    "a negative length": lambda r: r.replace(b"ontent-length: ", b"ontent-length: -"),
    "its JSON longer than it": lambda r: r.replace(b"eader-content-length: ", b"eader-content-length: 9"),
    "half of it": lambda r: r[: len(r) // 2],
    "its head alone": lambda r: r[: _head(r)],
    "its body alone": lambda r: r[_head(r) :],
    "nothing": lambda r: b"",
    "noise": lambda r: bytes(range(256)) * 8,
    "an endless header": lambda r: b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    "many headers": lambda r: b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 2_000 + b"\r\n",
    "chunks of a negative length": lambda r: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nabc",
    "another status": lambda r: r.replace(b" 200 ", b" 500 ", 1),
    "a redirection": lambda r: b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "only a promise": lambda r: b"HTTP/1.1 100 Continue\r\n\r\n",
}


@pytest.fixture(scope="module")
def between_lies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OffloadHarness]:
    with offload_world(tmp_path_factory.mktemp("lies"), "local", "cut-1", timeouts=PATIENT) as harness:
        yield harness


@pytest.mark.parametrize("name", LIES)
def test_a_false_response_is_refused(between_lies: OffloadHarness, name: str) -> None:
    """E3, byte for byte: whatever is made of a good response on its way, the device finishes by itself."""
    between_lies.anew(Fault(rewrite=LIES[name]))
    report = ask(between_lies, InferOptions(hedge="never")).report
    assert report.fallback and report.cause in ("server", "link"), report
    between_lies.settles()


def test_any_flipped_byte_of_a_response_is_detected_or_harmless(tmp_path: Path) -> None:
    """Head and JSON: a right answer, from somewhere. (Tensors' own bytes are what TLS is for.)"""
    with offload_world(tmp_path, "local", "cut-1", timeouts=PATIENT) as harness:
        sizes(harness)
        good = bytes(harness.wire.last.received)
        length = oip.header_length({"inference-header-content-length": _header(good)}) or 0
        dice = random.Random(os.environ["EDGESPLIT_SEED"])
        for _ in range(60):
            place, bit = dice.randrange(_head(good) + length), 1 << dice.randrange(8)
            harness.anew(Fault(rewrite=lambda r, at=place, bit=bit: r[:at] + bytes([r[at] ^ bit]) + r[at + 1 :]))  # type: ignore[misc]
            ask(harness, AT_ONCE)
        harness.settles()


def _header(response: bytes) -> str:
    lines = response[: _head(response)].decode().lower().split("\r\n")
    return next(line.partition(": ")[2] for line in lines if line.startswith("inference-header-content-length"))


@pytest.mark.parametrize("same_id", [True, False])
def test_a_replayed_answer_is_refused_under_its_own_id_too(tmp_path: Path, same_id: bool) -> None:
    """E3: the whole response of a moment ago, to a request of the same or of another id but other tensors."""
    with offload_world(tmp_path, "local", "cut-1") as harness:
        sizes(harness)
        harness.anew()
        ask(harness, InferOptions(hedge="never"), request_id="r-1")
        old = bytes(harness.wire.last.received)
        harness.anew(Fault(rewrite=lambda response: old))
        answer = harness.engine.infer(
            "handmade", {"a": A + 1, "b": B}, deadline_s=LONG_S, request_id="r-1" if same_id else "r-2"
        )
        assert np.array_equal(answer.outputs["out"], 2 * (A + 1 + B))
        assert answer.report.fallback and answer.report.cause == "server"


def test_a_late_response_is_dropped(tmp_path: Path) -> None:
    """E2: the wire keeps the response until the device has finished, then lets it go: neither this request nor the next
    one sees it."""
    with offload_world(tmp_path, "local", "cut-1", timeouts=PATIENT) as harness:
        sizes(harness)
        harness.anew(Fault(down=0, how="silence"))
        assert ask(harness, request_id="r-1").report.fallback
        late = harness.wire.last
        harness.wire.fault = Fault()
        late.let_go.set()
        answer = harness.engine.infer(
            "handmade", {"a": A + 1, "b": B}, deadline_s=LONG_S, options=InferOptions(hedge="never")
        )
        assert np.array_equal(answer.outputs["out"], 2 * (A + 1 + B)) and not answer.report.fallback
        assert harness.wire.last is not late
        assert harness.engine.hedge_budget.counts["cancelled"] == 1


# Links


SLOW = Link(up_bytes_per_s=8_000, down_bytes_per_s=8_000, rtt_s=0.02)
GOOD = Link(up_bytes_per_s=1e7, down_bytes_per_s=1e7, rtt_s=0.002)
DEAD = Link(up_bytes_per_s=0.0, down_bytes_per_s=0.0, rtt_s=0.002)


@contextmanager
def shaped_world(folder: Path, link: Link, *rows: str) -> Iterator[tuple[OffloadHarness, ShapedLink]]:
    made: list[ShapedLink] = []

    @contextmanager
    def between(port: int) -> Iterator[int]:
        with ShapedLink("127.0.0.1", port, link) as shaped:
            made.append(shaped)
            yield shaped.port

    with offload_world(folder, *rows, between=between, idle_probe_s=0.2) as harness:
        yield harness, made[0]


def test_at_64_kbit_per_second_every_request_is_answered(tmp_path: Path) -> None:
    """Slow is not dead: many at once on a link that carries a few in a second, each answered once and rightly."""
    with shaped_world(tmp_path, SLOW, "local", "cut-1") as (harness, _):
        answers = _many(harness, workers=4, each=5)
        assert len(answers) == 20
        harness.settles()


@pytest.mark.parametrize("rows", [("local", "cut-1"), ("cut-1",)])
def test_a_link_at_0_opens_the_breaker_and_its_return_closes_it(tmp_path: Path, rows: tuple[str, ...]) -> None:
    """Nothing is refused and nothing ends: what hangs opens it. With a fallback all are answered meanwhile, without one
    all are told; when the link is back, so is the cloud."""
    with shaped_world(tmp_path, GOOD, *rows) as (harness, link):
        ask(harness)
        link.set_link(DEAD)
        if "local" in rows:
            while harness.engine.breaker.is_allowing:
                ask(harness, InferOptions())
            assert ask(harness, InferOptions()).report.row == "local"
        else:
            with pytest.raises(DeadlineExceeded):
                ask(harness, deadline_s=1.5)
            eventually("the breaker opens", lambda: not harness.engine.breaker.is_allowing)
        link.set_link(GOOD)
        eventually("the cloud is tried again", lambda: harness.engine.breaker.is_allowing)
        eventually("it is trusted again", lambda: _asked(harness) and harness.engine.breaker.state == "closed")


def _asked(harness: OffloadHarness) -> bool:
    """One more request; without a fallback it may be told that the cloud is not there."""
    try:
        ask(harness, InferOptions(hedge="never"))
    except LinkError:
        return False
    return True


def test_a_flapping_link_loses_and_duplicates_no_answer(tmp_path: Path) -> None:
    """Cut and restored again and again under requests: each id one answer, and afterwards the cloud again."""
    with shaped_world(tmp_path, GOOD, "local", "cut-1") as (harness, link):
        flaps, stop = [0], threading.Event()

        def flap() -> None:
            while not stop.wait(0.1):
                link.cut()
                stop.wait(0.1)
                link.restore()
                flaps[0] += 1

        flapping = threading.Thread(target=flap, daemon=True)
        flapping.start()
        answered = 0
        while flaps[0] < 6:
            answered += len(_many(harness, workers=4, each=5, name=f"flap-{flaps[0]}-{answered}"))
        stop.set()
        flapping.join(20)
        assert answered >= 20
        eventually("the cloud is trusted again", lambda: _asked(harness) and harness.engine.breaker.state == "closed")
        harness.settles()


def _many(harness: OffloadHarness, *, workers: int, each: int, name: str = "r") -> dict[str, Answer]:
    """Answers by id; every id has exactly one, and a retry of it is given the same."""
    answers: dict[str, Answer] = {}
    wrong: list[str] = []
    lock = threading.Lock()

    def work(worker: int) -> None:
        for number in range(each):
            one = f"{name}-{worker}-{number}"
            try:
                answer = ask(harness, InferOptions(), request_id=one)
                again = ask(harness, InferOptions(), request_id=one)
            except Exception as error:
                with lock:
                    wrong.append(f"{one}: {error!r}")
                continue
            with lock:
                if one in answers or again is not answer:
                    wrong.append(f"{one}: answered twice")
                answers[one] = answer

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(answers) == workers * each
    return answers


def test_an_unreachable_server_before_the_first_request_opens_the_breaker(tmp_path: Path) -> None:
    """E1, before: no server, no port, a port that accepts and never speaks: the device answers, the breaker opens."""
    with offload_world(tmp_path, "local", "cut-1") as harness, socket.create_server(("127.0.0.1", 0)) as mute:
        for port in (_free(), mute.getsockname()[1]):
            harness.engine.own_target._remote = OffloadClient(f"http://127.0.0.1:{port}")
            harness.anew()
            while harness.engine.breaker.is_allowing:
                ask(harness, InferOptions())
            assert ask(harness).report.row == "local"


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
