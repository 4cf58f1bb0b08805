"""Every wiring of the corpus is read as it is built."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.facts.records import Stack

from .corpus_blocks import BLOCKS, BlockCase, Expect

BY_NAME = {case.name: case for case in BLOCKS}


def _build(case: BlockCase) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    return model if case.name.endswith("_train") else model.eval()


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_every_model_of_the_corpus_runs_and_depends_on_its_input(case: BlockCase) -> None:
    model, inputs = _build(case), case.inputs()
    other = tuple((t + 1) % 50 if t.dtype == torch.long else t + 1 for t in inputs)
    with torch.no_grad():
        y, moved = model(*inputs), model(*other)
    assert torch.isfinite(y).all()
    assert not torch.allclose(y, moved)


@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.name)
def test_stacks_are_read_as_they_are_built(case: BlockCase) -> None:
    placement = nw.map(_build(case), case.inputs()).placement
    found = placement.stacks
    wanted = case.stacks * len(found) if case.every else case.stacks
    if case.optional:
        wanted = wanted[: len(found)]
    elif case.every:
        assert found
    else:
        assert len(found) == len(wanted), [str(stack.kind) for stack in found]
    for stack, expect in zip(found, wanted, strict=False):
        assert _disagreements(stack, expect) == {}
    for name, value in (("qk_norm", case.qk), ("inner_norm", case.inner), ("embedding_norm", case.embedding)):
        assert value is None or getattr(placement, name) is value, name


@pytest.mark.parametrize("case", [case for case in BLOCKS if case.places], ids=lambda case: case.name)
def test_named_norms_are_placed(case: BlockCase) -> None:
    assert case.places
    places = {site.path: str(site.placement) for site in nw.map(_build(case), case.inputs()).norms}
    assert {path: places.get(path) for path in case.places} == dict(case.places)


@pytest.mark.parametrize("name", ["pre", "post", "sandwich", "res_post", "parallel", "pre_query_key_norm", "resnet_v1"])
def test_every_executed_norm_is_listed_and_placed(name: str) -> None:
    case = BY_NAME[name]
    model = _build(case)
    kinds = ("Layer", "Rms", "BatchNorm2d")
    wanted = {path for path, module in model.named_modules() if type(module).__name__ in kinds}
    report = nw.map(model, case.inputs())
    assert {site.path for site in report.norms} == wanted
    assert not report.not_executed
    assert all(str(site.placement) != "unknown" for site in report.norms)


def test_layers_are_numbered_along_the_stack() -> None:
    case = BY_NAME["pre"]
    layers = {site.path: (site.stack, site.layer) for site in nw.map(_build(case), case.inputs()).norms}
    assert [layers[f"blocks.{i}.n1"] for i in range(4)] == [(0, i) for i in range(4)]
    assert [layers[f"blocks.{i}.n2"] for i in range(4)] == [(0, i) for i in range(4)]


def test_the_constant_of_a_deep_norm_skip_is_read_off_the_graph() -> None:
    case = BY_NAME["post_deep_norm"]
    (stack,) = nw.map(_build(case), case.inputs()).placement.stacks
    assert [member.wiring.skip_scale for member in stack.members] == pytest.approx([8**0.25] * 8)


def test_the_residual_multiplier_is_read_off_the_graph() -> None:
    case = BY_NAME["pre_scaled_branch"]
    (stack,) = nw.map(_build(case), case.inputs()).placement.stacks
    assert [member.wiring.branch_scale for member in stack.members] == pytest.approx([0.22] * 8)


def test_a_module_that_does_not_run_is_listed_as_not_executed() -> None:
    case = BY_NAME["pre"]
    model = _build(case)
    model.add_module("unused", nn.LayerNorm(24))
    report = nw.map(model, case.inputs())
    assert "unused" in report.not_executed
    assert "unused" not in {site.path for site in report.norms}


def test_a_shared_block_lists_each_norm_once_with_its_calls() -> None:
    case = BY_NAME["pre_shared_block"]
    calls = {site.path: site.calls for site in nw.map(_build(case), case.inputs()).norms}
    assert calls == {"blocks.0.n1": 4, "blocks.0.n2": 4, "last": 1}


def _disagreements(stack: Stack, expect: Expect) -> dict[str, object]:
    wanted = {
        "starts_with_norm": expect.starts,
        "final_norm": expect.final,
        "depth": expect.depth,
        "sublayers": expect.sublayers,
        "name": expect.name,
    }
    wrong: dict[str, object] = {
        name: getattr(stack, name)
        for name, value in wanted.items()
        if value is not None and getattr(stack, name) != value
    }
    if str(stack.kind) not in expect.kinds:
        wrong["kind"] = str(stack.kind)
    return wrong


def test_blocks_are_counted_where_one_forward_loops_over_their_parts() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"n": nn.LayerNorm(8), "a": nn.Linear(8, 8), "m": nn.LayerNorm(8), "f": nn.Linear(8, 8)})
                for _ in range(5)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                assert isinstance(block, nn.ModuleDict)
                x = x + block["a"](block["n"](x))
                x = x + block["f"](block["m"](x))
            return x

    (stack,) = nw.map(Loops(), torch.randn(2, 5, 8)).placement.stacks
    assert (stack.depth, stack.sublayers) == (5, 10)


def test_a_norm_between_two_pre_norm_encoders_closes_one_stack_and_starts_the_next() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(self.norm(x))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.Sequential(*(Block() for _ in range(8))), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.blocks(x))

    report = nw.map(nn.Sequential(nn.Linear(8, 8), Encoder(), Encoder()), torch.randn(2, 5, 8))
    stacks = [(str(s.kind), s.depth, s.starts_with_norm, s.final_norm) for s in report.placement.stacks]
    assert stacks == [("pre", 8, False, True), ("pre", 8, True, True)]
    assert {n.path: str(n.placement) for n in report.norms if n.path.endswith("last")} == {
        "1.last": "final",
        "2.last": "final",
    }


def test_blocks_are_counted_within_stages_but_sublayers_are_no_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self, branch: nn.Module) -> None:
            super().__init__()
            self.norm, self.branch = nn.LayerNorm(8), branch

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.branch(self.norm(x))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    def depth(*stages: nn.Module) -> int:
        (stack,) = nw.map(nn.Sequential(*stages), torch.randn(2, 5, 8)).placement.stacks
        return stack.depth

    assert depth(*(nn.Sequential(*(Residual(nn.Linear(8, 8)) for _ in range(2))) for _ in range(3))) == 6
    assert depth(*(nn.Sequential(Residual(Attention()), Residual(nn.Linear(8, 8))) for _ in range(3))) == 3
