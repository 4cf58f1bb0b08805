"""Every norm of transformers beside our spec of it: the same bits, and gradients at least as near to float64.

The same bits are the promise of the eager kernel; the best kernel may be one unit in the last place away.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from normwise import kernels
from normwise.kernels import eager
from normwise.layers import FAMILIES, LayerNorm, RMSNorm
from normwise.spec import family_name, reference
from tests.layers.norm_calls import Compute, build, class_of, operands, run_ours, run_theirs
from tests.layers.transformers_norms import BLOCKS, NORMS, NOT_EXPRESSIBLE, WIDTH, Norm
from tests.layers.transformers_source import norm_sources

pytest.importorskip("transformers")

OWN = [(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
MIXED = [(dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)]  # float32 gains beside halves
DTYPES = {"any": OWN + MIXED, "own": OWN, "float32": OWN[:1] + MIXED}
TOLD = {name for norm in NORMS for name in norm.names}
REFUSED = {name: why for names, why in NOT_EXPRESSIBLE.items() for name in names.split()}
# Times the error of the class, at most: mean and largest. Torch's group and batch norms sum gradients in float64,
# which ours have within float32; behind a modulation stands a half-precision Linear; a temperature is 4 numbers.
FACTORS = (1.05, 1.8)
# Compiled kernels add up in another order, which has another error of the same size: the mean of two times 32 such
# errors is known within a fifth each, and the largest of them scatters more.
OTHER_ORDER = (1.5, 2.5)
LOOSE: dict[str, tuple[float, float]] = dict.fromkeys(
    ("batch", "grouped", "grouped_sequence", "modulated", "qk"), (2.5, 2.5)
)

each_norm = pytest.mark.parametrize("norm", NORMS, ids=[f"{norm.names[0]}-{norm.call}" for norm in NORMS])
LIKE = [norm for norm in NORMS if norm.call == "plain" and norm.spec in FAMILIES.values() and norm.spec.kind != "scale"]
LIKE = [norm for norm in LIKE if "moonshine" not in norm.classes]  # its gain is named gamma
WITH_CONFIG = (
    "albert beit bert big-bird bloom camembert canine codegen convbert ctrl deberta-v2 deit dinov2 "
    "dinov2-with-registers dpt electra ernie falcon flaubert fnet gpt-bigcode gpt-neo gpt-neox gpt2 gptj hiera hubert "
    "layoutlm longformer luke markuplm modernbert modernbert-decoder mpnet mpt mra nystromformer openai-gpt phi pvt "
    "rembert roberta roformer stablelm starcoder2 swin tapas unispeech vilt vit vit-mae vit-msn wav2vec2 wavlm xlm "
    "xlm-roberta xlnet yolos"
)
Run = Callable[[Norm, nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def distinct(norm: Norm) -> list[str]:
    """Return one class for each distinct source among the classes of a convention."""
    return list({norm_sources()[name]: name for name in reversed(norm.names)}.values())


def ulps(y: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many numbers of the dtype lie between the two at most."""
    integer = {2: torch.int16, 4: torch.int32}[y.element_size()]

    def rank(t: torch.Tensor) -> torch.Tensor:
        bits = t.contiguous().view(integer).long()
        return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)

    return int((rank(y) - rank(other)).abs().max())


def differences(norm: Norm, name: str, seed: int = 0) -> list[str]:
    """Return for each pair of dtypes what differs from the class: nothing, if the spec is right."""
    found = []
    for dtype, weight_dtype in DTYPES[norm.weights]:
        theirs, ours = outputs(norm, name, dtype, weight_dtype, eager.forward, seed)
        if theirs.dtype is not ours.dtype or theirs.shape != ours.shape:
            found.append(f"{name}: {ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}")
        elif not torch.equal(theirs, ours) and (apart := ulps(theirs, ours)) > norm.ulps:
            found.append(f"{name}: {apart} ulp apart for x {dtype}, weight {weight_dtype}")
    return found


def outputs(
    norm: Norm, name: str, dtype: torch.dtype, weight_dtype: torch.dtype, compute: Compute, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the class gives and what ours does, with the same random parameters and input."""
    generator = torch.Generator().manual_seed(seed)
    module = build(norm, name, weight_dtype, generator)
    given = operands(norm, dtype, weight_dtype, generator)
    with torch.no_grad():
        return run_theirs(norm, module, given), run_ours(norm, module, given, compute)


def gradients(run: Run, norm: Norm, module: nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().clone().requires_grad_(name != "mask") for name, t in given.items()}
    y = run(norm, module, leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(given["x"].dtype).to(y.dtype))
    wanted = [*leaves.items(), *module.named_parameters()]
    found = {name: t.grad.double() for name, t in wanted if t.grad is not None}
    module.zero_grad()
    return found


def widened(module: nn.Module, given: dict[str, torch.Tensor]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return copy.deepcopy(module).double(), {name: t.double() for name, t in given.items()}


def tally() -> str:
    """Return how many of the norms of transformers agree bit for bit, nearly, or not at all."""
    sources, exact, near = norm_sources(), set[str](), set[str]()
    for norm in NORMS:
        agreeing = {sources[name] for name in distinct(norm) if not differences(norm, name)}
        (near if norm.ulps else exact).update(name for name in norm.names if sources[name] in agreeing)
    return (
        f"{len(sources)} classes say norm: {len(exact - near)} bit for bit, {len(near)} within 8 ulp, "
        f"{len(REFUSED)} not expressible, {len(sources) - len(TOLD) - len(REFUSED)} blocks around a norm"
    )


def test_every_class_that_says_norm_is_told() -> None:
    blocks = {name for name in norm_sources() if any(re.fullmatch(each, name.split(".")[1]) for each in BLOCKS)}
    untold = sorted(set(norm_sources()) - TOLD - set(REFUSED) - blocks)
    assert untold == [], "add these to tests/layers/transformers_norms.py"
    assert TOLD & set(REFUSED) == TOLD & blocks == set()
    assert (TOLD | set(REFUSED)) <= set(norm_sources())


@each_norm
def test_values_and_dtypes_are_those_of_the_class_bit_for_bit(norm: Norm) -> None:
    assert [line for name in distinct(norm) for line in differences(norm, name)] == []


@each_norm
def test_the_best_kernel_is_within_one_ulp_of_the_eager_one(norm: Norm) -> None:
    for dtype, weight_dtype in DTYPES[norm.weights]:
        defined, best = (
            outputs(norm, norm.names[0], dtype, weight_dtype, compute)[1]
            for compute in (eager.forward, kernels.forward)
        )
        assert best.dtype is defined.dtype
        # of numbers below 1 that of 1: what is left of a sum of gain and shift may be as small as it likes
        size = defined.double().abs().clamp_min(1.0).log2().floor().exp2()
        apart = ((best.double() - defined.double()).abs() / size)[defined.isfinite()]
        assert apart.max() <= torch.finfo(best.dtype).eps, (dtype, weight_dtype)


@pytest.mark.slow
@each_norm
def test_values_are_those_of_every_class_by_itself(norm: Norm) -> None:
    assert [line for name in norm.names for line in differences(norm, name, seed=2)] == []


@each_norm
@pytest.mark.parametrize(
    ("compute", "factors"), [(eager.forward, FACTORS), (kernels.forward, OTHER_ORDER)], ids=["eager", "best"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_at_least_as_near_to_float64_as_those_of_the_class(
    norm: Norm, dtype: torch.dtype, compute: Compute, factors: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_dtype = torch.float32 if norm.weights == "float32" else dtype
    module = build(norm, norm.names[0], weight_dtype, generator)
    given = operands(norm, dtype, weight_dtype, generator)
    theirs, ours = (gradients(run, norm, module, given) for run in (run_theirs, partial(run_ours, compute=compute)))
    true = gradients(lambda n, m, t: run_ours(n, m, t, reference), norm, *widened(module, given))
    mean, largest = LOOSE.get(norm.call, factors)
    assert theirs.keys() == ours.keys() == true.keys()
    for name, wanted in true.items():
        finite = theirs[name].isfinite()  # pocket-tts overflows in float16
        error, allowed = (ours[name] - wanted).abs()[finite], (theirs[name] - wanted).abs()[finite]
        assert error.mean() <= mean * allowed.mean(), name
        assert error.max() <= largest * allowed.max(), name


def test_the_count_of_norms_that_agree() -> None:
    assert tally() == (
        "393 classes say norm: 292 bit for bit, 1 within 8 ulp, 8 not expressible, 92 blocks around a norm"
    )


@each_norm
def test_eps_of_a_family_is_the_default_of_its_class(norm: Norm) -> None:
    if norm.spec not in FAMILIES.values():
        return  # the spec of no family
    defaults = {
        parameter.default
        for name in distinct(norm)
        for parameter in inspect.signature(class_of(name)).parameters.values()
        if parameter.name == "eps" and parameter.default is not inspect.Parameter.empty
    }
    if norm.names[0] != "deberta.DebertaLayerNorm":  # its config says 1e-7 always, the class 1e-12
        assert defaults <= {norm.spec.eps}


def test_a_family_is_the_norm_of_the_folder_of_its_name() -> None:
    by_folder: dict[str, list[Norm]] = {}
    for norm in NORMS:
        for name in norm.names:
            by_folder.setdefault(name.partition(".")[0].replace("_", "-"), []).append(norm)
    checked = [name for name in FAMILIES if name in by_folder]
    wrong = [name for name in checked if all(FAMILIES[name] != replace(n.spec, axes=(-1,)) for n in by_folder[name])]
    assert wrong == []
    assert len(checked) > 60


def test_eps_of_a_family_with_a_norm_of_torch_is_the_one_of_its_config() -> None:
    auto = pytest.importorskip("transformers").AutoConfig
    known = {family_name(name): name for name in importlib.import_module(auto.__module__).CONFIG_MAPPING_NAMES}
    for family in WITH_CONFIG.split():
        config = auto.for_model(known[family])
        keys = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        told = {eps for key in keys if (eps := getattr(config, key, None)) is not None}
        assert told == {FAMILIES[family].eps}, family


@pytest.mark.parametrize("norm", LIKE, ids=[norm.names[0] for norm in LIKE])
def test_a_layer_like_a_family_takes_its_state_dict_and_returns_its_values(norm: Norm) -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = build(norm, norm.names[0], torch.float32, generator)
    family = next(name for name, spec in FAMILIES.items() if spec == norm.spec)
    ours = (LayerNorm if norm.spec.center else RMSNorm).like(family, WIDTH, kernel="eager")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = operands(norm, torch.float32, torch.float32, generator)["x"]
    assert torch.equal(ours(x), theirs(x))
    assert ours.eps == norm.spec.eps


@pytest.mark.parametrize("family", ["imagegpt", "gradium-timestep"])
def test_float16_rows_whose_squares_overflow_in_the_class_stay_right_and_others_equal_it(family: str) -> None:
    norm = next(norm for norm in NORMS if norm.spec == FAMILIES[family])
    generator = torch.Generator().manual_seed(4)
    module = build(norm, norm.names[0], torch.float16, generator)
    x = 30 * operands(norm, torch.float16, torch.float16, generator)["x"]
    overflows = x.float().abs().amax(-1) >= 256
    with torch.no_grad():
        theirs, ours = run_theirs(norm, module, {"x": x}), run_ours(norm, module, {"x": x})
    true = reference(norm.spec, x.double(), module.get_parameter("weight").double())
    assert 10 < overflows.sum() < 100
    assert torch.equal(ours[~overflows], theirs[~overflows])
    assert theirs[overflows].abs().max() == 0
    assert (ours - true).abs()[overflows].max() <= 4 * 2**-11 * true.abs().max()


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "Gemma3", "pocket-tts", "Qwen3.5", "imagegpt"])
def test_like_takes_names_as_people_write_them(family: str) -> None:
    assert RMSNorm.like(family, 8).spec == FAMILIES[re.sub("[_.]", "-", family.lower())]


def test_like_of_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no family 'lama' is known here; did you mean 'llama' or .*\?"):
        RMSNorm.like("lama", 8)


def test_like_of_another_kind_says_which() -> None:
    with pytest.raises(ValueError, match=r"'llama' is of kind 'rms', asked for 'layer'; pass spec=, or one of: alb"):
        LayerNorm.like("llama", 8)
    with pytest.raises(
        ValueError, match=r"'mamba2-gated' is of kind 'gated rms', asked for 'rms'; did you mean 'mamba2'"
    ):
        RMSNorm.like("mamba2-gated", 8)


if __name__ == "__main__":
    print(tally())
