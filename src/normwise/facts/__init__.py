"""What is known about a target: norms, streams, placements, measured behaviour."""

from normwise.facts.facts import Facts as Facts
from normwise.facts.records import NormSite as NormSite
from normwise.facts.records import Placement as Placement
from normwise.facts.records import Stack as Stack
