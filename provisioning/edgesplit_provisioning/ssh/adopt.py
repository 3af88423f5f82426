"""One machine, from "it runs and ssh reaches it" to "its agent is online": asked, judged, copied, installed, enrolled.

Every step may be cut off: what was copied is continued, what was installed is found, a claim that was not used is
replaced by another, and nothing that was copied stays. A machine that is a device already keeps its identity.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Protocol
from urllib.parse import quote

from edgesplit.controller_client.claims import ClaimWish, make_claim
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import EdgeError, LinkError, NotFound, UsageError
from edgesplit.identifiers import device_name
from edgesplit_cli.output import plain
from edgesplit_provisioning.image.device_config import unreachable
from edgesplit_provisioning.ssh import decide, upload
from edgesplit_provisioning.ssh.connection import Ssh, last
from edgesplit_provisioning.ssh.facts import DATA, LOOK_AS_ROOT, PREFIX, Installed, Survey, parse_installed, survey
from edgesplit_provisioning.ssh.inventory import Host, proposed_name
from edgesplit_provisioning.ssh.sudo import AskPassword, AsRoot

CLAIM, INSTALLER = "claim.json", "install.sh"
START = "{prefix}/current/bin/edgesplit-agent supervise --data {data} --claim {data}/claim.json"
INSTALL_S = 1_800.0
"""A Raspberry Pi 3 on an old card takes some minutes."""
LOOK_AGAIN_S = 1.0

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


class Kit(Protocol):
    """What is needed of `edgesplit_provisioning.kit.Kit`."""

    @property
    def files(self) -> Mapping[str, Path]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def mark(self) -> str:
        """What it is called where it is installed."""
        ...

    @property
    def needs_bytes(self) -> int:
        """Free space that installing takes at its peak."""
        ...


class Told(Protocol):
    """Who is told how it goes."""

    def __call__(self, doing: str, done: int = 0, of: int = 0) -> None:
        """What is done now, and how many bytes of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for all machines of one call."""

    coral: bool = False
    interpreter: bool = False
    """The kit may bring its own Python."""
    prefix: str = PREFIX
    data: str = DATA
    service: bool = True
    replace: bool = False
    """A name that is a device's already is taken from it."""
    link: str = "wifi"
    wait_s: float = 0.0
    """So long for the device to be online; 0: do not wait."""
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What became of one machine."""

    host: str
    device: str
    device_class: str
    did: str
    """install, upgrade, repair, nothing; or what would be done."""
    version: str
    system: str
    state: str = ""
    """The device's at the controller, where that was waited for."""
    start: str = ""
    """What starts the agent there, where no service does."""
    warning: str = ""
    """Why it may not find the controller."""


@dataclass(slots=True)
class Adoption:
    """One machine's; `kit_for` makes or finds the kit that fits it."""

    controller: ControllerClient
    authority: str
    """The controller's own, in PEM: a device that is enrolled has it."""
    wish: Wish
    kit_for: Callable[[decide.Means, Survey, bool], Kit]
    """Of these means, with Coral's library or without."""
    ask_password: AskPassword = lambda target: ""
    told: Told = lambda doing, done=0, of=0: None
    pause: Callable[[float], object] = field(default_factory=lambda: threading.Event().wait)

    def adopt(self, ssh: Ssh) -> Adopted:
        """All of it. UsageError where this machine cannot be adopted as it is."""
        host, wish = ssh.host, self.wish
        self.told("looking")
        seen = survey(ssh, wish.prefix)
        means = decide.means(seen, interpreter=wish.interpreter)
        root = AsRoot.on(ssh, decide.root_by(seen), self.ask_password)
        there = parse_installed(root.run(LOOK_AS_ROOT, wish.prefix, wish.data).out)
        name, known = self._who(there, host, seen)
        device_class = "" if known else host.device_class or decide.device_class(seen, coral=wish.coral)
        self.told("making the kit")
        kit = self.kit_for(means, seen, wish.coral)
        step = decide.step(there, kit.mark, known=known)
        done = Adopted(
            host=host.target, device=name, device_class=device_class, did=step, version=kit.version,
            system=f"{plain(seen.os_name)[:80]}, Python {means.python}"
            + (" of the kit" if means.own_interpreter else "") + f" on {means.machine}",
        )  # fmt: skip
        if wish.dry_run:
            copied = upload.standing(ssh)
            decide.check_room(seen, _to_copy(kit, copied), kit.needs_bytes)
            return done
        if step != "nothing":
            done = replace(done, warning=self._install(ssh, root, seen, kit, name, device_class))
        if means.service and wish.service:
            return self._waited(done)
        return replace(done, start=START.format(prefix=wish.prefix, data=wish.data))

    def _who(self, there: Installed, host: Host, seen: Survey) -> tuple[str, bool]:
        """Its name, and whether the controller knows it by that already. UsageError where it is not ours to take."""
        decide.check_ours(there, self.authority, host.name)
        name = there.device or device_name(host.name or proposed_name(plain(seen.host)))
        known = bool(there.device) and self._state(name) not in ("", "revoked", "claimed")
        if there.device and not known:
            raise UsageError(
                f"it was device {name!r}, whom the controller does not know any more: `edgectl adopt {host.target}"
                " --remove --purge`, then adopt it anew"
            )
        return name, known

    def remove(self, ssh: Ssh, installer: Path, *, purge: bool) -> Adopted:
        """Undo it there; with `purge` also forget who the device was. The controller is told nothing."""
        self.told("looking")
        seen = survey(ssh, self.wish.prefix)
        root = AsRoot.on(ssh, decide.root_by(seen), self.ask_password)
        there = parse_installed(root.run(LOOK_AS_ROOT, self.wish.prefix, self.wish.data).out)
        nothing = not there.version and not (purge and there.data)
        did = "nothing" if nothing else "purge" if purge else "remove"
        if not (nothing or self.wish.dry_run):
            copied = upload.standing(ssh)
            upload.carry(ssh, {INSTALLER: installer}, copied, lambda done, of: None)
            self.told("removing")
            words = ["--remove", *(["--purge"] if purge else []), *([] if seen.systemd else ["--no-service"])]
            self._run_installer(root, copied.stage, words)
        return Adopted(
            host=ssh.host.target, device=plain(there.device), device_class="", did=did, version=plain(there.version),
            system=plain(seen.os_name)[:80],
        )  # fmt: skip

    def _install(self, ssh: Ssh, root: AsRoot, seen: Survey, kit: Kit, name: str, device_class: str) -> str:
        """`device_class`: of a device to come; empty where it has its identity. Why it may not find the controller."""
        copied = upload.standing(ssh)
        decide.check_room(seen, _to_copy(kit, copied), kit.needs_bytes)
        self.told("copying", 0, kit.bytes)
        upload.carry(ssh, kit.files, copied, lambda done, of: self.told("copying", done, of))
        words = ["--coral"] if self.wish.coral else []
        if not (self.wish.service and seen.systemd):
            words.append("--no-service")
        warning = ""
        if device_class:
            claim = self._claim(ssh.host, name, device_class)
            warning = unreachable(claim)
            upload.put_secret(ssh, CLAIM, claim)
            words += ["--claim", f"{copied.stage}/{CLAIM}"]
        self.told("installing")
        self._run_installer(root, copied.stage, words)
        return warning

    def _claim(self, host: Host, name: str, device_class: str) -> bytes:
        self.told("claiming")
        asked = ClaimWish(
            device=name, device_class=device_class, link=host.link or self.wish.link, group=host.group or None,
            labels=host.labels, replace=self.wish.replace,
        )  # fmt: skip
        return make_claim(self.controller, asked).encode()

    def _run_installer(self, root: AsRoot, stage: str, words: list[str]) -> None:
        """Nothing that was copied stays; where the connection is lost, the next call finds it and goes on."""
        places = ["--prefix", self.wish.prefix, "--data", self.wish.data]
        ran = root.run(
            _INSTALL, stage, *words, *places, timeout_s=INSTALL_S, said=lambda line: self.told(line[:60])
        )  # fmt: skip
        if not ran.ok:
            out = [str(plain(line)) for line in ran.out.decode("utf-8", "replace").splitlines() if line.strip()]
            raise EdgeError(
                f"the installer ended with {ran.status} there: {'; '.join(out[-3:])[:600] or last(ran.err)}"
            )

    def _state(self, name: str) -> str:
        """The device's at the controller; empty where there is none."""
        try:
            return str(self.controller.get(f"/v1/devices/{quote(name, safe='')}")["state"])
        except NotFound:
            return ""

    def _waited(self, done: Adopted) -> Adopted:
        if not self.wish.wait_s:
            return done
        self.told("waiting for it to be online")
        until, state = monotonic() + self.wish.wait_s, ""
        while (state := self._state(done.device)) != "online":
            if monotonic() > until:
                raise LinkError(
                    f"{done.device} is installed, and not online within {self.wish.wait_s:.0f} s"
                    f" ({state or 'unknown'}): can it reach {self.controller.url}? On it,"
                    " `journalctl -u edgesplit-agent` says why not"
                )
            self.pause(LOOK_AGAIN_S)
        return replace(done, state=state)


def _to_copy(kit: Kit, there: upload.Standing) -> int:
    return sum(max(0, path.stat().st_size - there.of(name)) for name, path in kit.files.items())
