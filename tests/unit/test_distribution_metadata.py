"""The distribution's metadata: licence, authors, versions of Python, extras."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import tomllib

from support import REPOSITORY

APACHE_2_0_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of the licence's text as the Apache Software Foundation publishes it."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return table


def test_the_licence_is_the_apache_licence_word_for_word(project: dict[str, Any]) -> None:
    """The file, and what the metadata says of it."""
    assert hashlib.sha256((REPOSITORY / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0_SHA256
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert not [name for name in project["classifiers"] if name.startswith("License ::")], "PEP 639: not both"
    assert project["authors"] and project["keywords"]


def test_the_classifiers_name_supported_versions_of_python(project: dict[str, Any]) -> None:
    """From the least that the metadata allows."""
    versions = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", name) for name in project["classifiers"]]
    minors = sorted(int(match[1]) for match in versions if match)
    assert project["requires-python"] == f">=3.{minors[0]}" and {11, 12, 13} <= set(minors)


def test_the_controllers_extras_are_refused_on_python_3_10(project: dict[str, Any]) -> None:
    """`edgectl up` died there at an import. An extra cannot require a Python, but what it depends on does: scipy 1.16
    is for 3.11 and newer, so pip refuses the extras that contain the controller, and installs those for devices."""
    extras = project["optional-dependencies"]
    (scipy,) = [one for one in extras["controller"] if one.startswith("scipy")]
    assert tuple(map(int, scipy.removeprefix("scipy>=").split("."))) >= (1, 16)
    assert any("edgesplit[controller]" in one for one in extras["cli"])
    assert not any("scipy" in one for name in ("agent", "offload", "tflite", "otel") for one in extras[name])


def test_the_operators_extra_has_no_planner_and_no_runtime(project: dict[str, Any]) -> None:
    """640 MB were needed on a remote operator's machine."""
    operator = " ".join(project["optional-dependencies"]["operator"])
    heavy = ("edgesplit[", "scipy", "onnxruntime", "litert", "matplotlib", "psycopg", "fastapi", "sqlalchemy")
    assert not [name for name in heavy if name in operator]


def test_security_and_contributing_name_files_that_exist() -> None:
    """Each link of the two pages leads somewhere in the repository."""
    for page in ("SECURITY.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)]+)\)", (REPOSITORY / page).read_text())
        assert links and all((REPOSITORY / link).exists() for link in links), links
