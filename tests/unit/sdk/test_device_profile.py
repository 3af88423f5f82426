"""Device profiles: every figure present, sourced and consistent; what is wrong is said."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
import yaml

from edgesplit.device_profile import NAME, PROFILE_PACKAGE, list_profiles, load_profile, parse_profile
from edgesplit.errors import UsageError

PROMISED = ["generic-x86", "jetson-nano", "raspberrypi3b+", "raspberrypi4"]
PROMISED += ["raspberrypi5", "jetson-orin-nano", "coral-usb-rpi4"]


def text_with(**changes: object) -> str:
    """The profile of a Raspberry Pi 4 with some fields changed, as YAML."""
    fields = yaml.safe_load(resources.files(PROFILE_PACKAGE).joinpath("raspberrypi4.yaml").read_text("utf-8"))
    fields.update(changes)
    return yaml.safe_dump({name: value for name, value in fields.items() if value is not None})


def test_the_promised_profiles_ship() -> None:
    """The device classes of the demo and of issue 3 are there, by the names that users type."""
    assert set(PROMISED) <= set(list_profiles())


@pytest.mark.parametrize("name", list_profiles())
def test_every_shipped_profile_is_whole(name: str) -> None:
    """A shipped profile loads, carries its file's name, and gives a source for every figure."""
    profile = load_profile(name)

    assert profile.name == name
    assert NAME.fullmatch(name) and "." not in name
    assert len(profile.figure_rows()) == 13 and all(all(row) for row in profile.figure_rows())
    assert all(figure.value > 0 and len(figure.source) > 20 for figure in profile.named_figures().values())


@pytest.mark.parametrize("name", list_profiles())
def test_an_assumption_gives_its_reasoning_and_a_derivation_its_formula(name: str) -> None:
    """A derived figure names what it was derived from; a published one names a document and its year."""
    for figure_name, figure in load_profile(name).named_figures().items():
        if figure.basis == "published":
            assert any(str(year) in figure.source for year in range(2012, 2100)), figure_name
        if figure.basis == "derived":
            assert any(sign in figure.source for sign in ("/", "*", "mean", "_per_s")), figure_name


@pytest.mark.parametrize("name", [name for name in list_profiles() if name != "generic-x86"])
def test_scaled_figures_follow_their_formulas(name: str) -> None:
    """What is scaled from generic-x86 moves with it: change one and this test says which others to recompute."""
    profile, host = load_profile(name), load_profile("generic-x86")
    slowdown = host.rates.memory_bytes_per_s.value / profile.rates.memory_bytes_per_s.value

    assert profile.zstd_slowdown.value == pytest.approx(slowdown, rel=0.01)
    assert profile.rates.jpeg_pixels_per_s.value == pytest.approx(
        host.rates.jpeg_pixels_per_s.value / profile.zstd_slowdown.value, rel=0.01
    )


def test_depthwise_is_never_priced_like_a_dense_convolution() -> None:
    """One rate for both would be wrong by ten times: no profile has that."""
    for name in list_profiles():
        rates = load_profile(name).rates
        assert rates.depthwise_flops_per_s.value < rates.dense_conv_flops_per_s.value / 5


@pytest.mark.parametrize(("typed", "meant"), [("rasberypi4", "raspberrypi4"), ("Jetson_Nano", "jetson-nano")])
def test_a_typo_is_answered_with_near_names(typed: str, meant: str) -> None:
    """A name nearly right is told what it may have meant."""
    with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
        load_profile(typed)


def test_an_unknown_name_is_answered_with_all_names() -> None:
    """A name like no other lists those there are, and says that a file works too."""
    with pytest.raises(UsageError, match=r"generic-x86, jetson-nano.*\.yaml"):
        load_profile("toaster")


def test_a_users_own_file_is_a_profile(tmp_path: Path) -> None:
    """A path to a YAML file is read as a profile, whatever it is called."""
    file = tmp_path / "mine.yaml"
    file.write_text(text_with(name="my-board"))

    assert load_profile(str(file)).name == "my-board"
    assert load_profile(file) == load_profile(str(file))


def test_numbers_may_be_written_as_people_write_them() -> None:
    """24e9, which YAML 1.1 takes for text, is a number here."""
    figure = "{value: 3e-5, basis: assumption, source: because it is an example}"
    profile = parse_profile(text_with(operator_overhead_s=None) + f"operator_overhead_s: {figure}\n", "mine")

    assert profile.operator_overhead_s.value == 3e-5


FIGURE = {"value": 1.0, "basis": "assumption", "source": "because it is an example"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"idle_watts": None}, "idle_watts"),
        ({"idle_watts": {**FIGURE, "value": 0}}, r"idle_watts\.value"),
        ({"idle_watts": {**FIGURE, "value": -1}}, r"idle_watts\.value"),
        ({"idle_watts": {**FIGURE, "value": float("inf")}}, "not a finite number"),
        ({"idle_watts": {"value": 1, "basis": "assumption"}}, "source"),
        ({"idle_watts": {**FIGURE, "source": "mine"}}, r"idle_watts\.source"),
        ({"idle_watts": {**FIGURE, "source": " " * 20}}, "idle_watts has no source"),
        ({"idle_watts": {**FIGURE, "basis": "guess"}}, r"idle_watts\.basis"),
        ({"idle_watts": {**FIGURE, "value": 99.0}}, "active_watts is below idle_watts"),
        ({"name": "my.board"}, "not a name"),
        ({"name": "../board"}, "not a name"),
        ({"threads": 0}, "threads"),
        ({"error": {**FIGURE, "low": 0.5, "high": 0.9, "coverage": 0.9}}, "error"),
        ({"fit": {"operators": []}}, "fit"),
        ({"turbo": True}, "turbo"),
        ({"host": "toaster"}, "host 'toaster'"),
        ({"host": "raspberrypi4"}, "host 'raspberrypi4'"),
        ({"format": "edgesplit.device-profile/9"}, "format"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], said: str) -> None:
    """A figure that is missing, unsourced or out of range, and a field nobody knows, are refused by name."""
    with pytest.raises(UsageError, match=said):
        parse_profile(text_with(**changes), "mine.yaml")


FIT = {
    "runtime": "onnxruntime",
    "machine": "mine",
    "taken": "2026-11-21",
    "run_s": 1e-6,
    "tensor_s": 0.0,
    "correction": 1.0,
    "cached_bytes": 1e6,
    "uncached_s_per_byte": 0.0,
    "whole": {"low": 0.9, "high": 1.1, "coverage": 0.9, "basis": "measured", "source": "because it is an example"},
}
LINE = {
    "family": "Relu",
    "centre": [5.0],
    "scale": [1.0],
    "lowest": [1.0],
    "highest": [9.0],
    "trend": [-9.0, 1.0],
    "points": [[3.0]],
    "bends": [0.1],
    "low": 0.9,
    "high": 1.1,
}


def test_a_calibrated_profile_carries_its_fit() -> None:
    """Plain numbers, checked for hanging together, never run."""
    profile = parse_profile(text_with(fit={**FIT, "operators": [LINE]}), "mine")

    assert profile.fit is not None and profile.fit.operators[0].points == ((3.0,),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trend": [1.0]}, "is inconsistent"),
        ({"points": [[1.0, 2.0]]}, "is inconsistent"),
        ({"bends": []}, "is inconsistent"),
        ({"scale": [0.0]}, "impossible numbers"),
        ({"trend": [float("nan"), 1.0]}, "impossible numbers"),
        ({"width": 0.0}, "impossible numbers"),
        ({"low": -1.0}, "low"),
        ({"low": 2.0, "high": 0.1}, "impossible numbers"),
        ({"points": [[0.0]]}, "impossible numbers"),
        ({"lowest": [-1.0]}, "impossible numbers"),
        ({"highest": [0.0]}, "impossible numbers"),
        ({"code": "import os"}, "code"),
    ],
)
def test_a_fit_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    """Whoever wrote the file: columns of one length, a bend per point, finite numbers, and nothing else."""
    with pytest.raises(UsageError, match=said):
        parse_profile(text_with(fit={**FIT, "operators": [{**LINE, **changes}]}), "mine")


BOMB = "a: &a [1, 1, 1, 1]\nb: &b [*a, *a, *a, *a]\nfit: {operators: [*b, *b, *b, *b]}\n"
WRONG_VALUES = ["a: !!int x", "a: !!timestamp x", "a: 2026-13-45", "a: 0x_", "a: !!binary x"]


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "{", "!!python/object/apply:os.system ['true']", "a: &a [*a]", BOMB, "[" * 5_000]
)
@pytest.mark.parametrize("tail", ["", "x" * 270_000])
def test_what_is_no_profile_is_refused(text: str, tail: str) -> None:
    """Other YAML, broken YAML, YAML that would run code, and files without end are refused, never executed."""
    with pytest.raises(UsageError, match="device profile mine"):
        parse_profile(text + tail, "mine")


@pytest.mark.parametrize("text", WRONG_VALUES)
def test_a_value_that_yaml_cannot_make_was_a_traceback(text: str) -> None:
    """A date without such a month, a number that is none: PyYAML raises what it likes, users read a refusal."""
    with pytest.raises(UsageError, match="device profile mine"):
        parse_profile(text, "mine")


def test_aliases_are_refused_by_name() -> None:
    """A few kilobytes of aliases stand for gigabytes; whoever used one to save a line is told what to do."""
    text = text_with().replace("basis: assumption", "basis: &a assumption", 1)

    with pytest.raises(UsageError, match=r"aliases \(\*a\) are not supported"):
        parse_profile(text + "again: *a\n", "mine")


def test_a_file_that_cannot_be_read_is_a_users_error(tmp_path: Path) -> None:
    """A path to nothing, or to bytes that are no text, is said so."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match="cannot read"):
        load_profile(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_profile(tmp_path / "binary.yaml")
