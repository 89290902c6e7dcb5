"""A fleet in threads: the real worker loop around the fake engine of `fake_stages`, over any hub. For tests of the client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from langchain_pshard.core.bundle import TOKENIZER_DIR, FileEntry, describe_file
from langchain_pshard.core.codec import Tensor
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.transport.hub import Hub
from langchain_pshard.transport.memory import MemoryNetwork
from langchain_pshard.transport.zeromq import ZmqHub
from tests.support.fake_stages import VOCAB, FakeRunner, FakeSampler, expected_token, make_identity
from workers.runners.runner import Logits, RunSlice
from workers.server import Server
from workers.worker import Worker

EOS = 2
PROMPT = [5, 6, 7]
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 "


def plain_tokens(prompt: Sequence[int], num_stages: int, max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What plain greedy decoding of the fake model gives."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(expected_token([*prompt, *tokens], num_stages))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens


def write_tokenizer(bundle: Path) -> tuple[FileEntry, ...]:
    """A tokenizer of one letter a token for the fake model's vocabulary: <pad>, <s>, </s>, A, B, ..."""
    vocab = {token: idx for idx, token in enumerate(["<pad>", "<s>", "</s>", *ALPHABET[: VOCAB - 3]])}
    fast = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<pad>", "<s>", "</s>"])
    folder = bundle / TOKENIZER_DIR
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}), encoding="utf-8")
    return tuple(describe_file(bundle, path) for path in sorted(folder.iterdir()))


class SlowRunner(FakeRunner):
    """Takes its time, so that a test can act in the middle of a generation."""

    delay_s = 0.0

    def run(self, slices: Sequence[RunSlice], hidden: Tensor | None) -> Tensor | Logits:
        time.sleep(self.delay_s)
        return super().run(slices, hidden)


class FakeWorker:
    """One worker in a thread."""

    def __init__(
        self, hub: Hub, bundle: Path, name: str, num_stages: int, served: Sequence[int], files: tuple[FileEntry, ...],
        *, address: str = "tcp://127.0.0.1:0", capacity: int = 1024, delay_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._hub = hub
        self.address = hub.listen(address)
        identity = make_identity(name, num_stages, *served, capacity=capacity, tokenizer_files=files)
        self.runners = {idx: SlowRunner(idx, idx == num_stages - 1, kv_capacity_tokens=capacity) for idx in served}
        for runner in self.runners.values():
            runner.delay_s = delay_s
        self._server = Server(hub=hub, worker=Worker(identity), runners=self.runners, sampler=FakeSampler(), bundle=bundle)
        self._thread = threading.Thread(target=self._serve, name=f"fake-{name}", daemon=True)
        self._thread.start()

    @property
    def kv_used_tokens(self) -> int:
        return sum(runner.kv_used_tokens for runner in self.runners.values())

    def stop(self) -> None:
        """Die: the connection breaks, everything is forgotten."""
        self._server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def drain(self) -> None:
        """Shut down politely: open streams go on, and nothing new is admitted."""
        self._server.drain()

    def _serve(self) -> None:
        try:
            self._server.serve()
        finally:
            self._hub.close()


class FakeFleet:
    """One worker a stage. `restart` puts a new process in a dead one's place."""

    def __init__(
        self, folder: Path, num_stages: int = 2, *, hub: Callable[[], Hub] = ZmqHub, capacity: int = 1024, delay_s: float = 0.0
    ) -> None:
        self.num_stages = num_stages
        self._bundle = folder / "bundle"
        self._files = write_tokenizer(self._bundle)
        self._hub = hub
        self._capacity = capacity
        self._delay_s = delay_s
        self.workers = [self._start(idx, f"worker-{idx}", "tcp://127.0.0.1:0") for idx in range(num_stages)]

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    @property
    def kv_used_tokens(self) -> int:
        return sum(worker.kv_used_tokens for worker in self.workers)

    def restart(self, idx: int) -> None:
        """A new worker, which knows nothing, at the same address."""
        self.workers[idx] = self._start(idx, f"worker-{idx}-again", self.workers[idx].address)

    def wait_until_free(self, timeout_s: float = 5.0) -> None:
        """All KV was given back."""
        deadline = time.monotonic() + timeout_s
        while self.kv_used_tokens:
            assert time.monotonic() < deadline, f"{self.kv_used_tokens} KV positions are still set aside"
            time.sleep(0.005)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, idx: int, name: str, address: str) -> FakeWorker:
        return FakeWorker(
            self._hub(), self._bundle, name, self.num_stages, [idx], self._files,
            address=address, capacity=self._capacity, delay_s=self._delay_s,
        )  # fmt: skip


def params(max_tokens: int | None = 16, **more: object) -> GenerationParams:
    return GenerationParams(max_tokens=max_tokens, ignore_eos=True, **{"draft": None, **more})  # type: ignore[arg-type]


def connect(fleet: FakeFleet, folder: Path, *, connect_timeout_s: float = 10.0, **options: object) -> PipelineClient:
    chosen = ClientOptions(cache_dir=folder / "cache", **options)  # type: ignore[arg-type]
    return PipelineClient.connect(fleet.addresses, connect_timeout_s=connect_timeout_s, options=chosen)


def connect_memory(fleet: FakeFleet, network: MemoryNetwork, folder: Path, **options: object) -> PipelineClient:
    """To a fleet on an in-memory network."""
    chosen = ClientOptions(cache_dir=folder / "cache", **options)  # type: ignore[arg-type]
    return PipelineClient.connect(fleet.addresses, options=chosen, hub_factory=network.hub, connect_timeout_s=5)
