"""The agent's folder, its local endpoint, its telemetry and its command line."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgesplit import Client
from edgesplit.errors import DeadlineExceeded, NotFound, UsageError
from edgesplit.http1.server import Request, Server
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import Report
from edgesplit.plan import Conditions, Link
from edgesplit_agent.main import main
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.serving.http_endpoint import Endpoint, is_local
from edgesplit_agent.state.data_folder import AgentAddress, DataFolder, Identity
from edgesplit_agent.state.slots import Current, SafeMode, Slots
from edgesplit_agent.telemetry.windows import TelemetryWindows, quantile
from support.agent_engine import EXPECTED, INPUT, LOCAL, active, record

ME = Identity(
    device="cam", device_class="pi4", broker="h:1", offload="https://h:2", controller="https://h:3", tuf_root="{}"
)


def test_one_agent_per_folder(tmp_path: Path) -> None:
    """A second start on the same folder fails in one line, and does not disturb the first."""
    first = DataFolder(tmp_path / "data")
    first.acquire()
    with pytest.raises(UsageError, match="another edgesplit-agent"):
        DataFolder(tmp_path / "data").acquire()
    first.release()
    DataFolder(tmp_path / "data").acquire()


def test_session_numbers_only_grow(tmp_path: Path) -> None:
    """They are on disk before they are used: also across restarts."""
    folder = DataFolder(tmp_path)
    assert [folder.next_session(1000.5), folder.next_session(1000.9), folder.next_session(7.0)] == [1000, 1001, 1002]
    assert DataFolder(tmp_path).next_session(0.0) == 1003  # A12: a clock without a battery does not bring it back
    (tmp_path / "session.json").unlink()
    assert folder.next_session(2000.0) == 2000


def test_current_statement_is_stored_byte_for_byte(tmp_path: Path) -> None:
    """current.json holds the statement as it was signed."""
    folder = DataFolder(tmp_path)
    assert folder.read_current() is None
    slots, safe = Slots(committed="b" * 64, trial="a" * 64), SafeMode("three starts", ("a" * 64,))
    current = Current(
        statement=b"\x00\xffsigned",
        counter=7,
        models={"m": slots},
        rejected={"c": "reason"},
        unhealthy_starts=2,
        safe_mode=safe,
    )
    folder.write_current(current)
    assert DataFolder(tmp_path).read_current() == current
    assert json.loads((tmp_path / "current.json").read_text())["models"] == {
        "m": {"committed": "b" * 64, "trial": "a" * 64}
    }


@pytest.mark.parametrize("spoilt", [b"", b"{", b"\xff" * 40, b"[]", b'{"number": "x"}'])
def test_corrupt_files_are_moved_aside(tmp_path: Path, spoilt: bytes) -> None:
    """A7: whatever a failing card left there, the agent starts, and the file is kept for inspection."""
    for name in ("session.json", "current.json", "agent.json"):
        (tmp_path / name).write_bytes(spoilt)
    folder = DataFolder(tmp_path)
    assert folder.read_current() is None and folder.read_address() is None and folder.next_session(9.0) == 9
    assert (tmp_path / "session.json.corrupt").read_bytes() == spoilt


def test_enrolment_is_all_or_nothing(tmp_path: Path) -> None:
    """A4: a device with a part of its credentials is not enrolled."""
    folder = DataFolder(tmp_path)
    folder.write_identity(ME)
    assert folder.read_identity() is None
    for path in (folder.key_file, folder.certificate_file, folder.ca_file):
        path.write_bytes(b"x")
    assert folder.read_identity() == ME


@pytest.mark.parametrize("spoilt", [None, b"", b"{", b"\xff" * 40])
def test_corrupt_enrolled_json_is_restored_from_its_copy(tmp_path: Path, spoilt: bytes | None) -> None:
    """A7: the claim is used up, so the identity could not be requested again: there is a copy."""
    folder = DataFolder(tmp_path)
    for path in (folder.key_file, folder.certificate_file, folder.ca_file):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    folder.write_identity(ME)
    enrolled = folder.identity / "enrolled.json"
    enrolled.unlink()
    if spoilt is not None:
        enrolled.write_bytes(spoilt)
    assert folder.read_identity() == ME and folder.read_identity() == ME


@pytest.fixture
def served() -> Iterator[str]:
    engine = Engine("pi4", None)
    engine.serve("tiny", active(LOCAL))
    server = Server(Endpoint(engine, lambda: {"device": "cam"}))
    server.start()
    yield server.url
    server.stop()
    engine.stop()


def get(url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body)


def test_client_gets_answer_and_report(served: str) -> None:
    """edgesplit.Client against the local endpoint: tensors, report, model list, errors."""
    client = Client(served)
    answer = client.infer("tiny", {"x": INPUT}, deadline_s=10)
    assert np.array_equal(answer.outputs["y"], EXPECTED)
    assert isinstance(answer.report, Report) and answer.report.row == "local"
    assert client.models() == ("tiny",) and client.ready() and client.ready("tiny") and not client.ready("huge")
    with pytest.raises(NotFound):
        client.infer("huge", {"x": INPUT}, deadline_s=5)
    with pytest.raises(UsageError):
        client.infer("tiny", {"x": INPUT}, deadline_s=5, outputs=["nothing"])


@pytest.mark.parametrize(
    ("path", "status", "holds"),
    [
        ("/v2", 200, lambda said: said["name"] == "edgesplit"),
        ("/v2/health/live", 200, lambda said: True),
        ("/v2/health/ready", 200, lambda said: True),
        ("/v2/models/tiny", 200, lambda said: said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]),
        ("/v2/models/tiny/versions/1", 200, lambda said: said["versions"] == ["1"]),
        ("/v2/models/tiny/versions/2", 404, lambda said: "version 2" in said["error"]),
        ("/v2/models/tiny/config", 200, lambda said: said["name"] == "tiny"),
        ("/v2/models/tiny/infer", 405, lambda said: True),
        ("/v2/models/huge/ready", 404, lambda said: "tiny" in said["error"]),
        ("/elsewhere", 404, lambda said: True),
        ("/edgesplit/status", 200, lambda said: said == {"device": "cam"}),
    ],
)
def test_health_metadata_and_status_paths(served: str, path: str, status: int, holds: Any) -> None:
    """What the Open Inference Protocol asks of a server, and our status beside it."""
    got, said = get(served, path)
    assert got == status and holds(said)


def test_plain_json_requests_are_accepted(served: str) -> None:
    """curl can send them."""
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}]})
    connection = http.client.HTTPConnection(served.removeprefix("http://"), timeout=10)
    connection.request("POST", "/v2/models/tiny/infer", body)
    said = json.loads(connection.getresponse().read())
    connection.close()
    assert said["outputs"][0]["data"] == EXPECTED.ravel().tolist()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "localhost:8600"}, True),
        ({"host": "127.0.0.1:8600"}, True),
        ({"host": "[::1]:8600"}, True),
        ({"host": "localhost:8600", "origin": "http://localhost:8600", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:8600", "sec-fetch-site": "none"}, True),  # typed into the address bar
        ({"host": "localhost:8600", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost:8600", "origin": "http://127.0.0.1:8600"}, False),
        ({"host": "localhost:8600", "sec-fetch-site": "same-site"}, False),  # a GET by a page of another port
        ({"host": "localhost:8600", "sec-fetch-site": "cross-site"}, False),
        ({"host": "evil.example:8600"}, False),  # DNS rebinding
        ({"host": "localhost.evil.example"}, False),
        ({"host": "127.0.0.1:8600", "origin": "https://evil.example"}, False),
        ({"host": "127.0.0.1:8600", "origin": "null"}, False),
        ({}, False),
    ],
)
def test_web_page_cannot_reach_the_local_endpoint(headers: dict[str, str], expected: bool) -> None:
    """Neither across origins, those of other ports of this machine included, nor under a DNS name that was pointed at
    this machine."""
    assert is_local(Request("GET", "/v2", headers=headers)) is expected


def test_cross_origin_request_gets_403(served: str) -> None:
    """And nothing ran."""
    assert get(served, "/v2", headers={"Origin": "https://evil.example"})[0] == 403


def test_telemetry_windows_count_and_reset() -> None:
    """Requests, fallbacks, switches, late samples, quantiles; the next window starts at zero and knows its row."""
    windows, release = TelemetryWindows(), active(LOCAL)
    now = Conditions(link=Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01))
    for number, row in enumerate(["cut-1", "cut-1", "local", "local"]):
        report = Report(
            release="r", row=row, fallback=number == 0, emulation_overrun=number == 1, latency_s=0.1 * (number + 1)
        )
        windows.finished(record(report))
    windows.finished(record(DeadlineExceeded("late")))
    window = windows.close_windows({"tiny": release}, now)[0]
    assert (window.requests, window.failed, window.fallbacks, window.switches, window.emulation_overruns) == (
        4,
        1,
        1,
        1,
        1,
    )
    assert window.latency_p50_s == pytest.approx(0.3) and window.latency_p95_s == pytest.approx(0.4)
    assert window.row == "local" and window.predicted_s == pytest.approx(LOCAL.device_s)
    assert windows.close_windows({"tiny": release}, now)[0].requests == 0
    windows.finished(record(Report(release="r", row="cut-1")))
    assert windows.close_windows({"tiny": release}, now)[0].switches == 1
    assert windows.total["tiny"] == {"requests": 5, "failed": 1, "fallbacks": 1, "switches": 2, "emulation_overruns": 1}


def test_quantile_without_requests_is_zero() -> None:
    """No requests, no latency."""
    assert quantile([], 0.95) == 0.0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "--data", "DATA"], "--claim"),
        (["run", "--data", "DATA", "--claim", "nowhere.json"], "cannot read the claim"),
        (["status", "--data", "DATA"], "no agent runs"),
        (["enrol", "--data", "DATA", "--claim", "nowhere.json"], "cannot read the claim"),
        (["run", "--data", "/proc/none"], "cannot write"),
    ],
)
def test_command_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    """What is wrong and what would help; exit code 2."""
    assert main([str(tmp_path / "d") if word == "DATA" else word for word in argv]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_status_of_a_dead_agent_is_a_link_error(tmp_path: Path) -> None:
    """agent.json outlived its agent: exit code 5, not a traceback."""
    DataFolder(tmp_path).write_address(AgentAddress(device="cam", url="http://127.0.0.1:9", pid=1, emulated=False))
    assert main(["status", "--data", str(tmp_path)]) == 5


def test_data_folder_permissions(tmp_path: Path) -> None:
    """The lock is readable by its owner only; nothing here is writable by others."""
    folder = DataFolder(tmp_path / "d")
    folder.acquire()
    folder.next_session(1.0)
    for path in (tmp_path / "d").iterdir():
        assert not os.stat(path).st_mode & stat.S_IWOTH
    assert oip.HEADER_LENGTH


@pytest.mark.parametrize("wrong", [["--link", "wify"], ["--broker", "nowhere"], ["--port", "TAKEN"]])
def test_claim_is_not_used_by_an_agent_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    """A claim is valid once: a bad --link or a taken port is refused before the claim is sent to the controller."""
    shown: list[object] = []
    monkeypatch.setattr("edgesplit_agent.main.read_claim", lambda path: path)
    monkeypatch.setattr("edgesplit_agent.main.enrol_with_retries", lambda *given: shown.append(given))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in wrong]
        port = [] if "--port" in words else ["--port", "0"]
        assert main(["run", "--data", str(tmp_path / "d"), "--claim", "claim.json", *port, *words]) == 2
    assert shown == []
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("wrong", [["--threads", "0"], ["--threads", "many"], ["--port", "70000"], ["--port", "-1"]])
def test_option_values_out_of_range_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    """Zero threads, or an invalid port."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "--data", str(tmp_path), *wrong])
    assert ended.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def modes(folder: Path) -> dict[str, int]:
    """The permissions of everything in the folder, and of itself."""
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (*folder.rglob("*"), folder)}


def test_a_data_folder_made_by_another_umask_becomes_private(tmp_path: Path) -> None:
    """Slices, metadata and `current.json` were readable by every user where no service manager set the umask."""
    folder = tmp_path / "data"
    for inner in (folder / "releases" / "abc", folder / "trust"):
        inner.mkdir(parents=True)
        inner.chmod(0o755)
    (folder / "current.json").write_text("{}")
    (folder / "current.json").chmod(0o644)
    (folder / "elsewhere").symlink_to(tmp_path)
    folder.chmod(0o755)
    outside = stat.S_IMODE(tmp_path.stat().st_mode)
    DataFolder(folder).make_private()
    found = modes(folder)
    assert (found["data"], found["releases"], found["trust"], found["current.json"]) == (0o700, 0o700, 0o700, 0o600)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == outside
    DataFolder(folder).make_private(passable=True)
    assert modes(folder)["data"] == 0o711 and modes(folder)["releases"] == 0o700


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ([], 0o700),
        (["--socket-mode", "660"], 0o711),
        (["--socket-mode", "660", "--socket", "none"], 0o700),
        (["--socket-mode", "666", "--socket", "/run/elsewhere.sock"], 0o700),
    ],
)
def test_an_agent_outside_of_a_service_manager_keeps_its_folder_private(
    tmp_path: Path, arguments: list[str], mode: int
) -> None:
    """With any umask of the shell, and without a core dump when it is aborted. Others may pass through to a socket that
    was given to them."""
    folder = tmp_path / "data"
    folder.mkdir()
    report = (
        "import atexit, os, resource, sys\n"
        "from edgesplit_agent.main import main\n"
        "os.umask(0o022)\n"
        "code = main(sys.argv[1:])\n"
        "assert code == 2, code\n"
        "print(oct(os.umask(0)), resource.getrlimit(resource.RLIMIT_CORE))\n"
    )
    command = [sys.executable, "-c", report, "run", "--data", str(folder), "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "is not enrolled" in done.stderr and done.stdout.strip() == "0o77 (0, 0)", done.stderr
    assert modes(folder)["data"] == mode and modes(folder)["lock"] == 0o600
