"""One machine over OpenSSH's own client, which honours the operator's configuration, agent, known hosts and jump hosts.

One master connection is opened and shared by every command, so that a passphrase is requested once. Host keys are
checked as strictly as the operator's configuration demands. Output of the other side is bytes of bounded length; ssh's
failures become errors of this SDK: LinkError may succeed on a retry, TrustError concerns the host key.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from edgesplit.errors import EdgeError, LinkError, TrustError, UsageError
from edgesplit.terminal_text import printable
from edgesplit_provisioning.ssh.inventory import Host

CONNECT_TIMEOUT_S = 20
"""Timeout of the TCP connection, in seconds."""
LOGIN_TIMEOUT_S = 120.0
"""Timeout of the whole connection, including a person who types a password."""
COMMAND_TIMEOUT_S = 120.0
"""Default timeout of a command, in seconds."""
MAX_OUTPUT_BYTES = 1 << 20
"""Limit on the output of one command; more is an error."""
BLOCK_BYTES = 1 << 16
SSH_FAILED = 255
"""Exit status by which ssh reports a failure of its own."""
_HOLD = "exec cat >/dev/null"
"""Command that the master connection runs: it ends with this process's end of the pipe, however this process ends."""
_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit status and output of a remote command."""

    status: int
    out: bytes
    err: str

    @property
    def ok(self) -> bool:
        return self.status == 0


class Ssh:
    """A connection to a machine, open between `__enter__` and `__exit__`."""

    def __init__(self, host: Host, options: Sequence[str] = (), *, may_ask: bool = False, program: str = "ssh") -> None:
        """`options` are passed to ssh with `-o` each; `may_ask`: a user is present who can answer ssh's prompts."""
        self.host = host
        self._program = program
        self._may_ask = may_ask
        self._operator_options = [part for option in options for part in ("-o", option)]
        self._folder: Path | None = None
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Ssh:
        if shutil.which(self._program) is None:
            raise UsageError("missing program `ssh`: install OpenSSH's client")
        self._folder = Path(tempfile.mkdtemp(prefix="es-"))
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, whatever its state."""
        if self._master is not None and self._master.stdin is not None:
            self._master.stdin.close()
        if self._master is not None and self._master.poll() is None:
            self._master.terminate()
            try:
                self._master.wait(5)
            except subprocess.TimeoutExpired:
                self._master.kill()
                self._master.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self, script: str, *arguments: str, content: bytes | Iterable[bytes] = b"",
        timeout_s: float = COMMAND_TIMEOUT_S, on_line: Callable[[str], None] = lambda line: None,
    ) -> CommandResult:  # fmt: skip
        """Run a POSIX shell script there, with these arguments ($1 and so on) and `content` as its standard input.

        `on_line` receives each line of output as it arrives. LinkError where the connection is lost, a timeout passes
        or the output is too long.
        """
        remote_command = shlex.join(["sh", "-c", script, "sh", *arguments])
        command = [*self._argv(("ControlMaster=no", "BatchMode=yes")), "--", self.host.target, remote_command]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with _ProcessStreams(process, content, on_line) as streams:
            status = streams.wait(timeout_s)
        if streams.is_too_long:
            raise LinkError(
                f"{self.host.target} says more than {MAX_OUTPUT_BYTES} bytes, which is not the expected output"
            )
        err = safe_text(bytes(streams.err))
        if status == SSH_FAILED:
            raise ssh_error(self.host.target, err)
        return CommandResult(status, bytes(streams.out), err)

    def _argv(self, fixed_options: Sequence[str]) -> list[str]:
        """The ssh command line. The operator's options come first, since ssh takes the first value of an option."""
        assert self._folder is not None
        port = ["-p", str(self.host.port)] if self.host.port else []
        key = ["-i", self.host.key] if self.host.key else []
        defaults = (*fixed_options, f"ControlPath={self._folder / 's'}",
                    f"ConnectTimeout={CONNECT_TIMEOUT_S}", "ServerAliveInterval=10",
                 "ServerAliveCountMax=3", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes")  # fmt: skip
        default_options = [part for option in defaults for part in ("-o", option)]
        return [self._program, "-T", *port, *key, *self._operator_options, *default_options]

    def _connect(self) -> None:
        assert self._folder is not None
        ours = ["ControlMaster=yes", "ControlPersist=no", f"BatchMode={'no' if self._may_ask else 'yes'}"]
        log = self._folder / "log"
        with log.open("wb") as err:
            self._master = subprocess.Popen(
                [*self._argv(ours), "--", self.host.target, _HOLD],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip
        # The control socket appears once the login has succeeded; until then ssh may be asking the user for a password.
        until, pause = monotonic() + LOGIN_TIMEOUT_S, threading.Event()
        while not (self._folder / "s").exists():
            if self._master.poll() is not None:
                raise ssh_error(self.host.target, safe_text(log.read_bytes()[-8_192:]))
            if monotonic() > until:
                raise LinkError(f"cannot reach {self.host.target}: no connection within {LOGIN_TIMEOUT_S:.0f} s")
            pause.wait(0.05)


class _ProcessStreams:
    """Feeds a process's input and reads its two outputs, each in a thread of its own, so that none blocks another."""

    def __init__(
        self, process: subprocess.Popen[bytes], content: bytes | Iterable[bytes], on_line: Callable[[str], None]
    ) -> None:
        self._process = process
        self.out, self.err = bytearray(), bytearray()
        self.is_too_long = False
        self._failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._write_input, args=(content,), daemon=True),
            threading.Thread(target=self._read_output, args=(process.stdout, self.out, on_line), daemon=True),
            threading.Thread(target=self._read_output, args=(process.stderr, self.err, None), daemon=True),
        ]

    def __enter__(self) -> _ProcessStreams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def wait(self, timeout_s: float) -> int:
        """Wait for the process and the reader threads; returns the exit status. LinkError on a timeout."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LinkError(f"no answer within {timeout_s:.0f} s") from error
        for thread in self._threads:
            thread.join(timeout=5)
        if self._failed is not None:
            raise self._failed
        return status

    def _write_input(self, content: bytes | Iterable[bytes]) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            for block in [content] if isinstance(content, bytes) else content:
                stream.write(block)
            stream.close()
        except BrokenPipeError:
            pass  # the process ended early; its exit status tells why
        except (OSError, EdgeError) as error:
            self._failed = error
            self._process.kill()

    def _read_output(self, stream: object, into: bytearray, on_line: Callable[[str], None] | None) -> None:
        line = b""
        for block in _blocks(stream):
            if len(into) + len(block) > MAX_OUTPUT_BYTES:
                self.is_too_long = True
                self._process.kill()
                return
            into += block
            if on_line is not None:
                *lines, line = (line + block).split(b"\n")
                for complete_line in lines:
                    on_line(safe_text(complete_line))


def _blocks(stream: object) -> Iterator[bytes]:
    with contextlib.suppress(OSError, ValueError):
        while block := stream.read1(BLOCK_BYTES):  # type: ignore[attr-defined]
            yield block


def safe_text(raw: bytes) -> str:
    """Remote output made safe for display: its last lines, without control characters."""
    lines = [str(printable(line)).strip() for line in raw.decode("utf-8", "replace").replace("\r", "\n").split("\n")]
    return "\n".join([line[:400] for line in lines if line][-_SHOWN_LINES:])


def ssh_error(target: str, err: str) -> EdgeError:
    """The error that ssh's own message stands for."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in err:
        return TrustError(
            f"{target} presents another host key than before: either the connection is intercepted, or the machine was"
            f" reinstalled; if you know that it was, forget the old key with `ssh-keygen -R HOST` and connect"
            f" once with `ssh {target}`"
        )
    if "Host key verification failed" in err or "No matching host key" in err:
        return TrustError(
            f"the host key of {target} is not known here: connect once with `ssh {target}`, compare the fingerprint,"
            " and do this again"
        )
    if "Permission denied" in err or "Too many authentication failures" in err:
        return UsageError(
            f"{target} refused the login ({last_line(err)}): give an authorised key with -i KEY, or load it into"
            " ssh-agent"
        )
    return LinkError(f"lost {target}: {last_line(err)}")


def last_line(err: str) -> str:
    """The last line of an error output."""
    return err.rpartition("\n")[2][:300] or "ssh gives no reason"
