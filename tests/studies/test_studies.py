"""What every study is held to: its page, its trials, its judges, and the full run that its page shows."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import ModuleType

import pytest

from normwise import studies
from normwise._parts import page_title
from normwise.errors import NotKnown
from normwise.rendering import Text
from normwise.rendering.plots import Chart
from normwise.studies import Outcome, Rows, Table
from normwise.studies._data import digests
from normwise.studies._trials import asked, seconds

STORED = Path(__file__).parents[2] / "docs" / "studies" / "data"
EN = ["Claim", "Source", "Method", "What would refute it", "Cost", "What this cannot show"]
ZH = ["主张", "出处", "方法", "什么会推翻它", "开销", "这里无法说明的"]
QUICK = 300  # CPU-seconds: what --quick promises for a study

every = pytest.mark.parametrize("name", studies.names())


def headings(page: str) -> list[str]:
    return re.findall(r"^## (.+)$", page, flags=re.MULTILINE)


def part_of(name: str) -> ModuleType:
    return studies.get(name)


def stored(name: str) -> studies.Evidence:
    return studies.show(STORED / f"{name}.jsonl")


def test_all_eleven_are_in_service() -> None:
    assert len(studies.names()) == 11


@every
def test_its_page_has_every_section_in_both_languages(name: str) -> None:
    part = part_of(name)
    assert headings(part.__doc__ or "") == EN
    assert headings(part.ZH) == ZH
    for lang in ("en", "zh"):
        assert 5 <= len(page_title(part, lang)) <= 90
        assert page_title(part, lang)[-1] not in ".。"
    assert re.search(r"arxiv\.org/abs/\d{4}\.\d{4,5}|\d{4}", part.__doc__ or "")


@every
def test_its_trials_are_plain_distinct_and_the_quick_ones_cheap(name: str) -> None:
    part = part_of(name)
    for quick in (True, False):
        trials = asked(name, part, quick=quick)
        assert len({trial.key for trial in trials}) == len(trials)
        for trial in trials:
            assert json.loads(json.dumps(trial.params)) == trial.params
            assert part.seconds(trial.params) > 0
    assert sum(seconds(part, trial.params) for trial in asked(name, part, quick=True)) < QUICK
    assert len(part.trials(True)) <= len(part.trials(False))


@every
def test_its_claims_name_who_says_them_and_nothing_is_concluded_from_nothing(name: str) -> None:
    for claim in part_of(name).CLAIMS:
        assert isinstance(claim.text, Text)
        assert claim.text.zh != claim.text
        assert claim.source
        with pytest.raises(NotKnown):
            claim.judge(Rows([]))
    assert studies.Evidence(study=name, part=part_of(name), rows=Rows([]), data={}).figures == ()


@every
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_an_interrupted_run_is_read_as_far_as_it_goes(name: str, share: float) -> None:
    """Judges and figures say that trials are missing; nothing else is raised, whichever are there."""
    evidence, draw = stored(name), random.Random(f"{name} {share}")
    for _ in range(5):
        some = Rows(row for row in evidence.rows if draw.random() < share)
        partial = studies.Evidence(study=name, part=part_of(name), rows=some, data={})
        assert len(partial.verdicts) == len(evidence.verdicts)
        assert len(partial.figures) <= len(evidence.figures)


@every
def test_its_page_shows_a_full_run_of_this_version(name: str) -> None:
    """A study whose numbers would change (VERSION) has to be run again before its page speaks of them."""
    part, evidence = part_of(name), stored(name)
    assert evidence.finished
    ran = {json.dumps(row.params, sort_keys=True) for row in evidence.rows}
    assert {json.dumps(dict(trial.params), sort_keys=True) for trial in asked(name, part, quick=False)} <= ran
    assert set(evidence.data) == set(part.DATA)


@every
def test_its_full_run_concludes_every_claim_with_figures_in_both_languages(name: str) -> None:
    evidence = stored(name)
    for verdict in evidence.verdicts:
        assert verdict.outcome is not Outcome.OPEN, verdict.says
        assert isinstance(verdict.says, Text)
        assert verdict.says.zh != verdict.says
        assert re.search(r"\d", verdict.says)
    kinds = {type(figure) for figure in evidence.figures}
    assert kinds == {Table, Chart}
    assert len(evidence.figures) == len(part_of(name).FIGURES)
    for figure in evidence.figures:
        assert isinstance(figure.title, Text)
        assert figure.note, "a figure carries its conditions"


def test_a_stored_run_names_no_machine() -> None:
    for path in sorted(STORED.glob("*.jsonl")):
        assert not re.search(r'"/[a-z]+/', path.read_text("utf-8")), path.name


def test_the_digests_of_the_data_are_those_of_its_bytes() -> None:
    found = digests(("standard-library", "digits"))
    assert set(found) == {"standard-library", "digits"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in found.values())
