"""What folding gain and bias of norms into their readers takes: edits, recipes, and which cannot be folded and why."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normwise.conversions._arithmetic import holds_numbers
from normwise.conversions._dataflow.idle import idle_parameters, not_checked
from normwise.conversions._dataflow.readers import Reader, Readers, leaves, readers_of
from normwise.conversions._edits import AddBias, Edit, SwapNorm, Untie, strange_hooks
from normwise.conversions._plan import Blocked, Change, Recipe, Refusal, Step
from normwise.facts.facts import Facts
from normwise.facts.flow import through_casts
from normwise.facts.sites import Site
from normwise.graph import ValueKind
from normwise.spec import PROMOTED, Cast, Gate, Modulation, NormSpec, Scope, Weight

__all__ = ["Folding", "fold", "growth"]

_WHAT = {"gain": ("weight",), "bias": ("bias",), "both": ("weight", "bias")}
_WORDS = {"weight": "gain", "bias": "bias"}
_UNEVEN = 10.0  # the largest gain over the median one, from which a quantised reader notices
# a bias that is registered is one that these use
_TAKE_A_BIAS = {kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_PROBE = ((1.0, 2.0, 4.0), (3.0, 5.0, 7.0))  # a weight


@dataclass(slots=True)
class Folding:
    """What folding some norms takes; the parts of a plan.

    Args:
        edits: of the readers.
        swaps: of the norms, for ``weightless``.
        recipes: of readers and norms.
        changes: what is folded.
        refused: what is not.
        folded: by path of the norm, which of its parameters are neutral now, or gone: "weight", "bias".
        constants: by key, the number that a parameter of these norms holds, where it was not folded for that reason.
        notes: what the user should know.
    """

    edits: list[Edit] = field(default_factory=list)
    swaps: list[SwapNorm] = field(default_factory=list)
    recipes: list[Recipe] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    folded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fold(
    facts: Facts,
    sites: Iterable[Site],
    *,
    what: str = "both",
    weightless: bool = False,
    create_bias: bool | None = None,
    untie: bool = False,
) -> Folding:
    """Return what folding the chosen norms takes, for a plan or as a part of another conversion.

    Recipes of the readers scale the input features; steps on the output features may be appended to them.

    Args:
        facts: of the target.
        sites: the norms, of ``facts.sites``.
        what: "gain", "bias" or "both".
        weightless: the parameters that are folded go.
        create_bias: readers get a bias where they have none; None for where the norm's is not zero.
        untie: a reader tied to an embedding gets a weight of its own.

    Raises:
        ValueError: ``what`` is none of the three.
    """
    if what not in _WHAT:
        raise ValueError(f"what={what!r} is none of {', '.join(map(repr, _WHAT))}")
    folder = _Folder(facts, what, weightless=weightless, create_bias=create_bias, untie=untie)
    for site in sites:
        try:
            folder.add(site)
        except Blocked as stop:
            folder.out.refused.append(stop.refusal(site.row.path))
    folder.tell()
    return folder.out


class _Folder:
    def __init__(self, facts: Facts, what: str, *, weightless: bool, create_bias: bool | None, untie: bool) -> None:
        self.facts, self.graph, self.out = facts, facts.graph, Folding()
        self.asked, self.weightless, self.create_bias, self.untie = _WHAT[what], weightless, create_bias, untie
        self.ids = {name: v.id for v in self.graph.values if v.kind is ValueKind.PARAM for name in v.names}
        self.unread = {name: shape for name, shape in idle_parameters(facts).items() if len(shape) > 1}
        self.widths: set[int] = set()  # of the norms that are folded

    # -- one norm ----------------------------------------------------------------------------------

    def add(self, site: Site) -> None:
        """Fold one norm, or raise ``Blocked`` with nothing changed."""
        spec = self._understood(site)
        row, neutral = site.row, {"weight": 1 - spec.weight_offset, "bias": 0.0}
        held = {name: key for name, key in (("weight", row.weight_path), ("bias", row.bias_path)) if key is not None}
        wanted = tuple(name for name in self.asked if name in held)
        todo = tuple(name for name in wanted if not self._is(held[name], neutral[name]))
        if todo == ("weight",) and "bias" in held and not self._is(held["bias"], 0.0):
            raise Blocked("its bias would have to be divided by its gain", unblock='what="both" folds both')
        swap = self._swap(site, spec, held, wanted) if self.weightless and wanted else None
        if not todo and swap is None:
            neutral_now = {"weight": "its gain is neutral", "bias": "its bias is zero"}
            said = " and ".join(
                neutral_now[name] if name in held else f"it has no {_WORDS[name]}" for name in self.asked
            )
            raise Blocked(f"there is nothing to fold: {said}")
        edits, recipes, paths = self._into_readers(site, held, todo, spec) if todo else ([], [], ())
        if swap is None:
            for name in todo:
                fill = Step(function="fill", numbers={"number": neutral[name]})
                recipes.append(Recipe(keys=self._keys(held[name]), steps=(fill,)))
        self.out.edits += edits
        self.out.recipes += recipes
        self.out.swaps += [swap] if swap is not None else []
        self.out.folded[row.path] = wanted
        self.widths.update(size for key in held.values() for size in self._shape(key) if size > 1)
        dropped = wanted if swap is not None else ()
        relied = {*dropped, *(("bias",) if "weight" in todo and "bias" in held else ())} - set(todo)
        self.out.constants.update({held[name]: neutral[name] for name in sorted(relied)})
        words = " and ".join(_WORDS[name] for name in todo or wanted)
        into = f"into {', '.join(paths)}{', and dropped' if swap else ''}" if todo else "neutral already"
        self.out.changes.append(Change(path=row.path, what=f"{words} {'folded' if todo else 'dropped'}", how=into))
        self._warn_of_uneven(row.path, held, todo, spec)

    def _understood(self, site: Site) -> NormSpec:
        row, spec, op = site.row, site.row.spec, site.calls[0].op
        if spec is None:
            raise Blocked("what it computes is not understood", op)
        if spec.running or spec.scope is Scope.BATCH:
            raise Blocked("it keeps running statistics", unblock="fold-batch-norm folds it whole")
        if spec.weight_on_input:
            raise Blocked("its gain stands before the norm, not behind it", op)
        keys = (row.weight_path, row.bias_path)
        if keys == (None, None) and spec.weight is Weight.NONE and not spec.bias:
            raise Blocked("there is nothing to fold: it has neither gain nor bias")
        if (spec.weight is Weight.NONE, not spec.bias) != tuple(key is None for key in keys):
            raise Blocked("its gain or bias is no parameter", op)
        for key in keys:
            if key is not None and (key not in self.ids or len([n for n in self._shape(key) if n > 1]) > 1):
                raise Blocked("its gain or bias is no vector", op)
            sharer = next((n for n in self._keys(key) if self._owner(n) is not self._owner(key)), None) if key else None
            if sharer is not None:
                raise Blocked(f"it shares a parameter with {sharer}", op)
        return spec

    def _into_readers(
        self, site: Site, held: dict[str, str], todo: tuple[str, ...], spec: NormSpec
    ) -> tuple[list[Edit], list[Recipe], tuple[str, ...]]:
        """Return edits and recipes of the readers, and their paths."""
        gain, bias = (self.ids[held[name]] if name in held else None for name in ("weight", "bias"))
        found = readers_of(self.facts, site, gain, bias)
        self._not_hooked(site, found)
        self._all_used(found, max(self._shape(held[todo[0]]), default=1))
        edits, recipes = list[Edit](), list[Recipe]()
        for reader in {r.weight: r for r in found.readers}.values():
            several = self.facts.tensors[held[todo[0]]].numel() > 1
            numbers: dict[str, Any] = {"dim": reader.dim, "groups": reader.groups if several else 1}
            if "weight" in todo:
                recipe, untied = self._own(reader, found)
                step = Step(
                    function="scale", reads=(held["weight"],), numbers={**numbers, "offset": spec.weight_offset}
                )
                recipes.append(replace(recipe, steps=(step,)))
                edits += untied
        if "bias" in todo:
            for recipe, added in self._shifted(found, held["bias"]):
                recipes.append(recipe)
                edits += added
        return edits, recipes, tuple(dict.fromkeys(r.path or "the model itself" for r in found.readers))

    # -- its readers -------------------------------------------------------------------------------

    def _own(self, reader: Reader, found: Readers) -> tuple[Recipe, list[Edit]]:
        """Return a recipe, still without steps, for a weight that nothing else reads, with what makes it so."""
        names = self.graph.values[reader.weight].names
        alike = [r for r in found.readers if r.weight == reader.weight]
        others = leaves(self.graph, reader.weight) - {r.op.id for r in alike}
        if any((r.dim, r.groups) != (reader.dim, reader.groups) for r in alike):
            raise Blocked(f"the weight of {reader.path} is read along two axes", reader.op)
        modules = [self.facts.modules[r.path] for r in alike]
        mine = [n for n in names if any(self._owner(n) is m for m in modules)]
        foreign = [n for n in names if n not in mine and len(names) > 1]
        if not others and not foreign:
            return Recipe(keys=names, steps=()), []
        op = self.graph.ops[min(others)] if others else reader.op
        place = self.graph.path(op) if others else foreign[0].rpartition(".")[0]
        why = f"the weight of its reader {reader.path} is shared with {place or 'the model itself'}"
        if len(mine) != 1 or not foreign or any(self.graph.ops[i].short != "embedding" for i in others):
            raise Blocked(why, op)
        if not self.untie:
            raise Blocked(why, op, f"untie=True copies it: {growth(self.facts, [mine[0]])}")
        path, _, name = mine[0].rpartition(".")
        return Recipe(keys=(mine[0],), steps=(), start=foreign[0]), [Untie(path=path, name=name, source=foreign[0])]

    def _shifted(self, found: Readers, key: str) -> Iterator[tuple[Recipe, list[Edit]]]:
        """Yield a recipe for the bias of every reader, with the edit that creates it where there is none."""
        if found.unsteady is not None:
            raise Blocked("its bias does not reach its readers as it is", found.unsteady)
        done = set[int | str]()
        for reader in found.readers:
            if reader.fixed is not None:
                raise Blocked(f"its bias cannot go into {reader.path or 'its reader'}: {reader.fixed}", reader.op)
            numbers = {"dim": reader.dim, "groups": reader.groups}
            step = Step(function="add_product", reads=(self._names(reader.weight)[0], key), numbers=numbers)
            if reader.bias is None:
                if reader.path not in done:
                    yield self._created(reader, step)
                done.add(reader.path)
                continue
            alike = [r for r in found.readers if r.bias == reader.bias]
            names, weights = self._names(reader.bias), {r.weight for r in alike}
            # a head may hold the bias of its own map a second time
            foreign = any(not f"{reader.path}.".startswith(f"{n.rpartition('.')[0]}.") for n in names if len(names) > 1)
            if foreign or leaves(self.graph, reader.bias) != {r.bias_op for r in alike} or len(weights) > 1:
                raise Blocked(f"the bias of its reader {reader.path} is used elsewhere as well", reader.op)
            if reader.bias not in done:
                yield Recipe(keys=self._names(reader.bias), steps=(step,)), []
            done.add(reader.bias)

    def _created(self, reader: Reader, step: Step) -> tuple[Recipe, list[Edit]]:
        module = self.facts.modules[reader.path]
        if self.create_bias is False:
            raise Blocked(f"its reader {reader.path} has no bias", reader.op, "create_bias=True gives it one")
        weight = self.graph.values[reader.weight]
        if f"{reader.path}.weight" not in weight.names or not _takes_a_bias(module):
            raise Blocked(
                f"its reader {reader.path or 'in the model itself'} has no bias, and would not use one", reader.op
            )
        size = weight.shape[0]
        recipe = Recipe(keys=(f"{reader.path}.bias",), steps=(step,), shape=(size,), dtype=weight.dtype)
        return recipe, [AddBias(path=reader.path, size=size, dtype=weight.dtype)]

    def _not_hooked(self, site: Site, found: Readers) -> None:
        for path in (site.row.path.partition("#")[0], *found.scopes):
            if strange_hooks(self.facts.modules[path]):
                raise Blocked(f"{path} has hooks, which see what it returns or is given", unblock="remove them first")

    def _all_used(self, found: Readers, size: int) -> None:
        """Refuse where weights stood idle in this run that may read the norm in another (experts without a token)."""
        for scope in (s for s in found.scopes if s):
            idle = next((n for n, s in self.unread.items() if n.startswith(f"{scope}.") and size in s), None)
            if idle is not None:
                raise Blocked(
                    f"{idle} was not used in this run and may read it in another", unblock="give inputs that use it"
                )

    # -- the norm ----------------------------------------------------------------------------------

    def _swap(self, site: Site, spec: NormSpec, held: dict[str, str], gone: tuple[str, ...]) -> SwapNorm | None:
        """Return the edit that drops parameters, where a module is the norm and nothing else."""
        path, flow = site.row.path, self.facts.flow
        module = self.facts.modules.get(path)
        if module is None or spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE:
            return None
        for call in site.calls:
            record = self.graph.calls[call.call]
            given = {call.input, through_casts(flow, call.input)}
            if not record.leaf or not given & set(record.inputs) or record.outputs != (call.output,):
                return None
        if {f"{path}.{name}" for name in module.state_dict()} != set(held.values()):
            return None
        kept = [name for name in held if name not in gone]
        if any(held[name] != f"{path}.{name}" for name in kept):
            return None
        given, hidden = self.graph.values[site.calls[0].input].shape, spec.scope is Scope.HIDDEN
        if "weight" in gone:
            cast = Cast.NONE if spec.cast is Cast.TO_WEIGHT else spec.cast
            out = None if spec.out_dtype == PROMOTED else spec.out_dtype
            plain = {"weight_offset": 0.0, "offset_in_weight_dtype": False}
            spec = replace(spec, weight=Weight.NONE, cast=cast, out_dtype=out, **plain)
        return SwapNorm(
            path=path,
            spec=asdict(replace(spec, bias="bias" in kept)),
            shape=tuple(given[a] for a in sorted(spec.axes)) if hidden else self._shape(held[gone[0]]),
            keeps=tuple(kept),
            drops=tuple(held[name].rpartition(".")[2] for name in gone),
        )

    # -- numbers -----------------------------------------------------------------------------------

    def _owner(self, key: str) -> nn.Module:
        return self.facts.modules[key.rpartition(".")[0]]

    def _shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.facts.tensors[key].shape)

    def _names(self, value: int) -> tuple[str, ...]:
        return self.graph.values[value].names

    def _keys(self, key: str) -> tuple[str, ...]:
        return self._names(self.ids[key])

    def _numbers(self, key: str) -> torch.Tensor | None:
        tensor = self.facts.tensors[key].detach()
        return tensor if holds_numbers(tensor) else None

    def _is(self, key: str, number: float) -> bool:
        """Whether a parameter is one number; not where there are no numbers."""
        tensor = self._numbers(key)
        return tensor is not None and bool((tensor == number).all())

    # -- notes -------------------------------------------------------------------------------------

    def _warn_of_uneven(self, path: str, held: dict[str, str], todo: tuple[str, ...], spec: NormSpec) -> None:
        tensor = self._numbers(held["weight"]) if "weight" in todo else None
        if tensor is None:
            return
        sizes = (tensor.double() + spec.weight_offset).abs()
        ratio = float(sizes.max() / sizes.median())
        if ratio >= _UNEVEN:
            self.out.notes.append(
                f"{path}: its largest gain is {ratio:.0f} times the median one, and so are the columns of its readers "
                "now: quantise after folding, with a scale for each column or group"
            )

    def tell(self) -> None:
        """Add the notes on the whole."""
        untied = [f"{e.path}.{e.name}" for e in self.out.edits if isinstance(e, Untie)]
        if untied:
            self.out.notes.append(f"{', '.join(untied)} no longer shares its weight: {growth(self.facts, untied)}")
        added = sum(isinstance(e, AddBias) for e in self.out.edits)
        if added:
            which = "1 reader has a bias" if added == 1 else f"{added} readers have biases"
            self.out.notes.append(f"{which} that the stock class does not load")
        self.out.notes += not_checked(self.unread, self.widths)
        if self.out.changes:
            self.out.notes.append("what hooks see behind these norms is without gain or bias now; outputs are the same")


def growth(facts: Facts, copied: Iterable[str]) -> str:
    """Say by how much copies of parameters, given by their keys, make a model larger."""
    own = sum(p.numel() for p in facts.target.model.parameters())
    return f"+{100 * sum(facts.tensors[key].numel() for key in copied) / own:.1f} % parameters"


def _takes_a_bias(module: nn.Module) -> bool:
    """Whether a module adds a bias that it is given: one of torch's, or one that does so on a small weight."""
    if type(module).forward in _TAKE_A_BIAS:
        return True
    x, weight, bias = torch.ones(1, 3), torch.tensor(_PROBE), torch.tensor([16.0, 32.0])
    probe = copy.copy(module)
    probe.__dict__["_parameters"] = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
    try:
        with torch.no_grad():
            made = probe.forward(x)
    except Exception:  # the forward of any module, on a weight that it may not take
        return False
    return isinstance(made, torch.Tensor) and torch.equal(made, x @ weight.T + bias)
