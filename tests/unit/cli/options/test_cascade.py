"""The options of a cascade: what is sent, and what is refused before anything is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from edgesplit.errors import UsageError
from edgesplit_cli.main import cli
from edgesplit_cli.options.cascade import cascade_body, parse_pair
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from support.chain_costs import chain_costs

NOTHING: dict[str, Any] = {
    "cascade": False, "exit_output": None, "changed": None, "scores": (), "pair": None, "certainty": None,
    "audit_share": None,
}  # fmt: skip


def test_only_what_was_given_is_sent() -> None:
    """The planner's defaults fill in the rest."""
    assert cascade_body(**NOTHING) is None
    body = cascade_body(**{**NOTHING, "cascade": True, "changed": 0.02})
    assert body == {"changed": 0.02}
    assert msgspec.convert(body, CascadeRequest) == CascadeRequest(changed=0.02)
    full = {"cascade": True, "changed": 0.01, "scores": ("entropy",), "pair": ("a", "b"), "certainty": 0.95}
    request = msgspec.convert(cascade_body(**{**NOTHING, **full, "audit_share": 0.0}), CascadeRequest)
    assert request.variants == ("a", "b") and request.audit_share == 0.0 and request.certainty == 0.95


def test_an_exit_is_of_one_model() -> None:
    """It is sent as the planner takes it; variants are of a family."""
    asked = {**NOTHING, "cascade": True, "changed": 0.02, "exit_output": "early"}
    assert msgspec.convert(cascade_body(**asked), CascadeRequest) == CascadeRequest(changed=0.02, exit_output="early")
    with pytest.raises(click.UsageError, match="give one of them"):
        cascade_body(**{**asked, "pair": ("a", "b")})


@pytest.mark.parametrize("option", ["exit_output", "changed", "scores", "pair", "certainty", "audit_share"])
def test_an_option_without_the_cascade_is_refused(option: str) -> None:
    """It would do nothing."""
    values = {
        "exit_output": "early",
        "changed": 0.1,
        "scores": ("margin",),
        "pair": ("a", "b"),
        "certainty": 0.9,
        "audit_share": 0.1,
    }
    with pytest.raises(click.UsageError, match="give --cascade too"):
        cascade_body(**{**NOTHING, option: values[option]})


def test_a_cascade_needs_its_allowance() -> None:
    """There is no default: what may change is the operator's to say."""
    with pytest.raises(click.UsageError, match=re.escape("--cascade needs --changed SHARE")):
        cascade_body(**{**NOTHING, "cascade": True})


@pytest.mark.parametrize("text", ["a", "a,", "a,a", "a,b,c", ""])
def test_a_pair_is_two_names(text: str) -> None:
    """Different ones."""
    with pytest.raises(UsageError, match="not a pair of variants"):
        parse_pair(text)
    assert parse_pair(" a, b") == ("a", "b")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cascade", "--changed", "2%"], "is no family"),
        (["--cascade", "--changed", "2%", "--exit", "early"], "without samples to compare"),
        (["--exit", "early"], "give --cascade too"),
        (["--cascade"], "--cascade needs --changed"),
        (["--changed", "2%"], "--allow-changed is for codecs"),
        (["--cascade", "--changed", "120%"], "120%"),
        (["--cascade", "--changed", "2%", "--cascade-variants", "student"], "not a pair of variants"),
    ],
)
def test_a_plan_without_a_family_has_no_cascade(words: list[str], told: str, tmp_path: Path) -> None:
    """Of a costs file, as of a model; and an option that is missing is named first."""
    costs = tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(chain_costs()))
    ended = CliRunner().invoke(cli, ["plan", str(costs), *words])
    said = f"{ended.output} {ended.exception}"
    assert ended.exit_code != 0 and told in said, said
