"""Names the convention of a foreign norm by what it does, never by what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from normwise.errors import NoNorm, NotKnown
from normwise.layers._convention_frozen import frozen_structure, momentum_of, moves
from normwise.layers._convention_probe import Probe, quiet
from normwise.layers._convention_rounding import Match, best_match, families_of
from normwise.layers._convention_structure import ELEMENTWISE, is_elementwise, structure_of
from normwise.spec import NormSpec

__all__ = ["convention_of", "families_of", "match_of"]


def convention_of(
    module: nn.Module,
    size: int | Sequence[int] | None = None,
    *,
    example: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> NormSpec:
    """Return the spec that a foreign norm module computes, found by calling a copy of it.

    What it computes is measured in float64: over which elements a statistic is taken, whether they are centred,
    which statistic divides, the size and the place of eps, what is added to the gain. How it rounds is found by
    comparing every rounding a spec can describe with the module, bit by bit, on float32, bfloat16, float16 and
    mixed inputs, with rows from small to large and with rows so small that eps decides; dtypes that the module
    refuses are left out. The nearest spec is returned: ``match_of`` says on which dtypes it is equal to the bit.
    Elsewhere it is within 4 units in the last place of half precision, 16 of float32, of the largest of result,
    shift and half the gain: sums and products in another order differ so.

    The module itself is not called and not changed; nor are its hooks, gradients and mode, or any random state.
    Axes count in the layout that was tried: [B, T, H], else channels first with one and with two more axes;
    ``example`` chooses another. Norms that compute the same there have one name: an InstanceNorm without
    parameters is a norm over the trailing axes. A batch norm is measured in training, and then in evaluation.

    Args:
        module: takes one floating tensor, or two (the second is a gate), and returns one of the same shape.
        size: sizes of the trailing axes, or the channels, where no parameter or buffer has them.
        example: an input whose shape to use, or an input and a gate.

    Raises:
        NotKnown: no spec describes it; ``why`` says how it differs from all of them. ``NoNorm`` where it is none.

    Examples:
        >>> spec = convention_of(nn.LayerNorm(8, eps=1e-6))
        >>> spec.kind, spec.eps, spec.form
        (<Kind.LAYER: 'layer'>, 1e-06, <Form.TORCH: 'torch'>)
        >>> convention_of(nn.Linear(8, 8))
        Traceback (most recent call last):
        normwise.errors.NoNorm: no statistic of its input divides it: ...
    """
    return match_of(module, size, example=example).spec


def match_of(
    module: nn.Module,
    size: int | Sequence[int] | None = None,
    *,
    example: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Match:
    """Return the spec of ``convention_of``, how near it comes on each pair of dtypes, and the names of its operands."""
    with quiet():
        probe = Probe(module, size, example)
        training = probe.is_training()
        probe.train(True)
        if moves(probe):
            return _running_match(probe)
        probe.train(training)
        if is_elementwise(probe):
            structure = frozen_structure(probe)
            if structure is None:
                raise NoNorm(ELEMENTWISE)
            return best_match(probe, structure)
        return best_match(probe, structure_of(probe))


def _running_match(probe: Probe) -> Match:
    """Return the match of a norm in training, whose buffers must be the running statistics of evaluation."""
    match = best_match(probe, structure_of(probe))
    probe.train(False)
    held = frozen_structure(probe)
    if held is None:
        raise NotKnown("its buffers move in training, but are not the mean and variance that evaluation uses")
    roles = best_match(probe, held).roles
    probe.train(True)
    return replace(match, spec=replace(match.spec, running=True, momentum=momentum_of(probe, held)), roles=roles)
