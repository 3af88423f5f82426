"""Yesterday's backup, restored under devices that live: they keep what they were told since, and nobody is told to go
below its counter."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from click.testing import CliRunner

from edgesplit.mqtt import messages
from edgesplit.release.manifest import Statement
from edgesplit_cli.main import cli
from support.controller_process import Device, Up, enrolled, eventually, tiny_model


def edgectl(*words: object) -> str:
    """The command, with a passphrase at hand."""
    done = CliRunner(env={"EDGESPLIT_PASSPHRASE": "correct horse"}).invoke(cli, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def runs(device: Device, statement: Statement) -> None:
    """The device says that it acts upon this statement."""
    said = messages.Reported(device.number, statement.counter, ())
    device.say("reported", said, qos=1, retain=True)


def born_again(device: Device) -> Device:
    """The device under a new session, at the broker that came back."""
    twin = device.again()
    twin.number += 1
    twin.connect()
    return twin


def test_a_release_made_after_the_backup_is_not_replaced_by_it(tmp_path: Path) -> None:
    """Backup while the controller runs, another release, the folder is lost, restore: the device that was told the
    newer one is told nothing until an operator deploys, and then above its counter. One that was told nothing since is
    as it was. Releases, models and the offload server's folder are there again."""
    up = Up(tmp_path / "data")
    assert up.start() == "ready"
    up.ok("POST", "/v1/models?name=tiny", tiny_model())
    moved, same = enrolled(up, "moved", tmp_path), enrolled(up, "same", tmp_path)
    old = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["all"]})["release"]
    acted_upon = {device.name: device.statement() for device in (moved, same)}
    for device in (moved, same):
        runs(device, acted_upon[device.name])

    file = tmp_path / "yesterday.backup"
    assert "sealed" in edgectl("--data", up.data, "backup", file)
    words = ["--data", str(up.data), "restore", str(file), "--force"]
    refused = CliRunner(env={"EDGESPLIT_PASSPHRASE": "correct horse"}).invoke(cli, words)
    assert f"a controller runs on {up.data}" in str(refused.exception)

    new = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "conv1", "to": ["moved"]})["release"]
    newer = moved.statement()
    while newer.releases[0].release != new:
        newer = moved.statement()
    for device in (moved, same):
        device.session.stop()
    up.end(signal.SIGKILL)
    shutil.rmtree(up.data)
    assert "2 devices" in edgectl("--data", up.data, "restore", file, "--yes")
    assert up.start() == "ready"

    moved, same = born_again(moved), born_again(same)
    runs(moved, newer)
    runs(same, acted_upon["same"])
    eventually("the one is ahead", lambda: up.ok("GET", "/v1/devices/moved")["counter"] == newer.counter)
    eventually("the other is as it was", lambda: up.ok("GET", "/v1/devices/same")["restored"] is None)
    assert up.ok("GET", "/v1/devices/moved")["restored"] is not None
    assert [one["release"] for one in up.ok("GET", "/v1/releases")] == [old]
    assert (up.data / "offload" / "releases" / old / "manifest.json").is_file()

    assert moved._queue(messages.topic("moved", "desired")).empty(), "it was told something that nobody asked for"
    again = up.ok("POST", "/v1/deployments", {"model": "tiny", "partition": "device", "to": ["all"]})["release"]
    assert again == old
    raw = moved.next(messages.topic("moved", "desired"))[0]
    moved.trust.refresh(moved.fetch)
    commanded = moved.trust.verify_statement(raw, "moved", for_install=True)
    assert commanded.counter > newer.counter and [one.release for one in commanded.releases] == [old]
    assert up.ok("GET", "/v1/devices/moved")["restored"] is None
    for device in (moved, same):
        device.session.stop()
    up.end()


def test_restore_asks_for_the_operators_that_come_back(tmp_path: Path) -> None:
    """They are listed with role and groups; without consent, and in a script without --yes, nothing is restored. The
    owner's token is a new one after the restore."""
    up = Up(tmp_path / "data")
    assert up.start() == "ready"
    up.ok("POST", "/v1/operators", {"name": "vic", "role": "viewer", "groups": ["doors"]})
    file, back = tmp_path / "a.backup", tmp_path / "back"
    made = edgectl("--data", up.data, "backup", file, "--json")
    signer, token = json.loads(made)["signer"], (up.data / "operator.token").read_text()
    up.end()
    words = ["--data", str(back), "restore", str(file)]
    for answer in ("", "n\n"):
        refused = CliRunner(env={"EDGESPLIT_PASSPHRASE": "correct horse"}).invoke(cli, words, input=answer)
        assert "vic  viewer  doors" in refused.output and "operator  admin  all groups" in refused.output
        assert "nothing was restored" in str(refused.exception) and not back.exists()
    done = CliRunner(env={"EDGESPLIT_PASSPHRASE": "correct horse"}).invoke(
        cli, [*words, "--signed-by", signer], input="y\n"
    )
    assert done.exit_code == 0 and "signature is valid" in done.output
    assert not (back / "operator.token").exists()
    again = Up(back)
    assert again.start() == "ready"
    assert (back / "operator.token").read_text() != token
    assert {one["name"] for one in again.ok("GET", "/v1/operators")} == {"operator", "vic"}
    again.end()


def test_a_backup_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """Where no controller ever was."""
    words = ["--data", str(tmp_path / "none"), "backup", str(tmp_path / "x")]
    done = CliRunner(env={"EDGESPLIT_PASSPHRASE": "p"}).invoke(cli, words)
    assert "no controller's data folder" in str(done.exception) and not list(tmp_path.iterdir())
