"""Yes-or-no questions with implications and costs, answered best by a minimum cut."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Questions"]


class Questions:
    """Questions of the kind "is this so", each any hashable; the answer yes lies on the sink's side of the cut."""

    def __init__(self) -> None:
        self._edges: dict[tuple[Hashable, Hashable], int | None] = {}  # None: infinite

    def implies(self, a: Hashable, b: Hashable) -> None:
        """If a then b."""
        if a != b:
            self._edges[b, a] = None

    def no(self, a: Hashable) -> None:
        """Not a."""
        self._edges["no", a] = None

    def costs(self, a: Hashable, b: Hashable, cost: int) -> None:
        """Pay for a without b."""
        self._edges.setdefault((b, a), cost)

    def gains(self, a: Hashable, gain: int) -> None:
        """Win something for a."""
        self._edges[a, "yes"] = gain

    def solved(self) -> set[Hashable]:
        """Return what is answered with yes, of the best answers the one with the fewest."""
        import networkx  # comes with torch; takes a quarter of a second to load

        graph = networkx.DiGraph()
        graph.add_nodes_from(("no", "yes"))
        for (a, b), cost in self._edges.items():
            graph.add_edge(a, b, **({} if cost is None else {"capacity": cost}))
        _, (_, yes) = networkx.minimum_cut(graph, "no", "yes")
        return set(yes)
