"""The offload server beyond what Triton's client sees: rows, codings, admission, loading, TLS, the process."""

from __future__ import annotations

import gzip
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard

from edgesplit.client.client import Connection, Reply
from edgesplit.errors import InferenceFailed, LinkError, MalformedMessage, TrustError
from edgesplit.http1.content_coding import UnknownCoding, decode_body
from edgesplit.limits import LIMITS
from edgesplit.oip import protocol as oip
from edgesplit.release import boundary_codecs
from edgesplit_offload.models import repository
from edgesplit_offload.models.slice_cache import SliceCache
from edgesplit_offload.server import OffloadServer
from support.agent_engine import eventually
from support.gated_offload_server import Gate, ask, error, outputs, post, soon
from support.handmade_release import COARSE, CODEC, CUT, DIGEST, LATER, LOCAL, MID, REMOTE, HandmadeRelease

PATIENCE_S = 20.0


@pytest.fixture
def release(tmp_path: Path) -> HandmadeRelease:
    return HandmadeRelease(tmp_path)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def serving(release: HandmadeRelease) -> Iterator[Callable[..., OffloadServer]]:
    """Starts servers of the handmade release, and stops them."""
    running: list[OffloadServer] = []

    def start(**options: object) -> OffloadServer:
        server = OffloadServer(Path("unused"), b"", **{"open_release": release.open, **options})  # type: ignore[arg-type]
        server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop(1.0)


def test_each_row_is_a_model_of_its_own(serving: Callable[..., OffloadServer], release: HandmadeRelease) -> None:
    """All-remote and cut give the same outputs from their own inputs; the slice they share is loaded once."""
    server = serving()
    assert outputs(ask(server, REMOTE, a=MID, b=MID))["out"] == outputs(ask(server, CUT, mid=2 * MID))["out"]
    assert release.asked == {"s01-head": 1, "s02-tail": 1}


def test_a_local_row_or_an_unknown_codec_is_not_run(serving: Callable[..., OffloadServer]) -> None:
    """Without a remote half: not found. A codec that this version does not have: a server error, not the client's."""
    server = serving()
    assert error(ask(server, LOCAL)) == (404, "row 'local' has no remote half")
    status, text = error(ask(server, LATER))
    assert (status, "int2" in text) == (500, True)


@pytest.mark.parametrize(("codec", "row"), [("int8", CODEC), *COARSE.items()])
def test_a_rows_codec_is_undone_before_its_slices_run(
    serving: Callable[..., OffloadServer], codec: str, row: str
) -> None:
    """Its form with its companions gives the answer within a step; the same row takes the tensor raw; nothing else."""
    server = serving()
    sent = boundary_codecs.encode("mid", MID, codec)
    step = 8 / boundary_codecs.STEPS[codec]
    assert outputs(ask(server, row, **sent))["out"] == pytest.approx([2, 4, 6, 8], abs=step)
    assert outputs(ask(server, row, mid=MID))["out"] == [2, 4, 6, 8]
    wrong_size = {**sent, "mid": sent["mid"].reshape(-1)[:1]}
    for spoilt in ({"mid": sent["mid"]}, {**sent, "mid": MID}, {"mid": MID.astype("float16")}, wrong_size):
        assert error(ask(server, row, **spoilt))[0] == 400
    assert error(ask(server, CUT, **sent))[0] == 400


def test_a_rows_metadata_names_what_travels(serving: Callable[..., OffloadServer]) -> None:
    """A foreign client sees the eight bits and their companions."""
    with closing(Connection("127.0.0.1", serving().port)) as connection:
        reply = connection.exchange("GET", f"/v2/models/{CODEC}", deadline=soon(), headers={}, body=[])
    told = msgspec.json.decode(reply.body)["inputs"]
    assert [(one["name"], one["datatype"]) for one in told] == [
        ("mid", "UINT8"), ("mid:scale", "FP32"), ("mid:zero_point", "UINT8")
    ]  # fmt: skip


def test_responses_report_seconds_and_load(serving: Callable[..., OffloadServer]) -> None:
    """On every response, errors included."""
    server = serving()
    for reply in (ask(server), ask(server, "nothing"), post(server, "/v2/edgesplit/probe", bytes(10_000))):
        assert 0 <= float(reply.headers["edgesplit-seconds"]) < PATIENCE_S
        assert float(reply.headers["edgesplit-load"]) >= 1
    assert len(reply.body) == 0


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate", "ZSTD", "identity"])
def test_bodies_may_be_compressed(serving: Callable[..., OffloadServer], coding: str) -> None:
    """The header length is that of the JSON before compression."""
    assert outputs(ask(serving(), coding=coding.lower()))["out"] == [2, 4, 6, 8]
    assert decode_body(zstandard.ZstdCompressor().compress(b"x"), "ZSTD") == b"x"


def test_an_unknown_coding_is_415(serving: Callable[..., OffloadServer]) -> None:
    """And the answer says what would do."""
    reply = ask(serving(), coding="br")
    assert reply.status == 415
    assert "zstd" in reply.headers["accept-encoding"]


def bombs() -> dict[str, tuple[str, bytes]]:
    zeros = bytes(3_000_000)
    streamed = zstandard.ZstdCompressor().compressobj()
    return {
        "gzip": ("gzip", gzip.compress(zeros)),
        "deflate": ("deflate", zlib.compress(zeros)),
        "zstd of known size": ("zstd", zstandard.ZstdCompressor().compress(zeros)),
        "zstd of unknown size": ("zstd", streamed.compress(zeros) + streamed.flush()),
    }


@pytest.mark.parametrize("name", bombs())
def test_decompression_bombs_are_bounded(name: str) -> None:
    """A body may grow to what an uncompressed one may have, and no further."""
    coding, body = bombs()[name]
    assert len(decode_body(body, coding)) == 3_000_000
    with pytest.raises(MalformedMessage, match="more than 2999999"):
        decode_body(body, coding, 2_999_999)


@pytest.mark.parametrize("name", bombs())
def test_compressed_bodies_cut_short_or_damaged_are_refused(name: str) -> None:
    """Every kind of damage is MalformedMessage; a stream of unknown size may be short, and its content then is."""
    coding, body = bombs()[name]
    for damaged in (b"", body[:3], body[: len(body) // 2], body[:-1], b"\xff" + body, b"nonsense" * 10):
        with suppress(MalformedMessage):
            assert len(decode_body(damaged, coding)) < 3_000_000 or "unknown" in name
    with pytest.raises(UnknownCoding):
        decode_body(body, "br")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "GET", 404), ("/v3", "GET", 404), ("/v2/models", "GET", 404), ("/v2/health/live", "POST", 405),
     (f"/v2/models/{CUT}/infer", "GET", 405), (f"/v2/models/{CUT}", "POST", 405), ("/v2/edgesplit/probe", "GET", 405),
     (f"/v2/models/{CUT}/versions/2/infer", "POST", 404), ("/v2/models/../../etc/passwd", "GET", 404),
     (f"/v2/models/{'AB' * 32}.x.y", "GET", 404), ("/v2/models/..%2f..%2fx.y.z", "GET", 404), ("/v2/", "GET", 200)],
)  # fmt: skip
def test_paths_and_methods(serving: Callable[..., OffloadServer], path: str, method: str, status: int) -> None:
    """What is not there is 404, what is there but not for this method 405; no path leads to a file."""
    with closing(http.client.HTTPConnection("127.0.0.1", serving().port, timeout=PATIENCE_S)) as connection:
        connection.request(method, path)
        assert connection.getresponse().status == status


def test_a_model_that_fails_is_an_error_and_the_server_lives(serving: Callable[..., OffloadServer], gate: Gate) -> None:
    """InferenceFailed is told in its words; anything else only by its kind."""
    server = serving(runtime=gate)
    gate.fail = InferenceFailed("slice s02-tail: NaN")
    assert error(ask(server)) == (500, "slice s02-tail: NaN")
    gate.fail = ZeroDivisionError("secret")
    assert error(ask(server)) == (500, "internal error: ZeroDivisionError")
    gate.fail = None
    assert outputs(ask(server))["out"] == [2, 4, 6, 8]


def test_a_release_that_is_not_trusted_is_not_run(serving: Callable[..., OffloadServer]) -> None:
    """And is asked for anew the next time: it may have been repaired."""
    asked = []

    def distrust(digest: str) -> HandmadeRelease:
        asked.append(digest)
        raise TrustError("signed by nobody")

    server = serving(open_release=distrust)
    assert [error(ask(server)) for _ in range(2)] == [(500, "signed by nobody")] * 2
    assert asked == [DIGEST] * 2


def test_full_queue_is_503_with_retry_after(serving: Callable[..., OffloadServer], gate: Gate) -> None:
    """One runs, one waits, the third is told to come back; when there is room again, all is well."""
    server = serving(runtime=gate, at_once=1, waiting=1)
    gate.leave.clear()
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(server))) for _ in range(2)]
    threads[0].start()
    assert gate.begun.acquire(timeout=PATIENCE_S)
    threads[1].start()
    while not server.scheduler.waiting:
        threading.Event().wait(0.002)
    refused = ask(server)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    gate.leave.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [reply.status for reply in replies] == [200, 200]
    assert max(float(reply.headers["edgesplit-load"]) for reply in replies) > 1


def test_a_request_whose_deadline_passes_in_the_queue_is_not_run(
    serving: Callable[..., OffloadServer], gate: Gate
) -> None:
    """The request's own `timeout` bounds its wait: 504, and the model does not run for it."""
    server = serving(runtime=gate, at_once=1)
    gate.leave.clear()
    first = threading.Thread(target=ask, args=(server,))
    first.start()
    assert gate.begun.acquire(timeout=PATIENCE_S)
    assert error(ask(server, timeout_us=30_000))[0] == 504
    gate.leave.set()
    first.join(PATIENCE_S)
    assert gate.runs == 1


def test_a_queued_request_whose_client_has_gone_is_not_run(serving: Callable[..., OffloadServer], gate: Gate) -> None:
    """It gives up its place in the queue."""
    server = serving(runtime=gate, at_once=1)
    gate.leave.clear()
    first = threading.Thread(target=ask, args=(server,))
    first.start()
    assert gate.begun.acquire(timeout=PATIENCE_S)
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}))
    body = b"".join(buffers)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        lengths = [f"content-length: {len(body)}", f"{oip.HEADER_LENGTH}: {length}"]
        head = "\r\n".join([f"POST /v2/models/{CUT}/infer HTTP/1.1", *lengths, "", ""])
        leaving.sendall(head.encode() + body)
        while not server.scheduler.waiting:
            threading.Event().wait(0.002)
    while server.scheduler.waiting:
        threading.Event().wait(0.002)
    gate.leave.set()
    first.join(PATIENCE_S)
    assert gate.runs == 1


def test_bytes_of_concurrent_bodies_are_bounded(
    serving: Callable[..., OffloadServer], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one server together: beyond that 503 with Retry-After before a byte of it is read; then there is room."""
    monkeypatch.setattr("edgesplit.http1.admission.LIMITS", replace(LIMITS, http_bodies_bytes=10_000))
    server = serving(runtime=gate)
    gate.leave.clear()
    first = threading.Thread(target=ask, args=(server,))
    first.start()
    assert gate.begun.acquire(timeout=PATIENCE_S)
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)) as connection:
        connection.putrequest("POST", "/v2/edgesplit/probe")
        connection.putheader("content-length", "10000")
        connection.endheaders()
        refused = connection.getresponse()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    gate.leave.set()
    first.join(PATIENCE_S)
    eventually("there is room", lambda: post(server, "/v2/edgesplit/probe", bytes(10_000)).status == 200)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_body_may_not_grow_beyond_what_its_model_takes(serving: Callable[..., OffloadServer], coding: str) -> None:
    """A small body with far more inside than four numbers, however they are written: refused, not unpacked."""
    pack = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress}[coding]
    packed = pack(bytes(3_000_000))
    reply = post(serving(), f"/v2/models/{CUT}/infer", packed, {"content-encoding": coding})
    assert error(reply) == (400, "compressed body: more than 1048704 bytes when decoded")


def test_concurrent_first_requests_load_each_slice_once(serving: Callable[..., OffloadServer], gate: Gate) -> None:
    """First use by many threads opens the release once and loads each slice once."""
    server = serving(runtime=gate, at_once=4, waiting=100)
    threads = [threading.Thread(target=ask, args=(server, model), kwargs=inputs)
               for model, inputs in [(CUT, {"mid": MID}), (REMOTE, {"a": MID, "b": MID})] * 6]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(gate.loads) == ["s01-head", "s02-tail"]


def test_the_least_recently_used_release_is_closed_when_there_are_too_many(
    release: HandmadeRelease, gate: Gate
) -> None:
    """It is opened again on demand."""
    opened: list[str] = []
    own = repository.ModelRepository(
        lambda digest: (opened.append(digest[:2]), release)[1], gate, SliceCache(), most_releases=2
    )
    for pair in ("aa", "bb", "aa", "cc", "aa", "bb"):
        own.model(oip.remote_name(pair * 32, "raspberrypi3b+", "cut-1"))
    assert opened == ["aa", "bb", "cc", "bb"]
    (plan,) = release.manifest.plans.values()
    assert len(own.models()) == 2 * sum(not row.is_local for row in plan.rows)


def test_a_missing_release_folder_is_404(tmp_path: Path) -> None:
    """By the real opener."""
    server = OffloadServer(tmp_path, b"{}")
    server.start()
    assert error(ask(server))[0] == 404
    server.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> object:
    from edgesplit_controller.pki.authority import Authority

    return Authority(tmp_path_factory.mktemp("authority"))


def test_mutual_tls_admits_only_certificates_of_our_authority(
    serving: Callable[..., OffloadServer], authority: object
) -> None:
    """A device with our certificate is served over TLS; one without any is not, and the server lives on."""
    ours = authority.issue_server("offload", ["127.0.0.1", "localhost"])  # type: ignore[attr-defined]
    device = authority.issue_client("camera-1")  # type: ignore[attr-defined]
    server = serving(tls=ours.server_context())
    assert server.url.startswith("https://")
    stranger = ssl.create_default_context(cafile=str(device.ca_file))
    with closing(Connection("127.0.0.1", server.port, stranger)) as connection, pytest.raises(LinkError):
        connection.exchange("GET", "/v2", deadline=soon())
    with closing(Connection("127.0.0.1", server.port)) as connection, pytest.raises((LinkError, MalformedMessage)):
        connection.exchange("GET", "/v2", deadline=soon())
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}))
    with closing(Connection("127.0.0.1", server.port, device.client_context())) as connection:
        for _ in range(3):
            reply = connection.exchange(
                "POST",
                f"/v2/models/{CUT}/infer",
                deadline=soon(),
                headers={oip.HEADER_LENGTH: str(length)},
                body=buffers,
            )
            assert outputs(reply)["out"] == [2, 4, 6, 8]


def test_only_the_operator_may_load_unload_and_configure(
    serving: Callable[..., OffloadServer], authority: object
) -> None:
    """Over mutual TLS a device may look, and gets 403 for load, unload and settings; the operator's certificate may."""
    ours = authority.issue_server("offload", ["127.0.0.1", "localhost"])  # type: ignore[attr-defined]
    server = serving(tls=ours.server_context())
    changes = [f"/v2/repository/models/{CUT}/load", f"/v2/repository/models/{CUT}/unload", "/v2/logging"]

    def statuses(name: str, method: str, paths: list[str]) -> list[int]:
        context = authority.issue_client(name).client_context()  # type: ignore[attr-defined]
        with closing(Connection("127.0.0.1", server.port, context)) as connection:
            return [connection.exchange(method, path, deadline=soon()).status for path in paths]

    assert statuses("camera-1", "POST", [*changes, "/v2/trace/setting"]) == [403] * 4
    assert statuses("camera-1", "GET", [f"/v2/models/{CUT}/stats", "/v2/logging"]) == [200] * 2
    assert statuses("operator", "POST", changes) == [200] * 3


def test_a_client_beyond_its_fair_share_gets_429(
    serving: Callable[..., OffloadServer], gate: Gate, authority: object
) -> None:
    """By its certificate's name, while another waits; with Retry-After."""
    ours = authority.issue_server("offload", ["127.0.0.1", "localhost"])  # type: ignore[attr-defined]
    server = serving(tls=ours.server_context(), runtime=gate, at_once=1, waiting=3)
    contexts = {name: authority.issue_client(name).client_context() for name in ("greedy", "modest")}  # type: ignore[attr-defined]
    buffers, length = oip.encode_request(oip.InferRequest({"mid": MID}))

    def asked(name: str) -> Reply:
        with closing(Connection("127.0.0.1", server.port, contexts[name])) as connection:
            headers = {oip.HEADER_LENGTH: str(length)}
            return connection.exchange(
                "POST", f"/v2/models/{CUT}/infer", deadline=soon(), headers=headers, body=buffers
            )

    gate.leave.clear()
    threads = []
    for place, name in enumerate(("greedy", "greedy", "modest")):
        threads.append(threading.Thread(target=asked, args=(name,)))
        threads[-1].start()
        while (server.scheduler.running, server.scheduler.waiting) != (1, place):
            threading.Event().wait(0.002)
    refused = asked("greedy")
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    gate.leave.set()
    for thread in threads:
        thread.join(PATIENCE_S)


class Process:
    """`python -m edgesplit_offload.main` with these arguments."""

    def __init__(self, *arguments: object) -> None:
        words = [sys.executable, "-m", "edgesplit_offload.main", *map(str, arguments)]
        self.child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.child.stdout
        return self.child.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Exit code and what it said to stderr."""
        _, told = self.child.communicate(timeout=PATIENCE_S)
        return self.child.returncode, told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_says_where_it_listens_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    """One line; it answers; told to stop, it ends with 0."""
    (tmp_path / "root.json").write_text("{}")
    process = Process("--releases", tmp_path, "--root", tmp_path / "root.json", "--port", 0, "--die-with-parent")
    prefix, _, url = process.line().partition("http://127.0.0.1:")
    assert prefix == "offload: listening on "
    with closing(Connection("127.0.0.1", int(url))) as connection:
        assert connection.exchange("GET", "/v2/health/live", deadline=soon()).status == 200
    process.child.send_signal(number)
    assert process.end()[0] == 0


def test_a_failing_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A taken port, a missing root, half of the TLS files, plain text beyond loopback: exit code 2 and one line."""
    root = tmp_path / "root.json"
    root.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = (
            (["--root", root, "--port", port], f"port {port}: Address already in use"),
            (["--root", tmp_path / "none", "--port", 0], "cannot read"),
            (["--root", root, "--cert", root], "go together"),
            (["--root", root, "--host", "0.0.0.0"], "only loopback"),
            (["--root", root, "--cert", root, "--key", root, "--ca", root], str(root)),
        )
        started = [(Process("--releases", tmp_path, *arguments), words) for arguments, words in cases]
        for process, words in started:
            code, told = process.end()
            assert (code, told.count("\n")) == (2, 1), told
            assert told.startswith("offload: ")
            assert words in told


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    """--die-with-parent: SIGKILL of the parent leaves nothing behind."""
    (tmp_path / "root.json").write_text("{}")
    arguments = ["--releases", str(tmp_path), "--root", str(tmp_path / "root.json"), "--port", "0", "--die-with-parent"]
    script = (
        "import subprocess, sys\n"
        f"words = [sys.executable, '-m', 'edgesplit_offload.main', *{arguments!r}]\n"
        "child = subprocess.Popen(words, stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode().strip(), child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline().split()[-1])
    descriptor = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    import select

    ended, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    assert ended
