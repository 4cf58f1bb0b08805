"""Traces any PyTorch model into plain data: ops, values, module calls."""

from normwise.graph.alignment import aligned as aligned
from normwise.graph.capture import Tracer as Tracer
from normwise.graph.data import ALIAS as ALIAS
from normwise.graph.data import OPAQUE as OPAQUE
from normwise.graph.data import Call as Call
from normwise.graph.data import Graph as Graph
from normwise.graph.data import Op as Op
from normwise.graph.data import Ref as Ref
from normwise.graph.data import Source as Source
from normwise.graph.data import Value as Value
from normwise.graph.data import ValueKind as ValueKind
from normwise.graph.observing import Instead as Instead
from normwise.graph.observing import Observer as Observer
from normwise.graph.trace import Recording as Recording
from normwise.graph.trace import trace as trace
