"""Building transformers models: the class of a configuration, random weights, or no weights at all."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normwise.errors import TargetError
from normwise.targets.hf_plan import parts
from normwise.targets.hf_recipes import recipe_for
from normwise.targets.offline import offline

__all__ = [
    "build_fake",
    "build_model",
    "count_numbers",
    "fake_storage",
    "library",
    "model_class",
    "model_named",
    "model_types",
    "quiet",
]

_HEADS = ("MODEL_FOR_PRETRAINING", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_MULTIMODAL_LM")


def library(text: str) -> None:
    """Make sure that transformers is installed.

    Raises:
        TargetError: it is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(f"{text}: this needs transformers, which is not installed; pip install 'normwise[hf]'")


def model_types() -> list[str]:
    """Return every model type that transformers knows."""
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    return list(mapping)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Use transformers offline and silently; random states, environment and verbosity are restored."""
    with offline(), _silent_logging():
        yield


@contextlib.contextmanager
def _silent_logging() -> Iterator[None]:
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(50)  # above everything that is logged
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def model_class(config: Any) -> type[nn.Module]:
    """Return the class of AutoModel, or the one the configuration or its modeling modules name first.

    Raises:
        TargetError: transformers has no model of this configuration, or none that can be called.
    """
    named = [cls for name in _names(config) if name and (cls := _attribute(config, name)) is not None]
    found = [cls for cls in named if _made_for(cls, config)] or named or _own_classes(config)
    if not found:
        raise TargetError(
            "transformers has no model class of its own for this configuration, only one that contains it"
        )
    callable_ones = [cls for cls in found if _has_forward(cls)]
    if not callable_ones:
        types = dict.fromkeys(part.model_type for part in parts(config) if part is not config)
        known = [f"hf:{name}" for name in types if name in model_types()]
        rest = f"; of its parts there are {', '.join(known)}" if known else ""
        raise TargetError(f"transformers' {found[0].__name__} has no forward and cannot be called as a whole{rest}")
    return callable_ones[0]


def _names(config: Any) -> list[str | None]:
    from transformers.models.auto import modeling_auto

    names = [recipe_for(config.model_type).cls, _first(modeling_auto.MODEL_MAPPING_NAMES.get(config.model_type))]
    names += list(config.architectures or [])
    for family in (*_HEADS, *sorted(dir(modeling_auto))):
        mapping = getattr(modeling_auto, f"{family.removesuffix('_MAPPING_NAMES')}_MAPPING_NAMES", None)
        if isinstance(mapping, dict) and family != "CONFIG_MAPPING_NAMES":
            names.append(_first(mapping.get(config.model_type)))
    return names


def _first(names: Any) -> str | None:
    return names[0] if isinstance(names, list | tuple) else names


def _modeling_modules(config: Any) -> Iterator[Any]:
    """Yield the module beside the one of the configuration, then the other modeling modules of its package."""
    own = type(config).__module__.replace("configuration_", "modeling_")
    package = importlib.import_module(own.rpartition(".")[0])
    beside = (f"{package.__name__}.{info.name}" for info in pkgutil.iter_modules(package.__path__))
    for name in sorted((name for name in beside if ".modeling_" in name), key=lambda name: name != own):
        yield importlib.import_module(name)


def model_named(module: Any, name: Any) -> type[nn.Module] | None:
    """Return the model class of a name in a module; None for all else, as a config.json may name anything."""
    from transformers import PreTrainedModel

    found = getattr(module, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _attribute(config: Any, name: str) -> type[nn.Module] | None:
    import transformers

    found = (model_named(module, name) for module in (*_modeling_modules(config), transformers))
    return next((cls for cls in found if cls is not None), None)


def _made_for(cls: type[nn.Module], config: Any) -> bool:
    return getattr(cls, "config_class", None) is type(config)


def _own_classes(config: Any) -> list[type[nn.Module]]:
    """Return the model classes of this very configuration, those that are named a model first."""
    from transformers import PreTrainedModel

    own = [
        cls
        for module in _modeling_modules(config)
        for cls in vars(module).values()
        if isinstance(cls, type)
        and issubclass(cls, PreTrainedModel)
        and cls.__module__ == module.__name__
        and cls.config_class is type(config)
        and not cls.__name__.endswith("PreTrainedModel")
    ]
    return sorted(own, key=lambda cls: (not _has_forward(cls), not cls.__name__.endswith("Model")))


def _has_forward(cls: type[nn.Module]) -> bool:
    return cls.forward is not nn.Module.forward


def build_model(config: Any, cls: type[nn.Module] | None = None) -> nn.Module:
    """Return the model in eval mode and float32 with random weights, of a class or of the one ``model_class`` gives."""
    return (cls or model_class(config))(config).float().eval()


def count_numbers(config: Any, cls: type[nn.Module] | None = None) -> tuple[int, int]:
    """Return how many numbers the parameters and the buffers hold, without allocating them."""
    with torch.device("meta"):
        model = (cls or model_class(config))(config)
    return sum(p.numel() for p in model.parameters()), sum(b.numel() for b in model.buffers())


def build_fake(config: Any, dtype: torch.dtype = torch.bfloat16, cls: type[nn.Module] | None = None) -> nn.Module:
    """Return the model of a configuration, of any size, without its weights.

    It is built on the meta device; parameters, buffers and plain tensor attributes then become
    FakeTensors of one mode (``next(model.parameters()).fake_mode``) on the CPU. Ties stay ties.

    Args:
        config: a transformers configuration.
        dtype: of the parameters; buffers keep theirs.
        cls: of the model; the one ``model_class`` gives by default.
    """
    with quiet(), torch.device("meta"):
        model = (cls or model_class(config))(config).to(dtype).eval()
    return fake_storage(model)


def fake_storage(model: nn.Module) -> nn.Module:
    """Turn what a model built on the meta device holds into FakeTensors of one mode on the CPU; ties stay ties."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                bare = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return made[id(tensor)]

    for module in model.modules():
        held: dict[str, Any]
        for held in (module._parameters, module._buffers, module.__dict__):
            held.update({name: fake(value) for name, value in held.items() if isinstance(value, Tensor)})
    return model
