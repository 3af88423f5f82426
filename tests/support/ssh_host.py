"""A machine to adopt: a real sshd on loopback in mount namespaces of its own, so that nothing of the host changes.

It has an os-release, homes and a place for programs of its own, an `sudo` and `df` that a test may replace, and keys
that were made for it. The installer that tests send is a small one of theirs, which writes down what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

from edgesplit.errors import NotFound
from edgesplit_provisioning.ssh.adopt import Adopter, AdoptOptions
from edgesplit_provisioning.ssh.connection import Ssh
from edgesplit_provisioning.ssh.inventory import Host, parse_host

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
BOOKWORM = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\n'
CA = "-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----"
INSTALLER = """#!/bin/sh
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
printf '%s\\n' "$@" >"$WORLD/asked"
prefix= data= claim= env= remove= purge=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=$2; shift ;; --data) data=$2; shift ;; --claim) claim=$2; shift ;; --env) env=$2; shift ;;
    --remove) remove=1 ;; --purge) purge=1 ;;
  esac
  shift
done
if [ -e "$WORLD/installer-fails" ]; then echo 'install: no Python here'; exit 9; fi
if [ -n "$remove" ]; then rm -rf "$prefix"; [ -z "$purge" ] || rm -rf "$data"; exit 0; fi
(cd "$kit" && echo '@SUMS@' | sha256sum -c >/dev/null) || { echo 'install: a file is spoilt'; exit 4; }
mkdir -p "$prefix/versions/@MARK@" "$data/identity"
ln -sfn "versions/@MARK@" "$prefix/current"
[ -z "$env" ] || cp "$kit/options.env" "$env"
if [ -n "$claim" ]; then
  cp "$claim" "$WORLD/claim.json"
  printf '{\\n "device": "%s",\\n "controller": "https://cloud:8443"\\n}' \
    "$(sed -n 's/.*"device": *"\\([a-z0-9-]*\\)".*/\\1/p' "$claim")" >"$data/identity/enrolled.json"
  printf '%s' "$CA" >"$data/identity/ca.pem"
fi
"""


class FakeKit:
    """As small as a kit can be."""

    def __init__(self, folder: Path, version: str = "1.0", content: bytes = b"wheels" * 1000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest, self.mark = SimpleNamespace(version=version, needs_bytes=1_000), f"{version}-0123abcd"
        sums = f"{hashlib.sha256(content).hexdigest()}  wheels.tar\n"
        installer = INSTALLER.replace("@MARK@", self.mark).replace("@SUMS@", sums)
        self.files: dict[str, Path] = {}
        for name, data in {"install.sh": installer.encode(), "wheels.tar": content}.items():
            self.files[name] = folder / name
            self.files[name].write_bytes(data)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


class FakeController:
    """Knows the devices that were claimed."""

    url = "https://cloud:8443"

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.claims: list[dict[str, Any]] = []

    def get(self, path: str, **query: Any) -> Any:
        name = path.rpartition("/")[2]
        if name not in self.states:
            raise NotFound(f"no device {name}")
        return {"name": name, "state": self.states[name]}

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        assert path == "/v1/devices/claims" and body is not None
        self.claims.append(dict(body))
        self.states[body["device"]] = "online"
        return {
            "device": body["device"], "device_class": body["device_class"], "token": "the-secret-token",
            "controller_url": self.url, "ca_pem": CA, "tuf_root": "{}", "expires": 2**40,
        }  # fmt: skip


class Machine:
    """The sshd, and what it is root of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = folder / "world"
        self.home = folder / "home"
        self.prefix, self.data = self.world / "opt" / "agent", self.world / "var" / "agent"
        self.environment = self.world / "agent.env"
        for one in (self.world, self.home / ".ssh", folder / "bin"):
            one.mkdir(parents=True)
        (self.world / "os-release").write_text(BOOKWORM)
        for name in ("host", "user", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
        self.port = _free_port()
        self.known = folder / "known_hosts"
        self.knows(folder / "host.pub")
        self._process: subprocess.Popen[bytes] | None = None

    def knows(self, public: Path) -> None:
        """The host key that the operator has for it."""
        kind, key, *_ = public.read_text().split()
        self.known.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def command(self, name: str, script: str) -> None:
        """What that command does there."""
        path = self.folder / "bin" / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def start(self) -> None:
        """Listen; where somebody else took the port meanwhile, at another."""
        for _ in range(5):
            if self._listens():
                return
            self.port = _free_port()
            self.knows(self.folder / "host.pub")
        raise AssertionError(f"sshd does not listen: {(self.folder / 'sshd.log').read_text()}")

    def _listens(self) -> bool:
        """A mount namespace gives it an os-release of its own."""
        config = self.folder / "sshd_config"
        environment = f"HOME={self.home} WORLD={self.world} PATH={self.folder}/bin:/usr/bin:/bin"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            f'PermitRootLogin yes\nMaxStartups 50\nMaxSessions 50\nSetEnv {environment} "CA={CA.splitlines()[1]}"\n'
            f"LogLevel INFO\n"
        )
        own = f"mount --bind {self.world}/os-release /usr/lib/os-release"
        script = f"{own} && mkdir -p /run/sshd && exec {SSHD} -D -e -f {config}"
        log = self.folder / "sshd.log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], stdout=file, stderr=file
            )
        until = monotonic() + 60
        while monotonic() < until and self._process.poll() is None:
            if b"Server listening on" in log.read_bytes():
                return True
            threading.Event().wait(0.02)
        self.stop()
        return False

    def stop(self) -> None:
        """End it, and every session."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def sessions(self) -> list[int]:
        """The processes of its sessions."""
        assert self._process is not None
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(stat[1]) == self._process.pid:
                    found.append(int(entry.name))
        return found

    @property
    def host(self) -> Host:
        return Host(target=parse_host("root@127.0.0.1").target, port=self.port, key=str(self.folder / "user"))

    @property
    def options(self) -> list[str]:
        """What an operator's configuration would say."""
        return [f"UserKnownHostsFile={self.known}", "GlobalKnownHostsFile=none", "IdentitiesOnly=yes",
                "StrictHostKeyChecking=yes"]  # fmt: skip

    def ssh(self, host: Host | None = None) -> Ssh:
        """A connection to it, as `edgectl adopt` makes it."""
        return Ssh(host or self.host, self.options)

    def wish(self, **more: Any) -> AdoptOptions:
        """Adopt into this world."""
        places = {"prefix": str(self.prefix), "data": str(self.data), "environment": str(self.environment)}
        return AdoptOptions(**places, **more)

    def adoption(self, controller: FakeController, kit: FakeKit, **more: Any) -> Adopter:
        """As `edgectl adopt` makes it."""
        return Adopter(controller, CA.splitlines()[1], self.wish(**more), lambda means, seen, coral: kit)

    @property
    def asked(self) -> list[str]:
        """What the installer was asked last; empty where it was not run."""
        path = self.world / "asked"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def claim(self) -> dict[str, Any]:
        """The claim that the installer was given."""
        found: dict[str, Any] = json.loads((self.world / "claim.json").read_text())
        return found

    @property
    def left(self) -> list[str]:
        """What lies in the home there."""
        return sorted(str(path.relative_to(self.home)) for path in self.home.rglob("*") if path.name != ".ssh")


def why_not() -> str:
    """Why there can be no such machine here; empty where there can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "no sshd here: tools/setup dev installs openssh-server"
    if os.geteuid() != 0:
        return "a mount namespace for sshd takes root"
    tried = subprocess.run(["unshare", "--mount", "--propagation", "private", "mount", "--bind", "/tmp", "/mnt"],
                           capture_output=True, check=False)  # fmt: skip
    return "" if tried.returncode == 0 else f"no mount namespaces here: {tried.stderr.decode().strip()[:100]}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
