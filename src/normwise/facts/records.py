"""The facts a report is made of: norms, stacks, sublayers, profile, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from normwise.spec import NormSpec, Wiring

__all__ = ["Break", "Evidence", "NormSite", "Place", "Placement", "ProfileRow", "Stack", "StackKind", "Sublayer"]


class Place(StrEnum):
    """Where a norm sits (DESIGN: placement of a site)."""

    PRE = "pre"
    POST = "post"
    BRANCH = "branch"  # after the sublayer, before the add
    QK = "qk"
    V = "v"
    FINAL = "final"
    EMBEDDING = "embedding"
    STEM = "stem"  # feeds the stream's origin
    INNER = "inner"  # inside a sublayer: latent, gate, sub-LN, conv-BN
    SHORTCUT = "shortcut"
    HEAD = "head"
    TAP = "tap"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """How a site's spec is known."""

    VERIFIED = "verified"  # replayed on random data against its closed form
    DERIVED = "derived"  # read off the graph
    PROBED = "probed"  # an opaque module, judged by behaviour
    KEYS = "keys"  # the keys of a checkpoint, and its config.json
    UNKNOWN = "unknown"


class StackKind(StrEnum):
    """The signature that at least 85 % of a stack's adds share."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    RES_POST = "res_post"
    PARALLEL = "parallel"
    PARALLEL_SHARED = "parallel_shared"
    NONE = "none"
    MIXED = "mixed"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSite:
    """One norm of the model, however many times it runs.

    ``path`` is the module that holds it (``named_modules()`` spelling), with ``#n`` appended
    when one module computes several. ``spec`` is None when its form is not understood.
    """

    path: str
    spec: NormSpec | None
    placement: Place
    stack: int | None = None
    layer: int | None = None  # index of the block (or sublayer, in a flat stack) within its stack
    calls: int = 1
    native: bool = False  # one torch.nn.functional norm, not loose arithmetic
    evidence: Evidence = Evidence.DERIVED
    source: str | None = None  # "file.py:123"
    note: str | None = None
    weight_path: str | None = None
    bias_path: str | None = None
    shape: tuple[int, ...] = ()  # of the norm's input
    dtype: str | None = None  # of the norm's input
    class_name: str = ""  # for display only, never consulted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """One residual add of a stack and what stands around it."""

    path: str  # the module in which the add happens
    signature: StackKind
    wiring: Wiring
    branch: tuple[str, ...] = ()  # what the branch contains: "attention", "conv", "mlp", "mix"
    source: str | None = None
    norms: tuple[str, ...] = ()  # paths of the norms of this sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One residual stream: a chain of adds that carry the same stream."""

    kind: StackKind
    name: str | None  # the placement, of ``normwise.placements.names()``, where it says more than the kind
    depth: int  # blocks
    sublayers: int  # residual adds
    starts_with_norm: bool
    final_norm: bool
    members: tuple[Sublayer, ...] = ()
    width: int | None = None
    mixture: tuple[tuple[str, int], ...] = ()  # signatures with their counts, most frequent first


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The model's summary: its stacks, largest first."""

    stacks: tuple[Stack, ...] = ()
    embedding_norm: bool = False
    qk_norm: bool = False
    inner_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place where the dataflow was lost: an activation that no traced op produced."""

    path: str
    source: str | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """Root mean squares along a stack, one row a sublayer; None where it was not measured.

    ``grad_median`` is that of the median token (a layer's own hides that one position may hold it all),
    ``grad_first_share`` the share of the gradient's energy on the first position, ``token_cosine`` the mean cosine
    between two tokens of a sample, ``eps_share`` the part of eps under the root of the sublayer's norm. ``branch_gain``
    is the second moment of the branch as it is added over that of what its sublayer reads (1 behind a norm),
    ``block_influence`` 1 - cos(stream before, stream behind) of the layer that ends here, ``query_grad`` that of the
    weights that make the attention's queries. What is ``predicted`` is so from theory at initialisation.
    """

    stack: int
    sublayer: int
    path: str
    residual_rms: float | None
    branch_rms: float | None
    grad_rms: float | None
    predicted_rms: float | None = None
    grad_median: float | None = None
    grad_first_share: float | None = None
    token_cosine: float | None = None
    eps_share: float | None = None
    branch_gain: float | None = None
    block_influence: float | None = None
    query_grad: float | None = None
    predicted_grad: float | None = None
    predicted_influence: float | None = None
