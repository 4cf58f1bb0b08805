"""What a sublayer does to second moments at initialisation, forward and backward, by token.

P [T, T] are second moments of the stream between tokens, per feature; K [T, T] those of its gradient. A matrix of
independent numbers multiplies both by its mean square times its fan: sigma^2 = ||W||^2 / rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from normwise.theory._gauss import Function, covariance, slope
from normwise.theory._softmax import weight_moments

__all__ = ["AttentionBranch", "Branch", "MLPBranch", "correlation", "sigma", "visible"]


def correlation(moments: torch.Tensor) -> torch.Tensor:
    """Return moments after a norm: divided by the sizes of both tokens."""
    size = moments.diagonal().clamp_min(1e-300).sqrt()
    return moments / (size[:, None] * size[None, :])


def sigma(matrix: torch.Tensor) -> float:
    """Return the second moment that unit inputs get of a matrix [out, in]: fan_in * Var(W)."""
    return float(torch.linalg.vector_norm(matrix.detach(), dtype=torch.float64)) ** 2 / matrix.shape[0]


def visible(steps: int, *, causal: bool, window: int | None = None) -> torch.Tensor:
    """Return [T, T], 1 where query i sees key j."""
    seen = torch.ones(steps, steps, dtype=torch.float64)
    seen = seen.tril() if causal else seen
    return seen if window is None else seen.triu(1 - window)


class Branch(ABC):
    """A sublayer, as second moments see it."""

    @abstractmethod
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the moments of what it returns, for those of what it is given."""

    @abstractmethod
    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the moments of the gradient at its input, for those at its output."""


@dataclass(frozen=True, slots=True)
class MLPBranch(Branch):
    """down(act(up(x))), or down(act(gate(x)) * up(x))."""

    activation: Function
    up: float
    down: float
    gate: float = 0.0
    inner_norm: bool = False

    def _act(self, inputs: torch.Tensor, scale: float, *, derivative: bool = False) -> torch.Tensor:
        return covariance(slope(self.activation) if derivative else self.activation, inputs * scale)

    def _inner(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.gate:
            return self._act(inputs, self.up)
        return self._act(inputs, self.gate) * inputs * self.up

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return down * E[act act']."""
        inner = self._inner(inputs)
        return (correlation(inner) if self.inner_norm else inner) * self.down

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient through both factors where there is a gate."""
        inner = gradient * self.down
        if self.inner_norm:
            size = self._inner(inputs).diagonal().sqrt()
            inner = inner / (size[:, None] * size[None, :])
        if not self.gate:
            return inner * self._act(inputs, self.up, derivative=True) * self.up
        through_gate = self._act(inputs, self.gate, derivative=True) * inputs * self.up * self.gate
        return inner * (through_gate + self._act(inputs, self.gate) * self.up)


@dataclass(frozen=True, slots=True)
class AttentionBranch(Branch):
    """Attention that is uniform over the keys a query sees, plus what normal scores make of it."""

    visible: torch.Tensor  # [T, T], 1 where query i sees key j
    query: float
    key: float
    value: float
    out: float
    scale: float = 1.0  # of the scores, times the root of head_dim
    qk_norm: bool = False
    value_norm: bool = False
    inner_norm: bool = False

    def _scores(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each pair of queries, the weight that both put on equal keys, [T, T], and for each query the
        energy of its scores' gradient times their variance, [T]."""
        same, different, share = self._parts(inputs)
        mean, apart = same.diagonal(), (same.diagonal() - different.diagonal()).clamp_min(0)
        queries = inputs * self.query * self.key
        if self.qk_norm:
            queries, apart = correlation(inputs), apart / mean.clamp_min(1e-300)
        # two queries agree about keys as far as they are alike; keys tell apart only what they do not share
        alike = queries * self.scale**2 * (apart[:, None] * apart[None, :]).sqrt()
        count, variance = self.visible.sum(1), alike.diagonal()
        weight, energy = weight_moments(variance, count)
        # E[sum a a'] = share e^c / (1 + share (e^c - 1)) where scores of two queries have covariance c, of few keys or
        # small scores; c is scaled so that a query and itself get the weight that they have
        own = ((count * weight - 1) / (1 - weight).clamp_min(1e-12)).clamp_min(0).log1p()
        scaled = (own / variance.clamp_min(1e-300)).sqrt()
        more = torch.expm1(alike * scaled[:, None] * scaled[None, :])
        common = share * (1 + more) / (1 + share * more)
        return common, energy * variance

    def _parts(self, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean moments of what two queries see, by equal and by different keys, and the uniform weight of the
        former."""
        uniform = self.visible / self.visible.sum(1, keepdim=True)
        share = uniform @ uniform.T
        same = uniform @ torch.diag(moments.diagonal()) @ uniform.T / share.clamp_min(1e-12)
        rest = (1 - share).clamp_min(0)
        different = torch.where(
            rest > 1e-9, (uniform @ moments @ uniform.T - share * same) / rest.clamp_min(1e-9), same
        )
        return same, different, share

    def _mixed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the moments of the weighted values."""
        values = correlation(inputs) if self.value_norm else inputs * self.value
        common, _ = self._scores(inputs)
        same, different, _ = self._parts(values)
        return common * same + (1 - common) * different

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return value * out * E[sum_jk a_ij a_i'k x_j x_k]."""
        mixed = self._mixed(inputs)
        return (correlation(mixed) if self.inner_norm else mixed) * self.out

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient by way of values, queries and keys."""
        common, scores = self._scores(inputs)
        inner = gradient * self.out
        if self.inner_norm:
            size = self._mixed(inputs).diagonal().sqrt()
            inner = inner / (size[:, None] * size[None, :])
        count = self.visible.sum(1)
        pairs = count[:, None] * count[None, :]
        together = (self.visible @ self.visible.T).clamp_min(1e-12)  # keys that both see
        on_same = self.visible.T @ (inner * common / together) @ self.visible
        elsewhere = (pairs - together).clamp_min(0)
        apart = torch.where(elsewhere > 0, inner * (1 - common) / elsewhere.clamp_min(1e-12), torch.zeros_like(inner))
        by_value = self.visible.T @ apart @ self.visible
        by_value.diagonal().copy_(on_same.diagonal())
        by_value = by_value * self.value
        # softmax: the gradient of a score is a_ij (v_j - mean), which leaves only what values do not share; as these
        # gradients sum to 0, they leave to queries only what keys do not share
        same, different, _ = self._parts(inputs)
        unlike = 1 - (different.diagonal() / same.diagonal().clamp_min(1e-300)).clamp(0, 1)
        each = inner.diagonal() * self.value * scores
        by_query = torch.diag(each * unlike)
        by_key = torch.diag(self.visible.T @ (each / count))
        return by_value + by_query + by_key
