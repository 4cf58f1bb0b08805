"""Faults of loading and of processes: checkpoints, configurations and references that the model departs from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.faults.case import Case, Fault, Observed, Unfit, swap
from bench.faults.injectors.placements import last_sublayer
from bench.faults.rewritten import Rewritten, rewrite
from normwise.facts.records import Place

__all__ = ["FAULTS"]


def _other_flag(case: Case) -> list[str]:
    """Weights of the other placement: the flag of the blocks was flipped."""
    if not case.name.startswith("torch:"):
        raise Unfit("no flag that moves the norms")
    case.evidence["checkpoint"] = {name: t.clone() for name, t in case.model.state_dict().items()}
    with torch.no_grad():
        y = case.call()
    case.evidence["loader"] = [(case.args[0], y), (case.args[0].flip(0), y.flip(0))]
    paths = []
    for path, module in case.model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.norm_first = not module.norm_first
            paths.append(path)
    return paths


def _dropped_final(case: Case) -> list[str]:
    """A model without the final norm that its checkpoint holds."""
    finals = case.vectors(places=(Place.FINAL,))
    site = finals[-1]
    swap(case, site.path, nn.Identity())
    return [site.path, *last_sublayer(case, site)]


def _other_eps(case: Case) -> list[str]:
    """An eps that is not that of the configuration."""
    config = case.evidence.get("config")
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")
    if config is None or not any(isinstance(getattr(config, n, None), float) for n in names):
        raise Unfit("no configuration that states eps")
    sites = case.vectors(shared=True)
    for site in sites:
        module = case.module(site.path)
        attribute = next((a for a in ("eps", "variance_epsilon") if isinstance(getattr(module, a, None), float)), None)
        if attribute is None:
            raise Unfit("no norm that holds its eps")
        setattr(module, attribute, 0.1)
    return [s.path for s in sites]


def _other_kind(case: Case) -> list[str]:
    """Norms of the other kind: the mean is taken out where the family keeps it, or kept where it takes it out."""
    sites = case.vectors(shared=True)
    if case.evidence.get("config") is None:
        raise Unfit("no configuration that states the kind")
    paths = rewrite(case, sites, Rewritten)
    for path in paths:
        norm = case.module(path)
        norm.centred = not norm.centred
    return paths


def _unlike_reference(attribute: str, value: Any) -> Any:
    def inject(case: Case) -> list[str]:
        return rewrite(case, case.some(case.vectors(), one=True), Rewritten, **{attribute: value})

    return inject


def _keeps_mean(case: Case) -> list[str]:
    return rewrite(case, case.some(case.vectors("layer")), Rewritten, centred=False)


def _moved_gain(case: Case) -> list[str]:
    (site,) = case.some(case.vectors(), one=True)
    with torch.no_grad():
        case.model.get_parameter(str(site.weight_path)).mul_(1.3)
    return [site.path]


def _swapped_names(case: Case) -> list[str]:
    """A checkpoint that says gamma and beta, loaded with strict=False: the norms stay at their initial values."""
    state = case.evidence["checkpoint"]
    sites = case.vectors()
    old: dict[str, Tensor] = dict(state)
    with torch.no_grad():
        for site in sites:
            for path, name in ((site.weight_path, "gamma"), (site.bias_path, "beta")):
                if path is None:
                    continue
                old[f"{site.path}.{name}"] = old.pop(path)
                neutral = (1.0 - (site.spec.weight_offset if site.spec else 0.0)) if name == "gamma" else 0.0
                case.model.get_parameter(path).fill_(neutral)
    case.evidence["checkpoint"] = old
    return [s.path for s in sites]


def _missing_keys(case: Case) -> list[str]:
    """One norm of the checkpoint did not arrive."""
    sites = case.some(case.vectors(), one=True)
    with torch.no_grad():
        for site in sites:
            case.model.get_parameter(str(site.weight_path)).fill_(1.0 - (site.spec.weight_offset if site.spec else 0.0))
            if site.bias_path:
                case.model.get_parameter(site.bias_path).zero_()
    return [s.path for s in sites]


def _apart(case: Case) -> list[str]:
    (site,) = case.some(case.vectors(), one=True)
    case.evidence["config"]["rank_states"][1][site.weight_path].add_(1e-3)
    return [site.path]


def ranks(case: Case) -> Observed:
    """Return how far states and gradients of the ranks are apart."""
    config = case.evidence["config"]
    pairs = [("rank_states", "state"), ("rank_gradients", "gradient")]
    return {
        f"{said} {name}": (tensor.double() - config[key][1][name].double()).abs().max()
        for key, said in pairs
        for name, tensor in config[key][0].items()
        if tensor.is_floating_point()
    }


def _unreduced(case: Case) -> list[str]:
    sites = case.vectors()
    for site in sites:
        for path in (site.weight_path, site.bias_path):
            if path in case.evidence["config"]["rank_gradients"][1]:
                case.evidence["config"]["rank_gradients"][1][path].mul_(0.5)
    return [s.path for s in sites]


def _buffers_apart(case: Case) -> list[str]:
    (site,) = case.some(case.batch_norms(), one=True)
    for name, tensor in case.evidence["config"]["rank_states"][1].items():
        if name.startswith(f"{site.path}.running"):
            tensor.mul_(1.2)
    return [site.path]


FAULTS = (
    Fault(
        name="placement-of-the-flag", codes=("CKP001",), inject=_other_flag, setting="loaded",
        effects=("PLC001",), what=("weights of the other placement", "权重来自另一种放置"),
    ),
    Fault(
        name="final-norm-dropped", codes=("CKP004", "PLC001"), inject=_dropped_final, setting="loaded",
        effects=("CKP004", "PLC001"),
        what=("no place for the final norm of the checkpoint", "检查点的末端归一化无处可放"),
    ),
    Fault(
        name="eps-of-another-model", codes=("CKP005",), inject=_other_eps, setting="loaded", effects=("NUM005",),
        what=("eps 0.1 where the configuration states another", "eps 为 0.1，与配置不同"),
    ),
    Fault(
        name="kind-of-another-model", codes=("CKP002",), inject=_other_kind, setting="loaded",
        what=("LayerNorm for RMSNorm, or the reverse", "LayerNorm 与 RMSNorm 互换"),
    ),
    Fault(
        name="kind-unlike-the-reference", codes=("CKP006", "CKP002"), inject=_keeps_mean,
        setting="referenced", what=("the mean is kept, the reference takes it out", "保留均值，而参考模型减去均值"),
    ),
    Fault(
        name="gain-unlike-the-reference", codes=("CKP006",), inject=_moved_gain, setting="referenced",
        what=("a gain 1.3 times that of the reference", "增益是参考模型的 1.3 倍"),
    ),
    Fault(
        name="offset-unlike-the-reference", codes=("CKP006", "PAR002"), inject=_unlike_reference("offset", 1.0),
        setting="referenced", effects=("PAR010",),
        what=("1 + weight, not weight as in the reference", "1 + weight，而参考模型乘以 weight"),
    ),
    Fault(
        name="gamma-and-beta", codes=("CKP003",), inject=_swapped_names, setting="loaded",
        what=("a checkpoint that says gamma and beta", "检查点用 gamma 与 beta 命名"),
    ),
    Fault(
        name="norm-not-loaded", codes=("CKP003",), inject=_missing_keys, setting="loaded",
        what=("one norm at its initial values", "一个归一化仍为初始值"),
    ),
    Fault(
        name="ranks-apart", codes=("DST002",), inject=_apart, setting="ranks", observe=ranks,
        what=("a gain that differs between two processes", "两个进程的增益不同"),
    ),
    Fault(
        name="gradients-not-reduced", codes=("DST005",), inject=_unreduced, setting="ranks", observe=ranks,
        what=("gradients of norms that are each process's own", "归一化的梯度没有跨进程求和"),
    ),
    Fault(
        name="statistics-apart", codes=("DST003",), inject=_buffers_apart, setting="ranks", observe=ranks,
        information=True, what=("running statistics that differ between two processes", "两个进程的运行统计量不同"),
    ),
)  # fmt: skip
