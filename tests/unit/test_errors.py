"""The error tree crosses the wire without losing its type."""

from __future__ import annotations

import pytest

from langchain_pshard.core import errors


def test_every_code_is_unique_and_comes_back_as_its_class() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PShardError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    for kind in kinds:
        back = errors.error_from_code(kind.code, "what happened")
        assert str(back) == "what happened"
        assert type(back) is kind or kind is errors.MissingExtraError


def test_unknown_code_of_a_newer_peer_is_still_an_error() -> None:
    assert type(errors.error_from_code("from-the-future", "x")) is errors.FleetError


def test_standard_classes_catch_them_too() -> None:
    with pytest.raises(ConnectionError):
        raise errors.WorkerLostError("gone")
    with pytest.raises(ValueError, match="bad"):
        raise errors.InvalidOptionError("bad")
    with pytest.raises(TimeoutError):
        raise errors.DeadlineError("late")


def test_context_overflow_names_all_lengths() -> None:
    error = errors.ContextOverflowError.of(num_prompt_tokens=2_000, max_tokens=100, context_length=2_048)
    for number in ("2000", "100", "2100", "2048"):
        assert number in str(error)
