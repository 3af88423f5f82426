"""Which version of the agent runs: the decisions, as tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.release.agent_release import Target, agent_builds, build_for, build_name
from edgesplit.release.manifest import decode_manifest
from edgesplit_agent.self_update import launcher, version_slots
from edgesplit_agent.self_update.launcher import LaunchContext, prepare_start, start_command
from edgesplit_agent.self_update.trial import VersionTrial
from edgesplit_agent.self_update.version_slots import INSTALLED, Versions
from edgesplit_agent.self_update.version_store import VersionStore
from edgesplit_agent.service.doctor_device import check_versions
from edgesplit_agent.state.data_folder import DataFolder
from edgesplit_agent.state.slots import UNHEALTHY_STARTS
from edgesplit_agent.version_check import NEEDS_LAUNCHER, incompatibility
from support.agent_versions import AgentRelease


class Became(BaseException):
    """In place of another program in this process."""


def _become(*_: object) -> None:
    raise Became


OLD, NEW = "a" * 64, "b" * 64
ON_OLD = Versions(installed="0.1.0", committed=OLD)
TRYING = version_slots.with_activated(ON_OLD, NEW, ("digits",), 7, "0.1.0")


def fresh(shelf: VersionStore, release: str) -> Path:
    """A folder for that release with an interpreter in it."""
    part = shelf.new_part_folder(release)
    (part / "bin").mkdir()
    (part / "bin" / "python").symlink_to(sys.executable)
    return part


def started(versions: Versions, times: int = 1) -> Versions:
    for _ in range(times):
        versions = version_slots.with_start_counted(versions, "0.1.0")
    return versions


def test_installed_version_runs_without_a_versions_file() -> None:
    """A device without a recorded version starts the installed one, and writes no record of it."""
    assert started(Versions(), 9) == Versions()


def test_third_unhealthy_start_of_a_trial_rolls_back() -> None:
    """Two unhealthy starts are not enough; after the third the committed version runs, and the reason is recorded."""
    assert started(TRYING, UNHEALTHY_STARTS).running == NEW

    back = started(TRYING, UNHEALTHY_STARTS + 1)

    assert back.running == OLD and back.unhealthy_starts == 1
    assert back.rejected == {NEW: "3 starts in a row were not found healthy"}


def test_third_unhealthy_start_of_a_committed_version_falls_back_to_installed() -> None:
    """A committed version that became unhealthy gives way to the installed one, which no update can change."""
    back = started(ON_OLD, UNHEALTHY_STARTS + 1)
    assert back.running == INSTALLED and OLD in back.rejected and not back.unhealthy_starts


def test_first_update_rolls_back_to_the_installed_version() -> None:
    """Where no release ran before, a roll-back starts the installed version."""
    trying = version_slots.with_activated(Versions(), NEW, (), 7, "0.1.0")
    assert trying.installed == "0.1.0"
    assert version_slots.with_rollback(trying, "it is silent").running == INSTALLED


def test_requested_stop_does_not_count_as_unhealthy() -> None:
    """Restarted by its operator again and again, a version on trial stays on trial."""
    versions = TRYING
    for _ in range(9):
        versions = version_slots.with_start_uncounted(started(versions), NEW)
    assert versions == TRYING


def test_commit_ends_the_trial_and_resets_the_count() -> None:
    """A version that was found healthy is committed; its unhealthy starts count from zero again."""
    done = version_slots.with_trial_committed(started(TRYING, 2))
    assert done == replace(ON_OLD, committed=NEW, counter=7)


def test_damaged_version_is_reinstalled_once() -> None:
    """A committed version that was damaged is not marked bad; one on trial is, because it was written a moment ago."""
    assert version_slots.with_damage(ON_OLD, "torn") == replace(ON_OLD, committed=INSTALLED)
    assert (
        version_slots.with_damage(TRYING, "torn").rejected == {NEW: "torn"}
        and version_slots.with_damage(TRYING, "torn").running == OLD
    )


def test_newly_installed_version_takes_precedence() -> None:
    """An operator who installs another version by hand gets that one, whatever release was committed before."""
    assert version_slots.with_start_counted(TRYING, "0.2.0") == Versions(installed="0.2.0")


def test_only_a_newer_statement_retries_a_failed_version() -> None:
    """The statement under which a version failed does not start it again; the next one may."""
    bad = version_slots.with_rollback(TRYING, "it is silent")
    assert version_slots.with_statement(bad, 7) == bad
    assert version_slots.with_statement(bad, 8).rejected == {}


@pytest.mark.parametrize(
    ("online_since", "serving", "now", "verdict"),
    [
        (None, {"digits"}, 299.0, "wait"),
        (None, {"digits"}, 300.0, "unhealthy"),
        (20.0, {"digits"}, 29.0, "wait"),
        (20.0, {"digits"}, 30.0, "healthy"),
        (295.0, {"digits"}, 301.0, "wait"),
        (20.0, set(), 30.0, "wait"),
        (20.0, {"other"}, 300.0, "unhealthy"),
    ],
)
def test_trial_needs_broker_connection_and_models(
    online_since: float | None, serving: set[str], now: float, verdict: str
) -> None:
    """The version must stay connected for the health time and serve the same models; it has five minutes for that."""
    trial = VersionTrial(NEW, 0.0, 300.0, frozenset({"digits"}), online_since)
    assert trial.verdict(serving, now, 10.0) == verdict
    assert all(trial.verdict(serving, moment, 10.0) for moment in trial.verdict_times(10.0))


def test_rollback_reason_names_what_was_missing() -> None:
    """Whether it was the link or a model."""
    trial = VersionTrial(NEW, 0.0, 300.0, frozenset({"digits"}))
    assert trial.unhealthy_reason(set()) == "it did not reach the broker within 300 s"
    assert "does not serve digits" in VersionTrial(NEW, 0.0, 300.0, frozenset({"digits"}), 5.0).unhealthy_reason(set())


def test_version_checks_launcher_and_folder_format() -> None:
    """A version knows what it needs: a launcher too old, a folder too new or too old is refused by name."""
    assert incompatibility(NEEDS_LAUNCHER, 1) == ""
    assert "newer installed version" in incompatibility(NEEDS_LAUNCHER - 1, 1)
    assert "format 9" in incompatibility(NEEDS_LAUNCHER, 9)


def test_folder_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A version never works on a format it cannot read, and says which one could."""
    (tmp_path / "format.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, match="newer edgesplit-agent"):
        DataFolder(tmp_path).acquire()
    DataFolder(tmp_path).lock()  # nobody holds it


def test_folder_format_is_raised_at_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the marker stays, so that the previous version can still read everything."""
    from edgesplit_agent.self_update.manager import VersionManager
    from edgesplit_agent.state import data_folder as module

    monkeypatch.setattr(module, "FORMAT", 2)
    folder = DataFolder(tmp_path)
    VersionStore(tmp_path).write(TRYING)
    own = VersionManager(folder, LaunchContext(NEW, True, ("launcher",), 1))

    own.write_format()
    assert folder.format == 1

    own.commit()
    assert folder.format == 2


def test_builds_are_named_by_version_python_and_machine() -> None:
    """The name in the signed manifest identifies a build; no other name is accepted as one."""
    assert build_name("0.3.0rc1", Target("3.10", "aarch64")) == "0.3.0rc1-cp310-aarch64"
    for version, target in (("0.3.0+x", Target("3.11", "aarch64")), ("1", Target("3", "aarch64"))):
        with pytest.raises(UsageError):
            build_name(version, target)
    with pytest.raises(UsageError, match="x86_64"):
        build_name("1.0", Target("3.11", "armv7l"))


def test_device_selects_the_matching_build() -> None:
    """If none matches, the error lists the targets that have builds."""
    manifest = decode_manifest(AgentRelease("0.3.0", name="0.3.0-cp311-aarch64").raw)
    assert build_for(manifest, Target("3.11", "aarch64")).version == "0.3.0"
    with pytest.raises(UsageError, match=r"only for Python 3\.11 on aarch64"):
        build_for(manifest, Target("3.10", "aarch64"))


def test_agent_release_by_the_planner_is_refused() -> None:
    """An agent release that claims to be another cut is refused, and a model's slices are no build."""
    with pytest.raises(TrustError, match="only the release key"):
        agent_builds(decode_manifest(AgentRelease("0.3.0", recut_of="c" * 64).raw))
    with pytest.raises(MalformedMessage, match="no build"):
        agent_builds(decode_manifest(AgentRelease("0.3.0", name="conv1").raw))


def test_installed_version_starts_with_its_own_interpreter(tmp_path: Path) -> None:
    """The whole command line reaches the agent, and the way to restart itself."""
    command, environment = start_command(
        Versions(), VersionStore(tmp_path), ["--port", "0"], ["launcher", "--port", "0"], {"A": "1"}
    )
    assert command == [sys.executable, "-m", "edgesplit_agent.main", "run", "--port", "0"]
    assert environment["A"] == "1"
    assert LaunchContext.from_environment(environment) == LaunchContext(
        INSTALLED, False, ("launcher", "--port", "0"), launcher.CONTRACT
    )


def test_release_starts_isolated(tmp_path: Path) -> None:
    """A version from a release sees neither the user's modules nor the current folder."""
    command, environment = start_command(TRYING, VersionStore(tmp_path), [], ["launcher"], {"PYTHONPATH": "/elsewhere"})
    assert command[:3] == [str(tmp_path / "versions" / NEW / "bin" / "python"), "-I", "-B"]
    assert "PYTHONPATH" not in environment
    assert LaunchContext.from_environment(environment) == LaunchContext(NEW, True, ("launcher",), launcher.CONTRACT)


def test_agent_without_launcher_is_recognised() -> None:
    """And garbage in the environment is no launcher."""
    assert LaunchContext.from_environment({}) is None
    assert LaunchContext.from_environment({launcher.LAUNCHER: "[1", launcher.LAUNCHER_CONTRACT: "1"}) is None
    assert (
        LaunchContext.from_environment({launcher.LAUNCHER: json.dumps(["x"]), launcher.LAUNCHER_CONTRACT: "one"})
        is None
    )


def test_damaged_version_does_not_start(tmp_path: Path) -> None:
    """Files lost, a byte changed, a file or a link too many: the previous version starts, and the reason is kept."""
    shelf = VersionStore(tmp_path)

    def put(release: str) -> None:
        part = fresh(shelf, release)
        (part / "module.py").write_text(release)
        (part / "link").symlink_to("module.py")
        shelf.adopt(part, release, "0.3.0")

    for spoil in (
        lambda home: (home / "module.py").write_text("x"),
        lambda home: (home / "module.py").unlink(),
        lambda home: (home / "more.pth").write_text("import os"),
        lambda home: ((home / "link").unlink(), (home / "link").symlink_to("/tmp")),
        lambda home: (home / "installed.json").write_text("{"),
        lambda home: ((home / "bin/python").unlink(), (home / "bin/python").symlink_to("/gone/python3.9")),
    ):
        put(OLD)
        put(NEW)
        shelf.write(TRYING)
        assert prepare_start(shelf, "0.1.0").running == NEW
        spoil(shelf.version_folder(NEW))
        found = prepare_start(shelf, "0.1.0")
        assert found.running == OLD and shelf.read() == found and NEW in found.rejected
    put(OLD)
    spoilt = (shelf.version_folder(OLD) / "module.py").write_text("x")
    assert spoilt and prepare_start(shelf, "0.1.0").running == INSTALLED


def test_corrupt_versions_file_starts_the_installed_version(tmp_path: Path) -> None:
    """Whatever `versions.json` holds, an agent starts."""
    shelf = VersionStore(tmp_path)
    for raw in (b"", b"{", b'{"committed": 7}', b"\xff\xfe", b"[" * 5_000):
        (tmp_path / "versions.json").write_bytes(raw)
        assert prepare_start(shelf, "0.1.0").running == INSTALLED


def test_locked_folder_counts_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second agent on the same folder is refused, and the first one's start counter is unaffected."""
    monkeypatch.setattr("signal.alarm", lambda seconds: None)
    monkeypatch.setattr("os.execve", _become)
    shelf, holder = VersionStore(tmp_path), DataFolder(tmp_path)
    holder.acquire()
    shelf.write(ON_OLD)
    for _ in range(9):
        with pytest.raises(Became):
            launcher.main(["--data", str(tmp_path)])
    assert shelf.read() == ON_OLD


def test_hanging_trial_is_ended_by_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sets an alarm that survives exec for a version on trial, and for no other."""
    alarms: list[int] = []
    monkeypatch.setattr("signal.alarm", alarms.append)
    monkeypatch.setattr("os.execve", _become)
    shelf = VersionStore(tmp_path)
    part = fresh(shelf, NEW)
    shelf.adopt(part, NEW, "0.3.0")
    shelf.write(version_slots.with_activated(Versions(), NEW, (), 7, launcher.__version__))

    for more in (["--trial-seconds", "20"], []):
        with pytest.raises(Became):
            launcher.main(["--data", str(tmp_path), *more])
        shelf.write(version_slots.with_trial_committed(shelf.read()))

    assert alarms == [20 + launcher.STARTING_S, 0]


def test_version_that_cannot_be_executed_is_rolled_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example on a noexec file system: the previous version starts in the same launch."""
    asked: list[str] = []

    def become(path: str, *_: object) -> None:
        asked.append(path)
        if path != sys.executable:
            raise PermissionError(13, "Permission denied")
        raise Became

    monkeypatch.setattr("signal.alarm", lambda seconds: None)
    monkeypatch.setattr("os.execve", become)
    shelf = VersionStore(tmp_path)
    shelf.adopt(fresh(shelf, NEW), NEW, "0.3.0")
    shelf.write(version_slots.with_activated(Versions(), NEW, (), 7, launcher.__version__))

    with pytest.raises(Became):
        launcher.main(["--data", str(tmp_path)])

    assert asked == [str(shelf.python(NEW)), sys.executable]
    assert shelf.read().rejected == {NEW: "it cannot be started: Permission denied"}


def test_doctor_reports_versions_and_failures(tmp_path: Path) -> None:
    """Which version the next start takes, whether it is complete, and why another does not run."""
    shelf, folder = VersionStore(tmp_path), DataFolder(tmp_path)
    assert [finding.level for finding in check_versions(folder)] == ["good"]

    part = fresh(shelf, OLD)
    (part / "module.py").write_text("x = 1")
    shelf.adopt(part, OLD, "0.3.0")
    shelf.write(version_slots.with_rollback(TRYING, "it is silent"))
    healthy, given_up = check_versions(folder)
    assert (healthy.level, given_up.level) == ("good", "warning") and "it is silent" in given_up.said

    (shelf.version_folder(OLD) / "module.py").write_text("x = 2")
    damaged = next(iter(check_versions(folder)))
    assert damaged.level == "warning" and "module.py" in damaged.said
