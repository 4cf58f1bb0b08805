"""What every layer must be: right in every dtype, like torch's twin, and a well-behaved module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normwise import layers
from tests.layers.layer_cases import BY_LAYER, CASES, LAYERS, Case, outputs, randomized, truth

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_layer = pytest.mark.parametrize("case", BY_LAYER.values(), ids=BY_LAYER)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
with_twin = pytest.mark.parametrize(
    "case", [each for each in CASES.values() if each.twin], ids=[name for name in CASES if CASES[name].twin]
)
IMAGE_CASES = {
    name: case for name, case in CASES.items() if case.inputs(1)[0].ndim == 4 and case.layer.__name__[0] != "Q"
}

# Half a unit in the last place; statistics of the few numbers here run in float32 or wider and cost some of its units.
HALF_UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDE_ROUNDINGS = 60  # a dozen sums and products, and values four times smaller than the largest they were made from


def run(case: Case, module: nn.Module, dtype: torch.dtype = torch.float64, batch: int = 3) -> tuple[torch.Tensor, ...]:
    return outputs(module(*(each.to(dtype) for each in case.inputs(batch)), **case.operands(batch)))


def test_every_layer_has_a_case() -> None:
    assert set(BY_LAYER) == LAYERS


def test_the_public_list_is_sorted_and_complete() -> None:
    public = {name for name, each in vars(layers).items() if isinstance(each, type) and issubclass(each, nn.Module)}
    assert public == LAYERS
    assert set(layers.__all__) - LAYERS == {name for name in layers.__all__ if name[0].islower() or name == "FAMILIES"}
    classes = [name for name in layers.__all__ if name in LAYERS]
    assert classes == sorted(classes)


@both_modes
@pytest.mark.parametrize("dtype", HALF_UNIT, ids=str)
@every_case
def test_computes_its_formula(case: Case, dtype: torch.dtype, training: bool) -> None:
    module = randomized(case.make(dtype)).train(training)
    inputs, operands = tuple(each.to(dtype) for each in case.inputs(3)), case.operands(3)
    expected = truth(case, module, inputs, operands)  # first: a batch norm moves its statistics
    wide = HALF_UNIT[torch.float64 if dtype is torch.float64 else torch.float32]
    narrow = HALF_UNIT[dtype] if dtype.itemsize == 2 else 0.0
    for ours, right in zip(outputs(module(*inputs, **operands)), expected, strict=True):
        assert ours.dtype is dtype
        # relative to each value for the roundings to the dtype, to the largest for those inside
        inside = WIDE_ROUNDINGS * wide + case.inner_roundings * narrow
        allowed = 1.01 * case.half_roundings * narrow * right.abs() + inside * right.abs().max()
        if dtype is torch.float16:
            allowed += 2.0**-25  # half a step between subnormal numbers
        assert ((ours.double() - right).abs() <= allowed).all()


@both_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_case
def test_float32_parameters_serve_half_precision_inputs(case: Case, dtype: torch.dtype, training: bool) -> None:
    module = randomized(case.make(torch.float32)).train(training)
    inputs, operands = tuple(each.to(dtype) for each in case.inputs(3)), case.operands(3)
    if isinstance(module, layers.AdaLayerNorm | layers.AdaRMSNorm):  # its Linear takes its own dtype alone
        inputs = (inputs[0], inputs[1].float())
    expected = truth(case, module, inputs, operands)
    for ours, right in zip(outputs(module(*inputs, **operands)), expected, strict=True):
        allowed = 1.01 * case.half_roundings * HALF_UNIT[dtype] * right.abs() + 1e-5 * right.abs().max()
        assert ((ours.double() - right).abs() <= allowed).all()


@every_case
def test_train_and_eval_differ_where_statistics_are_kept_and_nowhere_else(case: Case) -> None:
    module = randomized(case.make())
    evaluated, trained = run(case, module.eval()), run(case, module.train())
    tracked = getattr(module, "running_mean", None) is not None and not isinstance(module, layers.FrozenBatchNorm)
    assert all(map(torch.equal, evaluated, trained)) is not tracked


@every_case
def test_non_contiguous_inputs_give_the_same_values(case: Case) -> None:
    module = randomized(case.make()).eval()
    inputs, operands = case.inputs(3), case.operands(3)
    spread = [torch.stack([each, each + 1], -1)[..., 0] for each in inputs]
    turned = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in inputs]
    for strange in (spread, turned):
        assert not any(each.is_contiguous() for each in strange)
        for ours, plain in zip(outputs(module(*strange, **operands)), run(case, module), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("layer", [layers.LayerNorm, layers.RMSNorm, layers.ScaleNorm])
def test_rows_come_back_in_order_as_from_torch(layer: type[nn.Module], kernel: str) -> None:
    x = torch.randn(4, 6, 8).transpose(0, 1)
    assert layer(8, kernel=kernel)(x).stride() == nn.LayerNorm(8)(x).stride()


@both_modes
@pytest.mark.parametrize("name", IMAGE_CASES)
def test_channels_last_images_stay_channels_last(name: str, training: bool) -> None:
    case = IMAGE_CASES[name]
    module = randomized(case.make()).train(training)
    (x,) = case.inputs(3)
    moved = x.to(memory_format=torch.channels_last)
    y = module(moved, **case.operands(3))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module(x, **case.operands(3)), rtol=1e-13, atol=1e-13)


# -- a torch.nn module ------------------------------------------------------------------------


@with_twin
def test_is_torchs_twin(case: Case) -> None:
    assert case.twin is not None
    ours, theirs = randomized(case.make()), case.twin(dtype=torch.float64)
    for training in (True, True, False):
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        y, expected = run(case, ours.train(training))[0], theirs.train(training)(*case.inputs(3))
        torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
        expected_state = theirs.state_dict()
        if isinstance(ours, layers.InstanceNorm2d):  # torch's counts no batches, so momentum=None moves nothing there
            expected_state.pop("num_batches_tracked")
        for name, kept in expected_state.items():
            torch.testing.assert_close(ours.state_dict()[name], kept, rtol=1e-13, atol=1e-13)


@with_twin
def test_loads_what_torchs_twin_saved(case: Case) -> None:
    assert case.twin is not None
    theirs = randomized(case.twin(dtype=torch.float64)).eval()
    ours = case.make().eval()
    assert str(ours.load_state_dict(theirs.state_dict(), strict=True)) == "<All keys matched successfully>"
    torch.testing.assert_close(run(case, ours)[0], theirs(*case.inputs(3)), rtol=1e-13, atol=1e-13)


@with_twin
def test_takes_every_argument_of_torchs_twin_in_its_order(case: Case) -> None:
    import inspect

    assert case.twin is not None
    twin_class = getattr(nn, case.layer.__name__)
    theirs = list(inspect.signature(twin_class).parameters.values())
    ours = list(inspect.signature(case.layer).parameters.values())
    assert {each.name for each in theirs} <= {each.name for each in ours}
    both = [each.name for each in ours if each.kind is not each.KEYWORD_ONLY]
    assert both == [each.name for each in theirs][: len(both)]


@every_case
def test_a_state_dict_goes_round(case: Case) -> None:
    module, other = randomized(case.make()).eval(), randomized(case.make(), seed=1).eval()
    if module.state_dict():
        assert not all(map(torch.equal, run(case, module), run(case, other)))
    other.load_state_dict(module.state_dict(), strict=True)
    assert all(map(torch.equal, run(case, module), run(case, other)))


@every_case
def test_copies_and_pickles_compute_the_same_and_share_nothing(case: Case) -> None:
    module = randomized(case.make()).eval()
    before = run(case, module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
        assert all(map(torch.equal, run(case, twin), before))
        randomized(twin, seed=1)
    assert all(map(torch.equal, run(case, module), before))


@every_layer
def test_reset_parameters_starts_over(case: Case) -> None:
    module, new = randomized(case.make()), case.make()
    if list(module.parameters()):
        assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), new.parameters(), strict=True))
    for each in module.modules():
        if hasattr(each, "reset_parameters") and not isinstance(each, nn.Linear):
            each.reset_parameters()  # type: ignore[operator]
    if isinstance(module, layers.FrozenBatchNorm):  # constants: there is nothing to start
        return
    for name, kept in module.state_dict().items():
        assert torch.equal(kept, new.state_dict()[name]), name


@every_case
def test_works_on_meta(case: Case) -> None:
    module = case.make(torch.float32, "meta") if case.takes_dtype else case.make()
    assert all(each.is_meta for each in (*module.parameters(), *module.buffers()))
    inputs = [each.to("meta", torch.float32) for each in case.inputs(3)]
    operands = {name: each.to("meta") for name, each in case.operands(3).items()}
    found = [(y.shape, y.dtype, y.is_meta) for y in outputs(module(*inputs, **operands))]
    assert found == [(y.shape, y.dtype, True) for y in run(case, case.make(torch.float32), torch.float32)]


@every_case
def test_a_module_made_on_meta_can_be_filled(case: Case) -> None:
    if not case.takes_dtype:
        return
    module = case.make(torch.float64, "meta").to_empty(device="cpu")
    module.load_state_dict(randomized(case.make()).state_dict())
    assert all(map(torch.equal, run(case, module), run(case, randomized(case.make()))))


@both_modes
@every_case
def test_works_on_fake_tensors(case: Case, training: bool) -> None:
    with FakeTensorMode() as mode:
        module = case.make(torch.float32).train(training)
        inputs = [mode.from_tensor(each.float()) for each in case.inputs(3)]
        operands = {name: mode.from_tensor(each) for name, each in case.operands(3).items()}
        found = [(y.shape, y.dtype, y.stride()) for y in outputs(module(*inputs, **operands))]
    expected = run(case, case.make(torch.float32).train(training), torch.float32)
    assert found == [(y.shape, y.dtype, y.stride()) for y in expected]


@every_case
def test_moves_to_another_dtype_with_all_it_keeps(case: Case) -> None:
    module = randomized(case.make()).eval().to(torch.float32)
    assert {each.dtype for each in module.state_dict().values()} <= {torch.float32, torch.int64}
    for narrow, wide in zip(run(case, module, torch.float32), run(case, randomized(case.make()).eval()), strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


# -- what it says of itself -------------------------------------------------------------------

REPR = {
    "AdaLayerNorm": "AdaLayerNorm(\n  (6,), eps=1e-06, elementwise_affine=False, bias=False\n"
    "  (linear): Linear(in_features=3, out_features=12, bias=True)\n)",
    "AddRMSNorm": "AddRMSNorm((6,), eps=None, elementwise_affine=True)",
    "BatchNorm": "BatchNorm(6, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True, "
    "channel_dim=-1)",
    "BatchNorm2d mask": "BatchNorm2d(4, eps=1e-05, momentum=0.1, affine=True, bias=False, track_running_stats=True)",
    "CenteredRMSNorm": "CenteredRMSNorm((6,), eps=1e-06, elementwise_affine=False)",
    "ChannelLayerNorm": "ChannelLayerNorm(4, eps=1e-06, elementwise_affine=True, bias=True, channel_dim=1)",
    "Derf": "Derf((6,), alpha=0.5, shift=0.0, elementwise_affine=True)",
    "DynamicTanh": "DynamicTanh((6,), alpha=0.5, elementwise_affine=True)",
    "FrozenBatchNorm": "FrozenBatchNorm(4, eps=1e-05)",
    "GatedRMSNorm": "GatedRMSNorm((6,), eps=1e-06, elementwise_affine=True)",
    "GatedRMSNorm gate first, groups": "GatedRMSNorm((6,), eps=1e-06, elementwise_affine=True, gate=before, groups=2)",
    "GatedRMSNorm another convention": "GatedRMSNorm((6,), eps=1e-06, elementwise_affine=True, eps_inside=False, "
    "weight_offset=1.0, gate=before, gate_activation=sigmoid, cast=none)",
    "GroupNorm": "GroupNorm(2, 4, eps=1e-05, affine=True, bias=True)",
    "InstanceNorm1d": "InstanceNorm1d(4, eps=1e-05, momentum=0.1, affine=False, bias=False, track_running_stats=False)",
    "L2Norm": "L2Norm(dim=-1, eps=1e-12)",
    "LayerNorm": "LayerNorm((6,), eps=1e-05, elementwise_affine=True, bias=True)",
    "LayerNorm eps outside, unbiased": "LayerNorm((6,), eps=0.001, elementwise_affine=True, bias=True, "
    "eps_inside=False, biased=False, form=reciprocal)",
    "Norm": "Norm((1,), scope=other, axes=(-2,), center=True, statistic=variance, weight=none)",
    "PartialRMSNorm": "PartialRMSNorm((6,), eps=1e-08, elementwise_affine=True, partial=0.5)",
    "RMSNorm": "RMSNorm((6,), eps=None, elementwise_affine=True)",
    "RMSNorm unit offset": "RMSNorm((6,), eps=None, elementwise_affine=True, weight_offset=1.0)",
    "RMSNorm shift": "RMSNorm((6,), eps=None, elementwise_affine=True, bias=True)",
    "RMSNorm llama": "RMSNorm((6,), eps=1e-06, elementwise_affine=True, cast=before_weight, out_dtype=promoted)",
    "ScaleNorm": "ScaleNorm((6,), eps=1e-05)",
}


@pytest.mark.parametrize("name", REPR)
def test_shows_its_convention(name: str) -> None:
    assert repr(CASES[name].make()) == REPR[name]


@with_twin
def test_shows_what_torchs_twin_shows(case: Case) -> None:
    assert case.twin is not None
    assert repr(case.make()) == repr(case.twin())


@every_case
def test_two_layers_that_differ_look_different(case: Case) -> None:
    others = [each for each in CASES.values() if each is not case and each.layer is case.layer]
    shown = repr(case.make())
    same = [each for each in others if repr(each.make()) == shown]
    assert shown.startswith(f"{case.layer.__name__}(")
    assert all(each.operands is not case.operands for each in same)  # the mask alone differs


@every_layer
def test_is_documented_with_an_example_and_lives_in_its_namespace(case: Case) -> None:
    assert case.layer.__doc__ is not None
    assert ">>>" in case.layer.__doc__
    # but for those of conversions, which keep foreign names of tensors and call themselves like the layer
    assert [each for each in case.layer.__subclasses__() if each.__name__ != case.layer.__name__] == []
