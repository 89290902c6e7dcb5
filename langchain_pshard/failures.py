"""PShard's errors as LangChain's: each leaves the chat model as a class that is both, so that code written for either catches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as langchain

from langchain_pshard.core import errors
from langchain_pshard.core.errors import PShardError


class PromptTooLongError(errors.ContextOverflowError, langchain.ContextOverflowError):
    """The prompt does not fit the model's context."""


class InvalidRequestError(errors.InvalidOptionError, langchain.ModelInvalidRequestError):
    """The call cannot be made like this."""


class InvalidGrammarError(errors.GrammarError, langchain.ModelInvalidRequestError):
    """A schema or grammar of the call cannot be enforced."""


class CallTimeoutError(errors.DeadlineError, langchain.ModelTimeoutError):
    """The call took too long."""


class UnreachableError(errors.WorkerUnreachableError, langchain.ModelConnectionError):
    """A worker cannot be reached."""


class LostError(errors.WorkerLostError, langchain.ModelConnectionError):
    """A worker was lost during the call."""


class BusyError(errors.CapacityError, langchain.ModelRateLimitError):
    """The fleet has no room for the call."""


class StateGoneError(errors.StateLostError, langchain.ModelAPIError):
    """A worker no longer holds the state of the text."""


class EngineError(errors.InferenceError, langchain.ModelAPIError):
    """The inference engine of a worker failed."""


_KINDS: tuple[tuple[type[PShardError], type[PShardError]], ...] = (
    (errors.ContextOverflowError, PromptTooLongError),
    (errors.GrammarError, InvalidGrammarError),
    (errors.InvalidOptionError, InvalidRequestError),
    (errors.DeadlineError, CallTimeoutError),
    (errors.WorkerUnreachableError, UnreachableError),
    (errors.WorkerLostError, LostError),
    (errors.CapacityError, BusyError),
    (errors.StateLostError, StateGoneError),
    (errors.InferenceError, EngineError),
)


def as_langchain(error: PShardError) -> PShardError:
    """The same error as LangChain's class too, where it has one."""
    if isinstance(error, langchain.ModelError):
        return error
    kind = next((kind for base, kind in _KINDS if type(error) is base), None)
    if kind is None:
        return error
    twin = kind(*error.args)
    twin.__dict__.update(error.__dict__)
    return twin


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Errors of the block leave it as LangChain's."""
    try:
        yield
    except PShardError as error:
        twin = as_langchain(error)
        if twin is error:
            raise
        raise twin from error
