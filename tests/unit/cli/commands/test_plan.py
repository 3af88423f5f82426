"""`edgectl plan` and `edgectl check` without a controller: files in, tables, pictures and exit codes out."""

from __future__ import annotations

import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from edgesplit.device_profile import PROFILE_PACKAGE, load_profile
from edgesplit.errors import UsageError
from edgesplit.links import parse_link
from edgesplit.plan import Row
from edgesplit.quantities import DURATION, SIZE
from edgesplit_cli.commands.plan import plan_links
from edgesplit_cli.demo.run import locked
from edgesplit_cli.local.model import read_npy, read_npz
from edgesplit_cli.main import main
from edgesplit_cli.options.plan_limits import typed_value
from edgesplit_cli.output import check_writable
from edgesplit_controller.model_registry.registry import load_model
from edgesplit_partitioner.costs.build import build_costs
from edgesplit_partitioner.presentation.picture import label, labels, line_colours, shortened
from support import onnx_models as tiny
from support.chain_costs import chain_costs


@pytest.fixture
def costs_file(tmp_path: Path) -> Path:
    """Three layers, planned from a file."""
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(chain_costs()))
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A tiny convolutional network."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny.chain())
    return path


def edgectl(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command as the console script does; its exit code."""
    monkeypatch.setattr(sys, "argv", ["edgectl", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    """What the command prints with --json."""
    assert edgectl(monkeypatch, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--partition", "nowhere"], "--partition nowhere: no layer is called 'nowhere'"),
        (["--keep-first", "999"], "--keep-first 999: doorbell@1 has 3 layers; --partition device keeps them all"),
    ],
)
def test_a_limit_with_an_unknown_name_is_reported_by_its_option(
    costs_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    """Not by the planner's name for the limit."""
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "wifi", *words) == 2
    assert told in capsys.readouterr().err


def test_costs_file_is_planned_and_explained(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table, the reasons in sentences, and the same as JSON."""
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--explain", "--keep-first", "1") == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("switching table", "Why the cut after narrow?", "Next best is", "--keep-first 1 does not bind"):
        assert words in text
    found = as_json(monkeypatch, capsys, "plan", costs_file, "--link", "lte", "--explain")
    assert found["explanation"]["best"]["last"] == {"device": "narrow"}
    assert found["best"] == "cut-2"


def test_model_file_is_planned_without_a_controller(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured here, predicted for the device and for a gateway; the data folder holds nothing."""
    found = as_json(
        monkeypatch, capsys, "--data", model_file.parent / "none", "plan", model_file, "--device", "raspberrypi4",
        "--tier", "edge=jetson-nano@100mbit/2ms", "--link", "lte", "--input", "image/jpeg 64x48 scale=1/255",
    )  # fmt: skip
    assert found["tiers"] == ["device", "edge", "cloud"]
    assert found["basis"]["edge"].startswith("predicted: device profile jetson-nano")
    assert found["basis"]["cloud"].startswith("measured")
    assert [link["name"] for link in found["links"]] == ["100mbit/2ms", "lte"]
    assert found["certificate"]["gap"] < 1e-6


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--memory", "much"], 2, "not a size"),
        (["--energy", "5W"], 2, "not an energy"),
        (["--deadline", "soon"], 2, "not a duration"),
        (["--objective", "speed"], 2, "one of latency, p95, energy, throughput"),
        (["--tier", "edge"], 2, "not a tier"),
        (["--tier", "gateway@wifi"], 2, "no such tier"),
        (["--link", "fast"], 2, "not a link"),
        (["--deadline", "1ms"], 4, "deadline"),
        (["--plot", "picture.txt"], 2, "end it in .svg"),
    ],
)
def test_errors_are_one_line_with_their_exit_code(
    costs_file: Path,
    arguments: list[str],
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Usage errors exit with 2, infeasible limits with 4."""
    assert edgectl(monkeypatch, "plan", costs_file, *arguments) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_size_of_the_answer_was_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link time of 199 ms stood beside 42.8 KiB sent: it was the answer of 1.2 MB that took it."""
    costs = msgspec.to_builtins(chain_costs())
    costs["layers"][-1]["writes"]["scores"]["bytes"] = 1_200_000
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(costs))
    assert edgectl(monkeypatch, "plan", path, "--link", "lte") == 0
    text = capsys.readouterr().out
    assert "receives" in text and "1.1 MiB" in text


def test_a_picture_priced_as_a_tensor_hid_the_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan says so, with both sizes and what to type; not where the cloud would lose with the JPEG too."""
    costs = msgspec.to_builtins(chain_costs())
    costs["inputs"]["frame"]["bytes"] = 602_112
    costs["pictures"] = {"frame": {"jpeg_bytes": 13_312, "input_spec": "image/jpeg 224x224 rgb nchw"}}
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(costs))
    assert edgectl(monkeypatch, "plan", path, "--link", "4mbit/5ms") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "588.0 KiB as a tensor; as JPEG about 13.0 KiB" in text
    assert "push with --input 'image/jpeg 224x224 rgb nchw" in text
    (picture,) = as_json(monkeypatch, capsys, "plan", path, "--link", "4mbit/5ms")["pictures"]
    assert picture["hides_the_cloud"] and picture["seconds"] < 0.1
    assert edgectl(monkeypatch, "plan", path, "--link", "100kbit/5ms") == 0
    assert "as JPEG" not in capsys.readouterr().out


def test_a_model_file_without_an_input_spec_names_its_picture(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by its shape; with the input spec there is nothing to say."""
    (picture,) = as_json(monkeypatch, capsys, "plan", model_file, "--device", "raspberrypi4")["pictures"]
    assert picture["jpeg_bytes"] < picture["bytes"] and picture["input_spec"].startswith("image/jpeg ")
    spec = ("--input", "image/jpeg 64x48 scale=1/255")
    assert as_json(monkeypatch, capsys, "plan", model_file, "--device", "raspberrypi4", *spec)["pictures"] == []


def test_a_model_needs_a_device(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a device profile nothing can be predicted."""
    assert edgectl(monkeypatch, "plan", model_file) == 2
    assert "--device PROFILE is needed" in capsys.readouterr().err


def test_limits_and_objectives_are_passed_to_the_planner(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option as the planner's argument."""
    found = as_json(
        monkeypatch, capsys, "plan", costs_file, "--link", "lte", "--radio", "none", "--objective",
        "latency=1,energy=0.5", "--memory", "500kB", "--deadline", "900ms", "--energy", "20J", "--fallback", "cold",
    )  # fmt: skip
    assert found["limits"] == {
        "memory_bytes": "500000.0", "energy_joules": "20.0", "deadline_s": "0.9", "fallback": "cold"
    }  # fmt: skip
    assert found["objective"] == "1*latency + 0.5*energy"


def test_a_trace_sets_the_uplink_of_the_first_link(
    costs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the time fast, half slow: p95 is planned for the slow half, the mean for the harmonic mean."""
    fast = [millisecond for millisecond in range(10_000) for _ in range(1)]
    slow = list(range(10_000, 20_001, 100))
    trace = tmp_path / "up.trace"
    trace.write_text("\n".join(map(str, fast + slow)) + "\n")
    p95 = as_json(monkeypatch, capsys, "plan", costs_file, "--trace", trace, "--objective", "p95")
    mean = as_json(monkeypatch, capsys, "plan", costs_file, "--trace", trace)
    assert p95["link"]["up_bytes_per_s"] == pytest.approx(15_000, rel=0.1)
    assert mean["link"]["up_bytes_per_s"] == pytest.approx(2 / (1 / 1.5e6 + 1 / 15_000), rel=0.05)


KINDS = ([], ["--objective", "energy", "--radio", "wifi"], ["--keep-raw-input"], ["--partition", "device"])


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_every_kind_of_plan_is_plotted(
    costs_file: Path, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Latency, energy, a limit that forbids a candidate, and a forced cut; the same plan gives the same bytes."""
    for number, more in enumerate(KINDS):
        file = costs_file.parent / f"plan-{number}{ending}"
        assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--plot", file, *more) == 0
        assert f"drawn: {file}" in capsys.readouterr().out.replace("\n", "")
        drawn = file.read_bytes()
        assert drawn.startswith(b"\x89PNG") if ending == ".png" else b"The best cut over bandwidth" in drawn
    again = costs_file.parent / f"again{ending}"
    edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--plot", again)
    assert again.read_bytes() == (costs_file.parent / f"plan-0{ending}").read_bytes()


def test_plot_labels_and_colours_distinguish_cuts() -> None:
    """Pure modes by name, long layer names by their end; no two cuts inside share a colour."""
    inside = [Row(name=f"cut-{after}", split_after=after, remote=("z",)) for after in "ab"]
    rows = [Row(name="remote", remote=("z",)), *inside, Row(name="local")]
    assert len(set(line_colours(rows).values())) == 4
    assert label({"name": "local", "split_after": "z"}) == "all on the device"
    assert label({"name": "remote", "split_after": "", "up_bytes": 5, "compress": True}) == "all remote +zstd"
    long = label({"name": "cut-1", "split_after": "block/" * 20 + "conv", "up_bytes": 5})
    assert long.startswith("after …") and long.endswith("block/conv") and len(long) < 40


def test_links_connect_adjacent_tiers_and_the_first_has_the_radio() -> None:
    """--link reaches the cloud, each tier's own link reaches the tier; the radio is that of the link's name."""
    wifi, lte = parse_link("wifi"), parse_link("lte/2")
    found = plan_links(("device", "edge", "cloud"), wifi, [("edge", "", lte)])
    assert list(found) == ["device-edge", "edge-cloud"]
    assert found["device-edge"].radio == "lte" and found["edge-cloud"] == wifi
    assert plan_links(("device", "cloud"), parse_link("8mbit/40ms"))["device-cloud"].name == "8mbit/40ms"


def test_check_reports_every_boundary_of_a_file(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every boundary by name, the reason where there is none, exit code 0; as JSON with a verdict for scripts."""
    assert edgectl(monkeypatch, "check", model_file) == 0
    text = capsys.readouterr().out
    assert "stem/Conv" in text and "a fused group" in text and "exact" in text
    found = as_json(monkeypatch, capsys, "check", model_file, "--input", "image/jpeg 64x48 scale=1/255")
    assert found["is_safe"] and found["cuts"][1]["split_after"] == "input"


def test_check_accepts_the_cuts_of_a_plan(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's JSON is read, and its rows are checked; any other JSON is refused."""
    made = as_json(monkeypatch, capsys, "plan", model_file, "--device", "raspberrypi4")
    plan_file = model_file.parent / "plan.json"
    plan_file.write_text(json.dumps(made))
    assert as_json(monkeypatch, capsys, "check", model_file, "--plan", plan_file)["is_safe"]
    plan_file.write_text("[]")
    assert edgectl(monkeypatch, "check", model_file, "--plan", plan_file) == 2


def test_check_of_an_invalid_model_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the detected type of the file."""
    (tmp_path / "odd.onnx").write_bytes(b"\x80\x04pickle")
    assert edgectl(monkeypatch, "check", tmp_path / "odd.onnx") == 3
    assert "pickle" in capsys.readouterr().err


class OneModelController:
    """A controller that has one model."""

    asked: dict[str, Any]

    def get(self, path: str, **query: Any) -> Any:
        """The model as it is shown, or its costs."""
        self.asked = query
        if path.endswith("/costs"):
            return msgspec.to_builtins(chain_costs())
        return {"model": "door@3", "input": "image/jpeg 64x48 scale=1/255", "bindings": {}}

    def download(self, path: str) -> bytes:
        """Its file."""
        assert path == "/v1/models/door%403/file"
        return tiny.chain()


def test_a_registered_model_is_checked_with_its_stored_spec(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file, its input spec and its bindings come from the controller; they cannot be given again."""
    monkeypatch.setattr("edgesplit_cli.local.model.connect", lambda data: OneModelController())
    found = as_json(monkeypatch, capsys, "check", "door")
    assert found["model"] == "door@3" and found["cuts"][0]["sends"] == ["frame"] and found["is_safe"]
    assert edgectl(monkeypatch, "check", "door", "--bind", "batch=1") == 2


def test_a_registered_model_is_planned_with_the_controllers_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Device profile and lossy codecs are requested where they are needed; options for model files are refused."""
    controller = OneModelController()
    monkeypatch.setattr("edgesplit_cli.commands.plan.connect", lambda data: controller)
    found = as_json(monkeypatch, capsys, "plan", "door", "--device", "raspberrypi4", "--allow-loss", "1%")
    assert found["model"] == "doorbell@1"
    assert controller.asked == {"device": "raspberrypi4", "tier": None, "lossy": True}
    assert edgectl(monkeypatch, "plan", "door", "--device", "raspberrypi4", "--bind", "batch=1") == 2


def test_a_local_device_profile_was_unknown_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile file that the controller does not have: its measurements are combined with local predictions."""
    text = resources.files(PROFILE_PACKAGE).joinpath("jetson-nano.yaml").read_text("utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace("name: jetson-nano", "name: mine"))

    class WithCosts(OneModelController):
        def get(self, path: str, **query: Any) -> Any:
            shown = super().get(path, **query)
            if not path.endswith("/costs"):
                return shown
            model = load_model(tiny.chain(), "image/jpeg 64x48 scale=1/255", {})
            cloud_s = {layer.name: 0.001 for layer in model.graph.layers}
            return msgspec.to_builtins(
                build_costs("door@3", model.graph, profile=load_profile("generic-x86"), cloud_s=cloud_s, tensors={})
            )

    controller = WithCosts()
    monkeypatch.setattr("edgesplit_cli.local.model.connect", lambda data: controller)
    monkeypatch.setattr("edgesplit_cli.commands.plan.connect", lambda data: controller)
    found = as_json(
        monkeypatch, capsys, "plan", "door", "--device", tmp_path / "mine.yaml",
        "--tier", f"edge={tmp_path / 'mine.yaml'}@100mbit/2ms",
    )  # fmt: skip

    assert found["device_class"] == "mine" and found["tiers"] == ["device", "edge", "cloud"]
    assert "device profile mine" in found["basis"]["device"] and "device profile mine" in found["basis"]["edge"]
    assert found["basis"]["cloud"].startswith("measured: on this machine")


@pytest.mark.parametrize(
    "arrays", [{"x": np.zeros((1, 2), np.float32)}, {"y": np.zeros(1, np.float32)}, {"x": np.zeros(1, object)}]
)
def test_an_invalid_sample_was_reported_as_a_model_error(
    arrays: dict[str, Any],
    tmp_path: Path,
    model_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another shape, another name, or objects: the sample is reported, and nothing is measured. An allowance for loss
    needs two samples."""
    np.savez(tmp_path / "one.npz", **arrays)
    options = ("plan", model_file, "--device", "raspberrypi4")
    assert edgectl(monkeypatch, *options, "--samples", tmp_path / "one.npz") == 2
    said = capsys.readouterr().err
    assert "sample 1 of 1 does not fit" in said or "one.npz is not a valid .npz file of arrays" in said
    assert edgectl(monkeypatch, *options, "--allow-loss", "1%") == 2
    assert "--allow-loss needs --samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--link", "wify"], "not a link: 'wify'"),
        (["--memory", "5 apples"], "not a size: '5 apples'"),
        (["--deadline", "nan"], "not a duration: 'nan'"),
        (["--allow-loss", "50"], "at most 100%, as in 0.5%"),
        (["--tier", "edge=jetson-nano"], "as in edge=jetson-nano@100mbit/2ms"),
        (["--tier", "cloud=jetson-nano@wifi"], "tier name 'cloud' is taken"),
        (["--codecs", ""], "not a list of codecs"),
        (["--keep-first", "9999"], "has 3 layers"),
        (["--device", "jetson-nano"], "leave --device out"),
        (["--tier", "edge=jetson-nano@wifi"], "holds the tiers' figures"),
        (["--input", "image/jpeg 64x48"], "--input, --bind and --samples are for model files"),
        (["--plot", "no/folder/x.svg"], "there is no folder no/folder"),
        (["--plot", "x.jpg"], "end it in .svg, .png, .pdf"),
    ],
)
def test_a_mistyped_option_is_one_line_and_exit_code_2(
    arguments: list[str],
    told: str,
    costs_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reported before anything is measured or printed; nothing is silently dropped."""
    assert edgectl(monkeypatch, "plan", costs_file, *arguments) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.startswith("edgectl: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_device_option_equal_to_the_costs_file_is_accepted(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--device is refused only where it contradicts."""
    costs = msgspec.structs.replace(chain_costs(), device_class="raspberrypi4")
    costs_file.write_bytes(msgspec.json.encode(costs))
    assert edgectl(monkeypatch, "plan", costs_file, "--device", "raspberrypi4") == 0
    assert edgectl(monkeypatch, "plan", costs_file, "--device", "raspberrypi5") == 2
    assert "holds the device's figures, those of raspberrypi4" in capsys.readouterr().err


def test_conflicting_limits_are_named_by_their_options(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suggested alternatives can be typed as printed."""
    assert edgectl(monkeypatch, "plan", costs_file, "--deadline", "1ms") == 4
    told = capsys.readouterr().err
    least = re.search(r"no cut keeps --deadline 1ms\..* --deadline ([0-9.]+ms)$", told)
    assert least, told
    assert edgectl(monkeypatch, "plan", costs_file, "--deadline", least[1]) == 0


@pytest.mark.parametrize("typed", [["--deadline", "0.1s"], ["--deadline=0.1s"], ["--deadline", "100000us"]])
def test_a_limit_is_printed_as_it_was_typed(typed: list[str]) -> None:
    """Suggested alternatives have a unit that fits them."""
    assert typed_value("--deadline", DURATION, 0.1, ["plan", *typed, "--json"]) == typed[-1].removeprefix("--deadline=")
    assert typed_value("--deadline", DURATION, 0.2, ["plan", *typed]) == ""
    assert typed_value("--memory", SIZE, 0.1, ["plan", *typed]) == ""


def test_a_json_error_names_its_file_and_line(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a costs file that is no valid JSON."""
    costs_file.write_text('{"format": "edgesplit.costs/1",\n "model": "m"\n "tiers": []}')
    assert edgectl(monkeypatch, "plan", costs_file) == 2
    told = capsys.readouterr().err
    assert "costs.json: not a costs file" in told
    assert "(line 3, column 2)" in told


def test_a_picture_given_as_a_model_is_reported_as_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as a damaged ONNX file."""
    file = tmp_path / "frame.tflite"
    file.write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    assert edgectl(monkeypatch, "plan", file, "--device", "raspberrypi4") == 3
    assert f"{file}: neither ONNX nor TFLite but a JPEG picture" in capsys.readouterr().err


def test_tables_fit_80_columns(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No figure is broken in two in a terminal of 80 columns."""
    monkeypatch.setattr("edgesplit_cli.views.plan.console", lambda: Console(width=80, highlight=False))
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line[3:].startswith(("remote", "cut-", "local"))]
    assert rows
    assert all(re.search(r"\d+\.\d( +\d+\.\d){4}$", line.rstrip()) for line in rows), rows


@pytest.mark.parametrize(("objective", "words"), [("energy", "J"), ("throughput", "answers per second")])
def test_the_minimised_value_is_printed_with_its_unit(
    objective: str, words: str, costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Joules, or milliseconds of the slowest stage with the resulting rate."""
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--objective", objective) == 0
    assert words in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best:"))


def test_a_plot_states_the_basis_of_its_times(
    costs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted times are labelled as such in the plot itself; the switch point is that of the table."""
    file = tmp_path / "plan.svg"
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--plot", file) == 0
    drawn = file.read_text("utf-8")
    assert "device times predicted" in drawn


def test_cuts_that_end_with_the_same_layer_get_distinct_labels() -> None:
    """By their numbers of layers; a long name keeps whole parts of its path."""
    same = [{"name": "cut-1", "split_after": "out", "layers": 3}, {"name": "cut-2", "split_after": "out", "layers": 5}]
    assert labels(same) == ["after out (3 layers)", "after out (5 layers)"]
    assert shortened("MobilenetV1/MobilenetV1/Conv2d_6_depthwise/Relu6", 30) == "…/Conv2d_6_depthwise/Relu6"


@pytest.mark.parametrize("name", ["some.npz", "some.npy"])
@pytest.mark.parametrize("content", [b"hello", b"", None])
def test_invalid_sample_arrays_are_refused_without_a_traceback(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    """Python objects in an array, text, nothing: the file is named, nothing is unpickled."""
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    elif name.endswith("npz"):
        np.savez(file, image=np.array([{1: 2}], dtype=object))
    else:
        np.save(file, np.array([{1: 2}], dtype=object))
    with pytest.raises(UsageError, match=name) as refused:
        dict(read_npz(file)) if name.endswith("npz") else read_npy(file)
    assert content is None or "pickle" not in str(refused.value), "numpy's guess at what any other file is"


def test_a_second_demo_on_one_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would start its agents on those of the first."""
    with locked(tmp_path):
        assert edgectl(monkeypatch, "demo", "--folder", tmp_path) == 2
    assert f"another demo runs on {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["room", "=kitchen", "room="])
def test_a_label_without_a_value_is_refused(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--to KEY=VALUE` could never select it."""
    arguments = ["device", "claim", "cam", "--profile", "raspberrypi4", "--label", label]
    assert edgectl(monkeypatch, "--data", tmp_path, *arguments) == 2
    assert "KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("deadline", ["nan", "0", "-1", "1e9"])
def test_an_invalid_deadline_is_refused(
    deadline: str, costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any request."""
    assert edgectl(monkeypatch, "infer", "m", costs_file, "--deadline", deadline) == 2
    assert "--deadline" in capsys.readouterr().err


def test_gain_is_not_relative_to_a_forbidden_mode(
    costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All-remote may be faster and not allowed: then the gain is that over all-local, and is labelled so."""
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--keep-raw-input") == 0
    text = capsys.readouterr().out
    assert "x all-local (all-remote is forbidden)" in " ".join(text.split())
    assert "x: a limit forbids it" in text
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte") == 0
    assert "the better of all-local and all-remote" in " ".join(capsys.readouterr().out.split())


def test_a_cut_is_printed_with_its_codecs() -> None:
    """By codec, and compressed or not: cuts after one layer differ by nothing else."""
    row = {"name": "cut-1", "split_after": "conv", "codecs": {"t": "int8", "u": "raw"}, "compress": True}
    assert label(row) == "after conv int8 +zstd"
    assert label({"name": "cut-2", "split_after": "conv", "codecs": {"t": "raw"}, "compress": False}) == "after conv"


@pytest.mark.parametrize("name", ["a[/]b[red]", "$\\alpha_{2$ & <b>", "[bold]"])
def test_names_with_markup_are_printed_literally(
    name: str, costs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets are no style and dollars no formula: a layer or model may have any name."""
    costs = chain_costs()
    layers = tuple(msgspec.structs.replace(layer, name=f"{layer.name}{name}") for layer in costs.layers)
    costs_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(costs, layers=layers, model=name)))
    plot = tmp_path / "plan.svg"
    assert edgectl(monkeypatch, "plan", costs_file, "--link", "lte", "--explain", "--plot", plot) == 0
    text = capsys.readouterr().out
    assert text.startswith(name)
    assert f"narrow{name}" in text
    assert plot.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["device", "claim", "cam", "--profile", "raspberrypi4", "--out", "no/folder/claim.json"],
        ["calibrate", "--out", "no/folder/mine.yaml"],
        ["calibrate", "--out", "/proc/mine.yaml"],
        ["infer", "m", "COSTS", "--out", "no/folder/answer.npz"],
        ["plan", "COSTS", "--plot", "/proc/plan.svg"],
    ],
)
def test_an_unwritable_output_is_refused_before_the_work(
    arguments: list[str], costs_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A claim that cannot be written would be lost, as would minutes of measuring."""
    words = [str(costs_file) if word == "COSTS" else word for word in arguments]
    assert edgectl(monkeypatch, "--data", costs_file.parent, *words) == 2
    assert "cannot write " in capsys.readouterr().err


def test_a_loss_allowance_without_samples_is_refused(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--allow-loss of a model file without samples would have no effect."""
    assert edgectl(monkeypatch, "plan", model_file, "--device", "raspberrypi4", "--allow-loss", "1%") == 2
    assert "--allow-loss needs --samples" in capsys.readouterr().err


def test_checking_an_output_path_leaves_no_file(tmp_path: Path) -> None:
    """No file is created, an existing one is not changed."""
    check_writable(tmp_path / "new.svg")
    assert not (tmp_path / "new.svg").exists()
    (tmp_path / "old.svg").write_text("old")
    check_writable(tmp_path / "old.svg")
    assert (tmp_path / "old.svg").read_text() == "old"


def test_three_tier_cuts_name_the_tiers_of_the_rest() -> None:
    """The same layers on the device, and the others on the edge, in the cloud, or on both."""
    tiers = ("device", "edge", "cloud")
    edge = {"name": "cut-1", "split_after": "conv", "remote_layers": 3}
    both = edge | {"hops": [{"remote": ["head"]}]}
    cloud = edge | {"hops": [{"remote": ["a", "b", "head"]}]}
    assert [label(row, tiers) for row in (edge, both, cloud)] == [
        "after conv, rest on edge",
        "after conv, rest on edge and cloud",
        "after conv, rest on cloud",
    ]
    assert label({"name": "remote", "split_after": "", "remote_layers": 4}, tiers) == "all on edge"
    assert label({"name": "remote", "split_after": "", "remote_layers": 4}, ("device", "cloud")) == "all remote"
