"""Consistency of manifests: what a device or a server would refuse later is refused when a release is made."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.release.manifest import decode_manifest, encode_manifest
from support.agent_engine import CUT, LOCAL, manifest


def test_release_whose_cut_sends_more_tensors_than_one_request_holds_is_refused() -> None:
    """Its device would find out at the first request."""
    most = tuple(f"t{number}" for number in range(LIMITS.inference_tensors))
    wide = msgspec.structs.replace(CUT, sends=most)
    assert decode_manifest(encode_manifest(manifest(LOCAL, wide))).plans["pi4"].rows[1] == wide
    with pytest.raises(MalformedMessage, match="row 'cut-1' sends 16385 tensors and receives 1, at most 16384"):
        decode_manifest(encode_manifest(manifest(LOCAL, msgspec.structs.replace(CUT, sends=(*most, "t")))))
