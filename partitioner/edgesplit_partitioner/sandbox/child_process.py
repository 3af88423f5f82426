"""Child processes in which an untrusted model runs: `python -m MODULE ARGUMENTS`, confined, with a time limit.

The only way to start one: it confines itself (`sandbox.confined`) before it imports the module. A model that crashes or
hangs the runtime ends only its child process: the parent raises ChildFailed. A child process that was ended by a signal
from outside (Ctrl-C, a service that stops) is no fault of the model: Interrupted.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from edgesplit.errors import Interrupted, ModelRefused
from edgesplit.process.confinement import Confinement
from edgesplit.process.environment import environment_for_models

CONFINED: Final = "edgesplit_partitioner.sandbox.confined"
"""Module that confines its process and then runs another."""

INTERRUPT_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that mean an interruption from outside: no runtime raises them on its own process, and edgesplit does not
either."""


class ChildFailed(ModelRefused):
    """A child process crashed, exceeded its time limit or reported an error."""

    def __init__(self, reason: str, errors: str) -> None:
        super().__init__(reason)
        self.errors = errors
        """What the child process wrote to its standard error."""


class ChildOutOfTime(ChildFailed):
    """A child process exceeded its time limit, or used up its processor seconds."""


class ChildProcess:
    """A running child process, killed on exit. `runtime` names in errors what the child process runs models with."""

    def __init__(self, module: str, *arguments: object, limits: Confinement, runtime: str = "the runtime") -> None:
        self._runtime, self._limits = runtime, limits
        self._exceeded_s = 0.0
        # A file, since a pipe that nobody reads while the child writes its output would block the child.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        command = confined_command(_folder_of(module), limits, module, *arguments)
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, env=child_environment(), cwd=limits.folder or "/"
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the child process, if it still runs."""
        self._process.kill()
        with suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        self._errors.close()
        self._process.wait()

    def ask(self, job: bytes, limit_s: float) -> bytes:
        """Send one line and return the line that answers it."""
        with self._time_limit(limit_s):
            with suppress(BrokenPipeError):
                self._input.write(job + b"\n")
                self._input.flush()
            answer = self._output.readline()
        if not answer.endswith(b"\n"):
            raise self.failure()
        return answer

    def run(self, job: bytes, limit_s: float, on_line: Callable[[bytes], object]) -> None:
        """Send the job as the whole standard input, and pass each line of the output to `on_line` until the end."""
        with self._time_limit(limit_s):
            with suppress(BrokenPipeError):
                self._input.write(job)
                self._input.close()
            for line in self._output:
                on_line(line)
            status = self._process.wait()
        if status:
            raise self.failure()

    @contextmanager
    def _time_limit(self, seconds: float) -> Iterator[None]:
        """Kill the child process after these seconds, which ends its output."""

        def kill() -> None:
            self._exceeded_s = seconds  # tells this end from a crash
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def failure(self) -> ChildFailed:
        """Why the child process ended without an answer; Interrupted where a signal from outside ended it."""
        status = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode("utf-8", "replace")
        if self._exceeded_s:
            reason = f"{self._runtime} did not finish with the model within {self._exceeded_s:.0f} s"
            return ChildOutOfTime(reason, errors)
        if -status == signal.SIGXCPU:
            seconds = self._limits.cpu_s
            reason = f"{self._runtime} did not finish with the model within {seconds} s of processor time"
            return ChildOutOfTime(reason, errors)
        if -status in INTERRUPT_SIGNALS:
            name = signal.Signals(-status).name
            raise Interrupted(f"the process that tried the model was ended ({name}) before it had finished: try again")
        if status < 0:
            reason = f"{self._runtime} crashed on this model ({signal.Signals(-status).name})"
        else:
            last_line = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
            reason = f"{self._runtime} cannot run this model: {last_line[:300]}"
        return ChildFailed(reason, errors)


def confined_command(readable: Iterable[str], limits: Confinement, module: str, *arguments: object) -> list[str]:
    """The command of a child process, which may read these folders too. It must start in a folder that it may read or
    that has no modules (`-m` begins the search for modules there), with `child_environment`."""
    confinement = msgspec.json.encode(msgspec.structs.replace(limits, readable=tuple(readable))).decode()
    return [sys.executable, "-m", CONFINED, confinement, module, *map(str, arguments)]


def child_environment() -> dict[str, str]:
    """This process's environment without its secrets; the child finds the packages that this process does, wherever
    their path came from."""
    return {
        **environment_for_models(),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
    }


def _folder_of(module: str) -> tuple[str, ...]:
    """The folder in which this process finds the module."""
    spec = importlib.util.find_spec(module)
    return (os.path.dirname(os.path.abspath(spec.origin)),) if spec is not None and spec.origin else ()


def run_child(
    module: str,
    *arguments: object,
    limits: Confinement,
    limit_s: float,
    job: bytes = b"",
    on_line: Callable[[bytes], object] = lambda _: None,
    result: Path | None = None,
    runtime: str = "the runtime",
) -> bytes:
    """Run `module` as a child process on the job until it ends; `on_line` gets each line of its output. Returns the
    content of the file `result`, which the child process must write; ChildFailed where it does not."""
    if result is not None:
        result.unlink(missing_ok=True)
    with ChildProcess(module, *arguments, limits=limits, runtime=runtime) as child:
        child.run(job, limit_s, on_line)
        if result is None:
            return b""
        if not result.exists():
            raise child.failure()
        return result.read_bytes()


def child_main(main: Callable[[Path], None]) -> None:
    """The child's side: run `main` on the folder that is the first argument. An error is one line on standard error and
    exit status 1, which the parent translates."""
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # runtimes' exceptions share no base class
        print(" ".join(str(error).split())[:2000], file=sys.stderr)
        sys.exit(1)
