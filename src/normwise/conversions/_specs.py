"""What the spec of a norm becomes."""

from __future__ import annotations

from dataclasses import replace

from normwise.spec import Form, NormSpec, Statistic

__all__ = ["without_mean"]


def without_mean(spec: NormSpec, size: int) -> NormSpec:
    """Return the spec of the RMSNorm that a LayerNorm is on centred input.

    A variance that divides by D - 1 is the mean square times D / (D - 1): the factor goes to the output and to eps.
    """
    bare = replace(spec, center=False, statistic=Statistic.MEAN_SQUARE, biased=True, form=Form.RECIPROCAL)
    if spec.biased:
        return bare
    root = (size / (size - 1)) ** 0.5
    eps = None if spec.eps is None else spec.eps / (root * root if spec.eps_inside else root)
    return replace(bare, factor=spec.factor / root, eps=eps)
