"""Every refusal of functions, layers, kernels and specs: what was asked, what was given, one next step."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normwise
from normwise import functional as nf
from normwise import layers
from normwise.spec import Gate, NormSpec, Statistic, Weight, reference

SOURCE = Path(normwise.__file__).parent
# Refusals that need other processes, a model or a GPU, held to their words in a test of their own.
ELSEWHERE = {"kernels/_triton_rows.py", "layers/_collectives.py", "layers/sync_batch_norm.py", "layers/statistics.py"}

X, SEQUENCES, IMAGES = torch.ones(2, 3, 6), torch.ones(2, 4, 5), torch.ones(2, 4, 3, 3)
INTEGERS = torch.ones(2, 6, dtype=torch.long)
LENGTHS = torch.tensor([5, 2])
WRONG: dict[str, Any] = {"3.0": 3.0, "none": None, "tuple": (8,), "list": [1.0], "size": 6.5, "scope": "channel"}

Bad = tuple[Callable[[], Any], type[Exception], str]

BAD: dict[str, Bad] = {
    # functional/_checks.py
    "no tensor": (lambda: nf.layer_norm(WRONG["list"], 1), TypeError, r"layer_norm\(\) .* given list; wrap it"),
    "integers": (lambda: layers.LayerNorm(6)(INTEGERS), TypeError, r"LayerNorm .* given torch.int64; .*x.float\(\)"),
    "integers, batch": (lambda: layers.BatchNorm1d(6)(INTEGERS), TypeError, r"BatchNorm1d .* given torch.int64"),
    "integers, DyT": (lambda: layers.DynamicTanh(6)(INTEGERS), TypeError, r"DynamicTanh .* given torch.int64"),
    "list, Derf": (lambda: layers.Derf(6)([1.0]), TypeError, r"Derf .* given list"),
    "size no number": (
        lambda: layers.RMSNorm(WRONG["size"]),
        TypeError,
        r"RMSNorm needs whole numbers .* given 6.5; .*x.shape",
    ),
    "empty shape": (lambda: layers.LayerNorm(()), ValueError, r"LayerNorm .* given normalized_shape=\(\); .*x.shape"),
    "size of 0": (lambda: nf.rms_norm(X, (3, 0)), ValueError, r"rms_norm\(\) .* each 1 or more, given .*\(3, 0\);"),
    "trailing shape": (lambda: layers.RMSNorm(4)(X), ValueError, r"RMSNorm .* sizes \[4\], given .*6\]; build"),
    "too few axes": (lambda: nf.layer_norm(X[0, 0], (3, 6)), ValueError, r"sizes \[3, 6\], given .* \[6\]; build it"),
    "weight shape": (
        lambda: nf.layer_norm(X, 6, torch.ones(3)),
        ValueError,
        r"a weight of shape \[6\], given \[3\]; reshape it",
    ),
    "bias shape": (
        lambda: nf.group_norm(IMAGES, 2, None, torch.ones(3)),
        ValueError,
        r"a bias of shape \[4\], given \[3\];",
    ),
    "running shape": (
        lambda: nf.batch_norm(IMAGES, torch.ones(3), torch.ones(4)),
        ValueError,
        r"running_mean of shape \[4\], given",
    ),
    "scale shape": (
        lambda: layers.ModulatedLayerNorm(6)(X, torch.ones(2, 6)),
        ValueError,
        r"ModulatedLayerNorm needs a scale that broadcasts .*\[2, 3, 6\], given .* \[2, 6\]; .*scale.unsqueeze\(1\)",
    ),
    "shift shape": (
        lambda: nf.modulated_rms_norm(X, 6, torch.ones(6), torch.ones(5)),
        ValueError,
        r"needs a shift .* \[5\]; give",
    ),
    "norm() mask": (
        lambda: nf.norm(NormSpec(axes=(-2, -1)), X, mask=torch.ones(2, 3).bool()),
        ValueError,
        r"norm\(\) needs a mask that broadcasts .*\[2, 3, 6\], given a mask of shape \[2, 3\]; .*mask.unsqueeze",
    ),
    "norm() weight": (lambda: layers.Norm(NormSpec(), 5)(X), ValueError, r"norm\(\) needs a weight .* \[5\]; give"),
    "mask no tensor": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, mask=[True]),
        TypeError,
        r"BatchNorm1d needs a mask as a tensor, given list; wrap",
    ),
    "mask no bool": (
        lambda: nf.norm(NormSpec(), X, mask=torch.ones(2, 3, 1)),
        TypeError,
        r"bool mask, True = real, given torch.float32;",
    ),
    "groups": (lambda: layers.GroupNorm(3, 4), ValueError, r"GroupNorm splits 4 .* num_groups=3; pass a divisor of 4"),
    "groups, function": (lambda: nf.group_norm(IMAGES, 0), ValueError, r"group_norm\(\) .* num_groups=0; pass a div"),
    "parts, norm()": (lambda: nf.norm(NormSpec(groups=4), X), ValueError, r"norm\(\) splits 6 .* groups=4; pass"),
    "no part": (lambda: nf.norm(NormSpec(partial=0.1), X), ValueError, r"n = 6 and partial=0.1; change spec.partial"),
    "one axis, frozen": (
        lambda: layers.FrozenBatchNorm(3, channel_dim=-1)(torch.ones(3)),
        ValueError,
        r"FrozenBatchNorm needs a batch axis .* given shape \[3\]; add an axis",
    ),
    "gated spec": (
        lambda: layers.RMSNorm(6, spec=layers.FAMILIES["mamba2-gated"]),
        ValueError,
        r"RMSNorm computes norms with gate='none', given .* gate='before'; pass",
    ),
    "gated groups": (lambda: layers.GatedRMSNorm(6, groups=4), ValueError, r"GatedRMSNorm splits 6 .* groups=4; pass"),
    "gated groups of 0": (lambda: nf.gated_rms_norm(X, X, groups=0), ValueError, r"splits 6 .* groups=0; pass"),
    "no channel axis": (
        lambda: layers.BatchNorm(6, channel_dim=4)(X),
        ValueError,
        r"axis 4, given .* 3 axes, shape \[2, 3, 6\]; pass",
    ),
    "num_features": (
        lambda: layers.BatchNorm2d(5)(IMAGES),
        ValueError,
        r"BatchNorm2d has num_features=5 .* given 4 .*; build it with",
    ),
    "num_features, instance": (
        lambda: layers.InstanceNorm1d(5)(SEQUENCES),
        ValueError,
        r"num_features=5 .* given 4 there",
    ),
    "num_features, frozen": (lambda: layers.FrozenBatchNorm(5)(IMAGES), ValueError, r"num_features=5 .* given 4 there"),
    "num_channels": (lambda: layers.GroupNorm(1, 5)(IMAGES), ValueError, r"num_channels=5 .* given 4 there .*; build"),
    "num_channels, channel": (
        lambda: layers.ChannelRMSNorm(5)(IMAGES),
        ValueError,
        r"num_channels=5 on axis 1, given 4",
    ),
    "batch of 1 axis": (lambda: nf.batch_norm(X[0, 0]), ValueError, r"batch axis and channels, given shape \[6\]; add"),
    "nothing to use": (
        lambda: nf.batch_norm(IMAGES),
        ValueError,
        r"running_mean and running_var, given None; pass them",
    ),
    "one value": (
        lambda: layers.BatchNorm1d(6)(torch.ones(1, 6)),
        ValueError,
        r"one value per channel .* \[1, 6\]; use a larger batch",
    ),
    "instance of 2 axes": (
        lambda: nf.instance_norm(X[0]),
        ValueError,
        r"\[N, C, \*\] .* given shape \[3, 6\]; use layer",
    ),
    "instance, nothing to use": (
        lambda: nf.instance_norm(IMAGES, use_input_stats=False),
        ValueError,
        r"use_input_stats=False .* given None; pass",
    ),
    "one value of a sample": (
        lambda: layers.InstanceNorm1d(4)(torch.ones(2, 4, 1)),
        ValueError,
        r"per sample and channel, .* \[2, 4, 1\]; use",
    ),
    "norm() axes": (
        lambda: nf.norm(NormSpec(axes=(-4,)), X),
        ValueError,
        r"axes \[-4\], given an input of 3 axes, .*; change",
    ),
    "group of 1 axis": (
        lambda: nf.group_norm(X[0, 0], 2),
        ValueError,
        r"needs \[N, C, \*\], given shape \[6\]; add the",
    ),
    # functional/hidden.py
    "many gains": (
        lambda: nf.scale_norm(X, torch.ones(6)),
        ValueError,
        r"one scalar gain, given .* \[6\]; use rms_norm",
    ),
    "l2 axes": (
        lambda: layers.L2Norm(3)(X),
        ValueError,
        r"l2_norm\(\) over dim=\[3\], given an input of 3 axes, .*; pass axes",
    ),
    "partial": (
        lambda: nf.partial_rms_norm(X, p=0.1),
        ValueError,
        r"int\(H \* p\) .* given H = 6 and p = 0.1; pass a p",
    ),
    "gate shape, function": (
        lambda: nf.gated_rms_norm(X, X[0]),
        ValueError,
        r"shape \[2, 3, 6\], given a gate .*; expand",
    ),
    "residual": (
        lambda: layers.AddRMSNorm(6)(X, X[0]),
        ValueError,
        r"AddRMSNorm adds .* \[3, 6\] to .* \[2, 3, 6\]; expand",
    ),
    "lp order": (lambda: nf.lp_norm(X, p=0), ValueError, r"given p = 0 .*; pass a p above 0"),
    "lp axes": (lambda: nf.lp_norm(X, 1, 3), ValueError, r"over dim=\[3\], given an input of 3 axes, .*; pass axes"),
    # kernels/__init__.py
    "kernel": (
        lambda: layers.RMSNorm(6, kernel="fast"),
        ValueError,
        r"kernel='fast' is none of auto, .*eager; use kernel='auto'",
    ),
    "kernel that refuses": (
        lambda: nf.rms_norm(X, 6, eps=0.0, kernel="cpu"),
        ValueError,
        r"kernel='cpu' does not take this call: .*; use kernel='auto'",
    ),
    # functional/masks.py
    "lengths no tensor": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, lengths=[5, 2]),
        TypeError,
        r"lengths are a tensor, given list; wrap",
    ),
    "lengths no numbers": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, lengths=LENGTHS.float()),
        TypeError,
        r"given torch.float32; .*lengths.long",
    ),
    "lengths axes": (
        lambda: nf.mask_of_lengths(LENGTHS[:, None], 5),
        ValueError,
        r"given shape \[2, 1\]; pass shape \[B\]",
    ),
    "lengths above T": (
        lambda: layers.InstanceNorm1d(4)(SEQUENCES, lengths=LENGTHS + 1),
        ValueError,
        r"out of T = 5, given 3 to 6; pass",
    ),
    "negative lengths": (
        lambda: layers.GroupNorm(2, 4)(SEQUENCES, lengths=LENGTHS - 3),
        ValueError,
        r"out of T = 5, given -1 to 2; pass",
    ),
    "mask and lengths": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, mask=torch.ones(2, 5).bool(), lengths=LENGTHS),
        ValueError,
        r"takes mask or lengths, given both; drop lengths",
    ),
    "mask shape": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, mask=torch.ones(2, 4).bool()),
        ValueError,
        r"a mask of shape \[2, 5\] .* given \[2, 4\]; pass one value",
    ),
    "lengths of images": (
        lambda: layers.BatchNorm2d(4)(IMAGES, lengths=LENGTHS),
        ValueError,
        r"one axis .* \[2, 4, 3, 3\]; pass mask= instead",
    ),
    "lengths count": (
        lambda: layers.BatchNorm1d(4)(SEQUENCES, lengths=torch.tensor([5, 2, 1])),
        ValueError,
        r"one length a sample, 2 of them .* given shape \[3\]; pass lengths of shape \[2\]",
    ),
    # layers
    "no channels": (lambda: layers.BatchNorm1d(0), ValueError, r"BatchNorm1d .* given num_features=0; pass 1 or more"),
    "no whole channels": (
        lambda: layers.BatchNorm1d(WRONG["3.0"]),
        TypeError,
        r"num_features=3.0 of type float; pass an int",
    ),
    "no frozen channels": (lambda: layers.FrozenBatchNorm(0), ValueError, r"FrozenBatchNorm .* num_features=0; pass 1"),
    "no grouped channels": (lambda: layers.GroupNorm(1, 0), ValueError, r"GroupNorm .* num_channels=0; pass 1 or more"),
    "no whole groups": (
        lambda: layers.GroupNorm(WRONG["3.0"], 4),
        TypeError,
        r"GroupNorm .* num_groups=3.0 of type float",
    ),
    "no eps": (
        lambda: layers.BatchNorm1d(3, WRONG["none"]),
        ValueError,
        r"adds eps .* given None; pass a number",
    ),
    "no whole head": (lambda: layers.QKNorm(WRONG["3.0"]), TypeError, r"QKNorm .* head_dim=3.0 of type float"),
    "several axes, partial": (
        lambda: layers.PartialRMSNorm(WRONG["tuple"]),
        TypeError,
        r"normalized_shape=\(8,\) of type tuple",
    ),
    "several axes, adaptive": (
        lambda: layers.AdaLayerNorm(WRONG["tuple"], 4),
        TypeError,
        r"AdaLayerNorm .* of type tuple",
    ),
    "a spec that centres": (
        lambda: layers.RMSNorm(8, spec=layers.FAMILIES["gpt2"]),
        ValueError,
        r"RMSNorm computes norms with center=False, given a spec with center=True; use LayerNorm",
    ),
    "axes of BatchNorm2d": (
        lambda: layers.BatchNorm2d(4)(SEQUENCES),
        ValueError,
        r"takes inputs of 4 axes, given 3, shape .*; BatchNorm takes any",
    ),
    "no channels of a position": (
        lambda: layers.ChannelLayerNorm(0),
        ValueError,
        r"given num_channels=0; pass 1 or more",
    ),
    "another kind": (
        lambda: layers.RMSNorm.like("gpt2", 6),
        ValueError,
        r"'gpt2' is of kind 'layer', asked for 'rms'; ",
    ),
    "no family": (lambda: layers.RMSNorm.like("lama", 6), ValueError, r"no family 'lama' is known here; "),
    "nothing to freeze": (
        lambda: layers.FrozenBatchNorm.from_batch_norm(nn.BatchNorm1d(4, track_running_stats=False)),
        ValueError,
        r"BatchNorm1d keeps no running statistics to freeze; give",
    ),
    "gate shape": (
        lambda: layers.GatedRMSNorm(6)(X, X[0]),
        ValueError,
        r"GatedRMSNorm .* given a gate of shape \[3, 6\]; exp",
    ),
    "axes of InstanceNorm2d": (
        lambda: layers.InstanceNorm2d(4)(torch.ones(4, 4)),
        ValueError,
        r"of 4 axes, or 3 without a batch, given 2, .*; add",
    ),
    "condition": (
        lambda: layers.AdaLayerNorm(6, 3)(X, torch.ones(2, 4)),
        ValueError,
        r"has 3 features .* given shape \[2, 4\]; build",
    ),
    "running spec": (
        lambda: layers.Norm(NormSpec(running=True), 6),
        ValueError,
        r"given a spec with running=True; use BatchNorm",
    ),
    "partial layer": (lambda: layers.PartialRMSNorm(6, 0.1), ValueError, r"given H = 6 and p = 0.1; pass a p"),
    "over": (lambda: layers.QKNorm(6, over="heads"), ValueError, r"over='all_heads', given 'heads'; pass one of them"),
    "no heads": (
        lambda: layers.QKNorm(0),
        ValueError,
        r"QKNorm needs heads .* given \{'head_dim': 0.*; pass 1 or more",
    ),
    "heads unknown": (
        lambda: layers.QKNorm(6, over="all_heads"),
        ValueError,
        r"number of heads, given None; pass num_heads=",
    ),
    "queries": (
        lambda: layers.QKNorm(5)(X, X),
        ValueError,
        r"takes queries with 5 features .* \[2, 3, 6\]; split the heads",
    ),
    # spec
    "other statistic": (
        lambda: reference(NormSpec(statistic=Statistic.OTHER), X),
        ValueError,
        r"'other' names no formula .*; choose",
    ),
    "weight of none": (
        lambda: reference(NormSpec(weight=Weight.NONE), X, X[0, 0]),
        ValueError,
        r"weight of shape \(6,\) .* weight='none'; drop",
    ),
    "bias of none": (
        lambda: nf.norm(NormSpec(), X, None, X[0, 0]),
        ValueError,
        r"bias of shape \(6,\) .* bias=False; drop",
    ),
    "no gate": (
        lambda: nf.norm(NormSpec(gate=Gate.AFTER), X),
        ValueError,
        r"no gate was given .* gate='after'; pass gate=",
    ),
    "gate of none": (lambda: nf.norm(NormSpec(), X, gate=X), ValueError, r"a gate .* gate='none'; drop it"),
    "modulation": (
        lambda: nf.norm(NormSpec(), X, scale=X),
        ValueError,
        r"neither scale nor shift, given: scale; pass exactly",
    ),
    "unknown word": (
        lambda: NormSpec(scope=WRONG["scope"]),
        ValueError,
        r"no norm is like this: scope='channel' is none of ",
    ),
    "contradiction": (lambda: NormSpec(axes=(1,)), ValueError, r"no norm is like this: axes=\(1,\) must be negative"),
}

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"axes": ()}, r"axes=\(\) must be negative numbers, at least one"),
    ({"axes": (-1, -1)}, r"axes=\(-1, -1\) names an axis twice"),
    ({"eps": -1.0}, r"eps=-1.0 must be a finite number, 0 or more"),
    ({"groups": 0}, r"groups=0 must be 1 or more"),
    ({"groups": 2, "scope": "batch"}, r"groups=2 .* scope='batch'; use scope='group'"),
    ({"biased": False}, r"biased=False is about a variance, but statistic='mean_square'"),
    ({"partial": 1.5}, r"partial=1.5 is a fraction in \(0, 1\]"),
    ({"statistic": "completed", "center": True}, r"statistic='completed' is for one axis, not centred"),
    ({"weight": "none", "weight_on_input": True}, r"weight_on_input=True need a gain, but weight='none'"),
    ({"momentum": 0.1}, r"momentum=0.1 moves running statistics, but running=False"),
    ({"gate_activation": "relu"}, r"gate_activation='relu' is neither 'silu' nor 'sigmoid'"),
    ({"stats_dtype": "int8"}, r"stats_dtype='int8', .* are not among None and"),
]


@pytest.mark.parametrize("name", BAD)
def test_says_what_is_wrong_and_what_to_do(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message) as raised:
        call()
    told = str(raised.value)
    assert told.startswith("no norm is like this: ") or "; " in told  # one next step
    assert "\n" not in told


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS, ids=[" ".join(each) for each, _ in CONTRADICTIONS])
def test_a_spec_names_the_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormSpec(**fields)


# -- none is forgotten ------------------------------------------------------------------------


def refusals() -> set[tuple[str, int]]:
    """Return file and first line of every ``raise`` of a ValueError or TypeError in the packages tested here."""
    found = set()
    for package in ("functional", "layers", "kernels", "spec"):
        for path in (SOURCE / package).glob("*.py"):
            name = f"{package}/{path.name}"
            raises = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
            found |= {
                (name, each.lineno)
                for each in raises
                if isinstance(each.exc, ast.Call) and ast.unparse(each.exc.func) in ("ValueError", "TypeError")
            }
    return {(name, line) for name, line in found if name not in ELSEWHERE}


def test_every_raise_has_a_case() -> None:
    reached = set()
    for call, kind, _ in BAD.values():
        with pytest.raises(kind) as raised:
            call()
        last = raised.traceback[-1]
        reached.add((str(Path(last.path).relative_to(SOURCE)), last.lineno + 1))
    assert reached == refusals()


def test_every_contradiction_of_a_spec_has_a_case() -> None:
    tree = ast.parse((SOURCE / "spec" / "description.py").read_text())
    assert len(CONTRADICTIONS) == sum(isinstance(node, ast.Yield) for node in ast.walk(tree))


def test_a_refused_mask_leaves_the_running_statistics_alone() -> None:
    norm = layers.BatchNorm1d(4)
    before = [each.clone() for each in norm.buffers() if each.is_floating_point()]
    with pytest.raises(ValueError, match="mask"):
        norm(SEQUENCES, mask=torch.ones(2, 4).bool())
    assert all(map(torch.equal, before, [each for each in norm.buffers() if each.is_floating_point()]))
