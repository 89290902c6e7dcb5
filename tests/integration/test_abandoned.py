"""Whoever stops listening costs nothing more: work stops at once, and nothing is left behind, in this process or in the workers."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from benchmarks.fleet import RunningWorker, running_worker
from langchain_pshard import ChatPShard, PipelineClient
from langchain_pshard.core.errors import DeadlineError
from langchain_pshard.core.roles import StageStatus
from langchain_pshard.pipeline.generation import GenerationParams
from tests.support.bundles import TinyBundle

NUM_STREAMS = 1_000
TOGETHER = 20
MOST_STEPS_AFTERWARDS = 3
FREE_WITHIN_S = 1.0
LONG = GenerationParams(max_tokens=1_500, ignore_eos=True)
PROMPT = [9 + idx % 200 for idx in range(30)]
LONG_PROMPT = [9 + idx * idx % 200 for idx in range(500)]


@pytest.fixture(scope="module")
def workers(tiny_bundle: TinyBundle) -> Iterator[list[RunningWorker]]:
    """Two that nobody else talks to, so that their counts are ours."""
    bundle = tiny_bundle("llama", num_stages=2)
    with running_worker(bundle, 0) as first, running_worker(bundle, 1) as second:
        yield [first, second]


@pytest.fixture
def client(workers: list[RunningWorker]) -> Iterator[PipelineClient]:
    with PipelineClient.connect([worker.address for worker in workers]) as client:
        yield client


def stages(client: PipelineClient) -> list[StageStatus]:
    found = [worker.status for worker in client.status().workers]
    assert None not in found
    return [stage for status in found if status for stage in status.stages]


def wait_until_free(client: PipelineClient, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while held := [stage for stage in stages(client) if stage.kv_used_tokens or stage.num_streams]:
        assert time.monotonic() < deadline, held
        time.sleep(0.01)


# --- work stops -------------------------------------------------------------------------------------------------------------


def closed(client: PipelineClient) -> None:
    chunks = client.generate(PROMPT, LONG)
    for _ in range(5):
        next(chunks)
    chunks.close()


def dropped(client: PipelineClient) -> None:
    chunks = client.generate(PROMPT, LONG)
    for _ in range(5):
        next(chunks)
    del chunks
    gc.collect()


def closed_in_its_prompt(client: PipelineClient) -> None:
    num_steps = stages(client)[0].num_steps
    chunks = client.generate(LONG_PROMPT, GenerationParams(max_tokens=1_500, prefix_cache=False))
    while stages(client)[0].num_steps == num_steps:
        pass
    chunks.close()


def cancelled(client: PipelineClient) -> None:
    async def main() -> None:
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.agenerate(PROMPT, LONG):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def timed_out(client: PipelineClient) -> None:
    with pytest.raises(DeadlineError):
        client.complete(PROMPT, GenerationParams(max_tokens=1_500, ignore_eos=True, timeout_s=0.5))


def crowd(client: PipelineClient) -> None:
    """Eight at once, stopped together."""
    streams = [client.generate([*PROMPT, 9 + idx], LONG) for idx in range(8)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("leave", [closed, dropped, closed_in_its_prompt, cancelled, timed_out, crowd], ids=lambda leave: leave.__name__)
def test_work_stops_within_three_steps_and_blocks_are_free_within_a_second(
    client: PipelineClient, leave: Callable[[PipelineClient], None]
) -> None:
    before = stages(client)
    leave(client)
    left_at = time.monotonic()
    # The question travels behind the word that the stream is over: what a stage has computed by then it had begun before.
    then = stages(client)
    wait_until_free(client, FREE_WITHIN_S - (time.monotonic() - left_at))
    time.sleep(0.3)  # of work that goes on there would be hundreds of steps
    after = stages(client)
    assert after[0].num_steps > before[0].num_steps, "there was work to stop"
    assert [late.num_steps - early.num_steps <= MOST_STEPS_AFTERWARDS for early, late in zip(then, after, strict=True)] == [True, True]


def test_a_hundred_clients_that_leave_in_mid_stream_do_not_disturb_their_neighbour(
    client: PipelineClient, workers: list[RunningWorker]
) -> None:
    addresses = [worker.address for worker in workers]
    params = GenerationParams(max_tokens=200, ignore_eos=True)
    alone = client.complete(PROMPT, params).token_ids
    have_left = threading.Event()

    def go_on() -> list[tuple[int, ...]]:
        found = []
        while not have_left.is_set():
            found.append(client.complete(PROMPT, params).token_ids)
        return found

    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(go_on)
        try:
            for idx in range(100):
                with PipelineClient.connect(addresses) as leaving:
                    streams = [leaving.generate([9 + idx, *PROMPT], LONG) for _ in range(2)]
                    next(streams[0])
        finally:
            have_left.set()
    assert set(neighbour.result()) == {alone}
    wait_until_free(client, FREE_WITHIN_S)


# --- nothing is left ----------------------------------------------------------------------------------------------------------


def start_and_close(model: ChatPShard, number: int) -> None:
    stream = model.stream(f"Tell me about ship {number}.")
    next(stream)
    stream.close()  # type: ignore[attr-defined]


def start_and_drop(model: ChatPShard, number: int) -> None:
    next(model.stream(f"Tell me about snow {number}."))


async def start_and_cancel(model: ChatPShard, number: int) -> None:
    """Before its first token, in the middle, or while nobody waits for it."""

    async def read() -> None:
        async for _ in model.astream(f"Tell me about tea {number}."):
            await asyncio.sleep(0)

    task = asyncio.create_task(read())
    await asyncio.sleep(random.Random(number).choice([0.0, 0.001, 0.01, 0.03]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def start_and_leave_open(model: ChatPShard, number: int) -> None:
    """An asynchronous iterator that nobody closes: the event loop finds it when it ends."""
    await anext(model.astream(f"Tell me about rain {number}."))


async def cancel_all(model: ChatPShard, numbers: Sequence[int]) -> None:
    await asyncio.gather(*(start_and_cancel(model, number) for number in numbers))
    await asyncio.gather(*(start_and_leave_open(model, number) for number in numbers[: len(numbers) // 4]))


@pytest.mark.timeout(300)
def test_a_thousand_abandoned_streams_leave_nothing(workers: list[RunningWorker]) -> None:
    """The leak check around every test looks for threads, sockets and files of this process; here are those of the workers, and KV."""
    addresses = [worker.address for worker in workers]
    processes = [psutil.Process(worker.process.pid) for worker in workers]
    with ChatPShard(workers=addresses, max_tokens=1_000) as model:
        expected = model.invoke("Hello", max_tokens=20).text
        before = [(process.num_threads(), len(process.net_connections()), len(process.open_files())) for process in processes]
        for first in range(0, NUM_STREAMS, TOGETHER):
            numbers = range(first, first + TOGETHER)
            for number in numbers[::4]:
                start_and_close(model, number)
                start_and_drop(model, number + 1)
            asyncio.run(cancel_all(model, numbers[2::2]))
        gc.collect()
        with PipelineClient.connect(addresses) as observer:
            wait_until_free(observer, 2.0)
        assert model.invoke("Hello", max_tokens=20).text == expected
        deadline = time.monotonic() + 5.0
        while (after := [(p.num_threads(), len(p.net_connections()), len(p.open_files())) for p in processes]) != before:
            assert time.monotonic() < deadline, (before, after)
            time.sleep(0.05)
