"""Errors carry what a caller needs to act on."""

from __future__ import annotations

import pytest

from normwise import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "NormwiseError"])
def test_every_error_is_a_normwise_error(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.NormwiseError)


@pytest.mark.parametrize("name", errors.__all__)
def test_the_tree_in_the_docstring_names_every_error(name: str) -> None:
    assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("builtin", [ValueError, TypeError, RuntimeError])
def test_wrong_arguments_are_not_normwise_errors(builtin: type[Exception]) -> None:
    assert not issubclass(errors.NormwiseError, builtin)


def test_a_trace_error_knows_where_the_model_stopped() -> None:
    failure = errors.TraceError("the model raised", path="layers.3.attention")
    assert failure.path == "layers.3.attention"
    assert str(failure) == "the model raised"


def test_a_trace_error_outside_any_module_has_no_path() -> None:
    assert errors.TraceError("the model raised").path is None


def test_not_known_completes_the_sentence_not_checked() -> None:
    failure = errors.NotKnown("needs an optimizer")
    assert failure.why == str(failure) == "needs an optimizer"


def test_a_refused_conversion_gives_every_reason() -> None:
    failure = errors.ConversionRefused(["the norm is shared", "the next layer is not linear"])
    assert failure.reasons == ("the norm is shared", "the next layer is not linear")
    assert str(failure) == "the norm is shared; the next layer is not linear"
