"""The files for a broker that somebody else runs. mosquitto's are attacked in `test_broker`; EMQX's are read here by
its documented grammar, for there is no EMQX."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from edgesplit.errors import UsageError
from edgesplit_cli.main import cli
from edgesplit_controller.messaging.broker import CONTROLLERS, DEVICE_READS, DEVICE_WRITES, access_rules
from edgesplit_controller.messaging.broker_config import emqx_rules, write_broker_files
from edgesplit_controller.pki.authority import Authority
from edgesplit_controller.settings import broker_address

RULE = re.compile(
    r'\{(allow|deny), (all|\{username, \{re, "([^"]+)"\}\})(?:, (all|publish|subscribe), (\[[^\]]*\]))?\}\.'
)
"""One Erlang term of EMQX's acl.conf, of the forms that we use."""


def matches(pattern: str, topic: str) -> bool:
    """Does a topic, or a wish for topics, lie within a pattern?"""
    parts, asked = pattern.split("/"), topic.split("/")
    for at, part in enumerate(parts):
        if part == "#":
            return True
        if at >= len(asked) or asked[at] == "#" or part not in ("+", asked[at]):
            return False
    return len(parts) == len(asked)


def emqx_allows(user: str, action: str, topic: str) -> bool:
    """What EMQX answers: the first rule that fits decides."""
    for line in emqx_rules().splitlines():
        rule = RULE.fullmatch(line)
        assert rule is not None, line
        verdict, _, name, of, topics = rule.groups()
        if name is not None and not re.search(name, user):
            continue
        if of is not None and of not in ("all", action):
            continue
        patterns = [one.replace("${username}", user) for one in json.loads(topics)] if topics else ["#"]
        if any(matches(pattern, topic) for pattern in patterns):
            return verdict == "allow"
    return False


def mosquitto_allows(user: str, action: str, topic: str) -> bool:
    """What mosquitto answers by its own file: any line that fits allows."""
    whose, found = "", False
    for line in access_rules().splitlines():
        kind, *words = line.split() or [""]
        if kind == "user":
            whose = words[0]
        elif kind == "topic":
            found = found or (whose == user and matches(words[1], topic))
        elif [kind, *words[:1]] == ["pattern", {"publish": "write", "subscribe": "read"}[action]]:
            found = found or matches(words[1].replace("%u", user), topic)
    return found


def test_emqx_rules_allow_what_mosquittos_allow() -> None:
    """For devices and controllers, own topics and others', every kind and wildcards."""
    kinds = (*DEVICE_READS, *DEVICE_WRITES, "job", "birth/x", "#", "+")
    topics = [f"edgesplit/v1/{name}/{kind}" for name in ("cam-1", "cam-2", "+", "controller") for kind in kinds]
    topics += ["#", "+/+/+/+", "edgesplit/#", "edgesplit/v1/chunk/" + "0" * 64, "$SYS/#", "elsewhere", "edgesplit/v2/x"]
    decided = set()
    for user in ("cam-1", *CONTROLLERS, "controllers", "controller-2", "xcontroller"):
        for action in ("publish", "subscribe"):
            for topic in topics:
                answer = emqx_allows(user, action, topic)
                assert answer == mosquitto_allows(user, action, topic), (user, action, topic)
                decided.add(answer)
    assert decided == {True, False}


def test_emqx_configuration_is_well_formed(tmp_path: Path) -> None:
    """HOCON as its documentation has it: settings, and blocks that close; every file that it names is there."""
    authority = Authority(tmp_path / "keys")
    write_broker_files("emqx", tmp_path / "out", authority, authority.revocation_list([]), ["mq.example"], 8883)
    depth = 0
    for line in (tmp_path / "out" / "emqx.conf").read_text().splitlines():
        line = line.partition("#")[0].strip()
        depth += line.count("{") + line.count("[") - line.count("}") - line.count("]")
        known = r"[a-z0-9_.]+ = (?:\[|\[?\"[^\"]+\"\]?|\w+)|[a-z_.]+ \{|[\]}]|\{ type = file, .* \}|"
        assert re.fullmatch(known, line) and depth >= 0, line
    assert depth == 0
    named = re.findall(r'"(/[^"]+)"', (tmp_path / "out" / "emqx.conf").read_text())
    assert len(named) == 4 and all(Path(name).is_file() for name in named)


@pytest.mark.parametrize("kind", ["mosquitto", "emqx"])
def test_the_command_writes_what_the_broker_needs(tmp_path: Path, kind: str) -> None:
    """Before the first start of a controller: certificate for that host, key that only its owner reads, the empty
    list, and files that name each other where they will lie."""
    out = tmp_path / "out"
    words = [
        "--data",
        tmp_path / "data",
        "up",
        "--broker",
        "mqtts://mq.example:18883",
        "--advertised-broker",
        "10.1.1.1:1",
    ]
    words += ["--print-broker-config", kind, "--out", out, "--installed-at", "/etc/mq"]
    done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0 and {Path(line) for line in done.output.splitlines()} == set(out.iterdir())
    certificate = x509.load_pem_x509_certificate((out / "broker.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["mq.example"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["10.1.1.1"]
    assert stat.S_IMODE((out / "broker.key").stat().st_mode) == 0o600
    assert len(list(x509.load_pem_x509_crl((out / "revoked.pem").read_bytes()))) == 0
    text = "".join(file.read_text() for file in out.iterdir() if file.suffix in (".conf", ".txt"))
    assert str(out) not in text and "/etc/mq/broker.key" in text and "18883" in text
    assert not (tmp_path / "data" / "broker").exists()


def test_the_brokers_memory_is_bounded_as_the_option_says(tmp_path: Path) -> None:
    """In the files for another machine, whose memory is not this one's."""
    words = ["--data", str(tmp_path / "data"), "up", "--broker", "mqtts://mq", "--broker-memory", "768MiB"]
    words += ["--print-broker-config", "mosquitto", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    assert f"memory_limit {768 * 2**20}\n" in (tmp_path / "out" / "mosquitto.conf").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--broker", "mqtts://mq", "--broker-memory", "1MB", "--out", "x"], "at least 64.0 MiB"),
        (["--out", "x"], "--broker mqtts://HOST:8883"),
        (["--broker", "mqtts://mq"], "--out DIR"),
        (["--broker", "mqtt://mq", "--out", "x"], "mutual TLS is needed"),
    ],
)
def test_incomplete_options_for_broker_files_are_refused(tmp_path: Path, words: list[str], told: str) -> None:
    """The message names what is missing."""
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(
            cli,
            ["--data", str(tmp_path), "up", "--print-broker-config", "mosquitto", *words],
            catch_exceptions=False,
            standalone_mode=False,
        )
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("mqtts://mq", ("mq", 8883)),
        ("mqtts://mq/", ("mq", 8883)),
        ("MQTTS://10.0.0.2:1883", ("10.0.0.2", 1883)),
        ("mqtts://[::1]", ("::1", 8883)),
        ("mqtts://[::1]:99", ("::1", 99)),
    ],
)
def test_urls_of_brokers(url: str, meant: tuple[str, int]) -> None:
    """With and without a port."""
    assert broker_address(url) == meant


@pytest.mark.parametrize("url", ["mq:8883", "mqtts://", "mqtt://mq", "https://mq", "mqtts://mq:0", "mqtts://mq:99999"])
def test_other_urls_of_brokers_are_refused(url: str) -> None:
    """No TLS, no host, no port that exists."""
    with pytest.raises(UsageError):
        broker_address(url)
