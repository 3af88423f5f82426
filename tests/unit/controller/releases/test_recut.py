"""Another plan for a released model: a recut signed with the planner's key, or a reason for refusal."""

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


def test_a_recut_references_the_newest_release(maker: ReleaseMaker) -> None:
    """It names its base, the planner signs it, the offload server has it, and requested again it is the same."""
    first, _ = maker.release("conv")
    digest, manifest = maker.release("pool", recut=True)

    assert manifest.recut_of == first and manifest.fingerprint is None
    assert maker.repository.recuts() == [digest] and maker.repository.releases() == [first]
    assert signature_view(manifest) == {"signed_by": "planner", "recut_of": first}
    assert (maker.folder / "offload" / digest / "proof" / "base.json").is_file()
    assert maker.release("pool", recut=True)[0] == digest
    assert [release.options["signed_by"] for release in maker.releasing.all()] == ["targets", "planner"]


def test_a_recut_without_changes_returns_its_base(maker: ReleaseMaker) -> None:
    """The same plan needs no new signature."""
    made = maker.release("conv")
    assert maker.release("conv", recut=True) == made and maker.repository.recuts() == []


def test_new_plans_become_recuts_without_the_release_key(maker: ReleaseMaker) -> None:
    """Without an option; the base is always what the release key signed, not the last recut."""
    first, _ = maker.release("conv")
    maker.lose_the_release_key()
    for partition in ("pool", "flatten"):
        assert maker.release(partition)[1].recut_of == first
    assert len(maker.repository.recuts()) == 2


def test_a_first_release_requires_the_release_key(maker: ReleaseMaker) -> None:
    """Where the key is available the error names the option; without it there is no way."""
    with pytest.raises(UsageError, match=r"first release.*without --recut"):
        maker.release("conv", recut=True)
    maker.lose_the_release_key()
    with pytest.raises(UsageError, match="needs the release key: say where it is with --sign-with"):
        maker.release("conv")


def test_a_loosened_limit_is_refused_before_signing(maker: ReleaseMaker) -> None:
    """What devices would refuse is not published."""
    maker.release("pool", limits={"keep_raw_input": True, "keep_first": 2})
    with pytest.raises(UsageError, match=r"cannot be cut like this by the planner.*'image' leave the device"):
        maker.release("flatten", recut=True, limits={"keep_first": 2})
    with pytest.raises(UsageError, match=r"cannot be cut like this by the planner.*'pool' run elsewhere"):
        maker.release("flatten", recut=True, limits={"keep_raw_input": True})
    assert maker.repository.recuts() == []
    maker.release("flatten", recut=True, limits={"keep_raw_input": True, "keep_first": 3})


def test_a_recut_can_add_a_device_class(maker: ReleaseMaker) -> None:
    """Under the limits of the classes in the base."""
    maker.release("conv")
    _, manifest = maker.release("pool", recut=True, device="jetson-nano")
    assert set(manifest.plans) == {"jetson-nano"}


def test_a_recut_reuses_slices_of_its_base(maker: ReleaseMaker) -> None:
    """A table over the release's own slices sends nothing new, not even a graph."""
    _, base = maker.release("conv")
    _, manifest = maker.release("cloud", recut=True)
    assert manifest.slices == base.slices and [row.name for row in manifest.plans[CLASS].rows] != [
        row.name for row in base.plans[CLASS].rows
    ]


def test_a_tflite_recut_reuses_slices_only(tmp_path: Path) -> None:
    """A TFLite model has no fingerprint; what needs the release key is reported."""
    maker = ReleaseMaker(tmp_path, tflite_models.MODELS["chain"]())
    layers = [layer["name"] for layer in maker.model.shown["layers"]]
    first, base = maker.release(layers[1])
    assert base.fingerprint is None

    digest, manifest = maker.release("cloud", recut=True)
    assert manifest.recut_of == first and manifest.slices == base.slices and digest != first
    with pytest.raises(UsageError, match="another cut of this model needs the release key"):
        maker.release(layers[2], recut=True)


def test_a_recut_of_an_encrypted_release_reuses_its_ciphertext(maker: ReleaseMaker) -> None:
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


def test_a_model_prepared_by_another_runtime_version_is_not_recut(
    maker: ReleaseMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another onnxruntime may optimise differently: devices would refuse its slices, so nothing is published."""
    maker.release("conv")
    monkeypatch.setattr(releasing_module, "fingerprint_of", lambda loaded: b"another")
    with pytest.raises(UsageError, match="another version of onnxruntime"):
        maker.release("pool", recut=True)
    maker.release("cloud", recut=True)
    assert len(maker.repository.recuts()) == 1


def test_a_row_fits_slices_only_as_wholes(maker: ReleaseMaker) -> None:
    """Every row takes each slice whole or not at all."""
    _, base = maker.release("conv")
    table = base.plans[CLASS]
    rows = [msgspec.structs.replace(row, layers=("conv",)) for row in table.rows]
    assert is_union_of(msgspec.structs.replace(table, rows=tuple(rows)), base.slices)
    rows = [msgspec.structs.replace(row, layers=("conv", "pool")) for row in table.rows]
    assert not is_union_of(msgspec.structs.replace(table, rows=tuple(rows)), base.slices)
