"""One machine by OpenSSH's own client: the operator's configuration, agent, known hosts and jump hosts count.

One connection is opened and shared by every command, so that a passphrase is asked for once. Host keys are checked as
the operator's configuration says and never less. What the other side says is bytes, bounded; what ssh says of its
failures becomes our errors: LinkError may go better again, TrustError is about the host's key.
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
from edgesplit_cli.output import plain
from edgesplit_provisioning.ssh.inventory import Host

CONNECT_S = 20
LONGEST_CONNECT_S = 120.0
"""With a person who types a password meanwhile."""
COMMAND_S = 120.0
MOST_BYTES = 1 << 20
"""Of what one command says; more is an error."""
BLOCK = 1 << 16
SSH_FAILED = 255
_HOLD = "exec cat >/dev/null"
"""What the shared connection runs: it ends with our end of the pipe, however we end."""
_KEPT_LINES = 20


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command there ended."""

    status: int
    out: bytes
    err: str

    @property
    def ok(self) -> bool:
        return self.status == 0


class Ssh:
    """A machine, connected between `__enter__` and `__exit__`."""

    def __init__(self, host: Host, options: Sequence[str] = (), *, may_ask: bool = False, program: str = "ssh") -> None:
        """`options` are given to ssh as `-o` each; `may_ask`: somebody is there to answer ssh's questions."""
        self.host = host
        self._program = program
        self._may_ask = may_ask
        self._asked = [word for option in options for word in ("-o", option)]
        self._folder: Path | None = None
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Ssh:
        if shutil.which(self._program) is None:
            raise UsageError("there is no `ssh` here: install OpenSSH's client")
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
        """End the connection, whatever state it is in."""
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
        self,
        script: str,
        *arguments: str,
        content: bytes | Iterable[bytes] = b"",
        timeout_s: float = COMMAND_S,
        said: Callable[[str], None] = lambda line: None,
    ) -> Ran:
        """Run a POSIX shell script there with these arguments ($1 and so on) and `content` as its input.

        `said` is given each line as it comes. LinkError where the connection is lost or it takes too long.
        """
        words = ["sh", "-c", script, "sh", *arguments]
        command = [*self._argv(("ControlMaster=no", "BatchMode=yes")), "--", self.host.target, shlex.join(words)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with _Talk(process, content, said) as talk:
            status = talk.ended(timeout_s)
        if talk.overlong:
            raise LinkError(f"{self.host.target} says more than {MOST_BYTES} bytes: that is not what was asked")
        err = shown(bytes(talk.err))
        if status == SSH_FAILED:
            raise failure(self.host.target, err)
        return Ran(status, bytes(talk.out), err)

    def _argv(self, ours: Sequence[str]) -> list[str]:
        """What the operator says comes first, for ssh takes the first value of an option."""
        assert self._folder is not None
        port = ["-p", str(self.host.port)] if self.host.port else []
        key = ["-i", self.host.key] if self.host.key else []
        every = (*ours, f"ControlPath={self._folder / 's'}", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=10",
                 "ServerAliveCountMax=3", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes")  # fmt: skip
        return [self._program, "-T", *port, *key, *self._asked, *(word for one in every for word in ("-o", one))]

    def _connect(self) -> None:
        assert self._folder is not None
        ours = ["ControlMaster=yes", "ControlPersist=no", f"BatchMode={'no' if self._may_ask else 'yes'}"]
        log = self._folder / "log"
        with log.open("wb") as err:
            self._master = subprocess.Popen(
                [*self._argv(ours), "--", self.host.target, _HOLD],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err,
            )  # fmt: skip
        until, pause = monotonic() + LONGEST_CONNECT_S, threading.Event()
        while not (self._folder / "s").exists():
            if self._master.poll() is not None:
                raise failure(self.host.target, shown(log.read_bytes()[-8_192:]))
            if monotonic() > until:
                raise LinkError(f"cannot reach {self.host.target}: no connection within {LONGEST_CONNECT_S:.0f} s")
            pause.wait(0.05)


class _Talk:
    """Feeds a process and listens to it, each stream by a thread of its own, so that none of them holds up another."""

    def __init__(
        self, process: subprocess.Popen[bytes], content: bytes | Iterable[bytes], said: Callable[[str], None]
    ) -> None:
        self._process = process
        self._said = said
        self.out, self.err = bytearray(), bytearray()
        self.overlong = False
        self._failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._feed, args=(content,), daemon=True),
            threading.Thread(target=self._hear, args=(process.stdout, self.out, said), daemon=True),
            threading.Thread(target=self._hear, args=(process.stderr, self.err, None), daemon=True),
        ]

    def __enter__(self) -> _Talk:
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

    def ended(self, timeout_s: float) -> int:
        """The status, once it has ended and all is heard."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LinkError(f"no answer within {timeout_s:.0f} s") from error
        for thread in self._threads:
            thread.join(timeout=5)
        if self._failed is not None:
            raise self._failed
        return status

    def _feed(self, content: bytes | Iterable[bytes]) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            for block in [content] if isinstance(content, bytes) else content:
                stream.write(block)
            stream.close()
        except BrokenPipeError:
            pass  # how it ended says why
        except (OSError, EdgeError) as error:
            self._failed = error
            self._process.kill()

    def _hear(self, stream: object, into: bytearray, said: Callable[[str], None] | None) -> None:
        line = b""
        for block in _blocks(stream):
            if len(into) + len(block) > MOST_BYTES:
                self.overlong = True
                self._process.kill()
                return
            into += block
            if said is not None:
                *lines, line = (line + block).split(b"\n")
                for one in lines:
                    said(shown(one))


def _blocks(stream: object) -> Iterator[bytes]:
    read = stream.read1  # type: ignore[attr-defined]
    while True:
        try:
            block: bytes = read(BLOCK)
        except (OSError, ValueError):
            return
        if not block:
            return
        yield block


def shown(raw: bytes) -> str:
    """What the other side says, for people: its last lines, with nothing in it that a terminal would obey."""
    lines = [str(plain(line)).strip() for line in raw.decode("utf-8", "replace").replace("\r", "\n").split("\n")]
    return "\n".join([line[:400] for line in lines if line][-_KEPT_LINES:])


def failure(target: str, err: str) -> EdgeError:
    """The error that ssh's own words stand for."""
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in err:
        return TrustError(
            f"{target} shows another host key than it had: either somebody is in between, or it was installed anew; if"
            f" you know that it was, forget the old key with `ssh-keygen -R HOST` and connect once with `ssh {target}`"
        )
    if "Host key verification failed" in err or "No matching host key" in err:
        return TrustError(
            f"the host key of {target} is not known here: connect once with `ssh {target}`, compare the fingerprint,"
            " and do this again"
        )
    if "Permission denied" in err or "Too many authentication failures" in err:
        return UsageError(
            f"{target} does not let us in ({last(err)}): give a key that it knows with -i KEY, or load it into"
            " ssh-agent"
        )
    return LinkError(f"lost {target}: {last(err)}")


def last(err: str) -> str:
    """The last thing that was said."""
    return err.rpartition("\n")[2][:300] or "ssh does not say why"
