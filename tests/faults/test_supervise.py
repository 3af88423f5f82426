"""`edgesplit-agent supervise` against programs that end, hang and leave children behind, and against being killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.edgesplit_processes import eventually

PROGRAM = '''
"""Stands for an agent: notes its number, and those of its children; does what its word says."""
import os, signal, subprocess, sys, time
from pathlib import Path
from edgesplit_agent.host.sd_notify import ServiceManager

word, folder = sys.argv[1], Path(sys.argv[2])
address = os.environ["NOTIFY_SOCKET"]
manager = ServiceManager.from_environment(os.environ)
child = subprocess.Popen(["sleep", "1000"])
number = len(list(folder.glob("run*")))
told = folder / f"run{number}"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0) if word != "deaf" else None)
told.with_suffix(".part").write_text(f"{os.getpid()} {child.pid} {address}")
if word == "hangs" and number == 0:
    manager.ready("here")
    told.with_suffix(".part").rename(told)
    os.kill(os.getpid(), signal.SIGSTOP)
told.with_suffix(".part").rename(told) if not told.exists() else None
while True:
    time.sleep(1000)
'''
SUPERVISE = (
    "import sys\nfrom edgesplit_agent.service.supervisor import Supervisor\n"
    "sys.exit(Supervisor(sys.argv[2:], float(sys.argv[1])).serve())"
)


class Supervised:
    """A supervisor with that program."""

    def __init__(self, folder: Path, word: str, watchdog_s: float) -> None:
        self.folder = folder
        program = folder / "program.py"
        program.write_text(PROGRAM)
        command = [sys.executable, str(program), word, str(folder)]
        self.process = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(watchdog_s), *command])

    def run(self, number: int) -> tuple[int, int, str]:
        """The program's and its child's numbers in that run, and where it tells of itself, once it is there."""
        file = self.folder / f"run{number}"
        eventually(f"run {number}", lambda: file.exists() or self.process.poll() is not None)
        pid, child, address = file.read_text().split()
        return int(pid), int(child), address

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in self.folder.glob("run*"):
            for pid in file.read_text().split()[:2]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Supervised]]:
    """Supervisors that end with the test."""
    started: list[Supervised] = []

    def start(word: str = "waits", watchdog_s: float = 0.0) -> Supervised:
        started.append(Supervised(tmp_path, word, watchdog_s))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def gone(pid: int) -> bool:
    """Whether there is no such process; one that ended and that nobody collects is still there."""
    return not Path(f"/proc/{pid}").exists()


def ended(pid: int) -> bool:
    """Whether it runs no more; who collects it, where its supervisor is no more either, is the machine's business."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_program_that_ends_is_restarted_and_its_children_are_killed(
    supervised: Callable[..., Supervised],
) -> None:
    """Killed, it leaves a child behind, which must not run beside the next one's; both are collected."""
    running = supervised()
    pid, child, _ = running.run(0)
    os.kill(pid, signal.SIGKILL)
    again, _, _ = running.run(1)
    assert again != pid
    eventually("both are gone", lambda: gone(pid) and gone(child))


def test_watchdog_signals_of_other_processes_do_not_keep_a_hung_program_alive(
    supervised: Callable[..., Supervised],
) -> None:
    """A sign of life counts only from the program itself: the kernel says who sent it."""
    running = supervised("hangs", watchdog_s=1.0)
    pid, child, address = running.run(0)

    def killed() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, contextlib.suppress(OSError):
            stranger.sendto(b"WATCHDOG=1", "\0" + address[1:])
        return gone(pid) and gone(child)

    eventually("it is killed with its child", killed)
    assert running.run(1)[0] != pid


def test_sigterm_is_forwarded_and_leaves_no_process(supervised: Callable[..., Supervised]) -> None:
    """SIGTERM ends the program, then what it left, then us, with its own exit code."""
    running = supervised()
    pid, child, _ = running.run(0)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert gone(pid)
    eventually("its child has ended", lambda: ended(child))


def test_a_supervisor_that_is_killed_leaves_no_program_behind(supervised: Callable[..., Supervised]) -> None:
    """Not even one that would not end when it is told to."""
    running = supervised("deaf")
    pid, _, _ = running.run(0)
    running.process.kill()
    running.process.wait()
    eventually("the program has ended", lambda: ended(pid))


def test_sighup_restarts_the_program(supervised: Callable[..., Supervised]) -> None:
    """As after a change of what it reads when it starts."""
    running = supervised()
    pid, _, _ = running.run(0)
    running.process.send_signal(signal.SIGHUP)
    assert running.run(1)[0] != pid
    assert gone(pid) and running.process.poll() is None


def test_the_command_supervises_a_real_agent_that_waits_for_its_claim(tmp_path: Path) -> None:
    """`edgesplit-agent supervise` takes the options of `run`: an agent without a claim waits for one, and a wrong word
    is said at once."""
    command = [sys.executable, "-m", "edgesplit_agent.main", "supervise"]
    wrong = subprocess.run([*command, "--data", "x", "--prot", "1"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "--prot" in wrong.stderr
    data = tmp_path / "data"
    log = (tmp_path / "log").open("wb")
    words = ["--data", str(data), "--claim", str(data / "claim.json"), "--port", "0"]
    running = subprocess.Popen([*command, *words], stderr=log)
    try:
        lock = data / "lock"
        eventually("an agent has the folder", lambda: lock.exists() or running.poll() is not None)
        assert running.poll() is None
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, (tmp_path / "log").read_text()
