"""Runners of all stages of a bundle chained in this process, and plain loops over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.bundle import load_manifest
from langchain_pshard.core.messages import ClientId, SliceKind, StreamId
from langchain_pshard.core.sampling import History, SamplingParams, sample
from workers.runners.runner import Logits, Runner, RunSlice, StreamKey
from workers.shard import Settings, make_runner

PREFILL, ROWS = SliceKind.PREFILL, SliceKind.ROWS


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
        return values

    def _choose(self, row: npt.NDArray[np.float32], position: int) -> int:
        return sample(row, self._sampling, position=position, history=History(prompt=(), generated=()))

    def generate(self, stream: int, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Plain decoding: tokens, and the logits they were chosen from, [num_tokens, vocab]. The stream is closed."""
        self.open(stream, len(prompt) + num_tokens)
        rows = [self.run(piece(stream, 0, prompt, PREFILL))[0]]
        tokens = [self._choose(rows[0], len(prompt) - 1)]
        while len(tokens) < num_tokens:
            rows.append(self.run(piece(stream, len(prompt) + len(tokens) - 1, tokens[-1:], ROWS))[0])
            tokens.append(self._choose(rows[-1], len(prompt) + len(tokens) - 1))
        self.close_stream(stream)
        return tokens, np.stack(rows)

    def generate_with_drafts(
        self, stream: int, prompt: Sequence[int], num_tokens: int, drafts: Sequence[int], rng: np.random.Generator
    ) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Like `generate`, verifying up to four drafts a step: those of `drafts` (the right text), each wrong with probability 0.4."""
        self.open(stream, len(prompt) + num_tokens + 4)
        rows = [self.run(piece(stream, 0, prompt, PREFILL))[0]]
        tokens = [self._choose(rows[0], len(prompt) - 1)]
        while len(tokens) < num_tokens:
            right = list(drafts[len(tokens) : len(tokens) + int(rng.integers(0, 5))])
            guess = [token if rng.random() > 0.4 else (token + 1) % 200 for token in right]
            verified = [tokens[-1], *guess]
            logits = self.run(piece(stream, len(prompt) + len(tokens) - 1, verified, ROWS, len(verified)))
            for row, after in zip(logits, [*guess, None], strict=True):
                rows.append(row)
                tokens.append(self._choose(row, len(prompt) + len(tokens) - 1))
                if tokens[-1] != after:
                    break
        self.close_stream(stream)
        return tokens[:num_tokens], np.stack(rows[:num_tokens])

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
