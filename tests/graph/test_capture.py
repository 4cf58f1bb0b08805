"""The tracer sees views, writes, ties, modules and source lines as they are, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normwise.errors import TraceError
from normwise.graph import ALIAS, OPAQUE, Graph, Op, Recording, ValueKind, trace
from normwise.targets import target


def _trace(forward: Any, *inputs: Tensor, **modules: nn.Module) -> Recording:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, *args: Tensor) -> Any:
            return forward(self, *args)

    return trace(target(Model(), inputs))


def _names(graph: Graph) -> list[str]:
    return [op.short for op in graph.ops]


def _reaches(graph: Graph, start: int, goal: int) -> bool:
    """Whether a value is computed from another."""
    pending = [goal]
    while pending:
        value = pending.pop()
        if value == start:
            return True
        op = graph.producer(value)
        pending.extend(op.inputs if op else ())
    return False


def test_composite_ops_arrive_whole() -> None:
    recording = _trace(lambda m, x: nn.functional.rms_norm(m.a(x), (4,)), torch.randn(2, 3, 4), a=nn.Linear(4, 4))
    assert _names(recording.graph) == ["linear", "rms_norm"]


def test_a_no_op_cast_is_seen_and_makes_no_value() -> None:
    recording = _trace(lambda m, x: x.to(torch.float32) * 2, torch.randn(2, 3))
    cast, product = recording.graph.ops
    assert cast.outputs == ()
    assert product.inputs == cast.inputs


def test_a_write_in_place_makes_a_new_value() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = x + 1
        y *= 2
        return y

    graph = _trace(forward, torch.randn(2, 3)).graph
    add, mul = graph.ops
    assert mul.outputs != add.outputs
    assert graph.outputs == mul.outputs


def test_a_write_through_a_view_reaches_the_base() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        base = x.clone()
        base[:, 0] = y
        return base * 1

    graph = _trace(forward, torch.randn(2, 3), torch.randn(2)).graph
    written = next(v.id for v in graph.values if v.names == ("1",))
    assert any(op.name == ALIAS for op in graph.ops)
    assert _reaches(graph, written, graph.outputs[0])


def test_a_read_before_the_write_does_not_see_it() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        base = x.clone()
        before = base * 1
        base[:, 0] = y
        return before

    graph = _trace(forward, torch.randn(2, 3), torch.randn(2)).graph
    written = next(v.id for v in graph.values if v.names == ("1",))
    assert not _reaches(graph, written, graph.outputs[0])


def test_tied_parameters_are_one_value_with_both_names() -> None:
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    two.weight = one.weight
    graph = _trace(lambda m, x: m.b(m.a(x)), torch.randn(2, 3), a=one, b=two).graph
    assert [v.names for v in graph.values if v.kind is ValueKind.PARAM] == [("a.weight", "b.weight")]


def test_a_parameter_read_through_data_is_still_that_parameter() -> None:
    graph = _trace(lambda m, x: nn.functional.linear(x, m.a.weight.data), torch.randn(2, 3), a=nn.Linear(3, 3)).graph
    weight = next(v.id for v in graph.values if v.names == ("a.weight",))
    assert _reaches(graph, weight, graph.ops[-1].inputs[1])


def test_ops_know_their_module_and_their_line() -> None:
    graph = _trace(lambda m, x: m.a(x) + 1, torch.randn(2, 3), a=nn.Linear(3, 3)).graph
    linear, add = graph.ops
    assert (graph.path(linear), graph.path(add)) == ("a", "")
    assert add.source is not None
    assert add.source.file.endswith("test_capture.py")


def test_what_called_the_tracer_is_no_line_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert [op.source for op in trace(target(model, torch.randn(2, 3))).graph.ops] == [None, None]


def test_a_module_called_twice_has_two_calls() -> None:
    graph = _trace(lambda m, x: m.a(m.a(x)), torch.randn(2, 3), a=nn.Linear(3, 3)).graph
    assert [(c.path, c.ordinal) for c in graph.calls[1:]] == [("a", 0), ("a", 1)]


class _ThroughNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x) * 2)


def test_a_leaf_that_leaves_torch_is_bridged_by_an_opaque_op() -> None:
    graph = _trace(lambda m, x: m.a(x) + 1, torch.randn(2, 3), a=_ThroughNumpy()).graph
    assert [op.name for op in graph.ops[-2:]] == [OPAQUE, "aten.add"]
    assert _reaches(graph, next(v.id for v in graph.values if v.kind is ValueKind.INPUT), graph.outputs[0])


def test_numbers_in_one_element_tensors_are_read() -> None:
    graph = _trace(lambda m, x: x * torch.tensor(0.5), torch.randn(2, 3)).graph
    assert [v.scalar for v in graph.values if v.kind is ValueKind.CONST] == [0.5]


def test_a_graph_survives_json() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.a(x) + torch.arange(3, device=x.device).to(torch.float32)

    graph = _trace(forward, torch.randn(2, 3), a=nn.Linear(3, 3)).graph
    again = Graph.from_json(graph.to_json())
    assert again.to_json() == graph.to_json()
    assert again.ops == graph.ops
    assert again.values == graph.values


def test_the_error_names_the_module_that_raised() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no such luck")

    with pytest.raises(TraceError, match=r"raised in inner\.0: RuntimeError: no such luck") as caught:
        _trace(lambda m, x: m.inner(x), torch.randn(2), inner=nn.Sequential(Breaks()))
    assert caught.value.path == "inner.0"


def test_a_partial_trace_ends_where_the_model_did() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 5))
    graph = trace(target(model, torch.randn(2, 3)), partial=True).graph
    assert [op.short for op in graph.ops] == ["linear"]


def test_code_that_refuses_inference_tensors_is_traced_without_them() -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            if y.is_inference():
                raise RuntimeError("Inference tensors cannot be saved for backward")
            return self.norm(y)

    recording = trace(target(Refuses(), torch.randn(2, 3)))
    assert recording.graph.mode == "no_grad"
    assert "rsqrt" in _names(recording.graph)


def test_a_parameter_overwritten_by_the_forward_is_put_back() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(3)
            self.seen += 1
            self.cache["x"] = x * 1
            self.last = x
            return x * self.weight

    model = Writes()
    trace(target(model, torch.randn(2, 3)))
    assert model.weight.tolist() == [1, 1, 1]
    assert model.seen.item() == 0
    assert model.cache == {}
    assert not hasattr(model, "last")


def test_no_tag_is_left_on_the_inputs() -> None:
    x = torch.randn(2, 3)
    _trace(lambda m, x: x * 2, x)
    assert not vars(x)


def test_a_model_on_meta_is_traced_with_stand_ins() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    weight = model[0].weight
    recording = trace(target(model, torch.randn(2, 3)))
    assert recording.graph.fake
    assert _names(recording.graph) == ["linear", "layer_norm"]
    assert model[0].weight is weight


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_wrapped_models_keep_the_users_paths(wrap: Any) -> None:
    model = wrap(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    recording = trace(target(model, torch.randn(2, 3)))
    (norm,) = [op for op in recording.graph.ops if op.short == "layer_norm"]
    assert recording.graph.path(norm) in dict(model.named_modules())
    assert recording.graph.path(norm).endswith(".1")


def test_a_forward_that_raises_after_its_parts_ran_does_not_blame_them() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        raise RuntimeError(f"no head for {model.a(x).shape}")

    with pytest.raises(TraceError, match="the forward of Model raised: RuntimeError") as caught:
        _trace(forward, torch.randn(2, 3), a=nn.Linear(3, 3))
    assert caught.value.path is None


def test_ops_after_a_caught_error_belong_to_the_module_that_caught_it() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no kernel")

    def forward(model: Any, x: Tensor) -> Tensor:
        try:
            return model.fast(x)
        except ValueError:
            return model.slow(torch.tanh(x))

    graph = _trace(forward, torch.randn(2, 3), fast=Breaks(), slow=nn.Linear(3, 3)).graph
    assert [(op.short, graph.path(op)) for op in graph.ops] == [("tanh", ""), ("linear", "slow")]
    assert [c.parent for c in graph.calls if c.path == "slow"] == [0]


def test_only_torchs_ops_go_by_their_short_names() -> None:
    ops = [Op(0, name, "", (), {}, (), (), 0, None) for name in ("aten.add_", "higher_order.cond", "mylib.layer_norm")]
    assert [op.short for op in ops] == ["add", "cond", "mylib.layer_norm"]
