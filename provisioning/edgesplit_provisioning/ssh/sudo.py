"""Runs commands as root on a machine, through sudo where the login user is not root. A password is passed on sudo's
standard input only."""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.errors import UsageError
from edgesplit_provisioning.ssh.connection import COMMAND_TIMEOUT_S, CommandResult, Ssh
from edgesplit_provisioning.ssh.decide import RootMethod

AskPassword = Callable[[str], str]
"""Returns the sudo password for a machine; empty where no user can be asked."""
_WITHOUT_PASSWORD = 'exec sudo -n -- sh -c "$@"'
_WITH_PASSWORD = "exec sudo -S -p '' -- sh -c \"$@\""


class RootShell:
    """Runs scripts as root on a machine."""

    def __init__(self, ssh: Ssh, method: RootMethod, password: str = "") -> None:
        self._ssh = ssh
        self._method = method
        self._password = password

    @classmethod
    def on(cls, ssh: Ssh, method: RootMethod, ask_password: AskPassword) -> RootShell:
        """Check that root is reachable. UsageError where sudo needs a password and there is none or a wrong one."""
        if method != "sudo with password":
            return cls(ssh, method)
        password = ask_password(ssh.host.target)
        if not password:
            raise UsageError(
                f"sudo on {ssh.host.target} needs a password: add --ask-sudo-password, or let this user use"
                " sudo without (NOPASSWD)"
            )
        root = cls(ssh, method, password)
        if not root.run("true").ok:
            raise UsageError(f"sudo on {ssh.host.target} does not take this password, or this user may not use it")
        return root

    def run(
        self,
        script: str,
        *arguments: str,
        timeout_s: float = COMMAND_TIMEOUT_S,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> CommandResult:
        """Run a script as root, as `Ssh.run` does, without standard input."""
        command, stdin = (script, *arguments), b""
        if self._method == "sudo":
            command = (_WITHOUT_PASSWORD, script, "sh", *arguments)
        elif self._method == "sudo with password":
            command, stdin = (_WITH_PASSWORD, script, "sh", *arguments), self._password.encode() + b"\n"
        return self._ssh.run(*command, content=stdin, timeout_s=timeout_s, on_line=on_line)
