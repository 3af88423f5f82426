"""What a command says where its dependencies are not installed."""

from __future__ import annotations

import sys

import pytest

from edgesplit.missing_packages import missing_package_text, unsupported_python_text


def test_a_missing_dependency_names_the_extra_to_install() -> None:
    """By its top package, whatever part of it was imported."""
    text = missing_package_text(ModuleNotFoundError("x", name="paho.mqtt.client"), "edgesplit-agent", "agent")
    assert text.startswith("edgesplit-agent: paho is not installed") and "pip install 'edgesplit[agent]'" in text
    assert sys.executable in text


@pytest.mark.parametrize("name", [None, "edgesplit_agent.nothing", "fcntl", "ssl"])
def test_a_module_that_no_extra_has_is_no_matter_of_extras(name: str | None) -> None:
    """One of ours, or one of Python's own: a fault, whose traceback is wanted."""
    assert missing_package_text(ModuleNotFoundError("x", name=name), "edgectl", "cli") == ""


def test_an_old_python_is_named() -> None:
    """`edgectl` needs 3.11; it died at an import of `datetime.UTC`."""
    assert unsupported_python_text("edgectl", (3, 11), (3, 11)) == ""
    assert "needs Python 3.11 or newer" in unsupported_python_text("edgectl", (3, 11), (3, 10))
