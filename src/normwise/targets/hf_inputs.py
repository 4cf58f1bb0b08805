"""Inputs for any transformers model, made from its signature and configuration.

A plan is a set of modalities; the richest plan that the model runs on is taken, so that every tower of a
multimodal model is executed if that can be had. How many placeholder tokens an image or a sound needs is
not computed from formulas but asked of the model: its own ``get_image_features`` is run and counted.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from normwise.errors import TargetError
from normwise.targets.hf_config import parts
from normwise.targets.hf_recipes import recipe_for

__all__ = ["BATCH", "TIME", "Found", "example_inputs", "find_inputs", "generated_inputs", "one_line", "refuse_objects"]

BATCH, TIME = 2, 13  # unequal to each other and to every width

_IMAGE = (
    "pixel_values", "image_grid_thw", "image_grid_hws", "image_grid_hw", "image_sizes", "pixel_attention_mask",
    "spatial_shapes", "image_position_ids", "pixel_position_ids", "target_sizes", "aspect_ratio_ids",
    "aspect_ratio_mask", "image_attention_mask", "grid_thw", "grid_hws", "high_res_pixel_values",
)  # fmt: skip
_AUDIO = (
    "input_features", "input_values", "input_features_mask", "feature_attention_mask", "feature_lens", "aftercnn_lens",
    "chunk_sample_lengths", "audio_input_features",
)  # fmt: skip
_EXTRAS = (*_IMAGE[1:], *_AUDIO[2:7])  # what a call may have or not, beside the data itself
_LAST_RESORTS = {"bare", "codes", "embeddings"}  # words of plans that are tried where the others failed
_MOST_CALLS = 24
_MOST_ELEMENTS = 2**26  # of one input; a config.json decides how large an image is
_IDS = 2**20  # token ids that inputs are drawn from: more than any vocabulary has, and few to list
_TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "bbox", "mm_token_type_ids")
_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "im_patch_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}
_FENCES = {
    "image": (("vision_start_token_id", "image_start_token_id"), ("vision_end_token_id", "image_end_token_id")),
    "audio": (("audio_start_token_id",), ("audio_end_token_id",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One call that the model runs on, and what was left out of it, one sentence each."""

    kwargs: dict[str, Any]
    notes: tuple[str, ...] = ()


def example_inputs(model: nn.Module, *, batch: int = BATCH, time: int = TIME) -> dict[str, Any]:
    """Return keyword arguments that ``model`` runs on.

    Args:
        model: a transformers model.
        batch: samples.
        time: text tokens; frames of sound follow it, images keep their size.

    Raises:
        TargetError: no generated inputs were accepted; the message has the model's own words.
    """
    return find_inputs(model, batch=batch, time=time).kwargs


def find_inputs(model: nn.Module, *, batch: int = BATCH, time: int = TIME) -> Found:
    """Return the richest generated call that the model runs on, see ``example_inputs``."""
    maker = Maker(model, batch, time)
    first: Exception | None = None
    for plan in maker.plans():
        for call in maker.calls(plan):
            error = call if isinstance(call, Exception) else _refused(model, call)
            if error is not None and not isinstance(call, Exception) and (more := maker.asked_for(error, call)):
                call = call | more
                error = _refused(model, call)
            if error is None and not isinstance(call, Exception):
                return Found(kwargs=call, notes=_left_out(maker, plan, first))
            first = first or error
    raise TargetError(f"no generated inputs were accepted: {one_line(first)}")


def _refused(model: nn.Module, call: dict[str, Any]) -> Exception | None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(**call)
    except Exception as error:
        return error
    return None


def generated_inputs(model: nn.Module, *, batch: int = BATCH, time: int = TIME) -> dict[str, Any]:
    """Return the simplest call with the model's main input, without running it: for models that hold no numbers."""
    maker = Maker(model, batch, time)
    plans = [plan for plan in maker.plans() if not _LAST_RESORTS.intersection(plan)]
    plans = [plan for plan in plans if "text" in plan] or plans
    main, first = getattr(model, "main_input_name", None), dict[str, Any]()
    for call in (call for plan in reversed(plans) for call in maker.calls(plan)):
        if isinstance(call, Exception):
            continue
        if main in call:
            return call
        first = first or call
    return first


def refuse_objects(cls: type[nn.Module]) -> None:
    """Say so where no inputs can be generated for a class, because it takes more than tensors.

    Raises:
        TargetError: the first argument that is required and an object of its own.
    """
    for parameter in inspect.signature(cls.forward).parameters.values():
        kind = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        if parameter.default is parameter.empty and kind.endswith("Session"):
            raise TargetError(f"its forward works on a {kind}, the state of a running video: no inputs stand for it")


def one_line(error: BaseException | None) -> str:
    """Return the kind and the first words of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _left_out(maker: Maker, plan: tuple[str, ...], first: Exception | None) -> tuple[str, ...]:
    missing = [kind for kind in maker.modalities if kind not in plan]
    if not missing:
        return ()
    return (f"no inputs of this kind could be generated: {', '.join(missing)} ({one_line(first)})",)


@dataclass(slots=True)
class Maker:
    """Makes the arguments of one model."""

    model: nn.Module
    batch: int
    time: int
    config: Any = field(init=False)
    everything: list[Any] = field(init=False)
    names: list[str] = field(init=False)
    required: list[str] = field(init=False)
    generator: torch.Generator = field(init=False)
    parameters: list[inspect.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.everything = list(parts(self.config))
        forward = inspect.signature(self.model.forward)
        self.parameters = [p for p in forward.parameters.values() if p.kind in _NAMED]
        self.names = [p.name for p in self.parameters]
        self.required = [p.name for p in self.parameters if p.default is p.empty]
        self.generator = torch.Generator().manual_seed(0)

    # which arguments

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the kinds of data, beside text, that the call may take."""
        kinds = {"image": "pixel_values", "audio": next((n for n in _AUDIO[:2] if n in self.names), "")}
        return tuple(kind for kind, name in kinds.items() if name in self.names)

    def plans(self) -> Iterator[tuple[str, ...]]:
        """Yield sets of modalities, the richest first."""
        text = ("text",) if "input_ids" in self.names or "decoder_input_ids" in self.names else ()
        for count in range(len(self.modalities), -1, -1):
            for kinds in itertools.combinations(self.modalities, count):
                yield text + kinds
        if text and self.modalities:
            yield self.modalities
        if text:
            yield ("text", "no cache")
            yield ("text", "bare")
            yield ("text", "codes")
        if "inputs_embeds" in self.names:
            yield ("embeddings",)

    def calls(self, plan: tuple[str, ...]) -> Iterator[dict[str, Any] | Exception]:
        """Yield the calls of one plan: every combination of the layouts an argument may have."""
        recipe = recipe_for(self.config.model_type)
        given = recipe.inputs(self) if recipe.inputs else {}
        wanted = [name for name in self._wanted(plan) if name not in _TEXT and name not in given]
        layouts = {name: self._layouts(name) for name in wanted}
        for choice in itertools.islice(itertools.product(*layouts.values()), _MOST_CALLS):
            try:
                made = {name: make() for name, make in zip(layouts, choice, strict=True)}
                kwargs = {name: value for name, value in made.items() if value is not None} | given
                yield self.with_text(kwargs, plan) if "text" in plan and "input_ids" not in given else kwargs
            except Exception as error:  # a layout that this model cannot have
                yield error

    def _wanted(self, plan: tuple[str, ...]) -> list[str]:
        main = getattr(self.model, "main_input_name", None)
        chosen = {main} if isinstance(main, str) and "bare" not in plan else set()
        for kind, names in (("image", _IMAGE), ("audio", _AUDIO)):
            chosen = chosen | set(names) if kind in plan else chosen - set(names)
        if "embeddings" in plan:
            chosen |= {"inputs_embeds"}
        chosen |= set(self.required)
        return [name for name in self.names if name in chosen]

    def asked_for(self, error: Exception, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that an error names although the call does not have them."""
        words = set(re.findall(r"\w+", str(error)))
        missing = [name for name in self.names if name in words and name not in call and name not in _TEXT]
        return {name: self._layouts(name)[0]() for name in missing}

    # text

    def with_text(self, kwargs: dict[str, Any], plan: tuple[str, ...]) -> dict[str, Any]:
        """Return the call with token ids in which every image and sound has its placeholders."""
        coded = "codes" in plan and ("decoder_input_ids" if "decoder_input_ids" in self.names else "input_ids")
        ids = self.codes() if coded == "input_ids" else self.ids(self.time)
        kinds = torch.zeros_like(ids)
        for number, kind in enumerate(("image", "audio"), start=1):
            if kind in plan and (token := self.token(_PLACEHOLDERS[kind])) is not None:
                block = self._placeholders(kind, token, kwargs)
                ids = torch.cat([ids[:, :2], block, ids[:, 2:]], dim=1)
                marks = (block == token).long() * (number if kind == "image" else 3)
                kinds = torch.cat([kinds[:, :2], marks, kinds[:, 2:]], dim=1)
        call = dict(kwargs)
        if "no cache" in plan:
            call["use_cache"] = False
        if "input_ids" in self.names:
            call["input_ids"] = ids
            if "attention_mask" in self.names and "bare" not in plan:
                call["attention_mask"] = torch.ones_like(ids[:, :, 0] if ids.ndim == 3 else ids)
        if "decoder_input_ids" in self.names:
            call["decoder_input_ids"] = self.codes() if coded else self.ids(self.time + 4, decoder=True)
        if "bbox" in self.names:
            call["bbox"] = self.boxes(ids.shape[1])
        if "mm_token_type_ids" in self.names and "image" in plan:
            call["mm_token_type_ids"] = kinds
        return {name: value for name, value in call.items() if name in self.names or name == "use_cache"}

    def _placeholders(self, kind: str, token: int, kwargs: dict[str, Any]) -> Tensor:
        count = self._features(kind, kwargs)
        start, end = (self.token(names) for names in _FENCES[kind])
        row = [t for t in (start, *[token] * count, end) if t is not None]
        return torch.tensor(row).expand(self.batch, -1)

    def _features(self, kind: str, kwargs: dict[str, Any]) -> int:
        """Return how many features the model makes of one sample's image or sound."""
        owner = next((m for m in (self.model, *self.model.children()) if hasattr(m, f"get_{kind}_features")), None)
        if owner is None:
            return self.number("image_seq_length", "mm_tokens_per_image", default=1)
        method = getattr(owner, f"get_{kind}_features")
        accepted = inspect.signature(method).parameters
        for name, parameter in accepted.items():
            if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in kwargs:
                kwargs[name] = self._layouts(name)[0]()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answer = method(**{name: value for name, value in kwargs.items() if name in accepted})
        return max(1, _rows(answer) // self.batch)

    def token(self, names: tuple[str, ...]) -> int | None:
        """Return the id of a special token of the outermost configuration that has it."""
        values = (getattr(part, name, None) for part in self.everything for name in names)
        return next((value for value in values if isinstance(value, int) and value >= 0), None)

    def ids(self, length: int, *, decoder: bool = False) -> Tensor:
        """Return random ordinary token ids [B, length]."""
        special = {v for part in self.everything for k, v in vars(part).items() if "token" in k and isinstance(v, int)}
        limit = min(self.vocabulary(decoder=decoder), _IDS)
        ordinary = torch.tensor([i for i in range(limit) if i not in special] or [0])
        return ordinary[torch.randint(len(ordinary), (self.batch, length), generator=self.generator)]

    def codes(self, *, beside: int = 0) -> Tensor:
        """Return token ids [B, T, codebooks] of a sound; ``beside`` counts further rows, such as one of text."""
        count = self.number("num_codebooks", "num_quantizers", "num_channels", default=8) + beside
        return self.ids(self.time * count, decoder=True).view(self.batch, -1, count)

    def vocabulary(self, *, decoder: bool = False) -> int:
        """Return the number of token ids."""
        sizes = [v for p in self.everything if isinstance(v := vars(p).get("vocab_size"), int) and v > 0]
        try:
            sizes.append(cast(Any, self.model).get_input_embeddings().num_embeddings)
        except Exception:  # no text, or several embeddings
            sizes.append(sizes[0] if sizes else 100)
        return min(sizes) if decoder or not sizes else min(sizes[-1], *sizes)

    def boxes(self, length: int) -> Tensor:
        """Return boxes [B, length, 4] with corners in order."""
        corners = torch.randint(1, 60, (self.batch, length, 4), generator=self.generator)
        return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], dim=-1)

    # numbers of the configuration

    def number(self, *names: str, default: int, of: Any = None) -> int:
        """Return the first whole number of these names, the outermost configuration first."""
        for part in [of] if of is not None else self.everything:
            for name in names:
                known = name in dir(part) or name in type(part).attribute_map
                value = getattr(part, name, None) if known else None
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return default

    def noise(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(*_affordable(shape), generator=self.generator)

    def ones(self, *shape: int) -> Tensor:
        """Return a mask that hides nothing."""
        return torch.ones(*_affordable(shape), dtype=torch.long)

    # other arguments

    def _layouts(self, name: str) -> list[Callable[[], Any]]:
        from normwise.targets import hf_layouts

        choices = hf_layouts.layouts(self, name)
        if name in _EXTRAS and name not in self.required:
            choices = [*choices, lambda: None]
        return choices


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _affordable(shape: tuple[int, ...]) -> tuple[int, ...]:
    if (count := math.prod(shape)) > _MOST_ELEMENTS:
        sizes = "x".join(map(str, shape))
        raise TargetError(f"an input of {sizes} has {count:,} numbers, the limit is {_MOST_ELEMENTS:,}")
    return shape


def _rows(answer: Any) -> int:
    """Return how many feature vectors are in what a feature method returned."""
    pooled = getattr(answer, "pooler_output", None)
    answer = pooled if pooled is not None else getattr(answer, "last_hidden_state", answer)
    if isinstance(answer, Tensor):
        return answer.numel() // answer.shape[-1]
    if isinstance(answer, list | tuple):
        return sum(_rows(item) for item in answer)
    return 0
