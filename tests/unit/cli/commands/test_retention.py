"""The commands that end something: what they ask of the controller, and what they print."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from edgesplit_cli.commands import gc, model, release, undeploy
from edgesplit_cli.main import cli

UNDEPLOYED: dict[str, Any] = {
    "rollout": 7, "model": "digits", "supersedes": [{"rollout": 5, "devices": 1}],
    "devices": [
        {"device": "cam-1", "release": "ab" * 32, "model": "digits@2", "state": "online"},
        {"device": "cam-2", "release": "", "model": "digits", "state": "offline"},
    ],
}  # fmt: skip
COLLECTED: dict[str, Any] = {
    "rules": {"releases": 3, "versions": 0, "history_s": 7_776_000.0, "unused_s": 86_400.0},
    "releases": [{"name": "cd" * 32, "model": "digits@1", "bytes": 2_097_152, "reason": "nothing uses it"}],
    "models": [{"name": "digits@1", "model": "digits@1", "bytes": 1_024, "reason": "older than the newest"}],
    "kept": [{"name": "ab" * 32, "model": "digits@2", "bytes": 0, "reason": "digits is deployed to cam-1"}],
    "rollouts": 1, "proposals": 0, "unlisted": 1, "blobs": 9, "blob_bytes": 3_145_728, "exported": 1,
    "exported_bytes": 1_048_576, "database_bytes": 0, "waiting": 2, "waiting_bytes": 2_048,
}  # fmt: skip


class Controller:
    """Answers as the API does, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []

    def post(self, path: str, body: Any) -> Any:
        self.asked.append(("POST", path, body))
        if path == "/v1/collections":
            return {**COLLECTED, "dry_run": body["dry_run"]}
        return {**UNDEPLOYED, "rollout": None if body["dry_run"] else 7}

    def delete(self, path: str) -> Any:
        self.asked.append(("DELETE", path, None))
        return {"models": ["digits@1"] if "models" in path else [], "releases": ["cd" * 32]}


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    for module in (gc, model, release, undeploy):
        monkeypatch.setattr(module, "connect", lambda data: made)
    return made


def printed(*words: str, code: int = 0) -> str:
    """What the command prints."""
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == code, (done.output, done.exception)
    return done.output if code == 0 else str(done.exception)


def test_undeploy_asks_for_the_devices_that_are_named(controller: Controller) -> None:
    """By name, by group and all; the terms are those of a rollout without gates. Devices that are off are named."""
    text = printed("undeploy", "digits", "--from", "cam-1", "--group", "doors", "--canary", "10%", "--rate", "5/min")
    ((_, path, body),) = controller.asked
    assert path == "/v1/undeployments" and body["targets"] == ["cam-1", "group=doors"]
    assert (body["rollout"]["stages"], body["rollout"]["rate"], body["rollout"]["gates"]) == (["10%"], "5/min", [])
    assert "digits is removed from cam-1, cam-2" in text and "told when they are back: cam-2" in text
    assert "takes 1 device over from rollout 5" in text and "Rollout 7" in text
    printed("undeploy", "digits", "--all")
    assert controller.asked[-1][2]["targets"] == ["all"]
    assert "say from which devices" in printed("undeploy", "digits", code=1)


def test_a_dry_run_of_undeploy_shows_what_each_device_runs(controller: Controller) -> None:
    """And changes nothing."""
    text = printed("undeploy", "digits", "--all", "--dry-run")
    assert controller.asked[0][2]["dry_run"] is True
    assert "digits@2" in text and "not yet" in text and "would be removed from 2 devices; nothing was changed" in text


def test_gc_shows_what_goes_and_why_the_rest_stays(controller: Controller) -> None:
    """In a dry run; afterwards what has gone, and what waits for how long."""
    text = printed("gc", "--dry-run", "--keep-unused", "0s")
    assert controller.asked == [("POST", "/v1/collections", {"dry_run": True, "keep_unused_s": 0.0})]
    for words in (
        "would go",
        "digits@1  cdcdcdcdcdcdcdcd",
        "2.0 MiB",
        "nothing uses it",
        "digits is deployed to cam-1",
    ):
        assert words in text
    assert "9 blobs of 3.0 MiB, 1 release of 1.0 MiB on the offload server" in text
    assert "kept until 1d after they were stored: 2 blobs of 2.0 KiB" in text
    assert "why it stays" not in printed("gc")


def test_removed_models_and_releases_are_named(controller: Controller) -> None:
    """With what deletes their files."""
    assert "removed digits@1 and 1 release; `edgectl gc`" in printed("model", "remove", "digits@1")
    assert "removed release cdcdcdcdcdcdcdcd; `edgectl gc`" in printed("release", "remove", "cdcdcdcd")
    assert [path for _, path, _ in controller.asked] == ["/v1/models/digits%401", "/v1/releases/cdcdcdcd"]
