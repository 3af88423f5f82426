"""`edgectl family create`: answer rules of one model or of all, and samples with what they show."""

from __future__ import annotations

import pytest

from edgesplit.errors import UsageError
from edgesplit_cli.commands.family import _with_rules, parse_answer


def test_a_rule_is_of_all_models_or_of_the_one_that_is_named() -> None:
    """By its name, with or without the version. An output's name may contain the sign."""
    rules = [parse_answer(text) for text in ("boxes:yolox", "big@1=boxes:yolov8:0.4", "class:x=y")]
    assert [(rule.model, rule.rule) for rule in rules] == [
        ("", "boxes:yolox"), ("big@1", "boxes:yolov8:0.4"), ("", "class:x=y"),
    ]  # fmt: skip
    variants = [{"model": "small@2"}, {"model": "big@1"}]
    assert _with_rules(variants, rules) == [{"model": "small@2"}, {"model": "big@1", "answer": "boxes:yolov8:0.4"}]
    by_name = [parse_answer("small=boxes:ssd")]
    assert _with_rules(variants, by_name)[0]["answer"] == "boxes:ssd"


def test_a_rule_of_no_variant_is_refused() -> None:
    """It is a typing error; so is a model without a rule."""
    with pytest.raises(UsageError, match="huge is none of the variants"):
        _with_rules([{"model": "small"}], [parse_answer("huge=boxes:ssd")])
    with pytest.raises(UsageError, match="give RULE or MODEL=RULE"):
        parse_answer("small=")
