"""The seam between what a stage decides and the engine that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from langchain_pshard.core.numerics import Numerics

TokenArray = npt.NDArray[np.int32]
NO_TOKENS: TokenArray = np.zeros(0, dtype=np.int32)
Logits = npt.NDArray[np.float32]
NOT_FINITE = (
    "not finite: the weights are damaged, or a number in the model's layers grew out of range; try --numerics exact, or another prompt"
)
"""How errors go on that tell of infinite numbers and of those that are none."""


class StreamKey(NamedTuple):
    """A stream as a worker knows it: the ids of several clients never mix."""

    client: ClientId
    stream: StreamId


class RunSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that passed the one step rule: `start` is at most the length the runner holds; beyond it the runner forgets."""

    key: StreamKey
    start: int
    tokens: TokenArray  # [n]
    kind: SliceKind
    num_sampled: int
    returns_logits: bool = False


class Runner(Protocol):
    """One stage of the model. Used by one thread.

    Invariants: a stream's KV never exceeds what `open` set aside for it; `run` on one stream never changes what another holds; the
    same slices after the same history give the same bits, whatever else is in the batch (as far as `numerics` promises).
    """

    @property
    def numerics(self) -> Numerics: ...

    @property
    def is_rewind_exact(self) -> bool:
        """Whether a slice that starts below the held length gives the same tokens as if what it drops had never been."""

    @property
    def kv_capacity_tokens(self) -> int:
        """KV positions the stage can hold over all streams."""

    @property
    def kv_stream_tokens(self) -> int | None:
        """Most KV positions that are set aside for one stream, however long it is; None: as many as it has."""

    @property
    def kv_used_tokens(self) -> int:
        """KV positions set aside for open streams."""

    def open(self, key: StreamKey, num_tokens: int, prompt: TokenArray = NO_TOKENS, *, shares_generated: bool = False) -> int:
        """Set aside KV for `num_tokens` positions.

        Args:
            key: a stream that is not open.
            num_tokens: positions of prompt and output.
            prompt: the tokens that the stream will prefill first, at most `num_tokens`; empty when it must share nothing with others.
            shares_generated: whether KV of generated text may stand in for that of a prompt, which differs from it in its last bits.

        Returns:
            How many leading positions of the prompt the stream holds already, because another one computed the same; it may rewind them
            like any others.

        Raises:
            CapacityError: not so much is free; the message has needed, free and total positions.
        """

    def close_stream(self, key: StreamKey) -> None:
        """Free the stream's KV. Unknown streams are ignored."""

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        """Compute the slices as one inference.

        Args:
            slices: each stream at most once, all open.
            hidden: [tokens, hidden] in the boundary type, slices in order; None on the first stage, which embeds the tokens.

        Returns:
            [tokens, hidden] in the boundary type, memory of the caller's; or on the last stage the logits [sum of num_sampled, vocab]
            float32, in memory that is gone with the next `run`.

        Raises:
            InferenceError: the engine failed; the state of the slices' streams is undefined from their start on.
            StateLostError: a slice goes back to where the KV it needs was given up, as every layer's window had passed it. Nothing was
                computed.
            CapacityError: a slice goes back into positions that other streams share by now, and there is no room for a copy. Nothing was
                computed.
        """

    def close(self) -> None:
        """Give the memory back. Idempotent."""
