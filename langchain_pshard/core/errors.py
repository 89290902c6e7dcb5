"""The error tree: what the caller did wrong apart from what a peer or the network did wrong.

Every error that leaves a public function of the three packages is a `PShardError`. A message says what failed, the
value, what was valid, and what to do. The attributes carry the same facts for programs.

Errors that cross the wire travel as a `code` and a message (`messages.Refused`); `error_from_code` turns them back into the class
they left as, so a caller catches the same type whether the fault was found here or three machines away.
"""

from __future__ import annotations

from typing import ClassVar


class PShardError(Exception):
    """Base class of every error PShard raises on purpose.

    Attributes:
        code: short stable name of the class, used on the wire and in JSON logs.
        is_retryable: whether the same call may succeed later without being changed.
    """

    code: ClassVar[str] = "error"
    is_retryable: bool = False


# --- what the caller did wrong ---------------------------------------------------------------------------------------


class UsageError(PShardError):
    """The call, the option or the file the caller named cannot be used as it is."""

    code = "usage"


class InvalidOptionError(UsageError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""

    code = "invalid-option"


class GrammarError(InvalidOptionError):
    """A grammar (JSON schema, regular expression, Lark) is broken or asks for what cannot be enforced; the message names the part."""

    code = "grammar"


class MissingExtraError(UsageError, ImportError):
    """A feature needs packages of an extra that is not installed."""

    code = "missing-extra"

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs packages that are not installed: pip install 'langchain-pshard[{extra}]', or '.[{extra}]' in a checkout"
        )
        self.extra = extra


class ContextOverflowError(UsageError):
    """A prompt, or a prompt with the tokens asked for, does not fit the model's context."""

    code = "context-overflow"

    @classmethod
    def of(cls, *, num_prompt_tokens: int, max_tokens: int, context_length: int) -> ContextOverflowError:
        """The error for a prompt of `num_prompt_tokens` with room for `max_tokens` more asked for."""
        return cls(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together"
            f" {num_prompt_tokens + max_tokens}; the model's context holds {context_length}: shorten the prompt or lower max_tokens"
        )


class UnsupportedModelError(UsageError):
    """The exporter cannot cut this model; the message names what it found and what it supports."""

    code = "unsupported-model"


class SourceError(UsageError):
    """The model to export is missing, damaged or incomplete; the message names the file and the remedy."""

    code = "source"


class VerificationError(UsageError):
    """The exported shards do not compute what the model computes."""

    code = "verification"


class BundleError(UsageError):
    """A bundle or one of its files is missing, damaged or contradicts the manifest."""

    code = "bundle"


class FleetFileError(UsageError):
    """A fleet file is missing or says something impossible; the message names the file, the node, the field and what is valid."""

    code = "fleet-file"


class NoPlanError(UsageError):
    """No placement of the model on the nodes of a fleet is possible; the message has needed and available memory."""

    code = "no-plan"


class AddressInUseError(UsageError):
    """The address a worker should listen on is taken or cannot be bound."""

    code = "address-in-use"


# --- what a peer, a machine or the network did wrong -----------------------------------------------------------------


class FleetError(PShardError):
    """The fleet cannot serve the request; the caller's request itself is fine."""

    code = "fleet"


class FleetMismatchError(FleetError):
    """The workers named are not the stages of one model under one numerics class."""

    code = "fleet-mismatch"


class WorkerUnreachableError(FleetError, ConnectionError):
    """A worker did not answer within the time allowed.

    Attributes:
        addresses: of the workers concerned, as far as they are known.
    """

    code = "worker-unreachable"
    is_retryable = True

    def __init__(self, message: str, *, addresses: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.addresses = addresses


class WorkerLostError(FleetError, ConnectionError):
    """A worker that was serving a stream died, hung or left.

    Attributes:
        addresses: of the workers concerned, as far as they are known.
    """

    code = "worker-lost"
    is_retryable = True

    def __init__(self, message: str, *, addresses: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.addresses = addresses


class StateLostError(FleetError):
    """A stage no longer holds the KV state that a step builds on (it restarted, or the lease ran out)."""

    code = "state-lost"
    is_retryable = True


class CapacityError(FleetError):
    """The KV budget of a stage cannot hold the stream now, or at all."""

    code = "capacity"

    def __init__(self, message: str, *, is_retryable: bool = True) -> None:
        """
        Args:
            message: with needed and available figures.
            is_retryable: False when there will never be room for such a call.
        """
        super().__init__(message)
        self.is_retryable = is_retryable


class DeadlineError(FleetError, TimeoutError):
    """A generation made no progress, or did not end, within its time limit."""

    code = "deadline"
    is_retryable = True


class InferenceError(FleetError):
    """The inference engine of a stage failed on a step."""

    code = "inference"


class ProtocolError(FleetError):
    """A peer sent something the protocol does not allow, or speaks another version of it."""

    code = "protocol"


class ClosedError(PShardError):
    """The object was used after it was closed, or closed while the call was running."""

    code = "closed"


def _tree(root: type[PShardError]) -> dict[str, type[PShardError]]:
    found: dict[str, type[PShardError]] = {}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found | {root.code: root}  # a subclass elsewhere that keeps its parent's code does not take its place


def error_from_code(code: str, message: str) -> PShardError:
    """The error a peer reported, as the class it had there; an unknown code becomes a plain `FleetError`."""
    kind = _tree(PShardError).get(code, FleetError)
    if kind is MissingExtraError:  # its constructor composes the message itself
        kind = UsageError
    return kind(message)
