"""Gains that bfloat16 freezes at 1, and unit offset

## Claim
A gain that is stored in bfloat16 starts at 1.0, where the next numbers are 2^-7 above and 2^-8 below. An update of less
than half a step is rounded away, so that at the learning rates of large models the gains of norms never move. Stored as
1 + w with w at 0 (Gemma's unit offset) they do, and so they do with float32 master weights or stochastic rounding.
Weight decay pulls plain gains to 0 and gains with an offset to 1.

## Source
Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740, keep master weights in float32 because updates in half
precision are rounded away; Zamirai et al. 2020, https://arxiv.org/abs/2010.06192, find the same of bfloat16, and that
stochastic rounding cures it. Gemma Team 2024, https://arxiv.org/abs/2403.08295, store gains as 1 + w.

## Method
Pre-Norm decoders with RMSNorm (2 layers, 64 features, 320 gains) read bytes of the standard library: 200 steps of 8
windows of 64 bytes, Adam (0.9, 0.98) without warm-up. Every parameter is stored in bfloat16, rounded after each step
to the nearest, or at random in proportion; or a float32 copy is kept beside it. Counted are gains that were 1.0 after
every step. Matrices are stored in the same way, so plain gains and gains with an offset differ in nothing else.

The closed form: an update of Adam is at most B times the rate, where by Cauchy and Schwarz B^2 = max over t of
(1-a)^2 / (1-b) * (1-b^t) / (1-a^t)^2 * sum over k < t of (a^2/b)^k, whatever the gradients: B = 1.70 for a = 0.9 and
b = 0.98. Under the rate 2^-9 / B = 0.00115 no gain ever moves. The first update is the rate itself: over 2^-9 the gains
that go down move at once, over 2^-8 all do. Between, it depends on how steady the gradients are.

## What would refute it
A gain that moves under 2^-9 / B; gains with an offset that stay; master weights or stochastic rounding that do not free
them. Of decay: plain gains that do not follow (1 - rate * decay)^steps, or gains with an offset that leave 1 with it.

## Cost
6 CPU-minutes with 3 seeds; the quick set 1.

## What this cannot show
What frozen gains cost a large model over many steps: 200 steps of a small one show a difference in loss only if it is
larger than that between seeds. Moments are kept in float32 and so is the arithmetic of the model, since bfloat16
products are six times slower on this kind of processor: this is about where numbers are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parameters_to_vector

from normwise.functional.hidden import RMS
from normwise.layers import RMSNorm
from normwise.models import Decoder
from normwise.rendering import both
from normwise.rendering.plots import Chart, Line
from normwise.studies._corpus import VOCABULARY, corpus
from normwise.studies._curves import across
from normwise.studies._outcomes import not_shown, outcome
from normwise.studies._seeds import mean, order, spelled
from normwise.studies._storage import adam_bound, stored_training
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table
from normwise.studies._training import next_byte_loss, validation_loss

ZH = """被 bfloat16 冻结在 1 的增益，与单位偏移

## 主张
以 bfloat16 存储的增益从 1.0 开始，其上相邻的数相差 2^-7，其下相差 2^-8。小于半步的更新会被舍入掉，因此在大模型常用的
学习率下，归一化的增益永远不动。若存为 1 + w、w 从 0 开始（Gemma 的单位偏移），就会动；保留 float32 主权重或随机舍入也
会。权重衰减把普通增益拉向 0，把带偏移的增益拉向 1。

## 出处
Micikevicius 等 2017，https://arxiv.org/abs/1710.03740：因半精度的更新会被舍入掉，主权重保留为 float32；Zamirai 等
2020，https://arxiv.org/abs/2010.06192：bfloat16 也是如此，随机舍入可以解决。Gemma Team 2024，
https://arxiv.org/abs/2403.08295：增益存为 1 + w。

## 方法
带 RMSNorm 的 Pre-Norm 解码器（2 层、64 个特征、320 个增益）读标准库源码的字节：200 步，每步 8 个 64 字节的窗口，Adam
(0.9, 0.98)，无预热。所有参数以 bfloat16 存储，每步之后舍入到最近的数，或按比例随机舍入；或在旁边保留一份
float32。统计每一步之后都是 1.0 的增益。矩阵以同样方式存储，因此普通增益与带偏移的增益别无不同。

闭式：无论梯度如何，由 Cauchy-Schwarz 不等式，Adam 的一次更新不超过学习率的 B 倍，B^2 = max_t (1-a)^2 / (1-b) *
(1-b^t) / (1-a^t)^2 * sum_{k<t} (a^2/b)^k；a = 0.9、b = 0.98 时 B = 1.70。学习率低于 2^-9 / B = 0.00115 时没有增益会
动。第一次更新恰为学习率：超过 2^-9，向下的增益立刻移动；超过 2^-8，全部移动。两者之间取决于梯度有多稳定。

## 什么会推翻它
在 2^-9 / B 之下有增益移动；带偏移的增益不动；主权重或随机舍入不能让它们移动。关于衰减：
普通增益不按 (1 - 学习率 * 衰减)^步数
变化，或带偏移的增益因衰减而离开 1。

## 开销
3 个种子 6 CPU 分钟；快速集 1 分钟。

## 这里无法说明的
冻结的增益对大模型长期训练的代价：小模型 200 步，只有大于种子之间差别的损失差才看得出来。动量与模型的运算保留为
float32，因为这类处理器上 bfloat16 的乘积慢六倍：这里说的是数存在哪里。
"""

VERSION = 1
DATA = ("standard-library",)
SEEDS = 3

_LAYERS, _WIDTH, _BATCH, _LENGTH, _STEPS = 2, 64, 8, 64, 200
_BETAS = (0.9, 0.98)
_BELOW, _ABOVE = 2.0**-9, 2.0**-8  # half a step of bfloat16 under and over 1.0; a tie goes to 1.0, which is even
_RATES = (3e-4, 1e-3, 1.5e-3, 3e-3, 6e-3)
_DECAY = 1.0  # rate * decay * steps = 0.6: what a decay of 0.1 does in 10 times as many steps
_DECAYED_RATE = 3e-3
_FREE = 0.01  # of the gains: rare ones may be rounded away again after they moved, or have a gradient of nearly 0
_HALVES = 0.5  # of the way that decay alone would go: the gradient goes its own way meanwhile


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 0.022 * params.get("steps", _STEPS)


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return ways to store, rates and decays."""
    rates = (1e-3, 3e-3, 6e-3) if quick else _RATES
    found = [_trial("nearest", offset, rate) for rate in rates for offset in (False, True)]
    for rate in (1e-3, _DECAYED_RATE) if quick else (3e-4, 1e-3, _DECAYED_RATE):
        found += [_trial("master", False, rate), _trial("stochastic", False, rate)]
    found += [_trial("master", offset, _DECAYED_RATE, _DECAY) for offset in (False, True)]
    return found


def _trial(storage: str, offset: bool, rate: float, decay: float = 0.0) -> dict[str, Any]:
    return {"storage": storage, "offset": offset, "rate": rate, "decay": decay}


def measure(params: Params) -> dict[str, Any]:
    """Train once and follow the gains."""
    torch.manual_seed(params["seed"])
    text = corpus()
    norm = RMSNorm(1, add_unit_offset=params["offset"]).spec if params["offset"] else RMS
    model = Decoder(VOCABULARY, _WIDTH, _LAYERS, 4, norm=norm, positions="learned", context=_LENGTH)
    gains = [module.weight for module in model.modules() if isinstance(module, RMSNorm) and module.weight is not None]
    start = parameters_to_vector(gains).detach()
    steps, moved, first, largest = params.get("steps", _STEPS), torch.zeros(len(start), dtype=torch.bool), 0.0, 0.0
    updates = stored_training(
        list(model.parameters()),
        gains,
        storage=params["storage"],
        rate=params["rate"],
        betas=_BETAS,
        decay=params["decay"],
        seed=params["seed"],
    )
    windows = torch.Generator().manual_seed(params["seed"])
    for step in range(steps):
        ids = text.batch(_BATCH, _LENGTH, windows)
        loss = next_byte_loss(model, ids)
        model.zero_grad(set_to_none=True)
        loss.backward()
        largest = max(largest, next(updates))
        moved |= parameters_to_vector(gains).detach() != start
        first = float(moved.float().mean()) if step == 0 else first
    value = parameters_to_vector(gains).detach() + (1.0 if params["offset"] else 0.0)
    return {
        "never_moved": float((~moved).float().mean()),
        "moved_at_once": first,
        "mean_gain": float(value.mean()),
        "distance": float((value - 1).abs().mean()),
        "largest_update": largest / params["rate"],
        "validation": validation_loss(model, text, length=_LENGTH),
    }


_BOUND = adam_bound(*_BETAS)
_FREEZES = _BELOW / _BOUND  # under this rate no gain can move
_CONDITIONS = both(
    f"Pre-Norm decoder with RMSNorm, {_LAYERS} layers, {_WIDTH} features, {_BATCH} x {_LENGTH} bytes, {_STEPS} steps, "
    "Adam (0.9, 0.98), no warm-up; parameters stored in bfloat16",
    f"带 RMSNorm 的 Pre-Norm 解码器，{_LAYERS} 层、{_WIDTH} 个特征、{_BATCH} x {_LENGTH} 字节、{_STEPS} 步，Adam "
    "(0.9, 0.98)，无预热；参数以 bfloat16 存储",
)


def _plain(rows: Rows, **more: Any) -> Rows:
    return rows.where(**{"storage": "nearest", "offset": False, "decay": 0.0, **more})


def _judge_freezing(rows: Rows) -> Judgement:
    plain = _plain(rows)
    rates = sorted(plain.distinct("rate"))
    shares = {rate: plain.where(rate=rate).mean("never_moved") for rate in rates}
    told = ", ".join(f"{rate:g}: {share:.0%}" for rate, share in shares.items())
    says = both(
        f"share of gains that never moved, by rate: {told}. Under 2^-9 / B = {_FREEZES:.2g} none can",
        f"从未移动的增益比例（按学习率）：{told}。低于 2^-9 / B = {_FREEZES:.2g} 时都不能动",
    )
    if any(plain.where(rate=rate).spread("never_moved")[0] < 1.0 for rate in rates if rate < _FREEZES):
        return Judgement(Outcome.REFUTED, says)
    if all(share == 1.0 for share in shares.values()):
        return Judgement(Outcome.CONFIRMED, says)
    return Judgement(
        Outcome.DEPENDS,
        both(
            f"depends on the learning rate: {says}; over 2^-8 all move at once",
            f"取决于学习率：{says.zh}；超过 2^-8 全部立刻移动",
        ),
    )


def _judge_offset(rows: Rows) -> Judgement:
    offset = rows.where(storage="nearest", offset=True, decay=0.0)
    worst = offset.spread("never_moved")[1]
    plain = _plain(rows, rate=min(offset.distinct("rate"))).mean("never_moved")
    says = both(
        f"with unit offset at most {worst:.1%} of the gains never moved at any rate; plain gains {plain:.0%} at the "
        "lowest",
        f"带单位偏移时，任何学习率下从未移动的增益至多 {worst:.1%}；普通增益在最低学习率下为 {plain:.0%}",
    )
    return Judgement(Outcome.CONFIRMED if worst <= _FREE < plain else Outcome.REFUTED, says)


def _judge_cures(rows: Rows) -> Judgement:
    left: dict[str, dict[float, float]] = {}
    for storage in ("master", "stochastic"):
        cured = rows.where(storage=storage, offset=False, decay=0.0)
        rates = sorted(cured.distinct("rate"))
        left[storage] = {rate: cured.where(rate=rate).spread("never_moved")[1] for rate in rates}
    told = {name: ", ".join(f"{rate:g}: {share:.1%}" for rate, share in found.items()) for name, found in left.items()}
    decided = outcome(share <= _FREE for found in left.values() for share in found.values())
    depends = decided is Outcome.DEPENDS
    return Judgement(
        decided,
        both(
            f"{'depends on the learning rate: ' * depends}never moved, at most, by rate: float32 master weights "
            f"{told['master']}; stochastic rounding {told['stochastic']}",
            f"{'取决于学习率：' * depends}从未移动的至多（按学习率）：float32 主权重 {told['master']}；"
            f"随机舍入 {told['stochastic']}",
        ),
    )


def _judge_loss(rows: Rows) -> Judgement:
    found = [rate for rate in _plain(rows).distinct("rate") if _plain(rows, rate=rate).mean("never_moved") == 1.0]
    rate = max(found) if found else 1e-3
    frozen = _plain(rows, rate=rate)
    free = rows.where(storage="nearest", offset=True, decay=0.0, rate=rate)
    losses = [each.values("validation") for each in (frozen, free)]
    said, gap = [spelled(each, ".3f") for each in losses], mean(losses[0]) - mean(losses[1])
    says = both(
        f"at {rate:g}, validation loss {said[0]} with frozen gains and {said[1]} with gains that move: {gap:+.3f} nats",
        f"学习率 {rate:g}，冻结的增益验证损失 {said[0]}，会动的增益 {said[1]}：{gap:+.3f} 奈特",
    )
    found = order(*losses)
    if min(map(len, losses)) < 2 or not found:
        return not_shown(says, seeds=min(map(len, losses)))
    return Judgement(Outcome.CONFIRMED if found > 0 else Outcome.REFUTED, says)


def _judge_decay(rows: Rows) -> Judgement:
    at = {"storage": "master", "rate": _DECAYED_RATE}
    without = rows.where(**at, offset=False, decay=0.0).mean("mean_gain")
    plain = rows.where(**at, offset=False, decay=_DECAY).mean("mean_gain")
    offset = rows.where(**at, offset=True, decay=_DECAY).mean("mean_gain")
    alone = (1 - _DECAYED_RATE * _DECAY) ** _STEPS
    says = both(
        f"mean gain {without:.3f} without decay; with it {plain:.3f} for plain gains and {offset:.3f} with an offset "
        f"(decay alone: {alone:.3f} and 1)",
        f"无衰减时增益平均 {without:.3f}；有衰减时普通增益 {plain:.3f}，带偏移 {offset:.3f}（只有衰减："
        f"{alone:.3f} 与 1）",
    )
    falls = without - plain > _HALVES * (1 - alone)
    stays = abs(offset - 1) < min(abs(plain - 1), _HALVES * (1 - alone))
    return Judgement(Outcome.CONFIRMED if falls and stays else Outcome.REFUTED, says)


CLAIMS = (
    Claim(
        text=both("Gains stored in bfloat16 at 1.0 never move", "以 bfloat16 存于 1.0 的增益永远不动"),
        source="Zamirai et al. 2020, https://arxiv.org/abs/2010.06192",
        judge=_judge_freezing,
    ),
    Claim(
        text=both("Stored with unit offset, 1 + w, they do move", "存为单位偏移 1 + w 时它们会动"),
        source="Gemma Team 2024, https://arxiv.org/abs/2403.08295",
        judge=_judge_offset,
    ),
    Claim(
        text=both(
            "Float32 master weights or stochastic rounding let them move", "float32 主权重或随机舍入能让它们移动"
        ),
        source="Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740; Zamirai et al. 2020",
        judge=_judge_cures,
    ),
    Claim(
        text=both("Frozen gains cost quality", "冻结的增益会损失质量"),
        source="Zamirai et al. 2020, https://arxiv.org/abs/2010.06192, of all weights",
        judge=_judge_loss,
    ),
    Claim(
        text=both(
            "Weight decay pulls plain gains to 0 and gains with an offset to 1",
            "权重衰减把普通增益拉向 0，把带偏移的增益拉向 1",
        ),
        source="Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101, applied to gains",
        judge=_judge_decay,
    ),
)


def _table(rows: Rows) -> Table:
    names = ("never_moved", "moved_at_once", "mean_gain", "distance")
    return Table(
        title=both("What became of the gains", "增益变成了什么"),
        columns=(
            both("stored", "存储"),
            both("rate", "学习率"),
            both("decay", "衰减"),
            both("never moved", "从未移动"),
            both("moved at once", "立刻移动"),
            both("mean gain", "增益平均"),
            both("mean |gain - 1|", "平均 |增益 - 1|"),
            both("validation loss, nats", "验证损失，奈特"),
        ),
        rows=tuple(
            (
                _storage(params),
                params["rate"],
                params["decay"],
                *(rows.where(**params).mean(name) for name in names),
                rows.where(**params).said("validation", ".2f"),
            )
            for params in trials(quick=False)
            if rows.has(**params)
        ),
        note=both(
            f"{_CONDITIONS}. Moved at once: in the first step. Largest update of a gain: "
            f"{rows.spread('largest_update')[1]:.2f} rates (with decay, its share too); Adam's can be {_BOUND:.2f}.",
            f"{_CONDITIONS.zh}。立刻：第一步。增益最大的一次更新：{rows.spread('largest_update')[1]:.2f} 倍学习率"
            f"（含衰减部分）；Adam 的可达 {_BOUND:.2f} 倍。",
        ),
    )


def _storage(params: Params) -> str:
    kinds = {
        "nearest": both("to nearest", "就近舍入"),
        "master": both("float32 master", "float32 主权重"),
        "stochastic": both("stochastic", "随机舍入"),
    }
    kind = kinds[params["storage"]]
    return both(f"{kind}, unit offset", f"{kind.zh}，单位偏移") if params["offset"] else kind


def _chart(rows: Rows) -> Chart:
    lines = []
    for storage, offset in (("nearest", False), ("nearest", True), ("master", False), ("stochastic", False)):
        kind = {"storage": storage, "offset": offset, "decay": 0.0}
        some = rows.where(**kind)
        cells = [(rate, some.where(rate=rate)) for rate in sorted(some.distinct("rate"))]
        lines.append(across(_storage(kind), cells, "never_moved"))
    lines.append(
        Line(
            name=both("closed form", "闭式"),
            x=(min(_RATES), _FREEZES, (_FREEZES * _ABOVE) ** 0.5, _ABOVE, max(_RATES)),
            y=(1.0, 1.0, None, 0.0, 0.0),
            theory=True,
            like=lines[0].name,
        )
    )
    return Chart(
        title=both("Share of gains that never moved", "从未移动的增益比例"),
        x_label=both("learning rate", "学习率"),
        y_label=both("share", "比例"),
        lines=tuple(lines),
        log_x=True,
        note=both(
            f"{_CONDITIONS}. Closed form: 1 under 2^-9 / B = {_FREEZES:.2g}, 0 over 2^-8 = {_ABOVE:.2g}; between, it "
            "depends on the gradients.",
            f"{_CONDITIONS.zh}。闭式：低于 2^-9 / B = {_FREEZES:.2g} 为 1，高于 2^-8 = {_ABOVE:.2g} 为 0；"
            "之间取决于梯度。",
        ),
    )


FIGURES = (_table, _chart)
