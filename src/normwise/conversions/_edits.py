"""Edits: changes of a model's modules that tensors alone cannot express. Each is plain data with ``apply(model)``.

They are applied to a live model, to the stock class before its weights are loaded (``normwise.load``), and written
into the modeling file of a converted folder. A new edit is one dataclass with the decorator ``edit``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

import torch
from torch import nn

from normwise.spec import NormSpec

__all__ = [
    "CALL_HOOKS",
    "REPLACED",
    "AddBias",
    "CentreInput",
    "CentreOutput",
    "Edit",
    "Remove",
    "SwapNorm",
    "Untie",
    "edit",
    "edit_from",
    "replace_everywhere",
    "strange_hooks",
]

_COLLECTING = "transformers.utils.output_capturing"

EDITS: dict[str, type[Edit]] = {}
CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REPLACED = "_replaced"  # where a layer keeps the module whose place it took


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One change of the modules; abstract."""

    kind: ClassVar[str]
    path: str

    def apply(self, model: nn.Module) -> None:
        """Change the model in place."""
        raise NotImplementedError

    @property
    def created(self) -> tuple[str, ...]:
        """Return the state-dict keys that appear."""
        return ()

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the state-dict keys that go."""
        return ()

    @property
    def copies(self) -> Mapping[str, str]:
        """Return the keys that appear as copies of other tensors, with the keys of those."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return the edit as JSON-able data."""
        return {"edit": self.kind, **asdict(self)}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def edit(kind: str) -> Callable[[type], Any]:
    """Make a class an edit and register it under the name that manifests use."""

    def register(cls: type) -> Any:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.kind = kind
        EDITS[kind] = made
        return made

    return register


def edit_from(data: Mapping[str, Any]) -> Edit:
    """Rebuild an edit from ``to_json``.

    Raises:
        ValueError: this version knows no such edit.
    """
    cls = EDITS.get(data["edit"])
    if cls is None:
        raise ValueError(f"no edit is called {data['edit']!r}: a newer normwise wrote it; known are {sorted(EDITS)}")
    values = {f.name: _revived(data[f.name]) for f in fields(cls)}
    return cls(**values)


def _revived(item: Any) -> Any:
    return tuple(_revived(i) for i in item) if isinstance(item, list) else item


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module where another one stood; its mode is that of the old one."""
    parent, _, name = path.rpartition(".")
    holder = model.get_submodule(parent)
    module.train(model.get_submodule(path).training)
    if isinstance(holder, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        holder._modules[name] = module
    else:
        setattr(holder, name, module)


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in every place where another one stands: shared modules stay shared."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            replace_module(model, path, new)


@edit("swap-norm")
class SwapNorm(Edit):
    """Put a layer of ours in a norm's place, wherever the model holds it; it takes over the norm's tensors.

    Tensors keep their names, so the keys of the state dict stay. What the layer has and the norm lacks is created.

    Args:
        spec: the fields of the ``NormSpec``.
        shape: sizes of gain and shift.
        keeps: tensors that the layer takes over, by its own words: "weight", "bias", "running_mean", ...
        drops: names of those that go.
        creates: words of those that appear.
        layer: its name in ``normwise.layers``; nothing: the one that is natural for the spec.
        options: of its constructor, beyond what the spec tells.
        names: what the norm calls its tensors, where that is not the layer's word.
        then: children of the norm that are applied to the normalized value: an activation it has built in.
        learns: whether gain and shift are parameters, or buffers; None: what they were.
        reversible: the norm stays with the layer, and ``swap_layers.restore`` can put it back.
    """

    spec: Mapping[str, Any]
    shape: tuple[int, ...]
    keeps: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    creates: tuple[str, ...] = ()
    layer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    then: tuple[str, ...] = ()
    learns: bool | None = None
    reversible: bool = False

    def apply(self, model: nn.Module) -> None:
        """Replace the module."""
        from normwise.conversions._recognition.layers import build, take_over, usual_layer

        old, spec = model.get_submodule(self.path), self.norm_spec
        new = build(self.layer or usual_layer(spec), spec, self.shape, self.options)
        names = {word: self.names.get(word, word) for word in self.keeps}
        take_over(old, new, names, self.then, creates=self.creates, learns=self.learns)
        if self.reversible:
            vars(new)[REPLACED] = old  # not a submodule: neither in the state dict nor among the parameters
        replace_everywhere(model, old, new)

    @property
    def norm_spec(self) -> NormSpec:
        """Return the spec, whose axes are a list in JSON."""
        told: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in self.spec.items()}
        return NormSpec(**told)

    @property
    def created(self) -> tuple[str, ...]:
        """Return the keys that appear."""
        return tuple(f"{self.path}.{word}" for word in self.creates)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the keys of the tensors that go."""
        return tuple(f"{self.path}.{name}" for name in self.drops)


class _Centring:
    """Subtracts the mean over one axis from one tensor among a module's arguments or results."""

    def __init__(self, index: int, axis: int) -> None:
        self.index, self.axis = index, axis

    def _centred(self, tree: Any) -> Any:
        tensors = itertools.count()

        def centred(item: Any) -> Any:
            # the order of ``graph.capture.tensors_in``, by which a plan counts
            if isinstance(item, torch.Tensor):
                chosen = next(tensors) == self.index
                return item - item.mean(self.axis, keepdim=True) if chosen else item
            if isinstance(item, dict):
                changed = {key: centred(value) for key, value in item.items()}
                if any(changed[key] is not item[key] for key in item):
                    item = copy.copy(item)  # a ModelOutput stays one, and refuses update()
                    for key, value in changed.items():
                        item[key] = value
                return item
            if isinstance(item, (list, tuple)):
                parts = [centred(part) for part in item]
                if all(new is old for new, old in zip(parts, item, strict=True)):
                    return item  # a list may be there to be filled
                return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
            if hasattr(item, "__dataclass_fields__") and not isinstance(item, type):
                changed = {name: centred(getattr(item, name, None)) for name in item.__dataclass_fields__}
                if any(new is not getattr(item, name, None) for name, new in changed.items()):
                    item = copy.copy(item)
                    for name, new in changed.items():
                        object.__setattr__(item, name, new)  # it may be frozen
            return item

        made = centred(tree)
        if next(tensors) <= self.index:
            raise RuntimeError(f"the mean was to be subtracted from tensor {self.index}, but there are fewer here")
        return made


class _CentreOutput(_Centring):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._centred(output)


class _CentreInput(_Centring):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._centred((args, kwargs))


@edit("centre-output")
class CentreOutput(Edit):
    """Subtract the mean from what a module returns, in a forward hook.

    Args:
        index: which of the tensors it returns, counted through the nest.
        axis: the feature axis, negative.
    """

    index: int = 0
    axis: int = -1

    def apply(self, model: nn.Module) -> None:
        """Register the hook."""
        model.get_submodule(self.path).register_forward_hook(_CentreOutput(self.index, self.axis))


@edit("centre-input")
class CentreInput(Edit):
    """Subtract the mean from what a module is given, in a forward pre-hook.

    Args:
        index: which of the tensors in (args, kwargs), counted through the nest.
        axis: the feature axis, negative.
    """

    index: int = 0
    axis: int = -1

    def apply(self, model: nn.Module) -> None:
        """Register the hook."""
        hook = _CentreInput(self.index, self.axis)
        model.get_submodule(self.path).register_forward_pre_hook(hook, with_kwargs=True)


def strange_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return the hooks on a module that might see, or change, what a conversion changes, or would be lost with it.

    Those by which transformers collects hidden states for its outputs are none: what they collect is in the graph.
    """
    return tuple(
        hook
        for name in CALL_HOOKS
        for hook in getattr(module, name).values()
        if not isinstance(hook, _Centring) and not str(getattr(hook, "__module__", "")).startswith(_COLLECTING)
    )


@edit("add-bias")
class AddBias(Edit):
    """Give a linear map or convolution a bias of zeros.

    Args:
        size: its length.
        dtype: that of the weight, "float32".
    """

    size: int
    dtype: str

    def apply(self, model: nn.Module) -> None:
        """Register the parameter."""
        module = model.get_submodule(self.path)
        weight = next(module.parameters())
        # a copy in float64, on which the conversion is proved, gets a bias in float64
        bias = torch.zeros(self.size, dtype=weight.dtype, device=weight.device)
        module.register_parameter("bias", nn.Parameter(bias, requires_grad=weight.requires_grad))

    @property
    def created(self) -> tuple[str, ...]:
        """Return the key of the bias."""
        return (f"{self.path}.bias",)


@edit("untie")
class Untie(Edit):
    """Give a module a parameter of its own where it shared one.

    Args:
        name: of the parameter in the module at ``path``.
        source: a key of the shared tensor elsewhere.
    """

    name: str
    source: str

    def apply(self, model: nn.Module) -> None:
        """Copy the parameter, and tell a transformers configuration that nothing is tied."""
        module = model.get_submodule(self.path)
        shared = getattr(module, self.name)
        setattr(module, self.name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
        config: Any = getattr(model, "config", None)
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False

    @property
    def created(self) -> tuple[str, ...]:
        """Return the key of the copy; a checkpoint of a tied model may lack it."""
        return (f"{self.path}.{self.name}",)

    @property
    def copies(self) -> Mapping[str, str]:
        """Return the key of the copy with that of the shared tensor."""
        return {f"{self.path}.{self.name}": self.source}


@edit("remove")
class Remove(Edit):
    """Put an identity in a module's place.

    Args:
        keys: state-dict keys, below the module, that go with it.
        keep: a child that stays in its place (the activation of a fused norm), or nothing.
    """

    keys: tuple[str, ...] = ()
    keep: str = ""

    def apply(self, model: nn.Module) -> None:
        """Replace the module."""
        old = model.get_submodule(self.path)
        replace_module(model, self.path, old.get_submodule(self.keep) if self.keep else nn.Identity())

    @property
    def dropped(self) -> tuple[str, ...]:
        """Return the keys that go."""
        return tuple(f"{self.path}.{key}" for key in self.keys)
