"""What rules say about which finding comes before which."""

from __future__ import annotations

from graphlib import TopologicalSorter

from normwise.checkup.rules import all_rules


def explained() -> dict[str, tuple[str, ...]]:
    return {rule.CODE: getattr(rule, "EXPLAINS", ()) for rule in all_rules().values()}


def test_no_symptom_is_the_cause_of_its_cause() -> None:
    order = tuple(TopologicalSorter(explained()).static_order())  # a circle raises
    assert order.index("BNS004") < order.index("BNS002")
    assert order.index("PLC001") < order.index("CKP001")
    assert order.index("NUM005") < order.index("AXS007")
