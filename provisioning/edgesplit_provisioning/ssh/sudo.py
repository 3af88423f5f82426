"""Commands as root on a machine, by sudo where we are not root there. A password goes to sudo's input and nowhere
else."""

from __future__ import annotations

from collections.abc import Callable

from edgesplit.errors import UsageError
from edgesplit_provisioning.ssh.connection import COMMAND_S, Ran, Ssh
from edgesplit_provisioning.ssh.decide import Root

AskPassword = Callable[[str], str]
"""The password for sudo on that machine; empty where nobody can be asked."""
_WITHOUT_PASSWORD = 'exec sudo -n -- sh -c "$@"'
_WITH_PASSWORD = "exec sudo -S -p '' -- sh -c \"$@\""


class AsRoot:
    """Runs scripts as root there."""

    def __init__(self, ssh: Ssh, how: Root, password: str = "") -> None:
        self._ssh = ssh
        self._how = how
        self._password = password

    @classmethod
    def on(cls, ssh: Ssh, how: Root, ask: AskPassword) -> AsRoot:
        """UsageError where sudo wants a password, and there is none or a wrong one."""
        if how != "sudo with password":
            return cls(ssh, how)
        password = ask(ssh.host.target)
        if not password:
            raise UsageError(
                f"sudo on {ssh.host.target} wants a password: call this with --ask-sudo-password, or let this user use"
                " sudo without (NOPASSWD)"
            )
        root = cls(ssh, how, password)
        if not root.run("true").ok:
            raise UsageError(f"sudo on {ssh.host.target} does not take this password, or this user may not use it")
        return root

    def run(
        self,
        script: str,
        *arguments: str,
        timeout_s: float = COMMAND_S,
        said: Callable[[str], None] = lambda line: None,
    ) -> Ran:
        """As `Ssh.run`, without input of its own."""
        if self._how == "root":
            return self._ssh.run(script, *arguments, timeout_s=timeout_s, said=said)
        words = (script, "sh", *arguments)
        if self._how == "sudo":
            return self._ssh.run(_WITHOUT_PASSWORD, *words, timeout_s=timeout_s, said=said)
        given = self._password.encode() + b"\n"
        return self._ssh.run(_WITH_PASSWORD, *words, content=given, timeout_s=timeout_s, said=said)
