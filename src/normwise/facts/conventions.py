"""What a configuration says of a model's norms: their eps, kind, gain offset, cast and momentum.

A configuration is a dict or an object of transformers; nested ones ("text_config") are read as well. Its keys are
evidence and are read by name, the model is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from normwise.errors import NotKnown
from normwise.rendering import both
from normwise.spec import FAMILIES, Kind, NormSpec, family_name

__all__ = ["Conventions", "Stated", "read", "setting"]

# rms_norm_eps, layer_norm_epsilon, layernorm_eps, norm_eps, bn_eps, batchNormEpsilon, epsilon, ...
_EPS = re.compile(
    r"(?P<kind>rms|layer|ln|batch|bn|group|gn)?_?(?:norm|normalization)?_?(?:layer)?_?eps(?:ilon)?(?:_value)?"
)
_MOMENTUM = re.compile(r"(?:(?:batch|bn)_?)(?:norm|normalization)?_?momentum")
_KINDS: Mapping[str | None, frozenset[Kind]] = {
    "rms": frozenset({Kind.RMS}),
    # T5, Falcon and others name the eps of an RMSNorm "layer_norm_eps": the key says no more than "no batch norm"
    "layer": frozenset({Kind.LAYER, Kind.RMS}),
    "ln": frozenset({Kind.LAYER, Kind.RMS}),
    "batch": frozenset({Kind.BATCH}),
    "bn": frozenset({Kind.BATCH}),
    "group": frozenset({Kind.GROUP}),
    "gn": frozenset({Kind.GROUP}),
    None: frozenset({Kind.LAYER, Kind.RMS, Kind.BATCH, Kind.GROUP}),
}
_FRAMEWORK_KEYS = ("source", "source_framework", "framework", "backend", "library", "converted_from")
# defaults of the norms of other frameworks, from their documentation: keras.layers.BatchNormalization and
# LayerNormalization (epsilon=0.001), flax.linen.BatchNorm (1e-5) and LayerNorm (1e-6)
_DEFAULTS: Mapping[str, Mapping[Kind, float]] = {
    "keras": {Kind.BATCH: 1e-3, Kind.LAYER: 1e-3},
    "flax": {Kind.BATCH: 1e-5, Kind.LAYER: 1e-6},
}
_SPELLINGS = {"keras": "keras", "tensorflow": "keras", "tf": "keras", "tf2": "keras", "flax": "flax", "jax": "flax"}
# parts of a larger model that keep its convention
_PARTS = ("-text", "-model", "-encoder", "-decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """One number that a configuration states about norms."""

    key: str  # with the sections around it: "text_config.rms_norm_eps"
    value: float
    kinds: frozenset[Kind]  # it may be about norms of these kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """All that a configuration says."""

    eps: tuple[Stated, ...] = ()
    families: tuple[tuple[str, NormSpec], ...] = ()  # a known model_type and the norm of its family
    framework: str | None = None  # where the weights were trained: "keras", "flax"
    momentum: float | None = None  # the weight of the new batch, as torch counts

    def eps_of(self, kind: Kind) -> tuple[Stated, ...]:
        """Return what is said of the eps of norms of a kind, else the default of the framework the weights are from.

        A key that names the kind is taken before one that does not ("epsilon").
        """
        said = [s for s in self.eps if kind in s.kinds]
        narrow = min((len(s.kinds) for s in said), default=0)
        if said:
            return tuple(s for s in said if len(s.kinds) == narrow)
        default = _DEFAULTS.get(self.framework or "", {}).get(kind)
        if default is None:
            return ()
        return (Stated(key=f"default of {self.framework}", value=default, kinds=frozenset({kind})),)

    @property
    def kind(self) -> tuple[Kind, str] | None:
        """LAYER or RMS and what says so; None where nothing does, or parts of the model differ."""
        said = [(spec.kind, f"model_type {name}") for name, spec in self.families]
        said += [(Kind.RMS, s.key) for s in self.eps if s.kinds == frozenset({Kind.RMS})]
        said = [(kind, why) for kind, why in said if kind in (Kind.LAYER, Kind.RMS)]
        return said[0] if len({kind for kind, _ in said}) == 1 else None


def read(config: Any) -> Conventions:
    """Read a configuration.

    Raises:
        NotKnown: there is none, or it is no dict and no object with attributes.
    """
    if config is None:
        raise NotKnown(both("needs the configuration: pass config=...", "需要配置：传入 config=..."))
    try:
        sections = list(_sections(_mapping(config), ""))
    except NotKnown:
        raise
    except Exception as error:  # code of the user's object
        said = f"{type(error).__name__}: {error}"[:120]
        raise NotKnown(both(f"the configuration cannot be read: {said}", f"配置无法读取：{said}")) from error
    items = [(f"{where}{key}", str(key), value) for where, section in sections for key, value in section.items()]
    framework = next((f for _, key, value in items if (f := _framework(key, value)) is not None), None)
    return Conventions(
        eps=tuple(s for name, key, value in items if (s := _eps(name, key, value)) is not None),
        families=tuple(f for _, key, value in items if key == "model_type" and (f := _family(value)) is not None),
        framework=framework,
        momentum=next((m for _, key, value in items if (m := _momentum(key, value, framework)) is not None), None),
    )


def setting(config: Any, name: str, *, nested: bool = False) -> Any:
    """Return what a configuration says under a name; None where it says nothing or cannot be read.

    Args:
        config: a mapping or an object.
        name: the key or attribute.
        nested: look into the sections of a mapping as well.
    """
    try:
        if not isinstance(config, Mapping):
            return getattr(config, name, None)
        sections = [v for v in config.values() if isinstance(v, Mapping)] if nested else []
        return next((s[name] for s in (config, *sections) if s.get(name) is not None), None)
    except Exception:  # code of the user's object
        return None


def _mapping(config: Any) -> Mapping[Any, Any]:
    if isinstance(config, Mapping):
        return config
    as_dict = getattr(config, "to_dict", None)
    if callable(as_dict):
        made = as_dict()
        if isinstance(made, Mapping):
            return made
    if hasattr(config, "__dict__") and not isinstance(config, type):
        return vars(config)
    name = type(config).__name__
    raise NotKnown(both(f"config is a {name}, not a dict or an object", f"config 是 {name}，不是字典或对象"))


def _sections(config: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    yield where, config
    for key, value in config.items():
        if isinstance(value, Mapping) and where.count(".") < 3:
            yield from _sections(value, f"{where}{key}.")


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _eps(name: str, key: str, value: Any) -> Stated | None:
    found, number = _EPS.fullmatch(key.lower().replace("-", "_")), _number(value)
    if found is None or number is None or number < 0:
        return None
    return Stated(key=name, value=number, kinds=_KINDS[found["kind"]])


def _framework(key: str, value: Any) -> str | None:
    if key.lower() not in _FRAMEWORK_KEYS or not isinstance(value, str):
        return None
    return next((_SPELLINGS[word] for word in re.split(r"\W+|_", value.lower()) if word in _SPELLINGS), None)


def _momentum(key: str, value: Any, framework: str | None) -> float | None:
    number = _number(value)
    if number is None or _MOMENTUM.fullmatch(key.lower().replace("-", "_")) is None:
        return None
    return 1 - number if framework in _DEFAULTS else number  # elsewhere it is the weight of the old value


def _family(value: Any) -> tuple[str, NormSpec] | None:
    if not isinstance(value, str):
        return None
    name = family_name(value)
    while name not in FAMILIES:
        shorter = next((name.removesuffix(p) for p in _PARTS if name.endswith(p)), name)
        if shorter == name:
            return None
        name = shorter
    return value, FAMILIES[name]
