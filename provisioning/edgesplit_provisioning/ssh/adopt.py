"""Adopts one machine that is reachable by ssh: survey it, decide, upload the kit, install the agent, enrol it, wait
until it is online.

Every step can be interrupted and repeated: an upload continues, an installation is recognised, an unused claim is
replaced by a new one, and uploaded files are removed. A machine that is already a device keeps its identity.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Protocol
from urllib.parse import quote

from edgesplit.controller_client.claims import ClaimRequest, create_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError, LinkError, NotFound, UsageError
from edgesplit.identifiers import new_device_name
from edgesplit.terminal_text import printable
from edgesplit_provisioning.agent_options import ENVIRONMENT, FILE, environment_line
from edgesplit_provisioning.image.device_config import why_unreachable
from edgesplit_provisioning.kit import Kit
from edgesplit_provisioning.ssh import decide, upload
from edgesplit_provisioning.ssh.connection import Ssh, last_line
from edgesplit_provisioning.ssh.facts import (
    DATA,
    PREFIX,
    ROOT_SURVEY_SCRIPT,
    Installed,
    MachineFacts,
    gather_facts,
    parse_installed,
)
from edgesplit_provisioning.ssh.inventory import Host, proposed_name
from edgesplit_provisioning.ssh.sudo import AskPassword, RootShell

CLAIM, INSTALLER = "claim.json", "install.sh"
START_COMMAND = "{prefix}/current/bin/edgesplit-agent supervise --data {data} --claim {data}/claim.json"
"""Command that starts the agent where no service does."""
INSTALL_TIMEOUT_S = 1_800.0
"""Timeout of the installer; a Raspberry Pi 3 on a slow card takes some minutes."""
POLL_S = 1.0
"""Seconds between two requests for the device's state."""

_INSTALL = """
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
stage=$1
cd "$stage" || exit 3
shift
sh ./install.sh "$@" 2>&1
status=$?
cd / && rm -rf -- "$stage"
exit $status
"""


class OnProgress(Protocol):
    """Progress callback."""

    def __call__(self, step: str, done: int = 0, of: int = 0) -> None:
        """`step` names the current step; `done` of `of` bytes are finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions:
    """The options that apply to all machines of one run."""

    coral: bool = False
    interpreter: bool = False
    """True where the kit may contain its own Python."""
    prefix: str = PREFIX
    data: str = DATA
    service: bool = True
    replace: bool = False
    """Take over the name of an existing device."""
    link: str = "wifi"
    wait_s: float = 0.0
    """Seconds to wait for the device to be online; 0 does not wait."""
    dry_run: bool = False
    agent_options: str | None = None
    """Checked options of the agent's `run`; None leaves those that are there."""
    environment: str = ENVIRONMENT
    """The service's environment file, which has these options."""

    @property
    def options_line(self) -> str | None:
        """The line that the environment file is to have; None for any, also where no service reads that file."""
        wanted = self.service and self.agent_options is not None
        return environment_line(self.agent_options or "") if wanted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionResult:
    """Result of adopting one machine."""

    host: str
    device: str
    device_class: str
    did: str
    """What was done, or would be in a dry run: install, upgrade, repair, configure, remove, purge or nothing."""
    version: str
    system: str
    state: str = ""
    """State of the device at the controller, where it was waited for."""
    start: str = ""
    """Command that starts the agent, where no service does."""
    warning: str = ""
    """Why the device may not reach the controller; empty where it may."""


@dataclass(slots=True)
class Adopter:
    """Adopts machines with the same options; `kit_for` makes or finds the kit that fits a machine."""

    controller: ControllerClient
    authority: str
    """The controller's CA certificate in PEM; an enrolled device has the same."""
    options: AdoptOptions
    kit_for: Callable[[decide.InstallMeans, MachineFacts, bool], Kit]
    """Returns the kit for these means, with Coral's library or without."""
    ask_password: AskPassword = lambda target: ""
    on_progress: OnProgress = lambda step, done=0, of=0: None
    pause: Callable[[float], object] = field(default_factory=lambda: threading.Event().wait)

    def adopt(self, ssh: Ssh) -> AdoptionResult:
        """Adopt the machine. UsageError where it cannot be adopted as it is."""
        host, options = ssh.host, self.options
        self.on_progress("looking")
        facts = gather_facts(ssh, options.prefix)
        means = decide.choose_means(facts, interpreter=options.interpreter)
        root, installed = self._survey_as_root(ssh, facts)
        name, known = self._identify(installed, host, facts)
        device_class = "" if known else host.device_class or decide.device_class(facts, coral=options.coral)
        self.on_progress("making the kit")
        kit = self.kit_for(means, facts, options.coral)
        step = decide.next_action(installed, kit.mark, known=known, options=options.options_line)
        result = AdoptionResult(
            host=host.target, device=name, device_class=device_class, did=step, version=kit.manifest.version,
            system=f"{printable(facts.os_name)[:80]}, Python {means.python}"
            + (" of the kit" if means.own_interpreter else "") + f" on {means.machine}",
        )  # fmt: skip
        if options.dry_run:
            _read_upload_state(ssh, facts, kit)
            return result
        if step != "nothing":
            result = replace(result, warning=self._install(ssh, root, facts, kit, name, device_class))
        if means.service and options.service:
            return self._wait_online(result)
        start = START_COMMAND.format(prefix=options.prefix, data=options.data)
        return replace(result, start=f"{start} {options.agent_options or ''}".rstrip())

    def _survey_as_root(self, ssh: Ssh, facts: MachineFacts) -> tuple[RootShell, Installed]:
        root = RootShell.on(ssh, decide.root_method(facts), self.ask_password)
        places = (self.options.prefix, self.options.data, self.options.environment)
        return root, parse_installed(root.run(ROOT_SURVEY_SCRIPT, *places).out)

    def _identify(self, installed: Installed, host: Host, facts: MachineFacts) -> tuple[str, bool]:
        """The device's name, and whether the controller has it already. UsageError where it belongs to another
        controller."""
        decide.check_owner(installed, self.authority, host.name)
        name = installed.device or new_device_name(host.name or proposed_name(printable(facts.host)))
        known = bool(installed.device) and self._state(name) not in ("", "revoked", "claimed")
        if installed.device and not known:
            raise UsageError(
                f"it was device {name!r}, which the controller has no longer: `edgectl adopt {host.target}"
                " --remove --purge`, then adopt it anew"
            )
        return name, known

    def remove(self, ssh: Ssh, installer: Path, *, purge: bool) -> AdoptionResult:
        """Uninstall the agent; with `purge`, also delete its data and identity. The controller is not changed."""
        self.on_progress("looking")
        facts = gather_facts(ssh, self.options.prefix)
        root, installed = self._survey_as_root(ssh, facts)
        nothing = not installed.version and not (purge and installed.data)
        action = "nothing" if nothing else "purge" if purge else "remove"
        if not (nothing or self.options.dry_run):
            uploaded = upload.read_upload_state(ssh)
            upload.upload_files(ssh, {INSTALLER: installer}, uploaded, lambda done, of: None)
            self.on_progress("removing")
            arguments = ["--remove", *(["--purge"] if purge else []), *([] if facts.systemd else ["--no-service"])]
            self._run_installer(root, uploaded.stage, arguments)
        return AdoptionResult(
            host=ssh.host.target, device=printable(installed.device), device_class="", did=action,
            version=printable(installed.version),
            system=printable(facts.os_name)[:80],
        )  # fmt: skip

    def _install(self, ssh: Ssh, root: RootShell, facts: MachineFacts, kit: Kit, name: str, device_class: str) -> str:
        """Upload the kit and install it. An empty `device_class` marks a machine that is enrolled already and needs no
        claim. Returns why it may not reach the controller, or an empty string."""
        uploaded = _read_upload_state(ssh, facts, kit)
        self.on_progress("copying", 0, kit.bytes)
        upload.upload_files(ssh, kit.files, uploaded, lambda done, of: self.on_progress("copying", done, of))
        arguments = ["--coral"] if self.options.coral else []
        if not (self.options.service and facts.systemd):
            arguments.append("--no-service")
        warning = ""
        if device_class:
            claim = self._request_claim(ssh.host, name, device_class)
            warning = why_unreachable(claim)
            upload.upload_secret(ssh, CLAIM, claim)
            arguments += ["--claim", f"{uploaded.stage}/{CLAIM}"]
        if (line := self.options.options_line) is not None:
            upload.upload_secret(ssh, FILE, f"{line}\n".encode())
            arguments += ["--env", self.options.environment]
        self.on_progress("installing")
        self._run_installer(root, uploaded.stage, arguments)
        return warning

    def _request_claim(self, host: Host, name: str, device_class: str) -> bytes:
        self.on_progress("claiming")
        request = ClaimRequest(
            device=name, device_class=device_class, link=host.link or self.options.link, group=host.group or None,
            labels=host.labels, replace=self.options.replace,
        )  # fmt: skip
        return create_claim(self.controller, request).encode()

    def _run_installer(self, root: RootShell, stage: str, arguments: list[str]) -> None:
        """Run the installer, which removes the uploaded files. After a lost connection, the next run continues."""
        folders = ["--prefix", self.options.prefix, "--data", self.options.data]
        result = root.run(
            _INSTALL, stage, *arguments, *folders, timeout_s=INSTALL_TIMEOUT_S,
            on_line=lambda line: self.on_progress(line[:60])
        )  # fmt: skip
        if not result.ok:
            out = [str(printable(line)) for line in result.out.decode("utf-8", "replace").splitlines() if line.strip()]
            raise EdgeError(
                f"the installer ended with {result.status} there: {'; '.join(out[-3:])[:600] or last_line(result.err)}"
            )

    def _state(self, name: str) -> str:
        """State of the device at the controller; empty where it does not exist."""
        try:
            return str(self.controller.get(f"/v1/devices/{quote(name, safe='')}")["state"])
        except NotFound:
            return ""

    def _wait_online(self, result: AdoptionResult) -> AdoptionResult:
        if not self.options.wait_s:
            return result
        self.on_progress("waiting for it to be online")
        until = monotonic() + self.options.wait_s
        while (state := self._state(result.device)) != "online":
            if monotonic() > until:
                raise LinkError(
                    f"{result.device} is installed, and not online within {self.options.wait_s:.0f} s"
                    f" ({state or 'unknown'}): can it reach {self.controller.url}? On it,"
                    " `journalctl -u edgesplit-agent` says why not"
                )
            self.pause(POLL_S)
        return replace(result, state=state)


def _read_upload_state(ssh: Ssh, facts: MachineFacts, kit: Kit) -> upload.UploadState:
    """What an earlier upload left; UsageError where there is no room for the rest of the kit and its installation."""
    uploaded = upload.read_upload_state(ssh)
    to_upload = sum(max(0, path.stat().st_size - uploaded.bytes_of(name)) for name, path in kit.files.items())
    decide.check_free_space(facts, to_upload, kit.manifest.needs_bytes)
    return uploaded
