"""`edgectl infer --device`: which way a request goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit.http1.server import Response, Server
from edgesplit.oip.options import InferOptions
from edgesplit.oip.report import Report
from edgesplit_cli.commands import infer


class FakeApi:
    """A controller that knows one device."""

    def __init__(self, local_url: str | None) -> None:
        self.local_url = local_url

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/devices/cam-1"
        return {"local_url": self.local_url}


@pytest.fixture()
def agent() -> Iterator[Server]:
    """An agent's endpoint that says it is cam-1's."""
    server = Server(lambda request: Response(200, {}, [json.dumps({"device": "cam-1"}).encode()]), host="127.0.0.1")
    server.start()
    yield server
    server.stop()


def test_an_agent_on_this_machine_is_asked_directly(agent: Server) -> None:
    """Unless the operator wants the other way."""
    api: Any = FakeApi(agent.url)
    assert infer._find_agent(api, "cam-1", None) == agent.url
    assert infer._find_agent(api, "cam-1", "direct") == agent.url
    assert infer._find_agent(api, "cam-1", "controller") is None


@pytest.mark.parametrize(
    "url", [None, "", "http://127.0.0.1:1", "http://example.invalid/", "file:///etc/hostname", "http://[", "unix:///x"]
)
def test_a_device_elsewhere_is_asked_through_the_controller(url: str | None) -> None:
    """Its address is its own word: no other machine and no file is opened for it."""
    api: Any = FakeApi(url)
    assert infer._find_agent(api, "cam-1", None) is None
    with pytest.raises(UsageError, match="does not run on this machine"):
        infer._find_agent(api, "cam-1", "direct")


def test_another_devices_agent_at_the_same_address_is_not_asked(agent: Server) -> None:
    """Most agents have the same address, each on its own machine."""
    assert not infer._is_agent_of("cam-2", agent.url)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"variant": "small", "score": 0.93}, "answered by small, score 0.93"),
        (
            {"variant": "large", "score": 0.41, "escalated": True},
            "answered by large, as the first was not sure (score 0.41)",
        ),
        (
            {"variant": "large", "escalated": True},
            "answered by large, as the first was not sure (no score)",
        ),
        (
            {"variant": "small", "score": 0.41, "unsure": True},
            "answered by small, score 0.41; unsure, and the second could not be asked in time",
        ),
        ({"score": 0.999996, "row": "exit"}, "answered by the exit, score 0.999996"),
        ({"score": 0.2, "escalated": True}, "answered by the whole model, as the exit was not sure (score 0.2)"),
    ],
)
def test_a_cascade_says_who_answered_and_how_sure_the_first_was(fields: dict[str, Any], text: str) -> None:
    """In one line."""
    assert infer._cascade_text(msgspec.to_builtins(Report(**{"release": "r", "row": "x", **fields}))) == text


def test_an_option_of_the_agent_is_refused_where_the_controller_would_drop_it() -> None:
    """The error names the option."""
    api: Any = FakeApi(None)
    options = InferOptions(refuse_unsure=True)
    with pytest.raises(UsageError, match="--refuse-unsure is for a device that is asked directly"):
        infer._ask_device(api, "cam-1", None, "birds", Path("x.jpg"), 1.0, options, quiet=True)
