"""An application's inference options, as request parameters."""

from __future__ import annotations

import pytest

from edgesplit.errors import UsageError
from edgesplit.oip.options import InferOptions, from_parameters, to_parameters
from edgesplit.oip.protocol import Scalar


@pytest.mark.parametrize(
    "wishes",
    [
        InferOptions(),
        InferOptions(stream="camera 1", drop="oldest", queue=2),
        InferOptions(drop="newest", queue=1, hedge="never", stale_ok_s=1.5),
        InferOptions(stream="door", skip_still=0.01, answer="close:0.1"),
        InferOptions(skip_still=0.0),
        InferOptions(least_accuracy=0.7, refuse_unsure=True),
    ],
)
def test_options_round_trip(wishes: InferOptions) -> None:
    """Options at their default are not sent."""
    sent = to_parameters(wishes)
    assert from_parameters(sent) == wishes
    assert len(sent) == sum(
        value != other for value, other in zip(_fields(wishes), _fields(InferOptions()), strict=True)
    )


def _fields(wishes: InferOptions) -> list[object]:
    return [getattr(wishes, name) for name in InferOptions.__slots__]


def test_numbers_may_be_text() -> None:
    """Triton's client sends only text, whole numbers and booleans."""
    given = {"edgesplit_stale_ok": "2.5", "edgesplit_queue": "3", "edgesplit_drop": "oldest", "timeout": 5}
    assert from_parameters(given) == InferOptions(drop="oldest", queue=3, stale_ok_s=2.5)
    assert from_parameters({"edgesplit_refuse_unsure": "true"}) == InferOptions(refuse_unsure=True)


@pytest.mark.parametrize(
    "parameters",
    [
        {"edgesplit_drop": "youngest"},
        {"edgesplit_drop": 1},
        {"edgesplit_hedge": "sometimes"},
        {"edgesplit_hedge": ""},
        {"edgesplit_hedge": True},
        {"edgesplit_queue": 2},
        {"edgesplit_queue": 0, "edgesplit_drop": "oldest"},
        {"edgesplit_queue": "many", "edgesplit_drop": "oldest"},
        {"edgesplit_queue": 1e300, "edgesplit_drop": "oldest"},
        {"edgesplit_stale_ok": "nan"},
        {"edgesplit_stale_ok": -1},
        {"edgesplit_stale_ok": 10**400},
        {"edgesplit_stale_ok": True},
        {"edgesplit_stream": "x" * 81},
        {"edgesplit_skip_still": 0.6},
        {"edgesplit_skip_still": 1e-9},
        {"edgesplit_skip_still": -0.01},
        {"edgesplit_skip_still": "1%"},
        {"edgesplit_skip_still": True},
        {"edgesplit_answer": "x" * 201},
        {"edgesplit_answer": 1},
        {"edgesplit_stream": 7},
        {"edgesplit_refuse_unsure": 1},
        {"edgesplit_refuse_unsure": "yes"},
    ],
)
def test_invalid_option_is_refused(parameters: dict[str, Scalar]) -> None:
    """With the parameter's name in the text."""
    with pytest.raises(UsageError, match="edgesplit_"):
        from_parameters(parameters)
