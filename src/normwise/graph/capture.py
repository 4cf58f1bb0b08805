"""Records every op of one run with a dispatch mode, and resolves views and in-place writes.

Under ``torch.inference_mode`` composite ops (linear, layer_norm, rms_norm, attention, ``to``)
reach the mode whole, so there is no decomposition to undo and no-op casts stay visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from normwise.graph.data import ALIAS, OPAQUE, Call, Graph, Op, Ref, Value, ValueKind
from normwise.graph.observing import Observer
from normwise.graph.provenance import CallStack, SourceFinder

__all__ = ["Overwritten", "Tracer", "tensors_in"]

_TAG = "_normwise_tag"
_NO_WRITE = frozenset({"detach_", "requires_grad_", "set_", "resize_", "record_stream", "rename_"})


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nest of tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from tensors_in(item)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from tensors_in(getattr(tree, name, None))


class _Storage:
    """The writes made to one storage. The weak reference keeps its address from being reused."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.ref = StorageWeakRef(storage)
        self.writes: list[int] = []


class Overwritten:
    """Copies parameters, buffers and inputs before they are written to, whichever view of them is used."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._owned: dict[int, list[torch.Tensor]] = {}  # storage -> what the user holds of it
        self._saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor in [*model.parameters(), *model.buffers(), *tensors_in(inputs)]:
            if (key := _storage_key(tensor)) is not None and tensor.device.type != "meta":
                self._owned.setdefault(key, []).append(tensor.detach())

    def before(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Copy what an op is about to overwrite, and return it."""
        written = _written(func, args, kwargs)
        for tensor in written:
            key = _storage_key(tensor)
            if key in self._owned and key not in self._saved:
                self._saved[key] = [(owner, owner.detach().clone()) for owner in self._owned[key]]
        return written

    def undo(self) -> None:
        """Put the copies back."""
        for owner, copy in (pair for pairs in self._saved.values() for pair in pairs):
            with torch.no_grad(), torch.inference_mode(owner.is_inference()):
                owner.detach().copy_(copy)
        self._saved.clear()


class Tracer(TorchDispatchMode):
    """Builds a ``Graph`` while a model runs.

    ``constants`` keeps the tensors that no op produced (for replay). A tensor object is identified
    by a tag on it, a parameter, buffer or input by its id, a parameter's other views by their storage.
    """

    supports_higher_order_operators: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Any,
        fake: bool = False,
        stand_ins: Mapping[str, torch.Tensor] | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__()
        self._observer = observer
        self.graph = Graph(fake=fake)
        self.calls = CallStack(model)
        self.graph.calls = self.calls.calls
        self.graph.modules = {path: type(m).__name__ for path, m in model.named_modules(remove_duplicate=False)}
        self.constants: dict[int, torch.Tensor] = {}
        self._source = SourceFinder()
        self._token = object()
        self._known: dict[int, tuple[int, int]] = {}  # id(tensor) -> (value, writes seen)
        self._keep: list[torch.Tensor] = []  # so that those ids stay taken
        self._by_storage: dict[int, int] = {}  # storage -> value of a parameter, buffer or input
        self._storages: dict[int, _Storage] = {}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}  # storage -> the last value an op left in it
        self._overwritten = Overwritten(model, inputs)
        self.data: list[bool] = []  # by value: depends on an input of the model
        self._register(model, inputs, stand_ins or {})

    # -- what exists before the run ------------------------------------------------------

    def _register(self, model: nn.Module, inputs: Any, stand_ins: Mapping[str, torch.Tensor]) -> None:
        for kind, named in (
            (ValueKind.PARAM, model.named_parameters(remove_duplicate=False)),
            (ValueKind.BUFFER, model.named_buffers(remove_duplicate=False)),
        ):
            for path, own in named:
                tensor = stand_ins.get(path, own)
                known = self._known.get(id(tensor))
                if known is not None:
                    self.graph.values[known[0]].names += (path,)
                    continue
                value = self._mint(tensor, kind, names=(path,))
                self._remember(tensor, value)
                if (key := _storage_key(tensor)) is not None:
                    self._by_storage.setdefault(key, value)
        args, kwargs = inputs
        # texts and numbers become tensors inside the model: those carry the data
        self._made_inside = bool(args or kwargs) and next(tensors_in(inputs), None) is None
        for name, item in [*((str(i), a) for i, a in enumerate(args)), *kwargs.items()]:
            for tensor in tensors_in(item):
                if id(tensor) not in self._known:
                    value = self._mint(tensor, ValueKind.INPUT, names=(name,), data=True)
                    self._remember(tensor, value)
                    if (key := _storage_key(tensor)) is not None:
                        self._by_storage.setdefault(key, value)

    def _remember(self, tensor: torch.Tensor, value: int) -> None:
        self._known[id(tensor)] = (value, 0)
        self._keep.append(tensor)

    def _mint(
        self,
        tensor: torch.Tensor,
        kind: ValueKind,
        *,
        producer: int = -1,
        names: tuple[str, ...] = (),
        data: bool = False,
    ) -> int:
        value = Value(len(self.graph.values), producer, _shape(tensor), _dtype(tensor), kind, names)
        if not data and not self.graph.fake:
            value.scalar = _scalar(tensor)
        self.graph.values.append(value)
        self.data.append(data)
        if self._observer is not None and kind in (ValueKind.OP, ValueKind.INPUT):
            self._observer.made(value, tensor)
        return value.id

    # -- reading and writing tensors -----------------------------------------------------

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the value a tensor holds now."""
        key = _storage_key(tensor)
        storage = self._storages.get(key) if key is not None else None
        writes = len(storage.writes) if storage else 0
        tag = self._known.get(id(tensor)) or self._own_tag(tensor)
        if tag is None:
            return self._adopt(tensor, key, writes)
        value, seen = tag
        if storage is None or seen == writes:
            return value
        newer = [w for w in storage.writes[seen:] if w != value]
        value = self._alias(tensor, (value, *newer)) if newer else value
        self._tag(tensor, value, writes)
        return value

    def values_of(self, tree: Any) -> tuple[int, ...]:
        """Return the values of every tensor in a nest."""
        return tuple(self.value_of(t) for t in tensors_in(tree))

    def _own_tag(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        tag = getattr(tensor, _TAG, None)
        return tag[1:] if tag is not None and tag[0] is self._token else None

    def _tag(self, tensor: torch.Tensor, value: int, writes: int) -> None:
        if id(tensor) in self._known:
            self._known[id(tensor)] = (value, writes)
        else:
            setattr(tensor, _TAG, (self._token, value, writes))

    def _adopt(self, tensor: torch.Tensor, key: int | None, writes: int) -> int:
        """Take in a tensor object that no op produced: a parameter's ``.data``, a subclass of a result, a constant."""
        owner = self._by_storage.get(key) if key is not None else None
        if owner is not None:
            value = owner
            if tuple(tensor.shape) != self.graph.values[owner].shape:
                value = self._alias(tensor, (owner,))
        elif (made := self._left_in(key)) is not None:
            same = tuple(tensor.shape) == self.graph.values[made].shape
            value = made if same else self._alias(tensor, (made,))
        else:
            value = self._mint(tensor, ValueKind.CONST, data=self._made_inside and tensor.dim() > 0)
            self.constants[value] = tensor
        self._remember(tensor, value)
        self._known[id(tensor)] = (value, writes)
        return value

    def _left_in(self, key: int | None) -> int | None:
        """Return the value that an op left in a storage: another tensor object, such as a subclass, may hold it."""
        if key in self._storages:
            return self._storages[key].writes[-1]
        return self._made[key][1] if key in self._made else None

    def _alias(self, tensor: torch.Tensor, inputs: tuple[int, ...]) -> int:
        op = self._record(ALIAS, "", tuple(Ref(i) for i in inputs), {}, inputs)
        out = self._mint(tensor, ValueKind.OP, producer=op.id, data=any(self.data[i] for i in inputs))
        op.outputs = (out,)
        return out

    def _record(self, name: str, overload: str, args: Any, kwargs: Any, inputs: tuple[int, ...]) -> Op:
        op = Op(len(self.graph.ops), name, overload, args, kwargs, inputs, (), self.calls.current, self._source())
        self.graph.ops.append(op)
        for value in inputs:
            self.graph.values[value].uses.append(op.id)
        return op

    # -- the dispatch mode ---------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "higher_order")
        if namespace == "prim":
            return func(*args, **kwargs)
        inputs: list[int] = []
        plain_args, plain_kwargs = self._plain(args, inputs), self._plain(kwargs, inputs)
        written = _written(func, args, kwargs) if self.graph.fake else self._overwritten.before(func, args, kwargs)
        output = func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", func)
        name = f"{namespace}.{packet.__name__ if callable(packet) else packet}"
        overload = getattr(func, "_overloadname", "")
        op = self._record(name, overload, plain_args, plain_kwargs, tuple(inputs))
        arguments = {id(t) for t in tensors_in((args, kwargs))}
        op.outputs = tuple(self._outputs(op, output, written, arguments))
        return output

    def _plain(self, item: Any, inputs: list[int]) -> Any:
        if isinstance(item, torch.Tensor):
            value = self.value_of(item)
            inputs.append(value)
            return Ref(value)
        if isinstance(item, (list, tuple)):
            return tuple(self._plain(i, inputs) for i in item)
        if isinstance(item, dict):
            return {k: self._plain(v, inputs) for k, v in item.items()}
        return item

    def _outputs(self, op: Op, output: Any, written: list[torch.Tensor], arguments: set[int]) -> Iterator[int]:
        data = any(self.data[i] for i in op.inputs)
        for tensor in written:
            value = self._mint(tensor, ValueKind.OP, producer=op.id, data=data)
            self._note_write(tensor, value)
            yield value
        mutated = {id(t) for t in written}
        for tensor in tensors_in(output):
            if id(tensor) in mutated or id(tensor) in arguments:
                continue  # the op returned its own argument: nothing new was made
            value = self._mint(tensor, ValueKind.OP, producer=op.id, data=data)
            self._tag(tensor, value, self._writes(tensor))
            if (key := _storage_key(tensor)) is not None:
                self._made[key] = (StorageWeakRef(tensor.untyped_storage()), value)
            yield value

    def _note_write(self, tensor: torch.Tensor, value: int) -> None:
        key = _storage_key(tensor)
        if key is None:
            self._tag(tensor, value, 0)
            return
        if key not in self._storages:
            self._storages[key] = _Storage(tensor.untyped_storage())
        self._storages[key].writes.append(value)
        self._tag(tensor, value, len(self._storages[key].writes))

    def leave(self, call: Call, output: Any) -> tuple[int, ...]:
        """Return the values of a module's output; bridge a module that computed it outside torch.

        A leaf module whose output does not depend on the data although its input of the same shape
        does (a detour through numpy, a foreign kernel) becomes one opaque op.
        """
        if call.leaf:
            for tensor in tensors_in(output):
                value = self.value_of(tensor)
                shape = self.graph.values[value].shape
                same = [i for i in call.inputs if self.data[i] and self.graph.values[i].shape == shape]
                if same and not self.data[value] and tensor.is_floating_point():
                    self._bridge(tensor, (*same, value))
        return self.values_of(output)

    def _bridge(self, tensor: torch.Tensor, inputs: tuple[int, ...]) -> None:
        op = self._record(OPAQUE, "", tuple(Ref(i) for i in inputs), {}, inputs)
        out = self._mint(tensor, ValueKind.OP, producer=op.id, data=True)
        op.outputs = (out,)
        self._tag(tensor, out, self._writes(tensor))

    def _writes(self, tensor: torch.Tensor) -> int:
        key = _storage_key(tensor)
        storage = self._storages.get(key) if key is not None else None
        return len(storage.writes) if storage else 0

    # -- undoing what the model did to itself ---------------------------------------------

    def undo(self) -> None:
        """Put back parameters, buffers and inputs that the run overwrote, and forget the tags."""
        self._overwritten.undo()
        self._keep.clear()
        self._known.clear()

    def finish(self, output: Any) -> Graph:
        """Mark the model's outputs and return the graph."""
        self.graph.outputs = self.values_of(output)
        return self.graph


def _storage_key(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # wrapper subclasses and sparse tensors have none
        return None


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes; the ragged axis of a nested tensor has none and counts as one."""
    try:
        return tuple(int(s) for s in tensor.shape)
    except AttributeError:  # torch's NestedIntNode has no int_()
        return tuple(s if type(s) is int else 1 for s in tensor.shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _scalar(tensor: torch.Tensor) -> float | None:
    """Return the number in a one-element real tensor."""
    if tensor.numel() != 1 or tensor.device.type == "meta" or tensor.is_complex() or tensor.layout != torch.strided:
        return None
    try:
        return float(tensor.detach())
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an op overwrites, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or func.overloadpacket.__name__ in _NO_WRITE:
        return []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            item = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(item))
    return written
