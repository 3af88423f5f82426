"""What is decided about a machine before anything is done to it: pure, over what it says."""

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


def test_a_raspberry_pi_is_known_by_its_device_tree() -> None:
    """With what it runs, where there is room, and how to become root."""
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
def test_boards_have_their_profile(model: str, coral: bool, wanted: str) -> None:
    """By what firmware says that they are."""
    assert decide.device_class(replace(PI, model=model), coral=coral) == wanted


@pytest.mark.parametrize("model", ["Freescale i.MX8MQ Phanbell", "", "Raspberry Pi 3 Model B Rev 1.2"])
def test_a_board_without_a_profile_is_asked_for(model: str) -> None:
    """Nothing is guessed: a wrong profile makes wrong plans."""
    with pytest.raises(UsageError, match="--device-class"):
        decide.device_class(replace(PI, model=model), coral=False)


def test_jetpack_6_has_a_python_and_jetpack_5_gets_one() -> None:
    """Ubuntu 22.04 has 3.10; Ubuntu 20.04 and Mendel have none that fits, and the kit may bring its own."""
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
def test_machines_that_cannot_run_it_are_told_why(change: dict[str, object], said: str) -> None:
    """Before anything is copied."""
    with pytest.raises(UsageError, match=said):
        decide.choose_means(replace(PI, **change), interpreter=True)  # type: ignore[arg-type]


def test_what_is_done_follows_from_what_is_there() -> None:
    """Install, upgrade, repair, or nothing."""
    running = replace(NOTHING, version="1.0-aa", device="cam-1", service="active")
    assert decide.next_action(NOTHING, "1.0-aa", known=False) == "install"
    assert decide.next_action(running, "1.1-bb", known=True) == "upgrade"
    assert decide.next_action(running, "1.0-aa", known=True) == "nothing"
    assert decide.next_action(replace(running, service="failed"), "1.0-aa", known=True) == "repair"
    assert decide.next_action(replace(running, device=""), "1.0-aa", known=False) == "repair"


def test_an_identity_longer_than_is_asked_for_is_read_by_its_first_lines() -> None:
    """enrolled.json holds the TUF root, and is cut off there."""
    cut = b'{\n  "device": "cam-1",\n  "controller": "https://c:8443",\n  "tuf_root": "{'
    found = parse_installed(answer(enrolled=cut, current=b"versions/0.2-0011aabb\n", ca=b"pem\n", data=b"yes\n"))
    assert (found.device, found.controller, found.version) == ("cam-1", "https://c:8443", "0.2-0011aabb")


@given(st.binary(max_size=400))
def test_no_answer_of_a_machine_is_more_than_an_error(raw: bytes) -> None:
    """Whatever it says."""
    for said in (raw, b"edgesplit-survey-1\n" + raw + b"\nedgesplit-survey-end", answer(os=raw, model=raw, libc=raw)):
        for parse in (parse_facts, parse_installed):
            try:
                parse(said)
            except MalformedMessage:
                continue


@given(st.text(max_size=200))
def test_what_a_machine_says_is_shown_without_what_a_terminal_obeys(text: str) -> None:
    """Names become device names or errors, and words lose their control characters."""
    assert all(letter.isprintable() or letter == "\n" for letter in safe_text(text.encode("utf-8", "replace")))
    try:
        name = proposed_name(text)
    except UsageError:
        return
    assert name.isascii() and name == name.lower()


@pytest.mark.parametrize("text", ["-oProxyCommand=x", "a b", "user@", "a@-x", "x;y", "$(id)", "a\nb", "user@host:22/x"])
def test_what_ssh_would_take_for_an_option_is_no_machine(text: str) -> None:
    """Nor what a shell would take for more."""
    with pytest.raises(UsageError):
        parse_host(text)


@pytest.mark.parametrize("text", ["pi", "pi@cam-1.local", "root@[fe80::1%eth0]", "me@10.0.0.7", "jump.alias_1"])
def test_machines_are_named_as_ssh_names_them(text: str) -> None:
    """Aliases of the operator's configuration too."""
    assert parse_host(text).target == text


def test_a_batch_names_its_columns(tmp_path: Path) -> None:
    """One machine per line; labels by spaces."""
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
def test_a_batch_that_is_none_says_where(tmp_path: Path, text: str) -> None:
    """Nothing is adopted then."""
    file = tmp_path / "devices.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"devices\.csv"):
        read_batch(file)


def test_two_machines_cannot_have_one_name() -> None:
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
def test_what_ssh_says_becomes_an_error_that_says_what_to_do(err: str, kind: type[EdgeError]) -> None:
    """Host keys are trust, refusals are ours to mend, the rest may go better again."""
    assert type(ssh_error("pi@a", err)) is kind


def test_room_is_looked_at_on_both_disks() -> None:
    """Before the first byte is sent."""
    decide.check_free_space(PI, 10**9, 10**9)
    with pytest.raises(UsageError, match="prefix"):
        decide.check_free_space(replace(PI, prefix_free=10**6), 10**3, 10**9)
    with pytest.raises(UsageError, match="home"):
        decide.check_free_space(replace(PI, home_free=10**6), 10**9, 10**3)
