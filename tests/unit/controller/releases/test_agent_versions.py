"""Releases with a lineage are not deployed to agents that refuse them."""

from __future__ import annotations

import pytest

from edgesplit_controller.errors import Conflict
from edgesplit_controller.releases.agent_versions import check_agents
from edgesplit_controller.storage.tables.core import Device, Model

PLAIN = Model(name="birds", version=3, lineage=None)
VARIANT = Model(name="birds", version=4, lineage={"base": "birds@3"})


def device(name: str, version: str | None) -> Device:
    """A device that reported this version of its agent, or nothing yet."""
    return Device(name=name, birth=None if version is None else {"agent_version": version})


def test_agents_before_03_are_named_before_anything_is_signed() -> None:
    """They would refuse the manifest one by one. What never reported, or is no number, is accepted."""
    fleet = [device("old", "0.2.9"), device("new", "0.3.0"), device("dev", "0.10.1+local"), device("off", None)]
    check_agents(PLAIN, fleet)
    with pytest.raises(Conflict, match=r"birds@4 stands in for birds@3, and agents before 0.3 refuse .*: old;"):
        check_agents(VARIANT, fleet)
    check_agents(VARIANT, [*fleet[1:], device("odd", "nightly")])
