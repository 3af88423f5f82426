"""What the controller makes of another plan for a released model: a recut by the planner's key, or a reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit_controller.releases import build as releasing_module
from edgesplit_controller.releases.build import is_union_of, signature_view
from support import tflite_models
from support.release_maker import CLASS, ReleaseMaker


@pytest.fixture
def maker(tmp_path: Path) -> ReleaseMaker:
    return ReleaseMaker(tmp_path)


def test_another_cut_is_a_recut_of_the_newest_release(maker: ReleaseMaker) -> None:
    """It names its base, the planner signs it, the offload server has it, and asked for again it is the same."""
    first, _ = maker.release("conv")
    digest, manifest = maker.release("pool", recut=True)

    assert manifest.recut_of == first and manifest.fingerprint is None
    assert maker.repository.recuts() == [digest] and maker.repository.releases() == [first]
    assert signature_view(manifest) == {"signed_by": "planner", "recut_of": first}
    assert (maker.folder / "offload" / digest / "proof" / "base.json").is_file()
    assert maker.release("pool", recut=True)[0] == digest
    assert [one.options["signed_by"] for one in maker.releasing.all()] == ["targets", "planner"]


def test_a_recut_that_changes_nothing_is_its_base(maker: ReleaseMaker) -> None:
    """The same plan again needs no signature at all."""
    made = maker.release("conv")
    assert maker.release("conv", recut=True) == made and maker.repository.recuts() == []


def test_without_the_release_key_new_plans_are_recuts(maker: ReleaseMaker) -> None:
    """Nobody has to ask for it; the base is always what the release key signed, not the last recut."""
    first, _ = maker.release("conv")
    maker.lose_the_release_key()
    for partition in ("pool", "flatten"):
        assert maker.release(partition)[1].recut_of == first
    assert len(maker.repository.recuts()) == 2


def test_a_first_release_needs_the_release_key(maker: ReleaseMaker) -> None:
    """With it at hand the way is named; without it there is none."""
    with pytest.raises(UsageError, match=r"first release.*without --recut"):
        maker.release("conv", recut=True)
    maker.lose_the_release_key()
    with pytest.raises(UsageError, match="needs the release key: say where it is with --sign-with"):
        maker.release("conv")


def test_a_weaker_limit_is_told_before_anything_is_signed(maker: ReleaseMaker) -> None:
    """What devices would refuse is not published."""
    maker.release("pool", limits={"keep_raw_input": True, "keep_first": 2})
    with pytest.raises(UsageError, match=r"cannot be cut like this by the planner.*'image' leave the device"):
        maker.release("flatten", recut=True, limits={"keep_first": 2})
    with pytest.raises(UsageError, match=r"cannot be cut like this by the planner.*'pool' run elsewhere"):
        maker.release("flatten", recut=True, limits={"keep_raw_input": True})
    assert maker.repository.recuts() == []
    maker.release("flatten", recut=True, limits={"keep_raw_input": True, "keep_first": 3})


def test_a_device_class_that_the_base_does_not_know_gets_its_plan(maker: ReleaseMaker) -> None:
    """A recut may serve another kind of device, under the limits of those that were there."""
    maker.release("conv")
    _, manifest = maker.release("pool", recut=True, device="jetson-nano")
    assert set(manifest.plans) == {"jetson-nano"}


def test_slices_that_fit_are_used_as_they_are(maker: ReleaseMaker) -> None:
    """A table over the release's own slices sends nothing new, not even a graph."""
    _, base = maker.release("conv")
    _, manifest = maker.release("cloud", recut=True)
    assert manifest.slices == base.slices and [row.name for row in manifest.plans[CLASS].rows] != [
        row.name for row in base.plans[CLASS].rows
    ]


def test_a_tflite_model_goes_into_new_tables_and_is_not_cut_anew(tmp_path: Path) -> None:
    """It has no fingerprint; what needs the release key is said."""
    maker = ReleaseMaker(tmp_path, tflite_models.MODELS["chain"]())
    layers = [layer["name"] for layer in maker.model.shown["layers"]]
    first, base = maker.release(layers[1])
    assert base.fingerprint is None

    digest, manifest = maker.release("cloud", recut=True)
    assert manifest.recut_of == first and manifest.slices == base.slices and digest != first
    with pytest.raises(UsageError, match="another cut of this model needs the release key"):
        maker.release(layers[2], recut=True)


def test_an_encrypted_release_stays_encrypted(maker: ReleaseMaker) -> None:
    """Its slices go into new tables as the ciphertext that they are; it tells no digest of a weight, so it is not cut
    anew; and what was in clear is not encrypted by the planner."""
    first, base = maker.release("conv", encrypt=True)
    assert base.is_encrypted and base.fingerprint is None
    _, manifest = maker.release("cloud", recut=True)
    assert manifest.recut_of == first and manifest.slices == base.slices and manifest.golden == base.golden
    with pytest.raises(UsageError, match="another cut of this model needs the release key"):
        maker.release("pool", recut=True)

    maker.now += 60
    maker.release("flatten")
    with pytest.raises(UsageError, match="to encrypt it needs the release key"):
        maker.release("conv", recut=True, encrypt=True)


def test_a_model_that_is_prepared_otherwise_today_is_not_cut_anew(
    maker: ReleaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another onnxruntime may optimise otherwise: its slices would be refused by devices, so nothing is published."""
    maker.release("conv")
    monkeypatch.setattr(releasing_module, "fingerprint_of", lambda loaded: b"another")
    with pytest.raises(UsageError, match="another version of onnxruntime"):
        maker.release("pool", recut=True)
    maker.release("cloud", recut=True)
    assert len(maker.repository.recuts()) == 1


def test_fitting_is_a_question_of_whole_slices(maker: ReleaseMaker) -> None:
    """Every row takes each slice whole or not at all."""
    _, base = maker.release("conv")
    table = base.plans[CLASS]
    rows = [msgspec.structs.replace(row, layers=("conv",)) for row in table.rows]
    assert is_union_of(msgspec.structs.replace(table, rows=tuple(rows)), base.slices)
    rows = [msgspec.structs.replace(row, layers=("conv", "pool")) for row in table.rows]
    assert not is_union_of(msgspec.structs.replace(table, rows=tuple(rows)), base.slices)
