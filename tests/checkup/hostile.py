"""Evidence of the wrong kind, by the argument of ``nw.check`` that it is given for, with a word of the reason.

The word is None where the value says nothing or is harmless: then every rule is judged as without it or skipped for
a reason of its own.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader

__all__ = ["EVIDENCE", "ROWS", "WIDTH", "Net", "example", "longer", "trained"]

ROWS, STEPS, WIDTH = 8, 5, 8
Cases = dict[str, tuple[Any, str | None]]


class Net(nn.Module):
    """A batch norm, a pre-norm branch and a closing norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.bn, self.norm, self.mix = nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Linear(width, width)
        self.final, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.bn(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.final(x + self.mix(self.norm(x))))


def example() -> Tensor:
    return torch.randn(ROWS, STEPS, WIDTH, generator=torch.Generator().manual_seed(0))


def longer() -> Tensor:
    return torch.cat([example(), torch.zeros(ROWS, 3, WIDTH)], 1)


def trained() -> Net:
    torch.manual_seed(0)
    model = Net()
    for _ in range(30):
        model(torch.randn(ROWS, STEPS, WIDTH)).sum().backward()
    return model.eval()


class _Again:
    """Can be iterated any number of times, each time anew."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.start = start

    def __iter__(self) -> Any:
        return self.start()


class _Rude:
    """Every attribute, its text and its truth raise."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class _Unreadable(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("the file is gone")

    def __iter__(self) -> Iterator[str]:
        return iter(["layer_norm_eps", "norm.weight"])

    def __len__(self) -> int:
        return 2


def _boom(*_: Any, **__: Any) -> Any:
    raise ValueError("boom")


def _exit(*_: Any, **__: Any) -> Any:
    sys.exit(3)


def _raises_later() -> Iterator[Any]:
    yield (example(),)
    raise ValueError("boom")


def _endless() -> Iterator[Any]:
    while True:
        yield (example(),)


def _batches(*batches: Any) -> list[Any]:
    return list(batches)


def loaders() -> Cases:
    x = example()
    return {
        "raises at once": (_Again(_boom), "boom"),
        "raises at the second batch": (_Again(_raises_later), "boom"),
        "exits": (_Again(_exit), "SystemExit"),
        "other shapes": (_batches((x[..., :3],), (x[..., :3],)), "running_mean should contain"),
        "never ends": (_Again(_endless), "end of the loader is not known"),
        "one-shot": (iter([(x,)]), "only once"),
        "dicts": (_batches({"x": x}, {"x": x}), "neither tuples nor tensors"),
        "empty": ([], "empty"),
        "a tensor": (x, "cannot be iterated"),
        "a number": (5, "cannot be iterated"),
        "strings": (["a", "b"], "no tensors"),
        "a data set that raises": (DataLoader(_Broken(), batch_size=4), "gone"),
        "integers": (_batches((x.long(),), (x.long(),)), "not implemented for 'Long'"),
        "on meta": (_batches((x.to("meta"),), (x.to("meta"),)), "meta"),
        "NaN": (_batches((x * float("nan"),), (x * float("nan"),)), None),
        "no rows": (_batches((x[:0],), (x[:0],)), None),
    }


class _Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise KeyError("gone")


def checkpoints() -> Cases:
    sd = trained().state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that quantised tensors go away
        quantized = {k: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8) for k, t in sd.items()}
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode()
    return {
        "other shapes": ({k: torch.zeros([n + 1 for n in t.shape]) for k, t in sd.items()}, "shapes"),
        "strings": (dict.fromkeys(sd, "x"), "no tensors"),
        "integers": (dict.fromkeys(sd, 3), "no tensors"),
        "arrays": ({k: t.numpy() for k, t in sd.items()}, "no tensors"),
        "nested": ({"state_dict": sd, "epoch": 3}, None),
        "nested too deep": ({"a": {"b": {"c": sd}}}, "no tensors"),
        "meta": ({k: t.to("meta") for k, t in sd.items()}, "no tensors"),
        "fake": ({k: fake.from_tensor(t) for k, t in sd.items()}, "no tensors"),
        "sparse": ({k: t.to_sparse() for k, t in sd.items() if t.dim()}, "no tensors"),
        "quantised": (quantized, "no tensors"),
        "complex": ({k: t.to(torch.complex64) for k, t in sd.items()}, "no tensors"),
        "wrong keys": ({f"q{i}": torch.randn(3, 7) for i in range(9)}, "shares no tensor"),
        "huge keys": ({"a." * 5000 + k: t for k, t in sd.items()}, None),
        "odd keys": ({None: example(), 3: example(), ("a",): example()}, "shares no tensor"),
        "empty": ({}, "no tensors"),
        "a path": ("model.pt", "is a str"),
        "a list": ([sd], "is a list"),
        "a module": (trained(), "is a Net"),
        "a file that is gone": (_Unreadable(), "gone"),
    }


def padded() -> Cases:
    x, more = example(), longer()
    rows = "not the samples of inputs"
    return {
        "other samples": (torch.randn(ROWS, 8, WIDTH), rows),
        "shorter": (x[:, :3], rows),
        "no longer": (x, "not longer"),
        "other dtype": (more.double(), "does not run on padded_inputs"),
        "complex": (more.to(torch.complex64), "another kind"),
        "more arguments": ((more, more), rows),
        "no arguments": ((), rows),
        "an unknown keyword": ({"y": more}, "does not run on padded_inputs"),
        "a string": ("abc", rows),
        "fewer rows": (more[:2], rows),
        "wider": (torch.cat([x, torch.zeros(ROWS, STEPS, 3)], 2), "does not run on padded_inputs"),
        "padding in front": (torch.cat([torch.zeros(ROWS, 3, WIDTH), x], 1), rows),
        "meta": (more.to("meta"), "another kind or device"),
        "sparse": (more.to_sparse(), "another kind or device"),
    }


def lengths() -> Cases:
    whole = "not one whole number"
    return {
        "too long": ([900] * ROWS, "longer than padded_inputs"),
        "negative": ([-1] * ROWS, whole),
        "strings": (["a"] * ROWS, whole),
        "fractions": (torch.full((ROWS,), 2.5), whole),
        "infinite": ([float("inf")] * ROWS, whole),
        "a matrix": (torch.ones(ROWS, 2), whole),
        "meta": (torch.ones(ROWS, device="meta"), whole),
        "too few": ([5], whole),
        "none at all": ([], whole),
        "a number": (5, whole),
        "raises": (_Again(_boom), whole),
    }


def _net(forward: Callable[[Net, Any], Any], width: int = WIDTH) -> nn.Module:
    return type("Other", (Net,), {"forward": forward})(width)


def _restless(self: Net, x: Tensor) -> Tensor:
    self.mix = nn.Identity()  # type: ignore[assignment]
    self.register_buffer("new", torch.ones(2))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    return x


def _unlisted(*_: Any, **__: Any) -> Any:
    raise RuntimeError("sharded")


def references() -> Cases:
    unlisted = type("Unlisted", (Net,), {"named_parameters": _unlisted})()
    return {
        "other signature": (_net(lambda self, a, b: a), "missing 1 required"),  # type: ignore[arg-type, misc]
        "raises": (_net(_boom), "boom"),
        "exits": (_net(_exit), "SystemExit"),
        "other output": (_net(lambda self, x: Net.forward(self, x)[..., :2]), "other shapes"),
        "NaN": (_net(lambda self, x: Net.forward(self, x) * float("nan")), "NaN"),
        "no output": (_net(lambda self, x: None), "no floating-point tensor"),
        "another width": (Net(16), "does not run"),
        "meta": (Net().to("meta"), "no numbers"),
        "lazy": (nn.Sequential(nn.LazyLinear(3)), "not initialized"),
        "no module inside": (nn.Sequential(), "other shapes"),
        "changes itself": (_net(_restless), "other shapes"),
        "parameters that cannot be listed": (unlisted, "sharded"),
    }


def configs() -> Cases:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    return {
        "a string": ("abc", "is a str"),
        "a number": (5, "is a int"),
        "a list": ([1], "is a list"),
        "properties that raise": (_Rude(), "cannot be read"),
        "a file that is gone": (_Unreadable(), "cannot be read"),
        "to_dict raises": (type("Config", (), {"to_dict": _boom})(), "boom"),
        "keys of any kind": ({1: 2, None: 3, ("layer_norm_eps",): 1}, None),
        "values of any kind": ({"layer_norm_eps": _Rude(), "model_type": 5, "world_size": "x"}, None),
        "not finite": ({"layer_norm_eps": float("nan"), "norm_eps": float("inf"), "epsilon": 10**400}, None),
        "holds itself": (loop, None),
        "empty": ({}, None),
    }


def load_infos() -> Cases:
    lists = "no lists of keys"
    return {
        "a string": ("abc", lists),
        "a number": (4, lists),
        "empty": ({}, lists),
        "numbers": ({"missing_keys": 3, "unexpected_keys": None}, lists),
        "keys that are numbers": (([1], [2]), lists),
        "two strings": (("ab", "cd"), lists),
        "three lists": (([], [], []), lists),
        "properties that raise": (_Rude(), lists),
        "an iterator that raises": ({"missing_keys": _Again(_boom), "unexpected_keys": []}, lists),
        "keys of another model": ({"missing_keys": ["q.w"], "unexpected_keys": ["norm.weight"]}, None),
        "huge keys": ({"missing_keys": ["a." * 5000], "unexpected_keys": ["b" * 100000]}, None),
    }


def onlines() -> Cases:
    return {
        "another architecture": (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), "same paths"),
        "no norms": (nn.Identity(), "same paths"),
        "lazy": (nn.Sequential(nn.LazyBatchNorm1d()), "same paths"),
        "another width": (Net(16), None),
        "meta": (Net().to("meta"), None),
        "raises": (_net(_boom), None),
        "exits": (_net(_exit), None),
        "changes itself": (_net(_restless), None),
        "parameters that cannot be listed": (type("Unlisted", (Net,), {"named_parameters": _unlisted})(), "sharded"),
    }


def _train(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def _prints(model: nn.Module, x: Tensor) -> None:
    for stream in (sys.stdout, sys.stderr):
        print("noise" * 1000, file=stream)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    warnings.warn("noise", stacklevel=1)
    _train(model, x)


def _replaces(model: Any, x: Tensor) -> None:
    model.mix, model.norm = nn.Linear(WIDTH, WIDTH), nn.Identity()
    del model.head.bias
    model.head.bias = None
    model.register_buffer("new", torch.ones(1))
    model.__dict__["forward"] = lambda y: y
    _train(model, x)


def _hooks(model: Any, x: Tensor) -> None:
    model.norm.register_forward_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    register_module_forward_hook(lambda *_: None)
    _train(model, x)


def _deletes(model: Any, x: Tensor) -> None:
    del model.mix.weight
    model(x)


def _in_a_thread(model: nn.Module, x: Tensor) -> None:
    thread = threading.Thread(target=_train, args=(model, x))
    thread.start()
    thread.join()


def _flags(model: nn.Module, x: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.set_anomaly_enabled(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_autocast_enabled("cpu", True)
    torch.set_float32_matmul_precision("medium")


def _seeds(model: nn.Module, x: Tensor) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(4)
    _train(model, x)


def _empties(model: nn.Module, x: Tensor) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.zeros(3)
    model.half()


def _spoils(model: Any, x: Tensor) -> None:
    x.zero_()
    model.half()
    model.bn.running_mean.resize_(3)
    model.zero_grad()


def _nonsense(model: nn.Module, x: Tensor) -> Any:
    return {3: [_Rude()], None: model}


def _recurses(model: nn.Module, x: Tensor) -> None:
    _recurses(model, x)


CODE: dict[str, tuple[Callable[..., Any], str | None]] = {
    "raises": (_boom, "boom"),
    "exits": (_exit, "SystemExit"),
    "returns nonsense": (_nonsense, None),
    "prints and takes the streams": (_prints, None),
    "replaces modules": (_replaces, None),
    "adds hooks": (_hooks, None),
    "deletes a parameter": (_deletes, "no attribute 'weight'"),
    "starts a thread": (_in_a_thread, None),
    "sets flags": (_flags, None),
    "seeds": (_seeds, None),
    "empties parameters": (_empties, None),
    "spoils inputs and buffers": (_spoils, None),
    "recurses": (_recurses, "RecursionError"),
}


def train_steps() -> Cases:
    return {**CODE, "takes no arguments": (lambda: None, "takes 0 positional arguments"), "a string": ("x", "callable")}


def eval_fns() -> Cases:
    def over(code: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
        return lambda model, batches: [code(model, batch) for batch in batches]

    mine: Cases = {name: (over(code), why) for name, (code, why) in CODE.items()}
    return {**mine, "takes no arguments": (lambda: None, "takes 0 positional arguments"), "a string": ("x", "callable")}


def other_ranks() -> Cases:
    x, refused = example(), "refused"
    return {
        "a string": ("abc", refused),
        "a number": (3, refused),
        "another shape": (x[..., :3], refused),
        "more arguments": ((x, x), refused),
        "no arguments": ((), refused),
        "an unknown keyword": ({"y": x}, refused),
        "integers": (x.long(), refused),
        "meta": (x.to("meta"), refused),
        "sparse": (x.to_sparse(), refused),
        "objects": ((object(),), refused),
        "NaN": (x * float("nan"), None),
        "no rows": (x[:0], None),
    }


EVIDENCE: dict[str, Callable[[], Cases]] = {
    "loader": loaders,
    "checkpoint": checkpoints,
    "padded_inputs": padded,
    "lengths": lengths,
    "reference": references,
    "config": configs,
    "load_info": load_infos,
    "online": onlines,
    "train_step": train_steps,
    "eval_fn": eval_fns,
    "inputs_other_rank": other_ranks,
}
