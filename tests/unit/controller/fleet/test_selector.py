"""Device selector expressions, and the errors for invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit_controller.fleet.selector import MAX_CHARS, MAX_DEPTH, DeviceAttributes, parse_selector

FLEET = [
    DeviceAttributes("cam-1", "raspberrypi4", "cameras", {"site": "oslo", "kind": "lab"}),
    DeviceAttributes("cam-2", "raspberrypi4", "cameras", {"site": "oslo", "kind": "gate"}),
    DeviceAttributes("cam-3", "raspberrypi5", "cameras", {"site": "bergen"}),
    DeviceAttributes("door-1", "raspberrypi5", "doors", {"site": "oslo", "not": "so"}),
    DeviceAttributes("spare", "jetson-nano"),
]


def meant(text: str) -> str:
    """The devices that it means, in one line."""
    selector = parse_selector(text)
    return " ".join(device.name for device in FLEET if selector(device))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", "cam-1 cam-2 cam-3 door-1 spare"),
        ("cam-2", "cam-2"),
        ("cam-*", "cam-1 cam-2 cam-3"),
        ("group=cameras", "cam-1 cam-2 cam-3"),
        ("class=raspberrypi5", "cam-3 door-1"),
        ("site=oslo and not kind=lab", "cam-2 door-1"),
        ("site=oslo,bergen", "cam-1 cam-2 cam-3 door-1"),
        ("site!=oslo", "cam-3 spare"),
        ("site!=oslo,bergen", "spare"),
        ("site=*", "cam-1 cam-2 cam-3 door-1"),
        ("not site=*", "spare"),
        ("site=oslo and kind=lab or spare", "cam-1 spare"),
        ("spare or site=oslo and kind=lab", "cam-1 spare"),
        ("site=oslo and (kind=lab or group=doors)", "cam-1 door-1"),
        ("not (group=cameras or group=doors)", "spare"),
        ("not not spare", "spare"),
        ("NOT site=oslo AND group=cameras", "cam-3"),
        ("  site = 'oslo'   and name!=cam-1,cam-2 ", "door-1"),
        ('"not"=so', "door-1"),
        ("kind=nothing", ""),
    ],
)
def test_an_expression_selects_the_matching_devices(text: str, names: str) -> None:
    """`not` binds most, then `and`, then `or`; a device without a label has none of its values."""
    assert meant(text) == names


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 0, "is missing"),
        ("site=", 5, "a value is missing"),
        ("site=oslo kind=lab", 10, "`and` or `or` must stand between"),
        ("site=oslo and", 13, "is missing"),
        ("(site=oslo", 0, "not closed"),
        ("site=oslo)", 9, "must stand between"),
        ("and site=oslo", 0, "missing before 'and'"),
        ("site=oslo and & x", 14, "is not part of the language"),
        ("site=oslo,", 10, "a value is missing"),
        ("site==oslo", 5, "missing before '='"),
        ("not", 3, "is missing"),
        ("site=not", 5, "in quotes"),
    ],
)
def test_a_syntax_error_points_at_its_position(text: str, at: int, says: str) -> None:
    """The message has a caret below the offending word."""
    with pytest.raises(UsageError, match=says) as caught:
        parse_selector(text)
    _, shown, caret = str(caught.value).split("\n")
    assert shown == f"    {text}" and caret == f"    {' ' * at}^"


def test_length_and_depth_of_an_expression_are_bounded() -> None:
    """Length, words and depth beyond the limits are refused before evaluation."""
    with pytest.raises(UsageError, match="letters"):
        parse_selector("x" * (MAX_CHARS + 1))
    with pytest.raises(UsageError, match="words and signs"):
        parse_selector("a=1," * 240 + "2")
    with pytest.raises(UsageError, match="inside each other"):
        parse_selector("(" * (MAX_DEPTH + 2) + "x" + ")" * (MAX_DEPTH + 2))
    with pytest.raises(UsageError, match="inside each other"):
        parse_selector("not " * (MAX_DEPTH + 2) + "x")
    assert parse_selector("(" * MAX_DEPTH + "spare" + ")" * MAX_DEPTH)(FLEET[-1])


def test_an_expression_lists_the_names_it_uses() -> None:
    """A mistyped device name can be distinguished from an empty group."""
    selector = parse_selector("cam-1 or (group=doors and not cam-9) or cam-*")
    assert selector.names == {"cam-1", "cam-9"} and selector.comparisons == (("group", "doors"),)


words = st.sampled_from(["site", "=", "!=", "oslo", "(", ")", "and", "or", "not", ",", "'x'", "cam-1", "*", "all", "é"])


@given(st.lists(words, max_size=12).map(" ".join) | st.text(max_size=60))
@example("(" * 500)
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    """No other exception, and a parsed expression evaluates on every device."""
    try:
        selector = parse_selector(text)
    except UsageError:
        return
    assert all(selector(device) in (True, False) for device in FLEET)
