"""nw.ignore, and what becomes of findings that are kept quiet and of suppressions that were not needed."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import normwise as nw
from normwise.checkup import Finding, Report, Severity
from normwise.checkup.suppression import Suppression, at_or_below, codes, marked, quieted

# nw.ignore


class Net(nn.Module):
    """Two norms in blocks, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def checked(model: nn.Module, **more: Any) -> Report:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    return nw.check(model, torch.randn(4, 8), optimizer=optimizer, select=["PAR001"], **more)


ALL = ("blocks.0.0", "blocks.1.0", "norm")


def test_a_mark_keeps_quiet_what_is_found_at_the_module_and_leaves_the_rest() -> None:
    model = Net()
    assert [f.paths for f in checked(model).findings] == [ALL]
    assert nw.ignore(model.blocks, "PAR001", "the gains of blocks are decayed on purpose") is model.blocks
    report = checked(model)
    assert [f.paths for f in report.findings] == [("norm",)]
    assert [(s.finding.paths, s.by, s.where, s.reason) for s in report.suppressed] == [
        (("blocks.0.0", "blocks.1.0"), "ignore", "blocks", "the gains of blocks are decayed on purpose")
    ]
    assert report.unused == ()
    assert report.worst() is Severity.WARNING
    nw.ignore(model.norm, ["decayed-norm-scale"], "so is the last")
    report = checked(model)
    assert report.findings == report.passed == ()
    assert report.worst() is None
    assert [s.where for s in report.suppressed] == ["blocks", "norm"]


def test_the_whole_model_can_be_marked() -> None:
    report = checked(nw.ignore(Net(), "PAR", "a study of decay"))
    assert [(s.finding.paths, s.where) for s in report.suppressed] == [(ALL, "")]


def test_a_module_that_is_used_twice_is_covered_under_both_names() -> None:
    model = Net()
    model.add_module("again", nw.ignore(model.norm, "PAR001", "why"))
    (mark,) = marked(model)
    finding = Finding(message="", fix="", code="PAR001")
    assert mark.pattern == "norm"
    assert [mark.covers(finding, path) for path in ("norm", "again", "again#2", "norms")] == [True, True, True, False]


def test_a_mark_that_is_not_needed_is_named_only_where_its_rule_judged() -> None:
    model = Net()
    nw.ignore(model.blocks, "PAR001,PAR006", "old")
    assert [(u.code, u.pattern, u.by, u.where, u.reason) for u in checked(model).unused] == []
    free = nw.check(model, torch.randn(4, 8), optimizer=torch.optim.SGD(model.parameters()), select=["PAR001"])
    assert free.passed == ("PAR001",)
    assert [(u.code, u.pattern, u.by, u.where, u.reason) for u in free.unused] == [
        ("PAR001", "blocks", "ignore", "blocks", "old")
    ]
    unjudged = nw.check(model, torch.randn(4, 8), select=["PAR001"])
    assert [n.code for n in unjudged.not_checked] == ["PAR001"]
    assert unjudged.unused == ()


@pytest.mark.parametrize("wrapped", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_a_mark_is_seen_through_wrappers(wrapped: Callable[[nn.Module], Any]) -> None:
    model = Net()
    nw.ignore(model.blocks, "PAR001", "why")
    report = checked(wrapped(model))
    assert [s.finding.paths[0].partition(".")[2] for s in report.suppressed] == ["blocks.0.0"]
    assert len(report.findings) == 1
    assert checked(nw.ignore(wrapped(Net()), "PAR001", "why")).findings == ()


def test_copies_and_casts_of_a_module_are_marked_as_well() -> None:
    model = nw.ignore(Net(), "PAR001", "why")
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    copies += [torch.load(stream, weights_only=False), model.bfloat16()]
    assert [[each.reason for each in marked(each)] for each in copies] == [["why"]] * 5
    assert checked(Net(), dtype=torch.bfloat16).suppressed == ()
    assert len(checked(nw.ignore(Net(), "PAR001", "why"), dtype=torch.bfloat16).suppressed) == 1


def test_a_pickle_of_a_marked_module_opens_without_normwise() -> None:
    saved = pickle.dumps(nw.ignore(nn.LayerNorm(4), "PAR001", "why"))
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())); assert 'normwise' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], input=saved, check=True, capture_output=True)


def test_a_mark_changes_nothing_else() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 8)
    before = copy.deepcopy(model)
    nw.ignore(model, "PAR001", "why")
    assert list(model.state_dict()) == list(before.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in before.named_modules()]
    assert list(model.buffers()) == []
    assert repr(model) == repr(before)
    assert torch.equal(model(x), before(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), before(x))
    before.load_state_dict(model.state_dict(), strict=True)


def test_a_compiled_model_is_not_compiled_again_for_a_mark() -> None:
    model, x = Net(), torch.randn(4, 8)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = compiled(x)
    nw.ignore(model.norm, "PAR001", "why")
    assert torch.equal(compiled(x), expected)
    assert len(graphs) == 1


def test_marking_again_replaces_the_reason() -> None:
    norm = nn.LayerNorm(4)
    for rules, reason in (("PAR001", "first"), ("NUM", "other"), ("PAR001", " second ")):
        nw.ignore(norm, rules, reason)
    assert [(each.code, each.reason) for each in marked(norm)] == [("PAR001", "second"), ("NUM", "other")]


@pytest.mark.parametrize(
    ("rules", "reason", "said"),
    [
        ("PAR0001", "why", r"no rule is called 'PAR0001': did you mean 'PAR001'\?"),
        ("PAR001,decayed-norm-scales", "why", "did you mean 'decayed-norm-scale'"),
        ("", "why", "no rule is called ''"),
        ([], "why", "give the rules to keep quiet"),
        ("PAR001", "", "give a reason"),
        ("PAR001", " ", "give a reason"),
        ("PAR001", None, "give a reason"),
    ],
)
def test_a_wrong_mark_is_refused_at_once_and_leaves_nothing(rules: Any, reason: Any, said: str) -> None:
    norm = nn.LayerNorm(4)
    with pytest.raises(ValueError, match=said):
        nw.ignore(norm, rules, reason)
    assert marked(norm) == []


def test_only_modules_can_be_marked() -> None:
    with pytest.raises(TypeError, match=r"is a torch.nn.Module of the model, got a str"):
        nw.ignore("norm", "PAR001", "why")  # pyright: ignore[reportArgumentType, reportCallIssue]


# What is kept quiet


def suppression(code: str, *modules: str, reason: str = "r") -> Suppression:
    return Suppression(
        code=code,
        codes=codes(code),
        pattern=modules[0],
        by="ignore",
        where=modules[0],
        reason=reason,
        covers=lambda _, place: any(at_or_below(place, each) for each in modules),
    )


def found(code: str, *paths: str, path: str = "") -> Finding:
    return Finding(message="m", fix="f", code=code, path=path, paths=paths)


def test_a_family_is_unused_only_if_every_rule_of_it_judged() -> None:
    par = sorted(codes("PAR"))
    said = [suppression("PAR", "a")]
    assert [u.code for u in quieted(Report(target="t", passed=tuple(par)), said).unused] == ["PAR"]
    assert quieted(Report(target="t", passed=tuple(par[1:])), said).unused == ()
    assert quieted(Report(target="t", passed=tuple(par[1:]), findings=(found(par[0], "a.b"),)), said).unused == ()


def test_of_several_reasons_the_first_is_named_and_all_are_needed() -> None:
    report = Report(target="t", findings=(found("PAR001", "a", "b", "c"),))
    quiet = quieted(report, [suppression("PAR001", "a", reason="1"), suppression("PAR", "a", "b", reason="2")])
    assert [(s.finding.paths, s.reason) for s in quiet.suppressed] == [(("a",), "1"), (("b",), "2")]
    assert [f.paths for f in quiet.findings] == [("c",)]
    assert quiet.unused == ()


def test_a_finding_of_the_whole_model_is_covered_by_its_root_only() -> None:
    report = Report(target="t", findings=(found("PAR001"),))
    assert quieted(report, [suppression("PAR001", "a")]).findings == report.findings
    assert quieted(report, [suppression("PAR001", "")]).findings == ()


def test_the_first_place_stays_where_what_is_below_it_stays() -> None:
    report = Report(target="t", findings=(found("CKP004", "a#1", "a#2", path="a"),))
    both = Suppression(
        code="CKP004", codes=codes("CKP004"), pattern="", by="", where="", reason="", covers=lambda _, p: p == "a#1"
    )
    (left,) = quieted(report, [both]).findings
    assert (left.path, left.paths) == ("a", ("a#2",))


PLACES = ("a", "a.0", "a.1.b", "b", "b#2", "")


SOME = st.lists(st.sampled_from(PLACES), min_size=1, unique=True)


@given(
    st.lists(st.tuples(st.sampled_from(["PAR001", "NUM001"]), SOME)),
    st.lists(st.tuples(st.sampled_from(["PAR001", "PAR", "NUM001"]), st.sampled_from(PLACES))),
)
def test_nothing_is_lost_and_nothing_is_made_up(
    findings: list[tuple[str, list[str]]], said: list[tuple[str, str]]
) -> None:
    report = Report(target="t", findings=tuple(found(code, *paths) for code, paths in findings))
    quiet = quieted(report, [suppression(code, module) for code, module in said])
    kept, silent = list(quiet.findings), [s.finding for s in quiet.suppressed]
    expected = sorted((code, path) for code, paths in findings for path in paths)
    assert sorted((f.code, path) for f in (*kept, *silent) for path in f.paths) == expected
    for finding in kept:
        assert not any(finding.code in codes(c) and at_or_below(p, m) for p in finding.paths for c, m in said)
    for finding in silent:
        assert all(any(finding.code in codes(c) and at_or_below(p, m) for c, m in said) for p in finding.paths)
    assert {f.fingerprint for f in (*kept, *silent)} == {f.fingerprint for f in report.findings}
    assert replace(quiet, findings=(), suppressed=(), unused=()) == replace(report, findings=())
    assert quieted(quiet, [suppression(code, module) for code, module in said]).findings == quiet.findings
