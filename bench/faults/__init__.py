"""The benchmark of faults: known faults put into real architectures, and what the check says of each.

``python -m bench.faults`` runs what is not done yet; docs/fault-benchmark.md is the page of its results.
"""
