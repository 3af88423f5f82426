"""An allowance for loss, from the command line's text to the chosen row."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edgesplit.errors import UsageError
from edgesplit.plan import Link
from edgesplit_cli.local.model import read_labels
from edgesplit_cli.main import cli
from edgesplit_cli.output import percent_text
from edgesplit_cli.views.plan import loss_text
from edgesplit_partitioner import plan
from edgesplit_partitioner.costs.model import CodecCost, Costs, LayerCost, TensorCost

LINK = {"device-cloud": Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)}


def costs(**confirmed: float | None) -> Costs:
    """x -> a -> t -> b -> y: raw t takes 1 s, fp16 half, int8 a quarter, losing 0.1 and 0.4 % where they choose."""
    chosen = {"fp16": CodecCost(bytes=500_000, loss=0.001), "int8": CodecCost(bytes=250_000, loss=0.004)}
    codecs = {name: msgspec.structs.replace(chosen[name], confirmed_loss=lost) for name, lost in confirmed.items()}
    layers = (
        LayerCost(
            name="a", reads=("x",), seconds={"device": 0.1, "cloud": 0.1},
            writes={"t": TensorCost(bytes=1_000_000, codecs=codecs)},
        ),
        LayerCost(
            name="b", reads=("t",), seconds={"device": 5.0, "cloud": 0.1}, writes={"y": TensorCost(bytes=4)}
        ),
    )  # fmt: skip
    return Costs(
        model="m@1", tiers=("device", "cloud"), inputs={"x": TensorCost(bytes=9_000_000)}, outputs=("y",),
        layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("allowed", "int8", "fp16", "taken"),
    [
        (None, 0.004, 0.001, {}),
        (0.0, 0.004, 0.001, {}),
        (0.002, 0.004, 0.001, {"t": "fp16"}),
        (0.005, 0.004, 0.001, {"t": "int8"}),
        (0.005, 0.006, 0.001, {"t": "fp16"}),
        (0.005, 0.006, 0.006, {}),
        (0.005, None, 0.001, {"t": "int8"}),
    ],
)
def test_the_chosen_codec_must_be_confirmed_by_the_other_half(
    allowed: float | None, int8: float | None, fp16: float | None, taken: dict[str, str]
) -> None:
    """Lossless without an allowance; within it the cheapest codec whose loss the confirming half confirms."""
    made = plan(costs(int8=int8, fp16=fp16), LINK, limits={} if allowed is None else {"max_loss": allowed})

    assert {name: codec for name, codec in made.row.codecs.items() if codec != "raw"} == taken
    assert made.row.split_after == "a"
    if taken:
        assert 0 < made.row.loss <= (allowed or 0)
        assert made.row.confirmed_loss == {"int8": int8, "fp16": fp16}[taken["t"]]
    else:
        assert made.row.loss == 0 and made.row.confirmed_loss is None


def test_one_cut_with_two_codecs_is_two_rows() -> None:
    """Where eight bits take long to make, raw is best on a fast link and int8 on a slow one: the table has both, and
    the plan's own row is the one that was planned."""
    slow = CodecCost(bytes=250_000, loss=0.004, confirmed_loss=0.004, encode_s={"device": 0.9})
    layers = (
        msgspec.structs.replace(costs().layers[0], writes={"t": TensorCost(bytes=1_000_000, codecs={"int8": slow})}),
        costs().layers[1],
    )

    made = plan(msgspec.structs.replace(costs(), layers=layers), LINK, limits={"max_loss": 0.005})

    codecs = [row.codecs.get("t", "raw") for row in made.table.rows if row.split_after == "a"]
    assert sorted(codecs) == ["int8", "raw"]
    assert made.row.codecs.get("t", "raw") == "raw" and made.row.up_bytes == made.bytes - 4 == 1_000_000
    assert len({row.name for row in made.table.rows}) == len(made.table.rows)


def test_codecs_that_all_fail_leave_raw() -> None:
    """The operator allows only raw and int8; int8 is not confirmed."""
    made = plan(costs(int8=0.1), LINK, limits={"max_loss": 0.005}, codecs=("raw", "int8"))
    assert not set(made.row.codecs.values()) - {"raw"}


def test_custom_costs_are_planned_with_an_allowance(tmp_path: Path) -> None:
    """`edgectl plan COSTS.json --allow-loss 0.5%` reports the loss; text that is no share is refused."""
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs(int8=0.0045, fp16=0.001)))
    arguments = ["plan", str(file), "--link", "8mbit/10ms", "--allow-loss"]

    told = CliRunner().invoke(cli, [*arguments, "0.5%"])
    assert told.exit_code == 0, told.output
    assert "0.40% by the samples that choose, 0.45% by those that confirm (t by int8)" in told.output
    for wrong in ("much", "-1%", "101%", "2"):
        assert CliRunner().invoke(cli, [*arguments, wrong]).exit_code == 2


def test_shares_are_parsed_and_formatted() -> None:
    """Per cent or a part of one; small ones keep their significant digits."""
    assert [percent_text(part) for part in (None, 0.0, 0.0125, 3.9e-5)] == ["-", "0.00%", "1.25%", "3.9e-5"]
    assert loss_text({"name": "cut-1"}) == ""
    assert "not confirmed" in loss_text({"loss": 0.1, "codecs": {"t": "int8"}})


def test_labels_map_file_names_to_classes(tmp_path: Path) -> None:
    """No file is no labels; another shape is refused."""
    assert read_labels(tmp_path) == {}
    (tmp_path / "labels.json").write_text('{"a.jpg": 3}')
    assert read_labels(tmp_path) == {"a.jpg": 3}
    (tmp_path / "labels.json").write_text('["cat"]')
    with pytest.raises(UsageError, match=r"labels\.json"):
        read_labels(tmp_path)


def test_a_codec_is_confirmed_in_its_compressed_form() -> None:
    """In a compressed request by its own measurement: the loss of the plain codec once stood for it."""
    plain = CodecCost(bytes=900_000, loss=0.9, confirmed_loss=0.9)
    packed = CodecCost(bytes=1_000, loss=0.001, confirmed_loss=0.001)
    tensor = TensorCost(bytes=1_000_000, codecs={"int8": plain, "int8+zstd": packed})
    layers = (msgspec.structs.replace(costs().layers[0], writes={"t": tensor}), costs().layers[1])

    made = plan(msgspec.structs.replace(costs(), layers=layers), LINK, limits={"max_loss": 0.002})

    assert made.row.codecs == {"t": "int8"} and made.row.compress
    assert made.row.confirmed_loss == made.row.loss == 0.001
