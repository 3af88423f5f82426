"""Keys that do not lie on the controller, from outside: real processes, a real broker, the real command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import NotFound, TrustError, UsageError
from edgesplit.trust.identity import Credentials
from edgesplit_cli.signing import sign_release_list
from edgesplit_controller.tuf.signers import make_key_file
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames


@pytest.fixture(scope="module")
def agent(cloud: Cloud) -> Agent:
    """A device that enrolled while the root still lay on the controller, and trusts since then."""
    cloud.push_digits()
    return cloud.agent("cam")


@pytest.fixture(scope="module")
def operator(cloud: Cloud, agent: Agent) -> Path:
    """The operator's folder, after the root and the release key were moved into it."""
    folder = cloud.folder / "operator"
    cloud.edgectl("keys", "init", "--folder", str(folder), "--release-key", "new")
    return folder


def role(cloud: Cloud, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in cloud.json("keys", "show")["roles"] if one["role"] == name)
    return found


def published(cloud: Cloud) -> dict[str, bytes]:
    """Every file that devices are given."""
    folder = cloud.data / "tuf"
    return {
        str(file): file.read_bytes() for kind in ("metadata", "targets") for file in (folder / kind).rglob("*.json")
    }


def deployed(cloud: Cloud, operator: Path, partition: str, to: str) -> str:
    """Deploy with the operator's release key, and wait until the device runs it; the release."""
    made = cloud.json(
        "deploy", "digits", "--partition", partition, "--to", to, "--wait", "120",
        "--sign-with", str(operator / "release.pem"), "--yes",
    )  # fmt: skip
    return str(made["release"])


def helped(agent: Agent) -> bool:
    """Did the offload server finish an answer, by a release that it believes?"""
    report = agent.infer("digits", frame_input(frames(1)[0][0])).report
    return not report.fallback and report.row != "local"


def test_a_fresh_controller_reports_that_it_holds_the_root_key(tmp_path: Path) -> None:
    """The quick start needs no ceremony, and says plainly what that means and what moves the root away."""
    fresh = Cloud(tmp_path, "--no-offload")
    fresh.start()
    try:
        told = fresh.json("keys", "show")

        assert all(key["on_controller"] for one in told["roles"] for key in one["keys"])
        assert any("edgectl keys init" in notice for notice in told["notices"])
        eventually("up says so too", lambda: "edgectl keys init" in (tmp_path / "up.log").read_text())
        assert "on the controller" in fresh.edgectl("keys", "show")
    finally:
        fresh.stop()


def test_enrolled_devices_follow_a_root_key_that_moves_offline(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """Three root keys, two must sign, the release key elsewhere: the controller holds neither, the agent installs."""
    assert not list((cloud.data / "tuf" / "keys").glob("root*")) and not list(
        (cloud.data / "tuf" / "keys").glob("targets*")
    )
    root, targets = role(cloud, "root"), role(cloud, "targets")
    assert root["threshold"] == 2 and [key["on_controller"] for key in root["keys"]] == [False] * 3
    assert [key["on_controller"] for key in targets["keys"]] == [False]
    assert {file.name for file in operator.glob("*.pem")} == {"root-1.pem", "root-2.pem", "root-3.pem", "release.pem"}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in operator.glob("*.pem"))
    assert "done" in cloud.edgectl("keys", "init", "--folder", str(operator), "--release-key", "new")  # once more

    release = deployed(cloud, operator, "device", "cam")

    assert release in [one["release"] for one in cloud.api.get("/v1/releases")]
    jpeg, _ = frames(1)[0]
    assert agent.infer("digits", frame_input(jpeg)).outputs


def test_a_release_without_the_right_key_is_refused_and_changes_nothing(
    cloud: Cloud, agent: Agent, operator: Path
) -> None:
    """No key for a first release: the error says what to give. Another key: refused here already. Devices are told
    nothing."""
    never = ("--name", "never", "--input", "image/jpeg 128x128 q90 rgb nhwc scale=1/255")
    cloud.edgectl("model", "push", str(DIGITS / "digits.tflite"), *never)
    wrong = operator.parent / "wrong.pem"
    if not wrong.exists():
        make_key_file(wrong)
    before, deployments = published(cloud), cloud.api.get("/v1/deployments")

    assert "--sign-with" in cloud.edgectl("deploy", "never", "--to", "cam", code=2)
    said = cloud.edgectl(
        "deploy", "digits", "--partition", "cloud", "--to", "cam", "--sign-with", str(wrong), "--yes", code=6
    )

    assert "not the release key" in said
    unanswered = cloud.edgectl(
        "deploy",
        "digits",
        "--partition",
        "cloud",
        "--to",
        "cam",
        "--sign-with",
        str(operator / "release.pem"),
        code=130,
    )
    assert "of digits@1 (SHA-256" in unanswered and "plan for raspberrypi4" in unanswered
    assert "Sign this release?" in unanswered
    after = {name: raw for name, raw in published(cloud).items() if "timestamp" not in name and "snapshot" not in name}
    assert after == {name: raw for name, raw in before.items() if name in after}
    assert cloud.api.get("/v1/deployments") == deployments


def test_the_root_is_rotated_by_two_of_three_keys_and_devices_follow(
    cloud: Cloud, agent: Agent, operator: Path
) -> None:
    """One root key is lost: the two others name a new one. Old devices update, new ones begin with the new root."""
    second = operator.parent / "second"
    keep = [word for number in (1, 2) for word in ("--root-key", str(operator / f"root-{number}.pem"))]
    cloud.edgectl("keys", "rotate", "root", *keep, "--root-keys", "1", "--folder", str(second))

    assert len(role(cloud, "root")["keys"]) == 3 and role(cloud, "root")["threshold"] == 2
    deployed(cloud, operator, "cloud", "cam")
    eventually("the offload server helps", lambda: helped(agent))
    late = cloud.agent("late")
    claim = json.loads((cloud.folder / "late.claim.json").read_text())
    assert json.loads(claim["tuf_root"])["signed"]["version"] == role(cloud, "root")["version"]
    deployed(cloud, operator, "cloud", "late")
    eventually("the offload server helps the late one", lambda: helped(late))


def test_an_incomplete_key_change_names_what_is_missing(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """Wrong calls are one line with what to give instead, and nothing waits afterwards."""
    for words, hint in (
        (("rotate", "root"), "--root-keys N --folder DIR"),
        (("rotate", "targets"), "--release-key"),
        (("rotate", "root", "--root-keys", "1"), "--folder DIR"),
        (("rotate", "root", "--root-keys", "1", "--folder", str(operator)), "empty folder"),
        (("rotate", "timestamp", "--threshold", "1"), "name the role root"),
        (("init", "--folder", str(operator.parent / "third")), "keys rotate root"),
        (("init", "--root-keys", "0"), "at least one"),
        (("renew",), "--sign-with"),
        (("sign", "--sign-with", str(operator / "root-1.pem"), "--yes"), "no change of the keys waits"),
        (("drop", "--yes"), "no change of the keys waits"),
    ):
        assert hint in cloud.edgectl("keys", *words, code=2)
    assert cloud.json("keys", "show")["pending"] is None
    assert not (operator.parent / "third").exists()


def test_several_people_sign_one_after_another(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """Online keys change once two of the root's keys signed; a key of nobody adds nothing; the agent goes on."""
    wrong = operator.parent / "wrong.pem"
    if not wrong.exists():
        make_key_file(wrong)
    before = {name: role(cloud, name)["keys"] for name in ("timestamp", "snapshot", "director")}

    rotated = ("keys", "rotate", "timestamp", "snapshot", "director", "--sign-with")
    first = cloud.json(*rotated, str(operator / "root-1.pem"), "--sign-with", str(operator / "release.pem"))
    assert not first["done"] and [one["count"] for one in first["missing"]] == [1]
    assert "waits for signatures" in cloud.edgectl("keys", "show")
    assert "not a key that this change needs" in cloud.edgectl(
        "keys", "sign", "--sign-with", str(wrong), "--yes", code=6
    )
    assert {name: role(cloud, name)["keys"] for name in before} == before

    assert cloud.json("keys", "sign", "--sign-with", str(operator / "root-2.pem"), "--yes")["done"]

    after = {name: role(cloud, name)["keys"] for name in before}
    assert all(after[name] != before[name] and after[name][0]["on_controller"] for name in before)
    deployed(cloud, operator, "device", "cam")
    cloud.edgectl("keys", "renew", "--sign-with", str(operator / "release.pem"))
    what = [one["action"] for one in cloud.api.get("/v1/events")]
    assert {"keys.change", "keys.sign", "keys.changed", "keys.renew"} <= set(what)


def test_a_release_that_is_signed_after_another_was_published_is_refused(
    cloud: Cloud, agent: Agent, operator: Path
) -> None:
    """Two operators prepare at once: the second to sign is told to do it again, and the first release stays."""
    body = {"model": "digits", "partition": "auto", "to": ["cam"], "limits": {}, "codecs": ["raw"]}
    prepared = cloud.api.post("/v1/deployments", {**body, "elsewhere": True})
    assert "next_targets" in prepared
    signed = sign_release_list(prepared, [str(operator / "release.pem")])
    cloud.edgectl("keys", "renew", "--sign-with", str(operator / "release.pem"))

    with pytest.raises(UsageError, match="meanwhile"):
        cloud.api.post("/v1/deployments/signed", {**body, "release": prepared["release"], "next_targets": signed})

    assert prepared["release"] not in [one["release"] for one in cloud.api.get("/v1/releases")]


def test_malformed_key_requests_change_nothing(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """Each is answered with an error of its kind, what is published stays, and an operator's token is needed."""
    wish = {"model": "digits", "partition": "device", "to": ["cam"]}
    release = cloud.api.get("/v1/releases")[0]["release"]
    before = {name: raw for name, raw in published(cloud).items() if "targets" in name or "root" in name}
    for path, body, kind in (
        ("/v1/keys/change", {"threshold": 17}, UsageError),
        ("/v1/keys/change", {"anew": ["mirrors"]}, UsageError),
        ("/v1/keys/change", {"root_keys": [{"keyid": "a", "public": {}}]}, UsageError),
        ("/v1/keys/change", {"surprise": 1}, UsageError),
        ("/v1/keys/signatures", {"root": [{"keyid": "a", "sig": "not hex"}]}, UsageError),
        ("/v1/keys/signatures", {"root": [{"keyid": "a", "sig": "00"}]}, NotFound),
        ("/v1/keys/renew/signed", {"next_targets": "{}"}, TrustError),
        ("/v1/keys/renew/signed", {"next_targets": "[" * 100_000}, TrustError),
        ("/v1/deployments/signed", {**wish, "release": "0" * 64, "next_targets": "{}"}, NotFound),
        ("/v1/deployments/signed", {**wish, "release": "../../keys", "next_targets": "{}"}, NotFound),
        ("/v1/deployments/signed", {**wish, "model": "other", "release": release, "next_targets": "{}"}, NotFound),
    ):
        with pytest.raises(kind):
            cloud.api.post(path, body)
    keys = cloud.data / "keys"
    shown = Credentials(keys / "operator.key", keys / "operator.pem", cloud.data / "ca.pem")
    stranger = ControllerClient(cloud.api.url, "guess", shown.client_context())
    with pytest.raises(UsageError, match="token"):
        stranger.get("/v1/keys")

    after = {name: raw for name, raw in published(cloud).items() if "targets" in name or "root" in name}
    assert after == before and cloud.json("keys", "show")["pending"] is None


def test_a_restarted_controller_works_without_the_offline_keys(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """It starts without root and release key, its offload server believes from the new root, statements go out."""
    deployed(cloud, operator, "cloud", "cam")
    cloud.process.stop()
    cloud.start()

    assert (cloud.data / "offload" / "root.json").read_bytes() == cloud.data.joinpath(
        "tuf", "metadata", f"{role(cloud, 'root')['version']}.root.json"
    ).read_bytes()
    eventually("the offload server helps again", lambda: helped(agent))
    assert cloud.json("deploy", "digits", "--partition", "cloud", "--to", "cam", "--wait", "120")["deployment"]


def test_another_cut_needs_no_release_key(cloud: Cloud, agent: Agent, operator: Path) -> None:
    """What was released once is cut anew by the planner's key, which the controller holds; the planner's key changes
    by a signature of the release key, and the next cut is believed too."""
    deployed(cloud, operator, "device", "cam")
    layers = [one["name"] for one in cloud.json("model", "show", "digits")["layers"]]
    for number, after in enumerate((layers[10], layers[20])):
        if number:
            sign = ("--sign-with", str(operator / "release.pem"))
            cloud.edgectl("keys", "rotate", "planner", *sign)
        made = cloud.json("deploy", "digits", "--partition", after, "--to", "cam", "--wait", "120")
        assert made["signed_by"] == "planner" and made["recut_of"]
        eventually("an answer cut there", lambda after=after: helped(agent))
