"""A kit's install.sh, run as on a device: twice, killed, with a spoilt kit, on the wrong machine, and away again."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgesplit_provisioning.agent_options import environment_line
from support.kits import describe, made_up_wheel, repacked, small_kit

STEPS = ("checking the kit", "using ", "installing ", "is 1.0.0 now", "taking the claim")
SYSTEMCTL = """#!/bin/sh
# Stands for systemctl: keeps what it was asked.
echo "$*" >>"$(dirname "$0")/asked"
"""


@dataclass
class Device:
    """Where a kit is installed."""

    folder: Path
    more: list[str] = field(default_factory=lambda: ["--no-service"])

    @property
    def prefix(self) -> Path:
        return self.folder / "opt"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def argv(self, kit: Path, *words: str) -> list[str]:
        me = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        places = ["--prefix", str(self.prefix), "--data", str(self.data), "--user", me]
        return ["sh", str(kit / "install.sh"), *places, *self.more, *words]

    def run(self, kit: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(kit, *words), capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
        )

    def installed(self, kit: Path, *words: str, **environment: str) -> str:
        done = self.run(kit, *words, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def version(self) -> str:
        return subprocess.run(
            [str(self.prefix / "current" / "bin" / "edgesplit-agent"), "--version"], capture_output=True, text=True
        ).stdout.strip()


@pytest.fixture(scope="module")
def pip_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pip, as it is installed here."""
    return repacked(tmp_path_factory.mktemp("pip"), "pip")


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A scratch place to install into."""
    (tmp_path / "device").mkdir()
    return Device(tmp_path / "device")


@pytest.fixture
def kit(tmp_path: Path, pip_wheel: Path) -> Path:
    """A kit with a claim beside it."""
    made = small_kit(tmp_path / "kit", pip_wheel)
    (made / "claim.json").write_text('{"token": "secret"}')
    return made


def test_installing_twice_is_installing_once(device: Device, kit: Path) -> None:
    """The agent is there, the claim has moved into its folder, readable by nobody else, and the second run changes
    nothing."""
    assert "installing 1.0.0" in device.installed(kit)
    assert device.version() == "edgesplit-agent 1.0.0"
    assert not (kit / "claim.json").exists()
    claim = device.data / "claim.json"
    assert claim.read_text() == '{"token": "secret"}' and claim.stat().st_mode & 0o777 == 0o600
    assert device.data.stat().st_mode & 0o777 == 0o700
    before = os.readlink(device.prefix / "current"), (device.prefix / "current" / ".whole").stat().st_mtime_ns
    assert "installed already" in device.installed(kit)
    assert before == (
        os.readlink(device.prefix / "current"),
        (device.prefix / "current" / ".whole").stat().st_mtime_ns,
    )
    assert claim.exists()


def test_an_installation_that_was_killed_is_completed_by_the_next_run(device: Device, kit: Path) -> None:
    """Killed at every step, one after the other on what the one before left: the claim is never lost, what is
    `current` always works, and the last run finds nothing in its way."""
    for step in STEPS:
        with subprocess.Popen(
            device.argv(kit), stdout=subprocess.PIPE, text=True, start_new_session=True, bufsize=1
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if step in line:
                    os.killpg(running.pid, signal.SIGKILL)
                    break
        if (device.prefix / "current").is_symlink():
            assert device.version() == "edgesplit-agent 1.0.0"
        assert (kit / "claim.json").exists() or (device.data / "claim.json").exists()
    device.installed(kit)
    assert device.version() == "edgesplit-agent 1.0.0"
    assert (device.data / "claim.json").read_text() == '{"token": "secret"}' and not (kit / "claim.json").exists()
    assert sorted(one.name for one in device.prefix.iterdir()) == [".lock", "current", "versions"]
    assert len(list((device.prefix / "versions").iterdir())) == 1


def test_a_claim_that_was_being_erased_is_not_taken_over_the_one_in_place(device: Device, kit: Path) -> None:
    """A run that was killed between overwriting the medium's claim and deleting it leaves zeros there, which the next
    run took for the claim."""
    device.installed(kit)
    claim = (device.data / "claim.json").read_text()
    (kit / "claim.json").write_bytes(bytes(len(claim)))
    device.installed(kit)
    assert (device.data / "claim.json").read_text() == claim == '{"token": "secret"}'
    assert not (kit / "claim.json").exists()


def cut_description(kit: Path) -> None:
    (kit / "kit.json").write_bytes((kit / "kit.json").read_bytes()[:-30])


def other_format(kit: Path) -> None:
    (kit / "kit.json").write_bytes((kit / "kit.json").read_bytes().replace(b"kit/1", b"kit/9"))


def odd_line(kit: Path) -> None:
    (kit / "kit.json").write_bytes((kit / "kit.json").read_bytes().replace(b'"wheels.tar"', b'"WHEELS~1.TAR"'))


def flipped_wheels(kit: Path) -> None:
    raw = bytearray((kit / "wheels.tar").read_bytes())
    raw[len(raw) // 2] ^= 1
    (kit / "wheels.tar").write_bytes(raw)


def no_wheels(kit: Path) -> None:
    (kit / "wheels.tar").unlink()


def no_description(kit: Path) -> None:
    (kit / "kit.json").unlink()


def changed_script(kit: Path) -> None:
    with (kit / "install.sh").open("a") as script:
        script.write("# added\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_description, "kit.json is cut off"),
        (other_format, "not edgesplit.kit/1"),
        (odd_line, "kit.json is spoilt"),
        (flipped_wheels, "wheels.tar is spoilt"),
        (no_wheels, "wheels.tar is missing"),
        (no_description, "no kit.json"),
        (changed_script, "install.sh is spoilt"),
    ],
)
def test_a_spoilt_kit_is_refused_before_anything_is_installed(
    device: Device, kit: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """What is wrong is named, and the claim stays for the next try."""
    spoil(kit)
    done = device.run(kit)
    assert done.returncode == 1 and said in done.stderr
    assert not (device.prefix / "current").exists() and (kit / "claim.json").exists()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"machine": "riscv64"}, "this kit is for riscv64"),
        ({"glibc": "2.99"}, "needs glibc 2.99 or newer"),
        ({"python": "2.6"}, "no 64-bit Python 2.6 here"),
    ],
)
def test_a_kit_for_another_machine_says_so(
    device: Device, tmp_path: Path, pip_wheel: Path, other: dict[str, str], said: str
) -> None:
    """And what to do about it."""
    done = device.run(small_kit(tmp_path / "kit", pip_wheel, **other))
    assert done.returncode == 1 and said in done.stderr and "make" in done.stderr + "make" * ("glibc" in other)


def test_too_little_disk_space_is_refused_before_installing(device: Device, kit: Path) -> None:
    """By what the kit says that it needs."""
    raw = (kit / "kit.json").read_text()
    (kit / "kit.json").write_text(raw.replace('"needs_bytes": 1048576', '"needs_bytes": 999999999999999'))
    done = device.run(kit)
    assert done.returncode == 1 and "MB free, installing takes" in done.stderr


def test_a_failed_installation_leaves_the_running_version_untouched(
    device: Device, kit: Path, tmp_path: Path, pip_wheel: Path
) -> None:
    """A program that does not run here is never `current`, and takes no room."""
    device.installed(kit)
    broken = small_kit(tmp_path / "broken", pip_wheel, "2.0")
    wheel = made_up_wheel(tmp_path, "edgesplit", "2.0", command="edgesplit-agent = nowhere:main")
    with tarfile.open(broken / "wheels.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for one in (wheel, pip_wheel):
            archive.add(one, one.name)
    describe(broken, "2.0")
    done = device.run(broken)
    assert done.returncode == 1 and "does not run here" in done.stderr
    assert device.version() == "edgesplit-agent 1.0.0"
    assert [one.name.split("-")[0] for one in (device.prefix / "versions").iterdir()] == ["1.0.0"]
    assert not (device.prefix / ".unpacked").exists()


def test_a_kit_brings_its_own_python_where_the_device_has_another(
    device: Device, tmp_path: Path, pip_wheel: Path
) -> None:
    """It is unpacked beside the versions, once."""
    kit = small_kit(tmp_path / "kit", pip_wheel)
    real = subprocess.run(["sh", "-c", "command -v python3"], capture_output=True, text=True).stdout.strip()
    program = tmp_path / "python2.6"
    program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {real} "$@"\n')  # says that it is any version
    program.chmod(0o755)
    with tarfile.open(kit / "python.tar.gz", "w:gz") as archive:
        archive.add(program, "python/bin/python2.6")
    describe(kit, "1.0.0", python="2.6")
    assert "unpacking the Python" in device.installed(kit)
    assert device.version() == "edgesplit-agent 1.0.0"
    assert "unpacking" not in device.installed(kit)


def test_a_new_version_keeps_only_the_version_before_it(device: Device, tmp_path: Path, pip_wheel: Path) -> None:
    """`current` goes over by one rename."""
    for number in (1, 2, 3):
        device.installed(small_kit(tmp_path / f"kit{number}", pip_wheel, f"{number}.0"))
        assert device.version() == f"edgesplit-agent {number}.0"
    kept = sorted(one.name.split("-")[0] for one in (device.prefix / "versions").iterdir())
    assert kept == ["2.0", "3.0"]


def test_uninstalling_removes_only_what_was_installed(device: Device, kit: Path, tmp_path: Path) -> None:
    """The data folder only where that is asked for; a folder that is not the agent's, never."""
    device.installed(kit)
    device.installed(kit, "--remove")
    assert not device.prefix.exists() and (device.data / "claim.json").exists()
    device.installed(kit, "--remove", "--purge")
    assert not device.data.exists()
    device.installed(kit, "--remove", "--purge")
    other = Device(tmp_path / "other")
    for place in (other.prefix, other.data):
        place.mkdir(parents=True)
        (place / "thesis.txt").write_text("")
    assert other.run(kit, "--remove").returncode == 1
    assert (other.prefix / "thesis.txt").exists()
    (other.prefix / "thesis.txt").unlink()
    other.prefix.rmdir()
    assert other.run(kit, "--remove", "--purge").returncode == 1
    assert (other.data / "thesis.txt").exists()


def with_systemctl(device: Device) -> str:
    """The PATH on which the stand-in for systemctl is found; the service is installed into the device's own folder."""
    program = device.folder / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    device.more = ["--units", str(device.folder / "units")]
    return f"{program.parent}:{os.environ['PATH']}"


def test_the_service_is_put_in_place_and_restarted_only_where_something_changed(device: Device, kit: Path) -> None:
    """By systemctl; the unit is written by the agent that was installed."""
    if os.geteuid() != 0:
        pytest.skip("services are installed by root")
    path = with_systemctl(device)
    for last in ("restart", "start"):
        device.installed(kit, PATH=path)
        asked = (device.folder / "bin" / "asked").read_text().splitlines()
        assert asked[-3:] == [
            "daemon-reload",
            "enable --quiet edgesplit-agent.service",
            f"{last} --no-block edgesplit-agent.service",
        ]
    unit = (device.folder / "units" / "edgesplit-agent.service").read_text()
    assert f"--prefix {device.prefix} --data {device.data} --user root" in unit
    device.installed(kit, "--remove", PATH=path)
    assert not list((device.folder / "units").iterdir())


def test_the_agents_options_reach_the_environment_of_the_service(device: Device, kit: Path) -> None:
    """As a line of its own beside what is there already; the service is restarted where they changed, and a kit
    without options leaves them."""
    if os.geteuid() != 0:
        pytest.skip("services are installed by root")
    path = with_systemctl(device)
    environment = device.folder / "agent.env"
    environment.write_text('HTTPS_PROXY=http://proxy:3128\nOPTIONS="--port 8700"\n')
    environment.chmod(0o600)
    device.more += ["--env", str(environment)]
    device.installed(kit, PATH=path)
    assert "--port 8700" in environment.read_text()

    (kit / "options.env").write_text(f"{environment_line('--skip-still --changed 1%')}\n")
    for last in ("restart", "start"):
        device.installed(kit, PATH=path)
        assert (device.folder / "bin" / "asked").read_text().splitlines()[-1].startswith(last)
        assert environment.read_text().splitlines() == [
            "HTTPS_PROXY=http://proxy:3128",
            'OPTIONS="--skip-still --changed 1%"',
        ]
        assert environment.stat().st_mode & 0o777 == 0o600
    environment.unlink()
    device.installed(kit, PATH=path)
    assert environment.read_text() == 'OPTIONS="--skip-still --changed 1%"\n'


@pytest.mark.parametrize(
    "words", [("--prefix", "opt"), ("--data", "/"), ("--claim",), ("--unknown",), ("--purge",)], ids=" ".join
)
def test_a_wrong_call_of_the_installer_prints_its_usage(device: Device, kit: Path, words: tuple[str, ...]) -> None:
    """Exit code 2."""
    done = device.run(kit, *words)
    assert done.returncode == 2 and "usage: install.sh" in done.stderr
