"""Names in paths of the API, and the address under which this machine finds its own controller."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError, UsageError
from edgesplit_cli.commands import up
from edgesplit_cli.settings import segment
from edgesplit_controller.settings import Settings, await_port

OWN = {"api_url": "https://edge.example:8443", "api_port": 8443, "bind": "0.0.0.0"}


def test_a_question_mark_in_a_name_called_another_device() -> None:
    """`device revoke 'cam-1?'` revoked cam-1: a name is one segment of the path, whatever is in it."""
    assert segment("cam-1?force=true") == "cam-1%3Fforce%3Dtrue"
    assert segment("digits@2") == "digits%402"
    for impossible in ("", "a/b", "../x"):
        with pytest.raises(UsageError, match="is no name"):
            segment(impossible)


def test_a_letter_outside_ascii_in_a_path_was_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client encodes what a URL cannot hold, and leaves alone what is encoded."""
    sent: list[str] = []

    def request(_self: http.client.HTTPConnection, _method: str, target: str, **_more: Any) -> None:
        sent.append(target)
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPSConnection, "request", request)
    client = ControllerClient("https://127.0.0.1:1", "token", ssl.create_default_context())
    for path in ("/v1/models/ü", "/v1/models/a%2Fb", "/v1/devices?state=online"):
        with pytest.raises(LinkError):
            client.get(path)
    assert sent == ["/v1/models/%C3%BC", "/v1/models/a%2Fb", "/v1/devices?state=online"]


@pytest.mark.parametrize(
    ("addresses", "resolves", "url"),
    [
        (OWN, False, "https://127.0.0.1:8443"),
        (OWN, True, OWN["api_url"]),
        ({**OWN, "bind": "10.0.0.7"}, False, OWN["api_url"]),
        ({"api_url": OWN["api_url"], "bind": "0.0.0.0"}, False, OWN["api_url"]),
    ],
)
def test_a_host_that_only_devices_know_cut_off_every_command_on_the_controllers_machine(
    addresses: dict[str, Any], resolves: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`edgectl up --host NAME` is kept; commands on this machine find it where it listens all the same."""
    (tmp_path / "keys").mkdir()
    for name in ("operator.token", "ca.pem", "keys/operator.pem", "keys/operator.key"):
        (tmp_path / name).write_text("x")
    (tmp_path / "controller.json").write_text(json.dumps(addresses))

    def lookup(*_asked: object) -> list[str]:
        if not resolves:
            raise socket.gaierror("Name or service not known")
        return ["an address"]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert credentials.from_data_folder(tmp_path).url == url


def test_an_address_of_another_machine_was_advised_another_port(tmp_path: Path) -> None:
    """`edgectl up --bind` with an address that is not here: the option at fault is named, and nothing is waited for.
    192.0.2.0/24 is nobody's (RFC 5737)."""
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is no address of this machine: give --bind one that is"):
        await_port(Settings(data=tmp_path, bind="192.0.2.1"), "api_port", 60.0)


def test_a_host_that_this_machine_does_not_know_was_kept_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start goes on, because devices may know the name, and says that it is unknown here."""
    monkeypatch.setattr(up, "is_known_host", lambda host: host != "nowhere.example")
    for host, is_warned in (("nowhere.example", True), ("127.0.0.1", False)):
        up._on_ready(tmp_path, {}, {"api_url": f"https://{host}:8443", "mqtt_host": host, "mqtt_port": 8883})
        assert (f"this machine finds no address for {host}: devices must" in capsys.readouterr().out) == is_warned
