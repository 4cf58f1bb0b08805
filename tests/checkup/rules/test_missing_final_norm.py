from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities

H = 8
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, placement: str = "pre") -> None:
        super().__init__()
        self.norm, self.after, self.mlp = nn.LayerNorm(H), nn.LayerNorm(H), nn.Linear(H, H)
        self.placement = placement

    def forward(self, x: Tensor) -> Tensor:
        match self.placement:
            case "pre":
                return x + self.mlp(self.norm(x))
            case "sandwich":
                return x + self.after(self.mlp(self.norm(x)))
            case "res-post":
                return x + self.after(self.mlp(x))
        return self.norm(x + self.mlp(x))


def stack(*tail: nn.Module, depth: int = 3, placement: str = "pre") -> nn.Sequential:
    return nn.Sequential(*(Block(placement) for _ in range(depth)), *tail)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def encoder(norm: nn.Module | None) -> nn.Module:
    layer = nn.TransformerEncoderLayer(H, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)


def test_a_head_on_the_raw_stream_is_a_warning_that_names_the_head() -> None:
    (found,) = findings("PLC001", stack(nn.Linear(H, 3)), X)
    assert found.severity == "warning"
    assert found.paths == ("2", "3")
    assert found.evidence["adds"] == 3


@pytest.mark.parametrize("between", [nn.Identity(), Pooled(), nn.Dropout(), nn.ReLU()], ids=lambda m: type(m).__name__)
def test_pooling_dropout_and_activations_do_not_stand_for_a_norm(between: nn.Module) -> None:
    assert severities("PLC001", stack(between, nn.Linear(H, 3)), X) == ["warning"]


@pytest.mark.parametrize("norm", [nn.LayerNorm(H), nn.RMSNorm(H)], ids=["layer", "rms"])
def test_a_final_norm_is_enough_also_after_pooling(norm: nn.Module) -> None:
    assert findings("PLC001", stack(norm, nn.Linear(H, 3)), X) == []
    assert findings("PLC001", stack(Pooled(), norm, nn.Linear(H, 3)), X) == []


def test_a_stream_that_is_the_output_is_only_worth_knowing() -> None:
    assert severities("PLC001", stack(), X) == ["info"]


def test_torchs_pre_norm_encoder_without_a_norm_is_worth_knowing_and_with_one_is_silent() -> None:
    assert severities("PLC001", encoder(None).eval(), X) == ["info"]
    assert findings("PLC001", encoder(nn.LayerNorm(H)).eval(), X) == []


def test_torchs_pre_norm_encoder_without_a_norm_under_a_head_is_a_warning() -> None:
    assert severities("PLC001", nn.Sequential(encoder(None), nn.Linear(H, 2)).eval(), X) == ["warning"]


@pytest.mark.parametrize("placement", ["post", "sandwich", "res-post"])
def test_stacks_that_normalize_the_stream_or_the_branch_need_no_final_norm(placement: str) -> None:
    assert findings("PLC001", stack(nn.Linear(H, 3), placement=placement), X) == []


def test_one_block_is_no_stack() -> None:
    assert findings("PLC001", stack(nn.Linear(H, 3), depth=1), X) == []


def test_a_head_that_normalizes_further_on_is_fine() -> None:
    assert findings("PLC001", stack(nn.Linear(H, H), nn.GELU(), nn.LayerNorm(H), nn.Linear(H, 3)), X) == []


def test_a_cosine_head_is_fine() -> None:
    class Cosine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(x, dim=-1)

    assert findings("PLC001", stack(nn.Linear(H, 3), Cosine()), X) == []


def test_a_stage_whose_stream_starts_the_next_stage_is_judged_at_the_last() -> None:
    stages = nn.Sequential(stack(), nn.Linear(H, H), stack(nn.LayerNorm(H), nn.Linear(H, 3)))
    assert findings("PLC001", stages, X) == []


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = stack()
        layer = nn.TransformerDecoderLayer(H, 2, 16, batch_first=True, norm_first=True)
        self.decoder, self.head = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(H)), nn.Linear(H, 3)

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        return self.head(self.decoder(x, self.encoder(source)))


def test_a_memory_without_a_norm_is_worth_knowing() -> None:
    assert severities("PLC001", EncoderDecoder().eval(), X, X + 1) == ["info"]


def test_a_convolution_behind_the_stream_is_worth_knowing_only() -> None:
    """A codec's or detector's neck was trained on the stream as it is."""

    class Neck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(H, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.transpose(1, 2))

    (found,) = findings("PLC001", stack(Neck()), X)
    assert found.severity == "info"


# -- what a checkpoint or a reference holds ------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self, *, final: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(H) if final else nn.Identity(), nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loaded(*, final: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    right, model = Headed(final=True), Headed(final=final)
    nn.init.uniform_(right.norm.weight, 0.5, 3.0)  # type: ignore[arg-type]
    model.load_state_dict(right.state_dict(), strict=False)
    return right, model


def test_a_checkpoint_with_a_closing_norm_that_the_model_lacks_is_proof() -> None:
    right, model = loaded()
    (found,) = findings("PLC001", model, X, checkpoint=right.state_dict())
    assert (found.severity, found.basis) == ("error", "proof")
    assert found.evidence["lost_norm"] == "norm"


def test_a_reference_shows_that_the_norm_put_in_brings_the_outputs_back() -> None:
    right, model = loaded()
    (found,) = findings("PLC001", model, X, reference=right)
    assert found.severity == "error"
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 1e-5 < 0.1 < found.counterfactual["before"]


def test_a_load_report_alone_names_it() -> None:
    _, model = loaded()
    info = {"missing_keys": [], "unexpected_keys": ["norm.weight", "norm.bias"]}
    assert severities("PLC001", model, X, load_info=info) == ["error"]


def test_a_reference_without_the_norm_shows_that_it_was_meant() -> None:
    _, model = loaded()
    assert severities("PLC001", model, X, reference=loaded()[1]) == ["info"]


def test_unused_vectors_that_close_nothing_are_no_proof() -> None:
    right, model = loaded()
    own = {k: v for k, v in right.state_dict().items() if not k.startswith("norm")}
    other = {"decoder.weight": torch.ones(H, H), "decoder.bias": torch.zeros(H), "blocks.7.norm.weight": torch.ones(H)}
    assert severities("PLC001", model, X, checkpoint=own | other) == ["warning"]


def test_a_backbone_that_returns_its_stream_is_not_blamed_for_a_norm_it_left_out() -> None:
    right, model = loaded()
    model.head = nn.Identity()
    assert severities("PLC001", model, X, checkpoint=right.state_dict()) == ["info"]


def test_a_checkpoint_that_is_none_is_no_evidence() -> None:
    _, model = loaded()
    assert severities("PLC001", model, X, checkpoint={"step": 3}) == ["warning"]
