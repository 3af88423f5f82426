"""Imports without garbage collections."""

from __future__ import annotations

import gc

import pytest

from edgesplit.process.start_up import imports_not_collected


def test_collections_are_on_again_after_imports() -> None:
    """Also after an import that fails."""
    with pytest.raises(ImportError), imports_not_collected():
        assert not gc.isenabled()
        raise ImportError("no such module")
    assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    """Whoever turned them off, another block of imports too, turns them on."""
    with imports_not_collected():
        with imports_not_collected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
