"""The rules. Each is one module: its docstring is its page, its file name its name.

To add one, write the module (CONTRIBUTING: "a rule") and import it below.
"""

from __future__ import annotations

from types import ModuleType

from normwise._parts import collect
from normwise.checkup.rules import bad_buffers as bad_buffers
from normwise.checkup.rules import channel_is_time as channel_is_time
from normwise.checkup.rules import decayed_norm_scale as decayed_norm_scale
from normwise.checkup.rules import degenerate_reduction as degenerate_reduction
from normwise.checkup.rules import eps_lost_in_dtype as eps_lost_in_dtype
from normwise.checkup.rules import eps_outside_root as eps_outside_root
from normwise.checkup.rules import low_precision_statistics as low_precision_statistics
from normwise.checkup.rules import missing_final_norm as missing_final_norm
from normwise.checkup.rules import never_updated_stats as never_updated_stats
from normwise.checkup.rules import odd_block_out as odd_block_out
from normwise.checkup.rules import residual_from_normed as residual_from_normed

__all__ = ["all_rules"]

_NEEDS = ("CODE", "SEVERITY", "check", "bad", "good")


def all_rules() -> dict[str, ModuleType]:
    """Return every rule by its kebab-case name, in the order of the codes."""
    found = collect(globals(), needs=_NEEDS)
    return dict(sorted(found.items(), key=lambda item: item[1].CODE))
