"""An architecture of timm: timm:NAME, for example timm:resnet18 or timm:vit_tiny_patch16_224.

The model has its own widths and depth, random weights and generated images, as small as it takes them. Nothing is
downloaded: names that timm would look up elsewhere (``hf-hub:``) are not known here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets.guesses import BATCH, Maker
from normwise.targets.hf_build import fake_storage
from normwise.targets.offline import offline
from normwise.targets.target import InputsFrom, Target, Weights
from normwise.targets.timm_import import import_timm
from normwise.targets.user_code import blame

__all__ = ["EXAMPLE", "claims", "load"]

EXAMPLE = "timm:NAME"
_PREFIX = "timm:"
# Height and width of the images that are tried, smallest first, unequal where the model allows: 64 is two cells
# after the usual five halvings. Attention windows of 7 and 8 cells and three or four stages fit the later ones.
_SIZES = ((64, 96), (64, 64), (128, 128), (112, 112), (224, 224), (256, 256))
_LARGEST = 500_000_000  # parameters: 2 GB in float32; beyond, the model is built without weights
_RANDOM = "random weights, inputs generated"
_FAKE = "{:,} parameters examined at full size without any storage, inputs generated"


@dataclasses.dataclass(frozen=True, slots=True)
class _Built:
    """A model and the images that it runs on."""

    model: nn.Module
    images: torch.Tensor


def claims(text: str) -> bool:
    """Tell whether the text starts with ``timm:``."""
    return text.startswith(_PREFIX)


def load(text: str, *, inputs: str | None = None) -> Target:
    """Build the model of a name and images it runs on.

    Args:
        text: ``timm:NAME``, with or without the tag of its weights.
        inputs: a shape; the generated images are then left out.

    Raises:
        TargetError: timm is missing, the name is unknown, or the model cannot be built or fed.
    """
    with offline():
        timm = import_timm(text)
        name = _known(text.removeprefix(_PREFIX), timm)
        try:
            return _target(text, name, timm, generate=inputs is None)
        except TargetError:
            raise
        except Exception as error:  # whatever timm raises on a model it cannot build
            raise TargetError(f"{text} cannot be built: {blame(error)}") from error


def _known(name: str, timm: ModuleType) -> str:
    base, _, tag = name.partition(".")
    every = timm.list_models()
    alike = base.lower().replace("-", "_")
    if alike in every:
        return f"{alike}.{tag}" if tag else alike
    near = difflib.get_close_matches(alike, every, n=3, cutoff=0.5)
    guess = f"the nearest are {', '.join(near)}" if near else "timm:resnet18 and timm:vit_tiny_patch16_224 are two"
    raise TargetError(f"{_PREFIX}{name}: timm {timm.__version__} has no model {base!r}; {guess}")


def _target(text: str, name: str, timm: ModuleType, *, generate: bool) -> Target:
    with torch.device("meta"):
        skeleton = timm.create_model(name, pretrained=False)
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    large = count > _LARGEST
    note = _FAKE.format(count) if large else _RANDOM
    weights = Weights.FAKE if large else Weights.RANDOM
    if not generate:
        model = fake_storage(skeleton.eval()) if large else timm.create_model(name, pretrained=False).eval()
        return Target(model=model, name=text, weights=weights, notes=(note.removesuffix(", inputs generated"),))
    built = _fed(text, name, timm, skeleton.pretrained_cfg if hasattr(skeleton, "pretrained_cfg") else {}, large)
    shape = "x".join(map(str, built.images.shape))
    return Target(
        model=built.model, name=text, args=(built.images,), inputs_from=InputsFrom.INFERRED, weights=weights,
        notes=(f"{note} ({shape})",),
    )  # fmt: skip


def _fed(text: str, name: str, timm: ModuleType, config: dict[str, Any], large: bool) -> _Built:
    """Return the model with the smallest images it takes; those of its configuration are the last."""
    first: Exception | None = None
    model: nn.Module | None = None
    for options, size in _ways(config):
        try:
            if model is None or options:
                model = _build(timm, name, options, large)
            maker = Maker.of(model)
            images = maker.floats(BATCH, config.get("input_size", (3,))[0], *size)
            with torch.inference_mode(not large), torch.no_grad(), torch.random.fork_rng(devices=[]):
                model(images)
        except Exception as error:
            first, model = error, None if options else model
        else:
            return _Built(model, images)
    why = blame(first) if first else "it takes no images"
    raise TargetError(f"{text} ran on none of the generated images ({why}); give --inputs, such as 2x3x224x224")


def _ways(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    own = tuple(config.get("input_size", (3, 224, 224))[1:])
    area = own[0] * own[1]
    smaller = [size for size in _SIZES if size[0] * size[1] < area]
    if config.get("fixed_input_size"):
        yield from (({"img_size": size}, size) for size in smaller)
    else:
        yield from (({}, size) for size in smaller)
    yield {}, own


def _build(timm: ModuleType, name: str, options: dict[str, Any], large: bool) -> nn.Module:
    if not large:
        return timm.create_model(name, pretrained=False, **options).eval()
    with torch.device("meta"):
        return fake_storage(timm.create_model(name, pretrained=False, **options).eval())
