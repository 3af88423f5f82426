"""Child processes that answer, crash, hang and are interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit.errors import EdgeError, Interrupted
from edgesplit_partitioner.sandbox.child_process import ChildFailed, ChildProcess, run_child

Child = Callable[[str], str]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """Writes a child's program; returns the name of its module, which lies where only this process looks."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(program: str) -> str:
        (tmp_path / "child_under_test.py").write_text(f"import os, resource, signal, sys\n{program}\n")
        return "child_under_test"

    return write


def test_a_child_receives_its_job_and_streams_its_answer(child: Child, tmp_path: Path) -> None:
    """Arguments, the whole standard input, lines in their order, and the content of the result file."""
    module = child(
        "print(sys.argv[1]); print(sys.stdin.read(), flush=True); open(sys.argv[2], 'w').write('done')",
    )
    lines: list[bytes] = []
    result = tmp_path / "result"
    content = run_child(module, 7, result, limit_s=60.0, job=b"a\nb", on_line=lines.append, result=result)
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
        run_child(module, limit_s=limit_s)
    with ChildProcess(module) as process, pytest.raises(kind, match=reason):
        process.ask(b"job", limit_s)


def test_exit_code_zero_without_a_result_is_a_failure(child: Child, tmp_path: Path) -> None:
    """A library may exit the process in the middle of a model; an older result is no answer."""
    (tmp_path / "result").write_text("of the run before")
    with pytest.raises(ChildFailed, match="exit status 0"):
        run_child(child("sys.exit(0)"), limit_s=60.0, result=tmp_path / "result")


def test_long_standard_error_does_not_block_a_child(child: Child) -> None:
    """More on standard error than a pipe holds, before the first line of the answer."""
    lines: list[bytes] = []
    run_child(child("sys.stderr.write('x' * 2**20); print('done')"), limit_s=60.0, on_line=lines.append)
    assert lines == [b"done\n"]


def test_a_persistent_child_answers_line_by_line(child: Child) -> None:
    """Each job has its answer from the same process, until the process ends."""
    module = child("for line in sys.stdin:\n    print(os.getpid(), line.upper(), end='', flush=True)")
    with ChildProcess(module) as process:
        first, second = (process.ask(job, 60.0).split() for job in (b"one", b"two"))
    assert (first[1], second[1]) == (b"ONE", b"TWO") and first[0] == second[0]
