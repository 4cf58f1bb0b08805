"""What every report and study draws with: the text sanitiser, numbers, tables, collapsed paths and SVG.

Nothing here knows of models. Rich is loaded by ``tables`` only, when a table is printed.
"""

from normwise.rendering.cleaning import clean as clean
from normwise.rendering.cleaning import shorten as shorten

__all__ = ["clean", "shorten"]
