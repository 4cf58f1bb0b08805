"""Self-contained HTML pages: one frame with the styles of all; no script, no network, no file beside it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from normwise.rendering.cleaning import clean

__all__ = ["page_template"]

_HOME, _FRAME = "normwise.rendering", "page.html.jinja"  # what every page extends


@cache
def page_template(package: str, name: str) -> Template:
    """Compile a page once; every expression in it is cleaned, then escaped.

    Args:
        package: where its file is; the page extends ``page.html.jinja`` of this package.
        name: of the file.
    """

    def source(asked: str) -> str:
        home = _HOME if asked == _FRAME else package
        return files(home).joinpath(asked).read_text("utf-8")

    environment = Environment(
        loader=FunctionLoader(source),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)
