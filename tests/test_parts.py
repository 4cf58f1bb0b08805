"""``_parts.collect`` puts good parts in service and refuses incomplete ones with their file."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest

from normwise import _parts


def part(name: str, doc: str | None = "What it does.\n\nMore.", **names: Any) -> ModuleType:
    module = ModuleType(f"family.{name}", doc)
    module.__file__ = f"family/{name}.py"
    vars(module).update(names)
    return module


def collect(*modules: ModuleType, **others: Any) -> dict[str, ModuleType]:
    named = {module.__name__.rpartition(".")[2]: module for module in modules}
    return _parts.collect({"__name__": "family", **named, **others}, needs=("CODE", "check"))


def test_parts_are_keyed_by_kebab_case_names_in_alphabetical_order() -> None:
    later, sooner = part("vanishing_eps", CODE="B", check=print), part("dead_weight", CODE="A", check=print)
    assert list(collect(later, sooner).items()) == [("dead-weight", sooner), ("vanishing-eps", later)]


def test_a_part_without_a_needed_name_is_named_with_its_file() -> None:
    message = re.escape("family/broken.py: a part of family needs 'check'")
    with pytest.raises(TypeError, match=message):
        collect(part("broken", CODE="A"))


@pytest.mark.parametrize("doc", [None, ""])
def test_a_part_without_a_page_is_named_with_its_file(doc: str | None) -> None:
    with pytest.raises(TypeError, match=r"family/silent\.py: .* needs a docstring"):
        collect(part("silent", doc, CODE="A", check=print))


def test_what_is_no_module_of_the_family_is_left_alone() -> None:
    helper = part("_shared")
    assert collect(helper, re=re, CODE="A", renamed=part("other"), function=print) == {}


def test_the_title_of_a_page_is_its_first_line() -> None:
    assert _parts.page_title(part("x", "\n  A title.\n\n  A body.\n")) == "A title."
