"""The two programs of deploy/ that run inside containers, run here."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from support import REPOSITORY
from support.edgesplit_processes import eventually

DEPLOY = REPOSITORY / "deploy"
BROKER = DEPLOY / "kubernetes" / "base" / "broker.sh"
MOSQUITTO = """#!/bin/sh
# Stands for mosquitto: says what it was started with and which signals came.
trap 'echo reloaded' HUP
trap 'echo stopped; exit 0' TERM
echo "started $*"
while :; do sleep 0.1 & wait $!; done
"""


@pytest.fixture()
def broker(tmp_path: Path) -> Path:
    """A folder as the controller writes it, and a mosquitto that is none."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "mosquitto"
    program.write_text(MOSQUITTO)
    program.chmod(0o755)
    (tmp_path / "revoked.pem").write_text("nobody")
    return tmp_path


def started(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            ["sh", str(BROKER), str(folder)],
            env=environment,
            stdout=said,
            stderr=said,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored under nohup, and then for good
        )


def log_lines(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def test_only_a_new_revocation_list_reloads_the_broker(broker: Path) -> None:
    """The controller replaces the file; the script sends the signal once, and ends with its broker on SIGTERM."""
    running = started(broker)
    try:
        eventually("the broker runs", lambda: f"started -c {broker}/mosquitto.conf" in log_lines(broker))
        for number in (1, 2):
            (broker / ".new").write_text(f"revoked: {number}")
            (broker / ".new").rename(broker / "revoked.pem")
            eventually("the list is read again", lambda n=number: log_lines(broker).count("reloaded") == n)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    assert log_lines(broker)[-1] == "stopped" and log_lines(broker).count("reloaded") == 2


def test_the_script_ends_with_its_brokers_exit_status(broker: Path) -> None:
    """So that the container is restarted."""
    (broker / "bin" / "mosquitto").write_text("#!/bin/sh\nexit 3\n")
    assert started(broker).wait(30) == 3


def healthy(*words: str) -> int:
    """What the program's main answers, in this process."""
    found: int = runpy.run_path(str(DEPLOY / "images" / "healthy.py"))["main"](*words)
    return found


def test_only_a_server_that_answers_200_is_healthy() -> None:
    """Another status, and a refused connection, are unhealthy."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert healthy(f"{url}/metrics") == 0
        assert healthy(f"{url}/elsewhere") == 1
    finally:
        server.shutdown()
        server.server_close()
    assert healthy(f"{url}/metrics") == 1


def test_the_health_check_exits_with_its_result(tmp_path: Path) -> None:
    """As HEALTHCHECK reads it."""
    program = str(DEPLOY / "images" / "healthy.py")
    done = subprocess.run([sys.executable, program, "http://127.0.0.1:1/metrics"], capture_output=True, timeout=60)
    assert done.returncode == 1 and b"http://127.0.0.1:1/metrics" in done.stderr
