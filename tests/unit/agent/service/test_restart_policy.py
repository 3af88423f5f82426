"""The agent as a service: watchdog messages, restarts, and its systemd unit."""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from edgesplit.errors import LinkError, UsageError
from edgesplit_agent.host.sd_notify import ServiceManager
from edgesplit_agent.service.commands import launch_arguments
from edgesplit_agent.service.restart_policy import (
    RESTART,
    START_S,
    STOP_S,
    ProgramRun,
    failures_after,
)
from edgesplit_agent.service.systemd_unit import WATCHDOG_S, Installation, render_unit
from edgesplit_agent.service.watchdog import BEATS_PER_TIMEOUT, Watchdog


class Listening:
    """A service manager's socket."""

    def __init__(self, path: Path | str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def messages(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found


def test_notifications_follow_the_systemd_protocol(socket_folder: Path) -> None:
    """Sent to the socket that the environment names, which no child inherits."""
    manager_socket = Listening(socket_folder / "notify")
    environment = {"NOTIFY_SOCKET": str(socket_folder / "notify"), "WATCHDOG_USEC": "30000000", "HOME": "/"}
    manager = ServiceManager.from_environment(environment)
    assert environment == {"HOME": "/"}
    assert manager.is_present and manager.watchdog_s == 30.0
    manager.ready("serving\neverything")
    manager.alive()
    manager.stopping()
    assert manager_socket.messages() == ["READY=1\nSTATUS=serving everything", "WATCHDOG=1", "STOPPING=1"]


def test_abstract_notify_socket_is_supported() -> None:
    """As a supervisor uses it."""
    name = f"edgesplit-test-{os.getpid()}"
    listening = Listening(f"\0{name}")
    ServiceManager.from_environment({"NOTIFY_SOCKET": f"@{name}"}).status("here")
    assert listening.messages() == ["STATUS=here"]


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": "/nowhere/at/all"}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}],
    ids=str,
)
def test_no_notification_without_a_socket(environment: dict[str, str]) -> None:
    """Nor is a watchdog message expected of this process where it is another's to send."""
    manager = ServiceManager.from_environment(environment)
    manager.ready("")
    manager.alive()
    assert manager.watchdog_s == 0.0


def test_watchdog_message_needs_an_answered_health_check(socket_folder: Path) -> None:
    """The check runs as often as the watchdog interval demands; while requests would not be answered nothing is sent,
    and a failed check is repeated soon."""
    listening = Listening(socket_folder / "notify")
    now, answers = [100.0], [True]

    def proof() -> str:
        if not answers[0]:
            raise LinkError("the endpoint does not answer")
        return "all is well"

    pulse = Watchdog(ServiceManager(str(socket_folder / "notify"), 30.0), proof, clock=lambda: now[0])
    pulse.beat()
    assert listening.messages() == ["WATCHDOG=1", "STATUS=all is well"]
    pulse.beat()
    assert listening.messages() == []
    now[0] += 30.0 / BEATS_PER_TIMEOUT
    answers[0] = False
    pulse.beat()
    pulse.beat()
    assert listening.messages() == []
    answers[0] = True
    now[0] += 3.0
    pulse.beat()
    assert "WATCHDOG=1" in listening.messages()


def test_no_health_check_without_a_watchdog() -> None:
    """An agent that was started by hand does not check itself."""

    def proof() -> str:
        raise AssertionError("asked")

    Watchdog(ServiceManager(), proof).beat()


def test_start_watchdog_and_stop_timeouts() -> None:
    """Messages that are not understood do not count as a sign of life."""
    run = ProgramRun(since=10.0, watchdog_s=60.0)
    assert run.deadline == 10.0 + START_S and "not ready" in run.missed_deadline()
    run = run.after_notification(b"STATUS=loading", 20.0)
    assert run.deadline == 10.0 + START_S
    run = run.after_notification(b"READY=1\nSTATUS=here", 30.0)
    assert run.deadline == 90.0
    run = (
        run.after_notification(b"WATCHDOG=1", 50.0)
        .after_notification(b"\xff\x00garbage", 70.0)
        .after_notification(b"XWATCHDOG=1", 80.0)
    )
    assert run.deadline == 110.0 and "no watchdog notification for 60 s" in run.missed_deadline()
    assert ProgramRun(10.0, 0.0).after_notification(b"READY=1", 11.0).deadline == math.inf
    told = run.after_stop_request(100.0).after_stop_request(120.0)
    assert told.deadline == 100.0 + STOP_S and "did not end" in told.missed_deadline()
    assert told.after_kill().deadline == math.inf


def test_restarts_back_off_and_never_end() -> None:
    """Up to the longest pause, each with jitter; a run that lasted resets the back-off."""
    pauses = [RESTART.pause_s(failures, 1.0) for failures in range(60)]
    assert pauses[0] == RESTART.first_s and pauses == sorted(pauses) and pauses[-1] == RESTART.longest_s
    assert RESTART.pause_s(3, 0.0) == RESTART.pause_s(3, 1.0) / 2
    assert failures_after(5, 1.0) == 6 and failures_after(5, 3600.0) == 0


def test_supervise_takes_the_options_of_run() -> None:
    """Without its own."""
    words = ["supervise", "--data", "D", "--watchdog", "5", "--port", "0", "--watchdog=7"]
    assert launch_arguments(words) == ["launch", "--data", "D", "--port", "0"]


def test_unit_paths_are_escaped_or_refused() -> None:
    """A data folder below /var/lib is created by systemd; another is made writable."""
    usual = render_unit(Installation())
    assert "StateDirectory=edgesplit-agent\n" in usual and "ReadWritePaths" not in usual
    assert "\nLimitCORE=0\n" in usual and "\nUMask=0077\n" in usual
    assert f"WatchdogSec={WATCHDOG_S}s" in usual and "StartLimitIntervalSec=0" in usual
    other = render_unit(Installation(Path("/srv/agent"), Path("/srv/data"), "pi"))
    assert "ReadWritePaths=/srv/data\n" in other and "StateDirectory" not in other and "User=pi\n" in other
    assert "ExecStart=/srv/agent/current/bin/edgesplit-agent launch --data /srv/data " in other
    for wrong in (Path("relative"), Path("/with space"), Path("/a%i"), Path("/a\nExecStartPre=/bin/sh")):
        with pytest.raises(UsageError):
            Installation(data=wrong)
    with pytest.raises(UsageError):
        Installation(user="Root; rm")


@pytest.fixture
def unit_file(tmp_path: Path) -> Path:
    """The unit of an installation that is there; skips with its reason where systemd's tools are not."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "current" / "bin" / "edgesplit-agent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    file = tmp_path / "edgesplit-agent.service"
    file.write_text(render_unit(Installation(prefix=tmp_path, user="root")))
    return file


def test_systemd_accepts_the_unit(unit_file: Path) -> None:
    """Every directive of it."""
    done = subprocess.run(["systemd-analyze", "verify", str(unit_file)], capture_output=True, text=True, timeout=60)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "edgesplit-agent" in line]
    assert ours == []


def test_unit_has_a_low_exposure_score(unit_file: Path) -> None:
    """By systemd's own scale, on which 10 is a service without any limits; a user of its own is assumed."""
    unit_file.write_text(unit_file.read_text().replace("User=root", "User=edgesplit-agent"))
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(unit_file)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a unit that is not loaded")
    assert done.returncode == 0, done.stdout[-400:] + done.stderr
