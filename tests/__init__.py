"""The tests of normwise. A package, so that `tests.strategies` is ours: some wheels install a stray `tests`."""
