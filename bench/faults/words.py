"""The text of the page in two languages; braces are filled with figures, <<MARKS>> with tables."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHINESE", "ENGLISH", "Words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A language of the page."""

    index: int  # of texts that are given as (English, Chinese)
    suffix: str  # of the pages of this language
    page: str
    rules: tuple[str, ...]
    faults: tuple[str, ...]
    misses: tuple[str, ...]
    all: str
    information: str


ENGLISH = Words(
    index=0,
    suffix="",
    rules=("rule", "alive", "equivalent", "found", "right module", "said besides", "seconds", "detector", "anomaly mode"),
    faults=("fault", "what is broken", "expected", "alive", "found", "right module"),
    misses=("fault", "missed in", "why"),
    all="all",
    information=" (info)",
    page="""[English](fault-benchmark.md) | [简体中文](fault-benchmark.zh-CN.md)

# Benchmark of faults

How many known faults does the check find, does it name the right module, and what does it say of healthy models? {faults}
faults, at least one for each rule that can be put into an existing model, are injected into {architectures} architectures:
tiny models of transformers, models of normwise in several placements, torch's own encoders, convolutional networks. The
norms are found by the map, never by class names. This page is made from the results by `python -m bench.faults --page`;
`make bench-faults` runs what is missing.

## In short

| | |
|---|---|
| injected faults that are alive | {alive} |
| of these found by the expected rule | {recall} |
| of the found ones, the right module | {placed} |
| findings besides, above info, that neither the fault nor the healthy model explains | {false} (precision {precision}) |
| a check, median | {seconds} s |
| transformers' `DebugUnderflowOverflow` detects | {detector} ({detector_found}), the right module in {detector_right} |
| torch's anomaly mode detects | {anomaly} ({anomaly_found}), the right file in {anomaly_right} |
| checks of healthy models ({zoo} architectures, with and without evidence, three dtypes) | {healthy} |
| of these with a finding above info beyond the [true surprises](true-surprises.md) | {alarms} |
| replayed public bug reports whose cause comes first | {first} of {replayed} |
| of their healthy twins, with a finding above info | {twins} |
| `DebugUnderflowOverflow`, anomaly mode on the replays | {replay_detector}, {replay_anomaly} |

## How it is counted

- **Alive.** A fault counts only if it does something: outputs, gradients or buffers differ from those of the healthy twin by
  more than 1e-5 of their size in float64 (four spacings of the numbers in half precision), or the effect that the rule's page
  states is there: the gradient of a row of zeros, the buffers behind a training step, the weights behind a step of the
  optimizer, the batches of a loader. The others are *equivalent* and listed as such.
- **Found.** The expected rule reports it as a warning or an error. Where the rule's page says that the matter is only worth
  knowing, information counts; those are marked (info). A fault that is only reported as information where a warning is due is
  missed.
- **Right module.** The first module that the finding names, and nine tenths of all it blames, are modules at fault, parts of
  them, their direct owner, or the residual sublayer that they belong to.
- **Said besides.** Findings above info of other rules that the healthy twin does not have, apart from consequences that the
  pages of the rules name (a missing upcast makes rows of zero, a norm over time makes decoding differ).
- **One or all.** A fault of a norm sits in one norm, chosen by the name of the trial, or in every third trial in all norms of
  its class, as a fault in the code would.
- **Trained weights.** Where a rule needs them, gains and shifts are moved by 0.1, the model is fitted to random targets for 25
  steps, and running statistics are taken from the data.
- **The other tools** run forward and backward on the same faulty model. The detector is right if the last frame it prints is a
  module at fault, anomaly mode if the innermost line of its stack outside torch is in the file of one.

## By rule

<<RULES>>

## By fault

<<FAULTS>>

## What is missed, and why

<<MISSES>>
""",
)  # fmt: skip

CHINESE = Words(
    index=1,
    suffix=".zh-CN",
    rules=("规则", "有效", "等价", "找到", "模块正确", "多余报告", "秒", "溢出检测器", "异常模式"),
    faults=("故障", "破坏了什么", "预期规则", "有效", "找到", "模块正确"),
    misses=("故障", "漏报于", "原因"),
    all="合计",
    information="（提示）",
    page="""[English](fault-benchmark.md) | [简体中文](fault-benchmark.zh-CN.md)

# 故障基准

检查能找到多少已知故障，指出的模块是否正确，对健康模型又说什么？{faults} 种故障（凡能注入现有模型的规则至少一种）被注入
{architectures} 种架构：transformers 的小模型、normwise 多种放置的模型、torch 自带的编码器、卷积网络。归一化由结构图找到，
从不依赖类名。本页由 `python -m bench.faults --page` 从结果生成；`make bench-faults` 运行尚缺的部分。

## 概要

| | |
|---|---|
| 有效的注入故障 | {alive} |
| 其中被预期规则找到 | {recall} |
| 找到的故障中模块正确 | {placed} |
| 故障与健康模型都不能解释的其他提示以上报告 | {false}（精确率 {precision}） |
| 一次检查的中位时间 | {seconds} 秒 |
| transformers 的 `DebugUnderflowOverflow` 检出 | {detector}（{detector_found} 个），模块正确 {detector_right} 个 |
| torch 的异常模式检出 | {anomaly}（{anomaly_found} 个），文件正确 {anomaly_right} 个 |
| 健康模型的检查次数（{zoo} 种架构，有无证据，三种 dtype） | {healthy} |
| 其中在[真实的意外](true-surprises.zh-CN.md)之外有提示以上报告的 | {alarms} |
| 重放的公开问题中病因排在首位 | {first} / {replayed} |
| 其健康孪生中有提示以上报告的 | {twins} |
| 在重放上 `DebugUnderflowOverflow` 与异常模式检出 | {replay_detector}、{replay_anomaly} |

## 如何计数

- **有效。** 只有起作用的故障才计数：输出、梯度或缓冲区与健康孪生之差在 float64 中超过其大小的 1e-5（半精度中为数值间距的
  四倍），或规则页面所说的效果存在：零行的梯度、训练步后的缓冲区、优化器步后的权重、loader 的批次。其余为*等价*，另行列出。
- **找到。** 预期的规则报告为警告或错误。规则页面称仅供了解的，提示也算，并标注（提示）。应为警告却只作提示的算漏报。
- **模块正确。** 报告指出的第一个模块，以及所指责模块的十分之九，是故障模块、其部分、其直接所有者，或其所属的残差子层。
- **多余报告。** 健康孪生没有的、其他规则的提示以上报告；规则页面所说的后果除外（缺少上转换造成零行，跨时间的归一化使解码
  不同）。
- **一个或全部。** 归一化的故障位于由试验名称选定的一个归一化中；每三次试验有一次位于同类的全部归一化中，如同代码中的故障。
- **已训练的权重。** 规则需要时，增益与偏移移动 0.1，模型以 25 步拟合随机目标，运行统计量取自数据。
- **其他工具** 在同一故障模型上运行前向与反向。溢出检测器打印的最后一帧是故障模块即算正确；异常模式的调用栈中 torch 之外最
  内层一行位于故障模块的文件即算正确。

## 按规则

<<RULES>>

## 按故障

<<FAULTS>>

## 漏报及原因

<<MISSES>>
""",
)  # fmt: skip
