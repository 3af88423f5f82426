"""Options of `edgectl up` that are kept in the data folder, and `edgectl config`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from edgesplit.errors import UsageError
from edgesplit_cli.commands.up import to_settings, up
from edgesplit_cli.kept_options import FILE, KEPT_META, keep_given, options_of, read_options, shown
from edgesplit_cli.main import cli
from edgesplit_controller.settings import Settings


def start(data: Path, *words: str) -> Settings:
    """What `edgectl up` would start with; its options are kept, as after a start that succeeded."""
    context = up.make_context("up", list(words), obj=data)
    keep_given(data, context.meta[KEPT_META])
    return to_settings(data, context.params)


def config(data: Path, *words: str, fails: str = "") -> str:
    """Run `edgectl config`; its output, or with `fails` a text of the error."""
    done = CliRunner().invoke(cli, ["--data", str(data), "config", *words], standalone_mode=False)
    if fails:
        assert done.exception is not None and fails in str(getattr(done.exception, "message", done.exception))
    elif done.exception is not None:
        raise done.exception
    return done.output


def test_up_forgets_nothing_between_starts(tmp_path: Path) -> None:
    """Ports, host and bind of the first start hold for the second; an option given again replaces its own only."""
    first = start(
        tmp_path, "--api-port", "9443", "--mqtt-port", "9883", "--offload-port", "9500", "--host", "hub.local",
        "--host", "10.0.0.2", "--bind", "0.0.0.0", "--no-offload", "--telemetry-every", "10s",
        "--metrics", "127.0.0.1:9100",
    )  # fmt: skip
    assert first.hosts == ("hub.local", "10.0.0.2") and not first.offload and first.telemetry_s == 10.0
    assert start(tmp_path) == first
    moved = start(tmp_path, "--host", "other.local")
    assert moved.hosts == ("other.local",) and moved.api_port == 9443 and start(tmp_path) == moved


def test_options_of_one_call_are_not_kept(tmp_path: Path) -> None:
    """--force, --join and what an environment variable says hold for their call only."""
    assert start(tmp_path, "--force").force and not start(tmp_path).force
    context = up.make_context("up", [], obj=tmp_path)
    assert context.meta[KEPT_META] == {} and not (tmp_path / FILE).exists()


def test_an_environment_variable_precedes_a_kept_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of a start, by $EDGESPLIT_DATABASE, is not the kept one, and is not kept."""
    start(tmp_path, "--database", "postgresql://kept/x")
    monkeypatch.setenv("EDGESPLIT_DATABASE", "postgresql://other/x")
    assert start(tmp_path).database == "postgresql://other/x"
    monkeypatch.delenv("EDGESPLIT_DATABASE")
    assert start(tmp_path).database == "postgresql://kept/x"


def test_a_process_that_joins_uses_and_keeps_nothing(tmp_path: Path) -> None:
    """Its options are about its own machine; the folder is the first one's."""
    start(tmp_path, "--api-port", "9443")
    joined = start(tmp_path, "--join", "--api-port", "9444", "--database", "postgresql://x/y")
    assert joined.api_port == 9444 and read_options(tmp_path) == {"api-port": "9443"}
    assert start(tmp_path, "--join").api_port == 8443


def test_config_sets_shows_and_unsets(tmp_path: Path) -> None:
    """As `up` would have kept it; the file is the owner's alone, because a URL may have a password."""
    config(tmp_path, "set", "host", "hub.local", "10.0.0.2")
    config(tmp_path, "set", "no-offload")
    config(tmp_path, "set", "database", "postgresql://ed:secret@db/edge")
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    table, printed = config(tmp_path, "show"), json.loads(config(tmp_path, "show", "--json"))
    assert "secret" not in table and "hub.local, 10.0.0.2" in table
    assert printed == {"database": "postgresql://ed:***@db/edge", "host": "hub.local, 10.0.0.2", "no-offload": "yes"}
    started = start(tmp_path)
    assert started.hosts == ("hub.local", "10.0.0.2") and not started.offload
    for name in ("host", "no-offload", "database"):
        config(tmp_path, "unset", name)
    assert not (tmp_path / FILE).exists() and start(tmp_path) == Settings(data=tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("set", "colour", "red"), "no setting 'colour'"),
        (("set", "force"), "no setting 'force'"),
        (("set", "api-port", "99999"), "99999"),
        (("set", "host", "https://hub"), "neither a name nor an address"),
        (("set", "on-revocation", "reload"), "--broker"),
        (("set", "api-port"), "takes one value"),
        (("set", "no-offload", "yes"), "takes no value"),
        (("unset", "host"), "not kept"),
    ],
)
def test_config_refuses_what_up_could_not_start_with(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    """Nothing is kept then."""
    config(tmp_path, *words, fails=text)
    assert read_options(tmp_path) == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"host": 3}', '{"host": []}', '{"colour": "red"}'])
def test_a_damaged_file_is_said_at_the_start(tmp_path: Path, content: str) -> None:
    """And is not overwritten."""
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UsageError):
        start(tmp_path)
    assert (tmp_path / FILE).read_text() == content


def test_every_kept_option_becomes_a_setting() -> None:
    """No option of `up` is parsed and then dropped."""
    options: dict[str, Any] = {param.name or "": None for _, param in options_of(up)}
    used = set(options) - {"print_broker_config", "out", "installed_at", "help"}
    fields = set(Settings.__dataclass_fields__)
    renamed = {"hosts": "hosts", "no_offload": "offload", "telemetry_s": "telemetry_s"}
    assert {renamed.get(name, name) for name in used} <= fields


def test_passwords_are_not_shown() -> None:
    assert shown(["postgresql://a:b@c/d", "x"]) == "postgresql://a:***@c/d, x"
    assert isinstance(up, click.Command)
