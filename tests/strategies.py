"""Hypothesis strategies that the whole suite shares: a new oddity of shape or dtype is added here once."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from normwise.spec import Cast, Form, NormSpec, Statistic, Weight

__all__ = ["float64_tensors", "hidden_specs", "seeds"]

seeds = st.integers(min_value=0, max_value=2**31 - 1)


@st.composite
def float64_tensors(draw: st.DrawFn, *, min_hidden: int = 2) -> torch.Tensor:
    """Draw a float64 tensor [..., H] with one to four axes, a random mean and a scale over six decades."""
    leading = draw(st.lists(st.integers(1, 4), max_size=3))
    hidden = draw(st.integers(min_hidden, 33))
    generator = torch.Generator().manual_seed(draw(seeds))
    scale = 10.0 ** draw(st.integers(-3, 3))
    mean = draw(st.floats(-2.0, 2.0))
    return scale * (torch.randn(*leading, hidden, generator=generator, dtype=torch.float64) + mean)


@st.composite
def hidden_specs(draw: st.DrawFn, *, eps: float = 1e-6) -> NormSpec:
    """Draw a spec over the last axis: any center, statistic, eps position, cast and weight convention."""
    eps_inside = draw(st.booleans())
    statistic = draw(st.sampled_from([Statistic.VARIANCE, Statistic.MEAN_SQUARE, Statistic.L2]))
    weight = draw(st.sampled_from([Weight.NONE, Weight.VECTOR]))
    casts = [cast for cast in Cast if weight is Weight.VECTOR or cast is not Cast.TO_WEIGHT]
    return NormSpec(
        center=statistic is Statistic.VARIANCE and draw(st.booleans()),
        statistic=statistic,
        eps=eps,
        eps_inside=eps_inside,
        eps_clamp=not eps_inside and draw(st.booleans()),
        biased=statistic is not Statistic.VARIANCE or draw(st.booleans()),
        weight=weight,
        weight_offset=draw(st.sampled_from([0.0, 1.0])),
        factor=draw(st.sampled_from([1.0, 2.5])),
        cast=draw(st.sampled_from(casts)),
        form=draw(st.sampled_from(list(Form))),
    )
