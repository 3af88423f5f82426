"""Files that a controller's commands write, given to every command that takes one (tests/unit/cli/test_written_files.py
has the list)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgesplit_cli.main import cli
from support.controller_process import Up, tiny_model


def edgectl(*words: object) -> str:
    """The command's output; its error is raised."""
    environment = {"EDGESPLIT_PASSPHRASE": "correct horse"}
    done = CliRunner(env=environment).invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_credentials_audit_log_and_backup_are_read_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`login` and --credentials, `audit verify`, `plan` of measured costs, `restore` by passphrase and by key."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("EDGESPLIT_DATA", "EDGESPLIT_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    up = Up(tmp_path / "data")
    assert up.start() == "ready"
    try:
        owner = ("--data", up.data)
        added, rotated = tmp_path / "added.json", tmp_path / "rotated.json"
        edgectl(*owner, "operator", "add", "alice", "--role", "viewer", "--out", added)
        assert json.loads(edgectl("--credentials", added, "whoami", "--json"))["operator"] == "alice"
        assert "alice" in edgectl("login", added)
        edgectl(*owner, "operator", "rotate", "alice", "--out", rotated)
        assert json.loads(edgectl("--credentials", rotated, "whoami", "--json"))["operator"] == "alice"
        assert "alice" in edgectl("login", rotated)

        log = tmp_path / "log.jsonl"
        edgectl(*owner, "audit", "export", "--out", log)
        assert json.loads(edgectl("audit", "verify", log, "--json"))["problem"] == ""

        up.ok("POST", "/v1/models?name=tiny", tiny_model())
        costs = tmp_path / "costs.json"
        costs.write_text(edgectl(*owner, "profile", "tiny", "--json"))
        assert json.loads(edgectl("plan", costs, "--json"))["model"].startswith("tiny@")

        key = tmp_path / "backup.key"
        public = edgectl("backup", "--new-recipient", key).strip()
        sealed, encrypted = tmp_path / "sealed.backup", tmp_path / "encrypted.backup"
        edgectl(*owner, "backup", sealed)
        said = edgectl(*owner, "backup", encrypted, "--to", public)
        signer = re.findall(r"[A-Za-z0-9+/_=-]{43,}", said)[-1]
    finally:
        up.end()
    for number, words in enumerate(((sealed,), (encrypted, "--key", key, "--signed-by", signer))):
        folder = tmp_path / f"restored-{number}"
        edgectl("--data", folder, "restore", "--yes", *words)
        assert (folder / "controller.db").is_file()
        shutil.rmtree(folder)
