"""Child processes that answer, crash, hang, are interrupted, and reach for what is not theirs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import EdgeError, Interrupted
from edgesplit.process.confinement import Confinement, unavailable
from edgesplit_partitioner.sandbox.child_process import ChildFailed, ChildOutOfTime, ChildProcess, run_child

Child = Callable[[str], str]
LIMITS = Confinement(memory_bytes=2**32, cpu_s=60, file_bytes=2**20)
MISSING = {item.what: item.reason for item in unavailable()}
"""What this machine's kernel does not take from a child."""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """Writes a child's program; returns the name of its module, which lies where only this process looks."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(program: str) -> str:
        (tmp_path / "child_under_test.py").write_text(f"import os, resource, signal, sys\n{program}\n")
        return "child_under_test"

    return write


def in_folder(folder: Path) -> Confinement:
    """Limits of a child that works in that folder."""
    return msgspec.structs.replace(LIMITS, folder=str(folder))


def answers(module: str, *arguments: object, limits: Confinement = LIMITS) -> list[str]:
    """The lines that a child writes."""
    lines: list[bytes] = []
    run_child(module, *arguments, limits=limits, limit_s=60.0, on_line=lines.append)
    return [line.decode().strip() for line in lines]


def test_a_child_receives_its_job_and_streams_its_answer(child: Child, tmp_path: Path) -> None:
    """Arguments, the whole standard input, lines in their order, and the content of the result file."""
    module = child(
        "print(sys.argv[1]); print(sys.stdin.read(), flush=True); open(sys.argv[2], 'w').write('done')",
    )
    lines: list[bytes] = []
    result = tmp_path / "result"
    content = run_child(
        module, 7, result, limits=in_folder(tmp_path), limit_s=60.0, job=b"a\nb", on_line=lines.append, result=result
    )
    assert lines == [b"7\n", b"a\n", b"b\n"]
    assert content == b"done"


@pytest.mark.parametrize(
    ("program", "limit_s", "kind", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", 60.0, ChildFailed, r"the runtime crashed on this model \(SIGSEGV\)"),
        ("sys.exit('first line\\nout of luck')", 60.0, ChildFailed, "the runtime cannot run this model: out of luck"),
        ("sys.exit(3)", 60.0, ChildFailed, "exit status 3"),
        ("signal.pause()", 0.2, ChildFailed, "the runtime did not finish with the model within 0 s"),
        ("os.kill(os.getpid(), signal.SIGINT)", 60.0, Interrupted, "SIGINT"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 60.0, Interrupted, "SIGTERM"),
    ],
)
def test_a_child_without_an_answer_fails_with_the_reason(
    child: Child, program: str, limit_s: float, kind: type[EdgeError], reason: str
) -> None:
    """Crashes, errors and hangs are failures of the model; a signal from outside is an interruption, in either mode."""
    defaults = "for name in ('SIGINT', 'SIGTERM'): signal.signal(getattr(signal, name), signal.SIG_DFL)\n"
    module = child(f"resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{defaults}{program}")
    with pytest.raises(kind, match=reason):
        run_child(module, limits=LIMITS, limit_s=limit_s)
    with ChildProcess(module, limits=LIMITS) as process, pytest.raises(kind, match=reason):
        process.ask(b"job", limit_s)


def test_exit_code_zero_without_a_result_is_a_failure(child: Child, tmp_path: Path) -> None:
    """A library may exit the process in the middle of a model; an older result is no answer."""
    (tmp_path / "result").write_text("of the run before")
    with pytest.raises(ChildFailed, match="exit status 0"):
        run_child(child("sys.exit(0)"), limits=LIMITS, limit_s=60.0, result=tmp_path / "result")


def test_long_standard_error_does_not_block_a_child(child: Child) -> None:
    """More on standard error than a pipe holds, before the first line of the answer."""
    lines: list[bytes] = []
    module = child("sys.stderr.write('x' * 2**19); print('done')")
    run_child(module, limits=LIMITS, limit_s=60.0, on_line=lines.append)
    assert lines == [b"done\n"]


def test_a_persistent_child_answers_line_by_line(child: Child) -> None:
    """Each job has its answer from the same process, until the process ends."""
    module = child("for line in sys.stdin:\n    print(os.getpid(), line.upper(), end='', flush=True)")
    with ChildProcess(module, limits=LIMITS) as process:
        first, second = (process.ask(job, 60.0).split() for job in (b"one", b"two"))
    assert (first[1], second[1]) == (b"ONE", b"TWO") and first[0] == second[0]


# What a model that has taken over its child process can still reach


def test_an_endless_child_ends_after_its_processor_seconds(child: Child) -> None:
    """Long before its time limit, by the kernel, and the reason says so."""
    module, limits = child("while True: pass"), msgspec.structs.replace(LIMITS, cpu_s=1)
    with pytest.raises(ChildOutOfTime, match="did not finish with the model within 1 s of processor time"):
        run_child(module, limits=limits, limit_s=600.0)


def test_profiling_children_ran_without_limits_of_memory_files_and_cores(child: Child, tmp_path: Path) -> None:
    """Every child is limited before it imports anything, the first to go when memory is short, and leaves no core."""
    module = child(
        "for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):\n"
        "    print(resource.getrlimit(limit)[0])\n"
        "print(open('/proc/self/oom_score_adj').read().strip())",
    )
    assert answers(module) == [str(2**32), "60", str(2**20), "0", "1000"]
    greedy = child("with open(sys.argv[1], 'wb') as file: file.write(bytes(2**20 + 1))")
    with pytest.raises(ChildFailed, match="File too large"):
        run_child(greedy, tmp_path / "large", limits=in_folder(tmp_path), limit_s=60.0)


@pytest.mark.skipif("network" in MISSING, reason=MISSING.get("network", ""))
def test_a_child_reaches_no_network(child: Child) -> None:
    """Neither other machines nor this one's servers; a socket between threads is harmless."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        module = child(
            "import socket\n"
            "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
            "    try: socket.socket(family); print('opened')\n"
            "    except PermissionError: print('denied')\n"
            "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
            "except PermissionError: print('denied')",
        )
        assert answers(module, server.getsockname()[1]) == ["denied", "denied", "opened", "denied"]


@pytest.mark.skipif("files" in MISSING, reason=MISSING.get("files", ""))
def test_a_child_could_read_the_keys_of_the_controller(
    child: Child, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads and writes in its folder, and nowhere else: not even where the service was started from."""
    data = tmp_path_factory.mktemp("data")
    (data / "keys").mkdir()
    (data / "keys" / "ca.key").write_text("secret")
    monkeypatch.chdir(data)
    work = tmp_path / "work"
    work.mkdir()
    module = child(
        "from pathlib import Path\n"
        "def attempt(action):\n"
        "    try: print(action())\n"
        "    except OSError as error: print(type(error).__name__)\n"
        "key, work = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "attempt(key.read_text)\n"
        "attempt(lambda: os.listdir(key.parent))\n"
        "attempt(lambda: key.write_text('mine'))\n"
        "attempt(lambda: os.link(key, work / 'link'))\n"
        "attempt(lambda: os.unlink(key))\n"
        "attempt(lambda: (work / 'own').write_text('mine'))\n"
        "attempt((work / 'own').read_text)",
    )
    denied = ["PermissionError"] * 5
    found = answers(module, data / "keys" / "ca.key", work, limits=in_folder(work))
    assert [line.replace("OSError", "PermissionError") for line in found] == [*denied, "4", "mine"]
    assert (data / "keys" / "ca.key").read_text() == "secret" and os.listdir(work) == ["own"]


@pytest.mark.skipif("signals to other processes" in MISSING or "files" in MISSING, reason=f"{MISSING}")
def test_a_child_cannot_end_or_read_the_controller(child: Child) -> None:
    """No signals, no environment, no memory of the process that started it, though both are the same user's."""
    module = child(
        "for action in (lambda: os.kill(os.getppid(), 0), lambda: open(f'/proc/{os.getppid()}/environ').read(),\n"
        "               lambda: open(f'/proc/{os.getppid()}/mem', 'rb').read(1)):\n"
        "    try: action(); print('allowed')\n"
        "    except OSError: print('denied')",
    )
    assert answers(module) == ["denied", "denied", "denied"]
