"""Runners of all stages of a bundle chained in this process, and plain loops over them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import load_manifest
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from langchain_pshard.core.sampling import History, SamplingParams, sample
from workers.runners.runner import Logits, Runner, RunSlice, StreamKey
from workers.shard import Settings, make_runner

PREFILL, ROWS = SliceKind.PREFILL, SliceKind.ROWS
MAX_DRAFTS = 4
WRITER_TIMEOUT_S = 60.0


class Choice(NamedTuple):
    """A token and the logits it was chosen from, [vocab]."""

    token: int
    row: npt.NDArray[np.float32]


def _columns(choices: Sequence[Choice]) -> tuple[list[int], Logits]:
    return [choice.token for choice in choices], np.stack([choice.row for choice in choices])


class ArrivingText(Sequence[int]):
    """A text of known length that another thread is still generating; reading a token waits until it is there."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._tokens: list[int] = []

    def put(self, token: int) -> None:
        self._arrived.put(token)

    def __len__(self) -> int:
        return self._num_tokens

    def __getitem__(self, wanted: Any) -> Any:
        assert isinstance(wanted, slice), "drafts are read by the slice"
        while len(self._tokens) < min(wanted.stop, self._num_tokens):
            self._tokens.append(self._arrived.get(timeout=WRITER_TIMEOUT_S))
        return self._tokens[wanted]


def key(number: int) -> StreamKey:
    return StreamKey(ClientId("c"), StreamId(number))


def piece(stream: int, start: int, tokens: Sequence[int], kind: SliceKind, num_sampled: int = 1) -> RunSlice:
    return RunSlice(key=key(stream), start=start, tokens=np.array(tokens, dtype=np.int32), kind=kind, num_sampled=num_sampled)


class RunnerChain:
    """The stages of a bundle, one after another."""

    def __init__(self, bundle: Path, settings: Settings, sampling: SamplingParams | None = None) -> None:
        manifest = load_manifest(bundle)
        self._sampling = SamplingParams() if sampling is None else sampling
        self.runners: list[Runner] = [make_runner(bundle, manifest, idx, settings) for idx in range(manifest.num_stages)]

    def open(self, stream: int, num_tokens: int, shared: Sequence[int] = ()) -> int:
        """Open a stream on all stages; with a prompt to share, returns how much of it all of them hold already."""
        return min(runner.open(key(stream), num_tokens, np.array(shared, dtype=np.int32)) for runner in self.runners)

    def close_stream(self, stream: int) -> None:
        for runner in self.runners:
            runner.close_stream(key(stream))

    def run(self, *slices: RunSlice) -> Logits:
        values = None
        for runner in self.runners:
            values = runner.run(slices, values)
        assert values is not None
        assert values.dtype == np.float32
        return values.copy()  # the engine's own memory

    def _choose(self, row: npt.NDArray[np.float32], position: int) -> int:
        return sample(row, self._sampling, position=position, history=History(prompt=(), generated=()))

    def decode(self, stream: int, prompt: Sequence[int]) -> Iterator[Choice]:
        """Plain decoding of an open stream, without end."""
        step = piece(stream, 0, prompt, PREFILL)
        for position in itertools.count(len(prompt) - 1):
            row = self.run(step)[0]
            token = self._choose(row, position)
            yield Choice(token, row)
            step = piece(stream, position + 1, [token], ROWS)

    def decode_with_drafts(self, stream: int, prompt: Sequence[int], text: Sequence[int], rng: np.random.Generator) -> Iterator[Choice]:
        """Like `decode`, verifying up to `MAX_DRAFTS` drafts a step: those of `text` (the right one), each wrong with probability 0.4."""
        first = next(self.decode(stream, prompt))
        yield first
        token, num_done = first.token, 1
        while True:
            right = text[num_done : num_done + int(rng.integers(0, MAX_DRAFTS + 1))]
            guess = [draft if rng.random() > 0.4 else (draft + 1) % 200 for draft in right]
            logits = self.run(piece(stream, len(prompt) + num_done - 1, [token, *guess], ROWS, 1 + len(guess)))
            for row, after in zip(logits, [*guess, None], strict=True):
                token = self._choose(row, len(prompt) + num_done - 1)
                num_done += 1
                yield Choice(token, row)
                if token != after:
                    break

    def generate(self, stream: int, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Logits]:
        """`decode` of a stream of its own: tokens, and the logits they were chosen from, [num_tokens, vocab]."""
        self.open(stream, len(prompt) + num_tokens)
        choices = list(itertools.islice(self.decode(stream, prompt), num_tokens))
        self.close_stream(stream)
        return _columns(choices)

    def generate_with_drafts(
        self, stream: int, prompt: Sequence[int], num_tokens: int, text: Sequence[int], rng: np.random.Generator
    ) -> tuple[list[int], Logits]:
        """`decode_with_drafts` of a stream of its own."""
        self.open(stream, len(prompt) + num_tokens + MAX_DRAFTS)
        choices = list(itertools.islice(self.decode_with_drafts(stream, prompt, text, rng), num_tokens))
        self.close_stream(stream)
        return _columns(choices)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


@contextmanager
def running_chain(bundle: Path, settings: Settings, sampling: SamplingParams | None = None) -> Iterator[RunnerChain]:
    chain = RunnerChain(bundle, settings, sampling)
    try:
        yield chain
    finally:
        chain.close()
