"""What every report and study draws with: the text sanitiser, numbers, tables, collapsed paths and SVG.

Nothing here knows of models. Rich is loaded by ``tables`` and ``progress`` only, when something is printed.
"""

from normwise.rendering.cleaning import clean as clean
from normwise.rendering.cleaning import obeyed_by_none as obeyed_by_none
from normwise.rendering.cleaning import shorten as shorten
from normwise.rendering.languages import Text as Text
from normwise.rendering.languages import both as both
from normwise.rendering.languages import in_language as in_language

__all__ = ["Text", "both", "clean", "in_language", "obeyed_by_none", "shorten"]
