"""Rules that judge a model by the checkpoint, the configuration or the reference it came with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normwise as nw
from tests.checkup.rules.judging import findings, severities, why_not

CKP = ("CKP002", "CKP003", "CKP004", "CKP005", "CKP006")
State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.dense = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dense(self.norm(x)))


def trained(*, seed: int = 0, norm: type[nn.Module] = nn.LayerNorm, **options: Any) -> nn.Sequential:
    """A small pre-norm model whose gains and shifts have moved."""
    model = nn.Sequential(*(Block(norm(8, **options)) for _ in range(3)), norm(8, **options), nn.Linear(8, 3)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if gain else 0.2, 0.3, generator=generator)
    return model


def state(model: nn.Module) -> State:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def x() -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5)) + 0.3


def above_info(model: nn.Module, *inputs: Any, **evidence: Any) -> list[str]:
    report = nw.check(model, inputs, select=CKP, **evidence)
    assert not any("the rule failed" in n.why for n in report.not_checked)
    return [f.code for f in report.findings if f.severity != "info"]


# -- healthy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "base_model.model.", "_orig_mod."])
def test_a_model_loaded_right_has_no_finding_whatever_its_keys_begin_with(prefix: str) -> None:
    model = trained()
    kept = {f"{prefix}{key}": tensor for key, tensor in state(model).items()}
    assert above_info(model, x(), checkpoint=kept, reference=copy.deepcopy(model)) == []
    assert above_info(model, x(), checkpoint={"state_dict": kept, "epoch": 3}) == []


def test_a_loader_that_renames_or_adds_the_one_of_a_unit_offset_is_healthy() -> None:
    model = trained()
    renamed = {
        key.replace("norm.weight", "ln.gamma").replace("norm.bias", "ln.beta"): t for key, t in state(model).items()
    }
    shifted = {key: t - 1 if "norm.weight" in key else t for key, t in state(model).items()}
    assert above_info(model, x(), checkpoint=renamed) == []
    assert above_info(model, x(), checkpoint=shifted) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_no_difference(dtype: torch.dtype) -> None:
    model = trained()
    half = copy.deepcopy(model).to(dtype)
    assert above_info(half, x().to(dtype), checkpoint=state(model), reference=model) == []
    assert above_info(model, x(), checkpoint=state(half), reference=half) == []


def test_an_adapter_that_holds_its_own_weights_only_is_healthy() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model.add_module("adapter", nn.Linear(8, 8))
    kept = {key: t for key, t in state(model).items() if key.startswith("adapter")}
    assert above_info(model, x(), checkpoint=kept) == []


def test_a_new_head_with_a_norm_of_its_own_is_healthy() -> None:
    body = list(trained())[:3]
    model = nn.Sequential(*body, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
    info = {"missing_keys": [k for k in model.state_dict() if k.startswith("3")], "unexpected_keys": []}
    assert above_info(model, x(), checkpoint=state(nn.Sequential(*body)), load_info=info) == []


def test_a_model_trained_on_after_loading_is_healthy() -> None:
    model = trained()
    kept = state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert above_info(model, x(), checkpoint=kept) == []


class ByHand(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.scale, self.offset, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scale + self.offset


def test_a_reference_that_is_written_otherwise_but_computes_the_same_is_healthy() -> None:
    model = trained()
    port = copy.deepcopy(model)
    for block in [b for b in port if isinstance(b, Block)]:
        assert isinstance(block.norm, nn.LayerNorm)
        block.norm = ByHand(block.norm)
    assert above_info(port, x(), reference=model) == []
    assert above_info(model, x(), reference=port) == []


# -- faulty -------------------------------------------------------------------------------------------


def loaded(kept: State) -> tuple[nn.Module, Any]:
    model = trained()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model, model.load_state_dict(kept, strict=False)


@pytest.mark.parametrize("names", [("gamma", "beta"), ("scale", "offset")])
def test_renamed_norms_are_found_with_the_map_that_loads_them(names: tuple[str, str]) -> None:
    gain, shift = names
    kept = {
        k.replace("norm.weight", f"norm.{gain}").replace("norm.bias", f"norm.{shift}"): t
        for k, t in state(trained()).items()
    }
    model, info = loaded(kept)
    (found,) = findings("CKP003", model, x(), checkpoint=kept, load_info=info)
    assert found.severity == "error"
    assert found.evidence["key_map"] == {f"*.norm.{gain}": "*.norm.weight", f"*.norm.{shift}": "*.norm.bias"}
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 0.1


def test_norms_of_some_layers_that_the_checkpoint_lacks_are_found() -> None:
    kept = {key: t for key, t in state(trained()).items() if not key.startswith("1.norm")}
    model, info = loaded(kept)
    (found,) = findings("CKP003", model, x(), checkpoint=kept, load_info=info)
    assert (found.severity, found.paths) == ("error", ("1.norm",))


def test_norms_that_the_checkpoint_has_not_at_all_are_a_warning_unless_a_reference_agrees() -> None:
    kept = {key: t for key, t in state(trained()).items() if "norm" not in key and not key.startswith("3")}
    model, info = loaded(kept)
    assert severities("CKP003", model, x(), checkpoint=kept, load_info=info) == ["warning"]
    assert severities("CKP003", model, x(), checkpoint=kept, load_info=info, reference=copy.deepcopy(model)) == []


def test_a_shift_without_a_place_is_the_norms_kind_or_a_dropped_key() -> None:
    kept = state(trained())
    without_shift, rms = trained(bias=False), trained(norm=nn.RMSNorm, eps=1e-5)
    for model in (without_shift, rms):
        model.load_state_dict(kept, strict=False)
    assert above_info(without_shift, x(), checkpoint=kept) == ["CKP004"]
    assert above_info(rms, x(), checkpoint=kept) == ["CKP002"]


def test_layer_norm_for_rms_norm_is_found_by_a_reference_of_the_same_matrices() -> None:
    rms = trained(norm=nn.RMSNorm, eps=1e-5)
    port = trained(bias=False)
    port.load_state_dict(rms.state_dict())
    assert above_info(port, x(), reference=rms) == ["CKP002"]


def test_a_kind_that_changes_nothing_is_only_worth_knowing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, bias=False))
    linear = model[0]
    assert isinstance(linear, nn.Linear)
    with torch.no_grad():
        linear.weight.sub_(linear.weight.mean(0, keepdim=True))
        linear.bias.sub_(linear.bias.mean())
    assert severities("CKP002", model, x(), config={"rms_norm_eps": 1e-5}) == ["info"]


@pytest.mark.parametrize(
    "key", ["layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "epsilon", "ln_eps"]
)
def test_an_eps_under_any_name_is_compared(key: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-5))
    small = x() * 1e-3
    (found,) = findings("CKP005", model, small, config={key: 1e-1})
    assert (found.severity, found.evidence["stated"]) == ("warning", 1e-1)
    assert severities("CKP005", model, small, config={"text_config": {key: 1e-5}}) == []


def test_an_eps_that_some_norms_have_is_not_that_of_the_others() -> None:
    model = nn.Sequential(nn.LayerNorm(8, eps=1e-1), nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-6))
    assert severities("CKP005", model, x(), config={"layer_norm_eps": 1e-6}) == []


def test_statistics_that_a_file_of_parameters_leaves_behind_are_found() -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    source(torch.randn(16, 8) * 3 + 1)
    for _, parameter in source.named_parameters():
        nn.init.normal_(parameter, 0.5, 0.2)
    kept = {key: p.detach().clone() for key, p in source.named_parameters()}
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    model.load_state_dict(kept, strict=False)
    assert severities("CKP005", model, torch.randn(4, 8), checkpoint=kept) == ["error"]
    assert severities("CKP005", source.eval(), torch.randn(4, 8), checkpoint=state(source)) == []


def test_the_first_difference_names_the_property_of_the_norm() -> None:
    reference = trained()
    port = copy.deepcopy(reference)
    block = port[1]
    assert isinstance(block, Block)
    setattr(block.norm, "eps", 0.5)  # noqa: B010 - a plain attribute of the layer
    (found,) = findings("CKP006", port, x(), reference=reference)
    assert (found.path, found.severity, list(found.evidence["differing"])) == ("1.norm", "error", ["eps"])


def test_a_difference_that_no_norm_explains_is_only_worth_knowing() -> None:
    reference = trained()
    port = copy.deepcopy(reference)
    with torch.no_grad():
        next(iter(port[4].parameters())).add_(0.5)
    (found,) = findings("CKP006", port, x(), reference=reference)
    assert (found.path, found.severity) == ("4", "info")


# -- evidence of the wrong kind ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        ({"checkpoint": {k: torch.zeros(3, 3) for k in trained().state_dict()}}, "other shapes"),
        ({"checkpoint": {"epoch": 3}}, "no tensors"),
        ({"checkpoint": [1, 2]}, "not a state dict"),
        ({"checkpoint": {"other": torch.zeros(17)}}, "shares no tensor"),
        ({"load_info": "all keys matched"}, "missing_keys"),
    ],
)
def test_a_checkpoint_of_another_kind_is_not_judged(evidence: dict[str, Any], why: str) -> None:
    assert why in why_not("CKP003", trained(), x(), **evidence)


def test_a_reference_that_does_not_run_on_the_inputs_is_not_judged() -> None:
    assert "does not run" in why_not("CKP006", trained(), x(), reference=nn.Linear(3, 3))
    assert "other shapes" in why_not("CKP006", trained(), x(), reference=nn.Linear(8, 5))


def test_a_configuration_that_is_none_is_not_judged() -> None:
    assert "not a dict" in why_not("CKP005", trained(), x(), config=3)


# -- placement --------------------------------------------------------------------------------------------


class Reverser(nn.Module):
    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
        self.embed, self.positions = nn.Embedding(12, 16), nn.Parameter(torch.randn(6, 16) / 2)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
        self.head = nn.Linear(16, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.positions))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 12, (rows, 6))
    return ids, ids.flip(1)


@pytest.fixture(scope="module", params=[False, True], ids=["post-norm", "pre-norm"])
def reverser(request: pytest.FixtureRequest) -> tuple[bool, State, list[tuple[Tensor, Tensor]]]:
    """A small encoder trained to reverse its input, and data of the task."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Reverser(norm_first=request.param)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(110):
            ids, labels = batch(32)
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return request.param, state(model), [batch(64), batch(64)]


def encoder(kept: State, *, norm_first: bool) -> nn.Module:
    model = Reverser(norm_first=norm_first).eval()
    model.load_state_dict(kept)
    return model


def test_an_encoder_of_the_other_placement_is_found_by_its_loss(reverser: Any) -> None:
    norm_first, kept, data = reverser
    wrong = encoder(kept, norm_first=not norm_first)
    (found,) = findings("CKP001", wrong, data[0][0], checkpoint=kept, loader=data)
    assert found.severity == "error"
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < found.counterfactual["before"]
    assert severities("CKP001", encoder(kept, norm_first=norm_first), data[0][0], checkpoint=kept, loader=data) == []


def accuracy(model: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((model(ids).argmax(-1) == ids.flip(1)).float().mean()) for ids in batches) / len(batches)


def test_a_score_that_rises_with_quality_is_not_read_as_a_loss(reverser: Any) -> None:
    norm_first, kept, data = reverser
    right = encoder(kept, norm_first=norm_first)
    assert severities("CKP001", right, data[0][0], checkpoint=kept, eval_fn=accuracy) == []


def test_placement_is_not_judged_without_a_loss_or_a_checkpoint(reverser: Any) -> None:
    norm_first, kept, data = reverser
    model = encoder(kept, norm_first=norm_first)
    assert "needs a loss" in why_not("CKP001", model, data[0][0], checkpoint=kept)
    assert "needs the checkpoint" in why_not("CKP001", model, data[0][0], loader=data)


def test_a_key_alone_does_not_make_layer_norms_with_shifts_into_rms_norms() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.3, 0.5)
    features = torch.randn(4, 6)
    assert findings("CKP002", model, features, config={"rms_norm_eps": 1e-5}) == []
    (found,) = findings("CKP002", model, features, config={"model_type": "llama", "rms_norm_eps": 1e-5})
    assert found.severity == "error"


def test_a_norm_that_was_dropped_is_placed_where_it_would_stand() -> None:
    model = trained()
    kept = state(model)
    for where, path in (("0.inner", "0"), ("0.norm.scale", "0.norm"), ("final", "")):
        more = {f"{where}.weight": torch.full((8,), 1.3), f"{where}.bias": torch.full((8,), 0.2)}
        model.load_state_dict(kept | more, strict=False)
        (found,) = findings("CKP004", model, x(), checkpoint=kept | more)
        assert (found.path, found.paths) == (path, (path,))
