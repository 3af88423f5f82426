"""`edgectl sim`: its output, its refusals, and that it leaves no files behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgesplit.errors import EdgeError
from edgesplit_cli.main import cli


def _sim(*words: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(cli, ["sim", *words])
    return done.exit_code, done.stdout, done.exception


def test_a_simulated_hour_of_faults_is_reported_as_json(tmp_path: Path) -> None:
    """Virtual time needs no controller; every figure is marked as simulated."""
    faults = tmp_path / "faults.yaml"
    faults.write_text(
        "format: edgesplit.faults/1\nfaults:\n  - {what: power cut, rate: 2/h, for: 10s-60s}\n"
        "  - {what: release, at: 20m, how: golden, devices: 50%}\n"
    )
    code, out, _ = _sim(
        "--virtual", "--devices", "4", "--for", "1h", "--faults", str(faults), "--request-every", "1m", "--json"
    )  # fmt: skip
    said = json.loads(out)

    assert code == 0
    assert said["simulated"] and said["virtual"] and said["broken"] == []
    assert said["faults"]["release: golden"] == 1 and said["faults"]["power cut"] > 0
    assert said["devices"] == 4 and said["states"] == {"connected": 4}
    assert sum(said["requests"].values()) == said["asked"] > 0


def test_the_simulation_summary_is_readable(tmp_path: Path) -> None:
    """Devices, releases, and each invariant with its findings."""
    code, out, _ = _sim("--virtual", "--devices", "3", "--for", "5m", "--profile", "raspberrypi4=50%,jetson-nano")

    assert code == 0
    assert out.count("kept: ") == 4
    assert "3 simulated devices" in out and "fingerprint" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--profile", "a=70%,b=70%"), "more than 100%"),
        (("--profile", ",a"), "not a list of profiles"),
        (("--for", "soon"), "not a duration"),
        (("--link", "string"), "string"),
        (("--faults", "/nowhere.yaml"), "cannot read"),
        (("--devices", "0"), "0 is not in the range"),
    ],
)
def test_invalid_simulation_options_are_refused(words: tuple[str, ...], says: str) -> None:
    """Before anything begins."""
    done = CliRunner().invoke(cli, ["sim", "--virtual", *words])

    assert done.exit_code != 0
    assert says in str(done.exception) + done.output
    assert isinstance(done.exception, EdgeError | SystemExit)


def test_controller_faults_are_refused_for_a_real_controller(tmp_path: Path) -> None:
    """With a real controller only devices have faults."""
    from edgesplit_simulation.faults.schedule import USUAL_FAULTS, parse_faults
    from edgesplit_simulation.run import run_real

    with pytest.raises(EdgeError, match="cannot be applied to a real controller"):
        run_real(
            tmp_path, None, 1, first=1, prefix="sim", group="", seed=1, classes={}, link="wifi",  # type: ignore[arg-type]
            faults=parse_faults(USUAL_FAULTS), duration_s=1, request_every_s=0, telemetry_every_s=1, health_s=1,
        )  # fmt: skip
