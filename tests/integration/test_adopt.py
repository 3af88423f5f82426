"""`edgectl adopt` against a real sshd: what is done there, done twice, undone, cut off, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from edgesplit.errors import EdgeError, LinkError, TrustError, UsageError
from edgesplit_cli.commands import adopt as command
from edgesplit_cli.main import cli
from edgesplit_provisioning.ssh import upload
from edgesplit_provisioning.ssh.adopt import AdoptionResult
from edgesplit_provisioning.ssh.inventory import Host
from support.controller_process import eventually
from support.ssh_host import CA, FakeController, FakeKit, Machine, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "machine")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def cloud() -> FakeController:
    return FakeController()


@pytest.fixture
def kit(tmp_path: Path) -> FakeKit:
    return FakeKit(tmp_path / "kit")


def adopt(
    machine: Machine, cloud: FakeController, kit: FakeKit, host: Host | None = None, **wish: Any
) -> AdoptionResult:
    with machine.ssh(host) as ssh:
        return machine.adoption(cloud, kit, **wish).adopt(ssh)


def named(machine: Machine, name: str = "cam-1", **more: Any) -> Host:
    return Host(target=machine.host.target, port=machine.port, key=machine.host.key, name=name, **more)


def test_adopt_installs_a_device_and_removes_what_it_copied(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """The kit arrives whole, its installer runs with a claim of that name and class, and the home is as before."""
    host = named(machine, group="doors", labels={"room": "hall"})

    done = adopt(machine, cloud, kit, host)

    assert (done.did, done.device, done.version) == ("install", "cam-1", "1.0")
    assert done.device_class == "generic-x86" and "bookworm" in done.system
    assert machine.claim["device"] == "cam-1"
    assert cloud.claims[0]["group"] == "doors" and cloud.claims[0]["labels"] == {"room": "hall"}
    assert machine.left == []
    assert "the-secret-token" not in " ".join(machine.asked)


def test_adopting_again_changes_nothing_and_a_newer_kit_upgrades_with_the_same_identity(
    machine: Machine, cloud: FakeController, kit: FakeKit, tmp_path: Path
) -> None:
    """No second claim is made for a device that has its identity."""
    adopt(machine, cloud, kit, named(machine))
    (machine.world / "asked").unlink()

    again = adopt(machine, cloud, kit)
    assert (again.did, again.device, machine.asked) == ("nothing", "cam-1", [])

    newer = adopt(machine, cloud, FakeKit(tmp_path / "newer", "1.1"))
    assert (newer.did, newer.device, newer.version) == ("upgrade", "cam-1", "1.1")
    assert "--claim" not in machine.asked and len(cloud.claims) == 1


def test_the_agents_options_are_set_changed_and_left_alone(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """They arrive with the installation, a later call changes them and nothing else, and one without them leaves them;
    without a service they are in the command that starts the agent."""
    adopt(machine, cloud, kit, named(machine), agent_options="--skip-still --changed 1%")
    assert machine.environment.read_text() == 'OPTIONS="--skip-still --changed 1%"\n'
    assert machine.left == []

    assert adopt(machine, cloud, kit, agent_options="--skip-still --changed 1%").did == "nothing"
    assert adopt(machine, cloud, kit, agent_options="--skip-still", dry_run=True).did == "configure"
    assert adopt(machine, cloud, kit, agent_options="--skip-still").did == "configure"
    assert machine.environment.read_text() == 'OPTIONS="--skip-still"\n' and len(cloud.claims) == 1
    assert adopt(machine, cloud, kit).did == "nothing"
    assert machine.environment.read_text() == 'OPTIONS="--skip-still"\n'

    by_hand = adopt(machine, cloud, kit, agent_options="--skip-still --changed 2%", service=False)
    assert by_hand.did == "nothing" and by_hand.start.endswith("claim.json --skip-still --changed 2%")


def test_remove_undoes_an_adoption_and_purge_deletes_the_identity(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """Afterwards there is nothing, and removing once more says so."""
    adopt(machine, cloud, kit, named(machine))
    adoption = machine.adoption(cloud, kit)
    with machine.ssh() as ssh:
        removed = adoption.remove(ssh, kit.files["install.sh"], purge=False)
        assert (removed.did, removed.device) == ("remove", "cam-1")
        assert not machine.prefix.exists() and machine.data.exists()
        assert adoption.remove(ssh, kit.files["install.sh"], purge=True).did == "purge"
        assert not machine.data.exists()
        assert adoption.remove(ssh, kit.files["install.sh"], purge=True).did == "nothing"
    assert machine.left == []


def test_an_unknown_or_another_host_key_is_refused_before_anything_is_sent(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """Host keys are never taken on trust."""
    machine.known.write_text("")
    with pytest.raises(TrustError, match="not known here"):
        adopt(machine, cloud, kit)
    machine.knows(machine.folder / "stranger.pub")
    with pytest.raises(TrustError, match="another host key"):
        adopt(machine, cloud, kit)
    assert machine.asked == [] and cloud.claims == []


def test_an_ssh_key_that_the_machine_refuses_is_an_error_with_advice(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """The message says what to do."""
    stranger = Host(target=machine.host.target, port=machine.port, key=str(machine.folder / "stranger"))
    with pytest.raises(UsageError, match="-i KEY"):
        adopt(machine, cloud, kit, stranger)


def test_without_sudo_or_with_a_wrong_password_nothing_is_copied(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """Becoming root is tried before the first byte, and a password is never on a command line."""
    machine.command("id", "echo 1000\n")
    machine.command("sudo", 'echo "$@" >>"$WORLD/sudo"; [ "$1" = -n ] && exit 1\n[ "$1" = -S ] || exit 1\nread -r p\n'
                    '[ "$p" = right ] || exit 1\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')  # fmt: skip
    with pytest.raises(UsageError, match="needs a password"):
        adopt(machine, cloud, kit)
    adoption = machine.adoption(cloud, kit)
    with machine.ssh(named(machine)) as ssh:
        adoption.ask_password = lambda target: "wrong"
        with pytest.raises(UsageError, match="does not take this password"):
            adoption.adopt(ssh)
        assert machine.left == [] and cloud.claims == []
        adoption.ask_password = lambda target: "right"
        assert adoption.adopt(ssh).did == "install"
    assert "right" not in (machine.world / "sudo").read_text()


def test_too_little_disk_space_is_refused_before_anything_is_sent(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """Both the home's disk and the prefix's are looked at."""
    machine.command("df", "echo Filesystem; echo /dev/sda1 9000 8999 1 100% /\n")
    with pytest.raises(UsageError, match="no room there"):
        adopt(machine, cloud, kit, named(machine))
    assert machine.left == [] and cloud.claims == []


def test_a_disk_that_fills_up_while_copying_is_a_clear_error(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """df may promise what is gone a moment later."""
    machine.command("cat", 'case $1 in "") echo "cat: write error: No space left on device" >&2; exit 1;; esac\n'
                    'exec /bin/cat "$@"\n')  # fmt: skip
    with pytest.raises(UsageError, match="free some"):
        adopt(machine, cloud, kit, named(machine))


def test_an_interrupted_upload_is_resumed_by_the_next_call(
    machine: Machine, cloud: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came stays, and only the rest is sent; the file is whole in the end."""
    size = 3 << 20
    big = FakeKit(tmp_path / "big", content=os.urandom(size))
    begun = machine.home / ".edgesplit-adopt" / ".wheels.tar.part"

    def cut() -> None:
        eventually("some of it has come", lambda: begun.exists() and begun.stat().st_size)
        for session in machine.sessions():
            os.kill(session, signal.SIGKILL)

    monkeypatch.setattr(upload, "_blocks", _cut_after(size // 2, cut))
    with pytest.raises(LinkError):
        adopt(machine, cloud, big, named(machine))
    monkeypatch.undo()
    assert 0 < begun.stat().st_size < size and cloud.claims == []

    sent: dict[str, int] = {}
    monkeypatch.setattr(upload, "_blocks", _counted(sent))
    assert adopt(machine, cloud, big, named(machine)).did == "install"
    assert sent["wheels.tar"] < size
    assert machine.left == []


def test_a_spoilt_partial_upload_is_sent_again(machine: Machine, cloud: FakeController, kit: FakeKit) -> None:
    """The digest on the machine decides, not the size."""
    stage = machine.home / ".edgesplit-adopt"
    stage.mkdir(mode=0o700)
    (stage / ".wheels.tar.part").write_bytes(b"x" * 100)
    (stage / "left-over").write_bytes(b"of another version")
    assert adopt(machine, cloud, kit, named(machine)).did == "install"
    assert machine.left == []


def test_a_failing_installer_is_reported_and_leaves_no_claim_behind(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """The next call succeeds, with another claim."""
    (machine.world / "installer-fails").touch()
    with pytest.raises(EdgeError, match="ended with 9 there: install: no Python here"):
        adopt(machine, cloud, kit, named(machine))
    assert machine.left == []
    (machine.world / "installer-fails").unlink()
    assert adopt(machine, cloud, kit, named(machine)).did == "install"


def test_output_of_a_hostile_machine_is_never_executed(machine: Machine, cloud: FakeController, kit: FakeKit) -> None:
    """Quotes, substitutions, escape sequences and answers to what was not asked stay words."""
    (machine.world / "os-release").write_text(
        'ID=debian\nPRETTY_NAME="$(touch $WORLD/owned) `id` \x1b[2J\\"; rm -rf /"\nVERSION_ID=\'1\nuid 30\n'
    )
    done = adopt(machine, cloud, kit, named(machine), dry_run=True)
    assert "\x1b" not in done.system and not (machine.world / "owned").exists()

    machine.command("uname", "case $1 in -n) printf 'a; reboot\\n';; *) exec /bin/uname \"$@\";; esac\n")
    assert adopt(machine, cloud, kit, dry_run=True).device == "a-reboot"
    machine.command("uname", "case $1 in -n) printf '\\033]0;x\\007';; *) exec /bin/uname \"$@\";; esac\n")
    with pytest.raises(UsageError) as refused:
        adopt(machine, cloud, FakeKit(machine.folder / "k"), Host(target="root@127.0.0.1", port=machine.port,
              key=machine.host.key, name="-oProxyCommand=x"))  # fmt: skip
    assert "\x1b" not in str(refused.value)


def test_a_machine_that_sends_endless_output_is_disconnected(machine: Machine) -> None:
    """Its answers are bounded."""
    with machine.ssh() as ssh, pytest.raises(LinkError, match="more than"):
        ssh.run("yes")


def test_unsupported_machines_are_refused_with_the_reason(
    machine: Machine, cloud: FakeController, kit: FakeKit
) -> None:
    """Another system, a 32-bit one, a musl one: each has its reason."""
    (machine.world / "os-release").write_text("ID=alpine\nPRETTY_NAME=Alpine\n")
    with pytest.raises(UsageError, match="Alpine is not supported"):
        adopt(machine, cloud, kit, named(machine))
    (machine.world / "os-release").write_text("ID=raspbian\nPRETTY_NAME=Pi\n")
    machine.command("getconf", "[ $1 = LONG_BIT ] && echo 32\n")
    with pytest.raises(UsageError, match="64-bit"):
        adopt(machine, cloud, kit, named(machine))


def test_a_device_of_another_controller_is_left_alone(machine: Machine, cloud: FakeController, kit: FakeKit) -> None:
    """It must be taken away there first."""
    adopt(machine, cloud, kit, named(machine))
    (machine.data / "identity" / "ca.pem").write_text("theirs")
    with pytest.raises(UsageError, match="another one: remove it there first"):
        adopt(machine, cloud, kit, named(machine))
    (machine.data / "identity" / "ca.pem").write_text("ours")
    with pytest.raises(UsageError, match="'cam-1' already"):
        adopt(machine, cloud, kit, named(machine, "cam-2"))
    cloud.states["cam-1"] = "revoked"
    with pytest.raises(UsageError, match="--purge"):
        adopt(machine, cloud, kit, named(machine))


def test_dry_run_changes_nothing(machine: Machine, cloud: FakeController, kit: FakeKit) -> None:
    """--dry-run says what would be done."""
    done = adopt(machine, cloud, kit, named(machine), dry_run=True)
    assert done.did == "install" and machine.left == [] and machine.asked == [] and cloud.claims == []


def _cut_after(most: int, cut: Callable[[], object]) -> Callable[..., Iterator[bytes]]:
    def blocks(path: Path, offset: int, progress: Callable[[int], None]) -> Iterator[bytes]:
        with path.open("rb") as file:
            sent = 0
            while block := file.read(1 << 16):
                yield block
                sent += len(block)
                if sent == most:
                    cut()

    return blocks


def _counted(sent: dict[str, int]) -> Callable[..., Iterator[bytes]]:
    real = upload._blocks

    def blocks(path: Path, offset: int, progress: Callable[[int], None]) -> Iterator[bytes]:
        sent[path.name] = path.stat().st_size - offset
        return real(path, offset, progress)

    return blocks


def test_a_call_that_is_killed_leaves_no_connection_open(machine: Machine) -> None:
    """The shared connection ends with whoever opened it, also by SIGKILL."""
    script = (
        "import os, sys, signal; sys.path.insert(0, sys.argv[1])\n"
        "from edgesplit_provisioning.ssh.inventory import Host\nfrom edgesplit_provisioning.ssh.connection import Ssh\n"
        "ssh = Ssh(Host(target='root@127.0.0.1', port=int(sys.argv[2]), key=sys.argv[3]), sys.argv[4:]).__enter__()\n"
        "print(ssh._master.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [sys.executable, "-c", script, "tests", str(machine.port), machine.host.key, *machine.options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    eventually("no session is left", lambda: not machine.sessions())


def test_adopt_batch_reports_the_result_of_each_machine(
    machine: Machine, cloud: FakeController, kit: FakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails delays no other, and its error's code is the command's."""
    held = SimpleNamespace(ca_pem=CA.splitlines()[1])
    monkeypatch.setattr(command.credentials, "from_data_folder", lambda data: held)
    monkeypatch.setattr(command.ControllerClient, "from_credentials", lambda held: cloud)
    monkeypatch.setattr(command, "kit_maker", lambda *_: lambda means, seen, coral: kit)
    batch = tmp_path / "devices.csv"
    batch.write_text(f"host,name,group,port\nroot@127.0.0.1,cam-1,doors,{machine.port}\nnobody@127.0.0.1,cam-2,,1\n")
    options = [word for option in machine.options for word in ("-o", option)]
    places = ["--prefix", str(machine.prefix), "--agent-data", str(machine.data)]
    words = ["--data", str(tmp_path), "adopt", "--batch", str(batch), "-i", machine.host.key, *options, *places]

    result = CliRunner().invoke(cli, [*words, "--no-service", "--json"])

    first, second = json.loads(result.stdout)
    assert (first["device"], first["did"]) == ("cam-1", "install") and "supervise" in first["start"]
    assert second["kind"] == "LinkError" and result.exit_code == LinkError.exit_code
    assert [claim["group"] for claim in cloud.claims] == ["doors"]

    alone = [*words[:3], "root@127.0.0.1", "-p", str(machine.port), *words[5:]]
    again = CliRunner().invoke(cli, [*alone, "--no-service"])
    assert "cam-1 up to date" in again.stdout
    removed = CliRunner().invoke(cli, [*alone, "--remove"])
    assert "edgectl device revoke cam-1" in removed.stdout and not machine.prefix.exists()
