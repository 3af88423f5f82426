"""Releases with a lineage are not deployed to agents that refuse them."""

from __future__ import annotations

import pytest

from edgesplit_controller.errors import Conflict
from edgesplit_controller.releases.agent_versions import check_agents
from edgesplit_controller.storage.tables.core import Device, Model

PLAIN = Model(name="birds", version=3, lineage=None, shown={}, input_text="image/jpeg 640x480 rgb")
VARIANT = Model(name="birds", version=4, lineage={"base": "birds@3"})
KIND = Model(name="birds", version=5, lineage=None, shown={"output_kind": {"kind": "labels"}}, input_text="")


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


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (KIND, "has an output kind"),
        *(
            (
                Model(name="birds", version=6, lineage=None, shown={}, input_text=text),
                f"takes {text.split()[0]} in a way",
            )
            for text in (
                "image/png 8x8",
                "image/raw 8x8 nv12",
                "image/jpeg 8x8 letterbox",
                "image/jpeg 8x8 crop=0.9 fp16",
            )
        ),
    ],
)
def test_kinds_and_new_input_specs_need_agents_that_know_them(model: Model, why: str) -> None:
    """Their manifests have fields, or values of fields, that older agents refuse."""
    check_agents(model, [device("new", "0.3.0")])
    with pytest.raises(Conflict, match=f"birds@{model.version} {why}"):
        check_agents(model, [device("old", "0.2.9")])
