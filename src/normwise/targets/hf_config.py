"""A small configuration of any transformers model type: depth and widths reduced, structure kept.

The rules go by what a number is (a depth, a width, a head count, a token id), read from its name, and
never by the model type; what they cannot know is in the one table of ``hf_recipes``. A configuration is
shrunk by calling its class again with the reduced numbers, so that everything it derives (layer patterns,
head sizes) is derived anew. Booleans and strings, which decide structure, are never touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from normwise.targets.hf_plan import Plan, parts, read, sub_configs
from normwise.targets.hf_recipes import recipe_for
from normwise.targets.hf_shrink import Shrinker

__all__ = ["build_config", "departures", "parts", "shrunk"]

_LEFT_ALONE = {
    "id2label",
    "label2id",
    "num_labels",
    "chunk_size_feed_forward",
    "problem_type",
    "architectures",
    "dtype",
}


def build_config(model_type: str, *, reduced: bool = True, widths: bool = True) -> Any:
    """Return the default configuration of a type, or the small one of the same structure.

    Args:
        model_type: a key of transformers' ``CONFIG_MAPPING``.
        reduced: shrink depth, widths, vocabulary, heads, experts and images.
        widths: False keeps every width and reduces the rest.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    recipe = recipe_for(model_type)
    cls: Any = CONFIG_MAPPING[model_type]
    config = recipe.default() if recipe.default else cls(**_optional_towers(cls))
    return _rebuild(config, Plan.of(config, widths=widths)) if reduced else config


def _optional_towers(cls: Any) -> dict[str, Any]:
    """Return the towers for images and sounds that a class knows but leaves out unless they are given."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    specs = getattr(cls, "sub_configs_defaults", {})
    kinds = {
        name: getattr(specs[name], "model_type", None) or specs[name].config_class.model_type
        for name in ("vision_config", "audio_config")
        if getattr(specs.get(name), "optional", False)
    }
    return {name: CONFIG_MAPPING[kind]() for name, kind in kinds.items()}


def shrunk(config: Any) -> Any:
    """Return a small configuration of the same structure as a given one, which stays as it is."""
    return _rebuild(config, Plan.of(config, widths=True))


def _rebuild(config: Any, plan: Plan) -> Any:
    cls = type(config)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name[0] != "_" and f.name not in _LEFT_ALONE}
    shrinker = Shrinker(config, plan)
    fresh = _fresh(cls)
    given: dict[str, Any] = {}
    derived: dict[str, Any] = {}
    subs = sub_configs(config)
    for name, field in fields.items():
        if name in subs:
            given[name] = _rebuild(_substitute(subs[name]), plan)
            continue
        value = read(config, name)
        default = _default(field)
        if default is None and fresh is not None and value == read(fresh, name) and not _sections(value):
            derived[name] = value
            continue
        new = shrinker.reduce(name, value)
        if new != default:
            given[name] = new
    given |= (
        shrinker.open_numbers(fields, config)
        | shrinker.patterns(fields)
        | shrinker.outputs(config, fresh)
        | plan.tokens(config, fields)
    )
    recipe = recipe_for(config.model_type)
    given |= recipe.always | (recipe.config if plan.scale else {})
    if recipe.adjust:
        recipe.adjust(given, config)
    return _with_constants(cls(**given), given, derived, shrinker)


def _with_constants(small: Any, given: dict[str, Any], derived: dict[str, Any], shrinker: Shrinker) -> Any:
    """Return the configuration with what its class sets by itself reduced where it depends on nothing reduced.

    What the class derives from other fields (head sizes, patterns of layers) it has derived anew; where stages are
    tied to each other, its numbers stay.
    """
    if shrinker.staged:
        return small
    reduced = {name: shrinker.reduce(name, value) for name, value in derived.items() if read(small, name) == value}
    constants = {name: value for name, value in reduced.items() if value != derived[name]}
    return type(small)(**constants | given) if constants else small


def _fresh(cls: type) -> Any:
    try:
        return cls()
    except Exception:  # whatever a configuration class of transformers asks for
        return None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _sections(value: Any) -> bool:
    """Tell whether rotary angles are dealt out to axes by numbers that belong to one head size."""
    return isinstance(value, dict) and any(str(key).endswith("_section") for key in value)


def departures(model_type: str) -> tuple[str, ...]:
    """Return, for the report, where the small configuration departs from the default one beyond its size."""
    always = recipe_for(model_type).always
    notes = [f"set beside the sizes: {', '.join(f'{k}={v}' for k, v in always.items())}"] if always else []
    default = build_config(model_type, reduced=False)
    if any(vars(default).get(name) is not None for name in _optional_towers(type(default))):
        notes.append("towers that the default configuration leaves out are in")
    if any(part is not _substitute(part) for part in parts(default)):
        notes.append("a ResNet stands in for the backbone that only timm can build")
    return tuple(notes)


def _substitute(config: Any) -> Any:
    """Return a ResNet in the place of a backbone that only timm can build."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.utils.import_utils import is_timm_available

    # To transformers timm is of no use without PIL and torchvision.
    if config.model_type != "timm_backbone" or is_timm_available():
        return config

    wanted = list(config.out_indices or [-1])
    backbone: Any = CONFIG_MAPPING["resnet"]
    return backbone(out_indices=[i if i >= 0 else 5 + i for i in wanted])
