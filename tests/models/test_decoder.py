"""The decoder computes what its placement says, to the last digits of float64, and decodes step by step."""

from __future__ import annotations

import pytest
import torch

from normwise import placements
from normwise.models import Decoder
from tests.models import plain_loop
from tests.nearness import relative_error

HEADS, WIDTH, WORDS = 2, 16, 23


def built(placement: str, depth: int) -> Decoder:
    """Return a small decoder of which every number is random: gains, factors and all.

    Matrices are small: deep stacks of large ones multiply the last digits of whatever computes them.
    """
    torch.manual_seed(depth)
    model = Decoder(WORDS, WIDTH, depth, HEADS, placement=placement, eps=1e-5, context=32, init="normal").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * (0.02 if "branch_gain" in name else 0.2))
    return model


def ids(steps: int = 9) -> torch.Tensor:
    return torch.randint(WORDS, (2, steps), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("depth", [2, 12, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("placement", placements.names())
def test_every_placement_is_the_loop_that_its_paper_writes(placement: str, depth: int) -> None:
    model = built(placement, depth)
    given = model(ids())
    truth = plain_loop.logits(placement, model.state_dict(), ids(), HEADS, depth)
    assert relative_error(given, truth) < 1e-12
    upstream = torch.randn(given.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad((given * upstream).sum(), list(parameters.values()))
    leaves = {name: each.detach().requires_grad_() for name, each in parameters.items()}
    owners = {id(each): name for name, each in parameters.items()}  # one parameter may have several names
    named = {name: leaves[owners[id(each)]] for name, each in model.named_parameters(remove_duplicate=False)}
    wanted = torch.autograd.grad(
        (plain_loop.logits(placement, named, ids(), HEADS, depth) * upstream).sum(), list(leaves.values())
    )
    for name, grad, other in zip(parameters, grads, wanted, strict=True):
        assert relative_error(grad, other) < 1e-11, name


@pytest.mark.parametrize("placement", placements.names())
def test_decoding_step_by_step_is_the_full_pass(placement: str) -> None:
    model, given = built(placement, 3), ids()
    cache = model.new_cache()
    steps = [model(given[:, :4], cache=cache), *(model(given[:, i : i + 1], cache=cache) for i in range(4, 9))]
    assert relative_error(torch.cat(steps, 1), model(given)) < 1e-12


def test_no_later_token_is_seen() -> None:
    model, given = built("pre", 2), ids()
    changed = given.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % WORDS
    assert torch.equal(model(given)[:, :5], model(changed)[:, :5])
