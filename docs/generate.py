"""Write the pages that come from the code: the command line's help, a page a rule, a conversion and a study in two
languages, the layers, tables.

``python docs/generate.py`` writes them, ``--check`` only says which are out of date (exit code 1).
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from conversion_pages import conversion_pages  # beside this file, which is run as a script
from markup import cell, code, markdown
from placement_pages import placements_page
from study_pages import study_pages, study_table

from normwise import functional, layers
from normwise._parts import page, page_title
from normwise.checkup import rules
from normwise.cli import commands
from normwise.rendering.numbers import number
from normwise.spec import Cast, Gate, NormSpec, Scope, Weight

DOCS = Path(__file__).parent
READMES = {"README.md": "en", "README.zh-CN.md": "zh"}
# by language: the suffix of a page, the title of the index and its header
RULE_PAGES = {
    "en": (".md", "Rules", "| code | name | severity | what it finds |", "| what it is about | rules |"),
    "zh": (".zh-CN.md", "规则", "| 编号 | 名称 | 级别 | 发现什么 |", "| 关于什么 | 规则 |"),
}
FAMILIES = {
    "AXS": {
        "en": "axes: statistics over time, padding, other samples; leaks of the future",
        "zh": "轴：统计量跨了时间、填充或别的样本；未来信息泄漏",
    },
    "BNS": {
        "en": "state of batch norms: mode, running statistics, batches too small",
        "zh": "批归一化的状态：模式、运行统计、批太小",
    },
    "NUM": {
        "en": "numerics: half precision, eps, overflow, the origin of NaN",
        "zh": "数值：半精度、eps、溢出、NaN 的起点",
    },
    "PAR": {
        "en": "parameters and optimizer: decay, initialization, gains that blow up or never move",
        "zh": "参数与优化器：权重衰减、初始化、失控或从不更新的增益",
    },
    "PLC": {
        "en": "place on the residual stream: missing, doubled or misplaced norms, depth and warmup",
        "zh": "残差流上的位置：缺失、重复或放错的归一化，深度与预热",
    },
    "CKP": {
        "en": "checkpoints: lost, renamed or silently initialized norms, another eps or convention",
        "zh": "检查点：丢失、改名或被悄悄初始化的归一化，不同的 eps 或约定",
    },
    "DYN": {
        "en": "dynamics: what a training step does to norms, logits and gradients",
        "zh": "训练动态：一步训练对归一化、logits 和梯度的影响",
    },
    "DST": {
        "en": "several processes: statistics and gains that drift apart",
        "zh": "多进程：各进程之间渐行渐远的统计量和增益",
    },
}
GUIDES = {
    "which-norm.md": "families, norm, eps, gain and shift, cast, output dtype, else",
    "which-norm.zh-CN.md": "模型族, 归一化, eps, 增益和偏移, 转换, 输出精度, 其他",
}


def cli_page() -> str:
    """Return the help of every command, as the terminal shows it at 100 columns."""
    sections = [("normwise", commands), *((f"normwise {name}", each) for name, each in commands.commands.items())]
    blocks = [f"## {name}\n\n```text\n{_help(name, command)}\n```\n" for name, command in sections]
    return "# The command line\n\n" + "\n".join(blocks)


def _help(name: str, command: click.Command) -> str:
    context = click.Context(
        command, info_name=name, terminal_width=100, max_content_width=100, help_option_names=["-h", "--help"]
    )
    return command.get_help(context)


QUESTIONS = {
    "en": "Numbers of questions on the pages are those of [the seventy questions](../questions.md).",
    "zh": "页面上的问题编号见[七十个问题](../questions.zh-CN.md)。",
}


def rule_pages(lang: str) -> dict[str, str]:
    """Return the page of every rule by the name of its file, and the index as README, in one language."""
    suffix, title, header, _ = RULE_PAGES[lang]
    parts = sorted(rules.all_rules().items(), key=lambda item: item[1].CODE)
    pages = {
        f"{part.CODE}{suffix}": f"{_twins(part.CODE)}\n\n# {part.CODE} {name} ({part.SEVERITY})\n\n{page(part, lang)}\n"
        for name, part in parts
    }
    rows = "\n".join(
        f"| [{part.CODE}]({part.CODE}{suffix}) | {name} | {part.SEVERITY} | {page_title(part, lang)} |"
        for name, part in parts
    )
    index = f"{_twins('README')}\n\n# {title}\n\n{QUESTIONS[lang]}\n\n{header}\n|---|---|---|---|\n{rows}\n"
    return {f"README{suffix}": index, **pages}


def _twins(stem: str) -> str:
    return f"[English]({stem}.md) | [简体中文]({stem}.zh-CN.md)"


def readme(name: str, lang: str) -> str:
    """Return a README with its tables, of the families of rules and of the studies, made anew."""
    text = (DOCS.parent / name).read_text("utf-8")
    return _marked(_marked(text, "rules", rule_families(lang)), "studies", study_table(lang))


def _marked(text: str, mark: str, table: str) -> str:
    """Return a text with another table between its marks."""
    before, _, rest = text.partition(f"<!-- {mark} -->\n")
    after = rest.partition(f"<!-- /{mark} -->")[2]
    return f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{after}"


def rule_families(lang: str) -> str:
    """Return a row for each family of rules: what it is about, and its rules with links to their pages."""
    suffix, codes = RULE_PAGES[lang][0], sorted(part.CODE for part in rules.all_rules().values())
    rows = [RULE_PAGES[lang][3], "|---|---|"]
    for family, subject in FAMILIES.items():
        links = " ".join(f"[{code}](docs/rules/{code}{suffix})" for code in codes if code.startswith(family))
        if links:
            rows.append(f"| {subject[lang]} | {links} |")
    return "\n".join(rows)


def layers_page() -> str:
    """Return the reference of layers and functions, from their docstrings."""
    parts = [
        "# Layers",
        "Written from the docstrings by `docs/generate.py`. The tests run every example here, after `import torch`,\n"
        "`from torch import nn` and an import of what is shown.\n\n"
        "Which norm to take, and how those of one name differ: [which norm, which convention](which-norm.md).",
        "## Index",
        *(_index(module) for module in (layers, functional)),
        "## normwise.layers",
        *(_entry("", name, getattr(layers, name)) for name in layers.__all__),
        "## normwise.functional",
        *(_entry("functional.", name, getattr(functional, name)) for name in functional.__all__),
    ]
    return "\n\n".join(parts) + "\n"


def _index(module: Any) -> str:
    name = module.__name__
    rows = [f"| {code(each)} | {_title(getattr(module, each))} |" for each in module.__all__]
    return "\n".join([f"| {name} | |", "|---|---|", *rows])


def _title(thing: object) -> str:
    if not callable(thing):
        return "the norm of each model family, by name"
    return cell(_sections(thing)[""].split("\n\n")[0].split("; ")[0])


def _entry(home: str, name: str, thing: Any) -> str:
    """Return the section of one layer or function."""
    if not callable(thing):
        known = ", ".join(f"`{each}`" for each in sorted(thing))
        return f"### {home}{name}\n\nA dict from names to `NormSpec`, see [the table](which-norm.md#families): {known}."
    parts = [f"### {home}{name}", f"```python\n{name}{_call(thing)}\n```", _described(thing)]
    if inspect.isclass(thing):
        parts += _methods(thing)
    return "\n\n".join(parts)


def _described(thing: Any) -> str:
    sections = _sections(thing)
    parts = [markdown(sections.pop("")).strip()]
    for title, body in sections.items():
        if title == "Args":
            parts.append(_arguments(thing, body))
        elif title == "Examples":
            parts.append(f"```pycon\n{body}\n```")
        elif title == "Raises":
            lines = [f"- `{kind}`: {markdown(why)}" for kind, why in _items(body)]
            parts.append("\n".join(["Raises:", "", *lines]))
        else:
            parts.append(f"{title}: {markdown(' '.join(body.split()))}")
    return "\n\n".join(parts)


def _sections(thing: object) -> dict[str, str]:
    """Return the parts of a docstring by their titles; the text before them has none."""
    found = re.split(r"^(Args|Shape|Returns|Raises|Examples|References):\n", inspect.getdoc(thing) or "", flags=re.M)
    bodies = [inspect.cleandoc("\n" + body) for body in found[2::2]]
    return {"": found[0].strip(), **dict(zip(found[1::2], bodies, strict=True))}


def _items(body: str) -> Iterator[tuple[str, str]]:
    """Return the names and texts of an ``Args`` or ``Raises`` section."""
    for item in re.split(r"\n(?=\S)", body):
        name, _, text = item.partition(":")
        yield name, " ".join(text.split())


def _arguments(thing: Any, body: str) -> str:
    defaults = {name: _default(each) for name, each in inspect.signature(thing).parameters.items()}
    rows = [f"| `{name}` | {defaults[name]} | {cell(text)} |" for name, text in _items(body)]
    return "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    return "its own convention" if isinstance(parameter.default, NormSpec) else f"`{parameter.default!r}`"


def _call(thing: Any) -> str:
    """Return a signature without types; a default that is a whole spec is ``...``."""
    signature = inspect.signature(thing)
    plain = [
        each.replace(annotation=each.empty, default=... if isinstance(each.default, NormSpec) else each.default)
        for name, each in signature.parameters.items()
        if name != "self"
    ]
    call = str(inspect.Signature(plain)).replace("Ellipsis", "...")
    return call if len(call) < 100 else "(\n    " + ",\n    ".join(call[1:-1].split(", ")) + ",\n)"


def _methods(layer: type) -> list[str]:
    """Return how a layer is called, and its further methods."""
    forward = inspect.getattr_static(layer, "forward")
    parts = [f"Called as `layer{_call(forward).replace(chr(10) + '    ', ' ')}`: {cell(_sections(forward)[''])}"]
    if "Args" in _sections(forward):
        parts.append(_arguments(forward, _sections(forward)["Args"]))
    further = [name for name in ("convert", "from_batch_norm", "like", "reset_running_stats") if hasattr(layer, name)]
    lines = [f"- `{name}{_call(getattr(layer, name))}`: {_title(getattr(layer, name))}" for name in further]
    return [*parts, "\n".join(lines)] if lines else parts


def family_table(header: str) -> str:
    """Return the conventions of ``FAMILIES``, the families that share one in a row."""
    groups: dict[NormSpec, list[str]] = {}
    for name in sorted(layers.FAMILIES):
        groups.setdefault(layers.FAMILIES[name], []).append(name)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {_family(spec)} |" for spec, names in groups.items()]
    return "\n".join([f"| {' | '.join(header.split(', '))} |", "|---" * 7 + "|", *rows])


def _family(spec: NormSpec) -> str:
    gain = {Weight.NONE: "-", Weight.SCALAR: "scalar"}.get(spec.weight, "w")
    gain = f"{number(spec.weight_offset)} + {gain}" if spec.weight_offset else gain
    eps = "finfo" if spec.eps is None else number(spec.eps)
    named = {"axes", "center", "statistic", "eps", "weight", "weight_offset", "bias", "cast", "out_dtype"}
    usual = NormSpec(scope=Scope.HIDDEN)
    others = [each.name for each in fields(NormSpec) if each.name not in named]
    differing = [name for name in others if getattr(spec, name) != getattr(usual, name)]
    cells = [
        f"{'gated ' * (spec.gate is not Gate.NONE)}{spec.kind}",
        eps,
        gain + ", b" * spec.bias,
        "" if spec.cast is Cast.NONE else f"`{spec.cast}`",
        f"`{spec.out_dtype or 'input'}`",
        ", ".join(f"`{name}={getattr(spec, name)}`" for name in differing),
    ]
    return " | ".join(cells)


def differences_page() -> str:
    """Return what torch gets wrong, from the rows that the tests run on torch's layers and on ours."""
    rows = runpy.run_path(str(DOCS.parent / "tests" / "layers" / "torch_differences.py"))["DIFFERENCES"]
    lines = [f"| {cell(row.what)} | {_value(row.torch)} | {_right(row.exact, row.within)} |" for row in rows]
    return "\n".join(
        [
            "# Where torch differs",
            "",
            "Measured with torch 2.13 on a CPU, one thread. The tests run each row on torch's layer and on ours of",
            "the same name, and fail where torch has changed. Its wrong sums grow with the number of threads, its",
            "errors depend on the order of additions. Ours are within 1e-6 of the exact value unless the row says",
            "otherwise. Written by `docs/generate.py` from",
            "[torch_differences.py](../tests/layers/torch_differences.py).",
            "",
            "| what | torch | exact, and normwise |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )


def _value(value: float | str) -> str:
    return f"`{value}`" if isinstance(value, str) else number(value, 5)


def _right(exact: float | str, within: float) -> str:
    return _value(exact) + (f" ± {number(within)}" if within > 1e-6 else "")


def guide(name: str, header: str) -> str:
    """Return a guide with its table of families made anew."""
    return _marked((DOCS / name).read_text("utf-8"), "families", family_table(header))


def pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "layers.md": layers_page(),
        DOCS / "placement-list.md": placements_page(),
        DOCS / "torch-differences.md": differences_page(),
        **{DOCS / name: guide(name, header) for name, header in GUIDES.items()},
        **{DOCS / "rules" / name: text for lang in RULE_PAGES for name, text in rule_pages(lang).items()},
        **{DOCS / "conversions" / name: text for lang in RULE_PAGES for name, text in conversion_pages(lang).items()},
        **{DOCS / "studies" / name: text for lang in RULE_PAGES for name, text in study_pages(lang).items()},
        **{DOCS.parent / name: readme(name, lang) for name, lang in READMES.items()},
    }


def main(check: bool) -> int:
    """Write the pages, or name those that differ."""
    wanted = pages()
    made = [path for folder in ("rules", "conversions", "studies") for path in (DOCS / folder).glob("*.*")]
    stray = set(made) - set(wanted)
    stale = sorted(
        stray | {path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text}
    )
    if check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is out of date: run `make docs`")
        return int(bool(stale))
    for path in stray:
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    print(f"{len(wanted)} pages written, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
