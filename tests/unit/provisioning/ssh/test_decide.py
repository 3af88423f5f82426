"""Decisions about a machine before anything is changed on it: pure functions over its probe output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit_provisioning.ssh import decide
from edgesplit_provisioning.ssh.connection import safe_text, ssh_error
from edgesplit_provisioning.ssh.facts import Installed, MachineFacts, parse_facts, parse_installed
from edgesplit_provisioning.ssh.inventory import Host, check_distinct, parse_host, proposed_name, read_batch

PI = MachineFacts(
    os_id="debian", os_like=(), os_name="Debian GNU/Linux 12 (bookworm)", machine="aarch64", bits=64,
    libc=(2, 36), model="Raspberry Pi 4 Model B Rev 1.4", pythons=("3.11",), host="pi", home_free=10**10,
    prefix_free=10**10, systemd=True, uid=1000, has_sudo=True, sudo=True,
)  # fmt: skip
NOTHING = Installed(version="", device="", controller="", authority="", service="", data=False)


def answer(**told: bytes) -> bytes:
    """As a machine answers."""
    lines = [f"{name} {value.hex()}" for name, value in told.items()]
    return "\n".join(["motd: hello", "edgesplit-survey-1", *lines, "edgesplit-survey-end", ""]).encode()


def test_a_raspberry_pi_is_recognised_by_its_device_tree() -> None:
    """With its system, its free space, and the way to become root."""
    seen = parse_facts(
        answer(
            os=b'ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
            machine=b"aarch64\n",
            bits=b"64\n",
            libc=b"glibc 2.36\n",
            model=b"Raspberry Pi 5 Model B Rev 1.0\0",
            pythons=b"3.11\n3.11\n",
            uid=b"1000\n",
            has_sudo=b"yes\n",
            home_room=b"/dev/mmcblk0p2 30000000 1 29000000 1% /\n",
            systemd=b"yes\n",
        )
    )
    assert decide.device_class(seen, coral=False) == "raspberrypi5"
    assert decide.choose_means(seen, interpreter=False) == decide.InstallMeans("3.11", False, "aarch64", True)
    assert decide.root_method(seen) == "sudo with password"
    assert seen.home_free == 29_000_000 * 1024 and seen.prefix_free == 0


@pytest.mark.parametrize(
    ("model", "coral", "wanted"),
    [
        ("Raspberry Pi 3 Model B Plus Rev 1.3", False, "raspberrypi3b+"),
        ("Raspberry Pi Compute Module 4 Rev 1.1", False, "raspberrypi4"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", False, "jetson-orin-nano"),
        ("Raspberry Pi 4 Model B Rev 1.4", True, "coral-usb-rpi4"),
    ],
)
def test_boards_map_to_device_profiles(model: str, coral: bool, wanted: str) -> None:
    """By the model that the firmware reports."""
    assert decide.device_class(replace(PI, model=model), coral=coral) == wanted


@pytest.mark.parametrize("model", ["Freescale i.MX8MQ Phanbell", "", "Raspberry Pi 3 Model B Rev 1.2"])
def test_an_unknown_board_requires_a_profile(model: str) -> None:
    """Nothing is guessed: a wrong profile makes wrong plans."""
    with pytest.raises(UsageError, match="--device-class"):
        decide.device_class(replace(PI, model=model), coral=False)


def test_jetpack_5_needs_the_kits_interpreter() -> None:
    """Ubuntu 22.04 has 3.10; Ubuntu 20.04 and Mendel have none that fits, and the kit may contain one."""
    six = replace(PI, os_id="ubuntu", os_like=("debian",), pythons=("3.10",), libc=(2, 35))
    assert decide.choose_means(six, interpreter=True) == decide.InstallMeans("3.10", False, "aarch64", True)
    five = replace(six, pythons=("3.8",), libc=(2, 31))
    with pytest.raises(UsageError, match="--interpreter"):
        decide.choose_means(five, interpreter=False)
    assert decide.choose_means(five, interpreter=True) == decide.InstallMeans("3.11", True, "aarch64", True)
    mendel = replace(PI, os_id="mendel", os_like=("debian",), pythons=("3.7",), libc=(2, 28))
    assert decide.choose_means(mendel, interpreter=True).own_interpreter


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "armv7l"}, "64-bit"),
        ({"bits": 32}, "32-bit system"),
        ({"os_id": "fedora"}, "is not supported"),
        ({"libc": None}, "no glibc"),
        ({"libc": (2, 27)}, "glibc 2.27"),
    ],
)
def test_unsupported_machines_are_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    """Before anything is copied."""
    with pytest.raises(UsageError, match=said):
        decide.choose_means(replace(PI, **change), interpreter=True)  # type: ignore[arg-type]


def test_the_action_follows_from_the_installed_state() -> None:
    """Install, upgrade, repair, or nothing."""
    running = replace(NOTHING, version="1.0-aa", device="cam-1", service="active")
    assert decide.next_action(NOTHING, "1.0-aa", known=False) == "install"
    assert decide.next_action(running, "1.1-bb", known=True) == "upgrade"
    assert decide.next_action(running, "1.0-aa", known=True) == "nothing"
    assert decide.next_action(running, "1.0-aa", known=True, options='OPTIONS="--skip-still"') == "configure"
    same = replace(running, options='OPTIONS="--skip-still"')
    assert decide.next_action(same, "1.0-aa", known=True, options='OPTIONS="--skip-still"') == "nothing"
    assert decide.next_action(replace(running, service="failed"), "1.0-aa", known=True) == "repair"
    assert decide.next_action(replace(running, device=""), "1.0-aa", known=False) == "repair"


def test_a_truncated_identity_file_is_parsed() -> None:
    """enrolled.json holds the TUF root, and is read up to a limit."""
    cut = b'{\n  "device": "cam-1",\n  "controller": "https://c:8443",\n  "tuf_root": "{'
    found = parse_installed(answer(enrolled=cut, current=b"versions/0.2-0011aabb\n", ca=b"pem\n", data=b"yes\n"))
    assert (found.device, found.controller, found.version) == ("cam-1", "https://c:8443", "0.2-0011aabb")


@given(st.binary(max_size=400))
def test_any_probe_output_parses_or_is_an_error(raw: bytes) -> None:
    """No other exception."""
    for output in (raw, b"edgesplit-survey-1\n" + raw + b"\nedgesplit-survey-end", answer(os=raw, model=raw, libc=raw)):
        for parse in (parse_facts, parse_installed):
            try:
                parse(output)
            except MalformedMessage:
                continue


@given(st.text(max_size=200))
def test_machine_texts_are_stripped_of_control_characters(text: str) -> None:
    """Names become device names or errors."""
    assert all(letter.isprintable() or letter == "\n" for letter in safe_text(text.encode("utf-8", "replace")))
    try:
        name = proposed_name(text)
    except UsageError:
        return
    assert name.isascii() and name == name.lower()


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "a b", "user@", "a@-x", "x;y", "$(id)", "a\nb", "user@host:22/x"])
def test_a_host_that_looks_like_an_ssh_option_is_refused(text: str) -> None:
    """Nor may it contain shell syntax."""
    with pytest.raises(UsageError):
        parse_host(text)


@pytest.mark.parametrize("text", ["pi", "pi@cam-1.local", "root@[fe80::1%eth0]", "me@10.0.0.7", "jump.alias_1"])
def test_machines_are_named_like_ssh_hosts(text: str) -> None:
    """Aliases of the operator's configuration too."""
    assert parse_host(text).target == text


def test_a_batch_file_is_parsed_by_column(tmp_path: Path) -> None:
    """One machine per line; labels separated by spaces."""
    file = tmp_path / "devices.csv"
    file.write_text("host,name,labels,port\npi@a,cam-1,room=hall floor=2,2222\npi@b,,,\n")
    first, second = read_batch(file)
    assert first == Host(target="pi@a", name="cam-1", labels={"room": "hall", "floor": "2"}, port=2222)
    assert second == Host(target="pi@b")


@pytest.mark.parametrize(
    "text",
    ["", "name\ncam-1\n", "host,colour\na,b\n", "host\n-x\n", "host,port\na,99999\n", "host,labels\na,b\n", "host\n",
     "host,name\na\n", "host\na,b\n", 'host\n"a\n'],
)  # fmt: skip
def test_an_invalid_batch_names_its_line(tmp_path: Path, text: str) -> None:
    """No machine is adopted then."""
    file = tmp_path / "devices.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"devices\.csv"):
        read_batch(file)


def test_machines_and_names_in_a_batch_are_unique() -> None:
    """Nor can one machine be adopted twice at once."""
    with pytest.raises(UsageError, match="the same name twice"):
        check_distinct([Host(target="a", name="cam"), Host(target="b", name="cam")])
    with pytest.raises(UsageError, match="the same machine twice"):
        check_distinct([Host(target="a"), Host(target="a")])
    check_distinct([Host(target="a"), Host(target="a", port=2222)])


@pytest.mark.parametrize(
    ("err", "kind"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", TrustError),
        ("Host key verification failed.", TrustError),
        ("pi@a: Permission denied (publickey).", UsageError),
        ("ssh: connect to host a port 22: Connection refused", LinkError),
        ("", LinkError),
    ],
)
def test_ssh_errors_map_to_error_kinds_with_advice(err: str, kind: type[EdgeError]) -> None:
    """Host keys are a matter of trust, refusals need the operator, everything else may succeed later."""
    assert type(ssh_error("pi@a", err)) is kind


def test_free_space_is_checked_on_both_disks() -> None:
    """Before the first byte is sent."""
    decide.check_free_space(PI, 10**9, 10**9)
    with pytest.raises(UsageError, match="prefix"):
        decide.check_free_space(replace(PI, prefix_free=10**6), 10**3, 10**9)
    with pytest.raises(UsageError, match="home"):
        decide.check_free_space(replace(PI, home_free=10**6), 10**9, 10**3)
