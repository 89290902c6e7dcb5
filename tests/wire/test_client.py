"""The client against real worker loops around a deterministic fake engine, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from langchain_pshard.core.errors import (
    CapacityError,
    ClosedError,
    ContextOverflowError,
    DeadlineError,
    FleetMismatchError,
    InvalidOptionError,
)
from langchain_pshard.pipeline.client import PipelineClient
from langchain_pshard.pipeline.generation import FinishReason, GenerationParams
from langchain_pshard.pipeline.options import ClientOptions
from tests.support.fake_fleet import PROMPT, FakeFleet, connect, params, plain_tokens
from tests.support.fake_stages import CONTEXT

# --- generating ------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_plain_decoding(client: PipelineClient, fleet: FakeFleet) -> None:
    result = client.complete(PROMPT, params(24))
    assert list(result.token_ids) == plain_tokens(PROMPT, 2, 24, ignore_eos=True)
    assert result.finish_reason is FinishReason.LENGTH
    assert result.stats.num_prompt_tokens == 3
    assert result.stats.num_generated_tokens == 24
    assert result.stats.num_steps == 24
    assert len(result.stats.stage_compute_ms) == 2
    fleet.wait_until_free()


def test_text_is_the_decoded_tokens_and_the_end_token_does_not_show(client: PipelineClient) -> None:
    for first in range(3, 40):
        expected = plain_tokens([first], 2, 60)
        if expected[-1] == 2:
            break
    result = client.complete([first], GenerationParams(max_tokens=60))
    assert list(result.token_ids) == expected
    assert result.finish_reason is FinishReason.STOP
    assert result.text == client.tokenizer.decode(expected[:-1])


def test_text_prompt_is_encoded(client: PipelineClient) -> None:
    tokens = client.tokenizer.encode("HELLO")
    assert client.complete("HELLO", params(8)).token_ids == tuple(plain_tokens(tokens, 2, 8, ignore_eos=True))


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 258, 400])
def test_prompts_of_any_length(client: PipelineClient, length: int) -> None:
    prompt = [3 + idx % 50 for idx in range(length)]
    assert list(client.complete(prompt, params(4)).token_ids) == plain_tokens(prompt, 2, 4, ignore_eos=True)


def test_many_at_once_equal_their_solo_outputs(client: PipelineClient, fleet: FakeFleet) -> None:
    prompts = [[3 + idx, 4, 5 + idx % 7] for idx in range(20)]
    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(lambda prompt: list(client.complete(prompt, params(12)).token_ids), prompts))
    assert results == [plain_tokens(prompt, 2, 12, ignore_eos=True) for prompt in prompts]
    assert max(len(batch) for batch in fleet.workers[0].runners[0].batches) > 4  # they shared steps


def test_stop_string_ends_the_work(client: PipelineClient, fleet: FakeFleet) -> None:
    expected = plain_tokens(PROMPT, 2, 40, ignore_eos=True)
    text = client.tokenizer.decode(expected)
    stop = text[9:12]
    result = client.complete(PROMPT, params(300, stop=(stop,)))
    assert result.text == text[: text.find(stop)]
    assert result.finish_reason is FinishReason.STOP
    assert stop not in result.text
    fleet.wait_until_free()


def test_drafts_change_the_speed_only(client: PipelineClient, fleet: FakeFleet) -> None:
    expected = plain_tokens(PROMPT, 2, 40, ignore_eos=True)

    class Half:
        """Right twice, then wrong."""

        def begin(self, prompt: Sequence[int]) -> Half:
            assert list(prompt) == PROMPT
            self.done = 0
            return self

        def extend(self, tokens: Sequence[int]) -> None:
            self.done += len(tokens)

        def propose(self, max_tokens: int) -> Sequence[int]:
            return [*expected[self.done : self.done + 2], 3, 3][:max_tokens]

    result = client.complete(PROMPT, params(40, draft_tokens=4), drafter=Half())
    assert list(result.token_ids) == expected
    assert result.stats.num_steps < 20
    assert 20 <= result.stats.num_accepted_tokens <= result.stats.num_drafted_tokens
    fleet.wait_until_free()


def test_broken_drafter_ends_its_own_stream(client: PipelineClient, fleet: FakeFleet) -> None:
    class Broken:
        def begin(self, prompt: Sequence[int]) -> Broken:
            return self

        def extend(self, tokens: Sequence[int]) -> None:
            pass

        def propose(self, max_tokens: int) -> Sequence[int]:
            raise KeyError("no")

    class BrokenAtOnce(Broken):
        def begin(self, prompt: Sequence[int]) -> Broken:
            raise KeyError("no")

    with pytest.raises(InvalidOptionError, match="drafter Broken failed"):
        client.complete(PROMPT, params(40), drafter=Broken())
    with pytest.raises(InvalidOptionError, match="drafter BrokenAtOnce failed"):
        client.generate(PROMPT, params(40), drafter=BrokenAtOnce())
    assert len(client.complete(PROMPT, params(4)).token_ids) == 4
    fleet.wait_until_free()


# --- refused before any work -----------------------------------------------------------------------------------------


def test_bad_prompts_are_refused_at_once(client: PipelineClient) -> None:
    with pytest.raises(InvalidOptionError, match="empty"):
        client.generate([])
    with pytest.raises(InvalidOptionError, match="token id 64; valid: 0 to 63"):
        client.generate([3, 64])
    with pytest.raises(ContextOverflowError, match=f"500 tokens .* max_tokens is 13.* {CONTEXT}"):
        client.generate([3] * 500, params(13))
    with pytest.raises(ContextOverflowError):
        client.generate([3] * CONTEXT)


def test_more_than_a_stage_holds_is_refused_with_figures(tmp_path: Path) -> None:
    with (
        FakeFleet(tmp_path, capacity=64) as fleet,
        connect(fleet, tmp_path) as client,
        pytest.raises(CapacityError, match=r"need 103 KV positions; stage 0 at .* holds 64"),
    ):
        client.generate(PROMPT, params(100))


# --- stopping --------------------------------------------------------------------------------------------------------


def test_close_stops_the_work(client: PipelineClient, fleet: FakeFleet) -> None:
    chunks = client.generate(PROMPT, params(400))
    next(chunks)
    chunks.close()
    assert list(chunks) == []
    fleet.wait_until_free()


def test_abandoned_iterator_stops_the_work(client: PipelineClient, fleet: FakeFleet) -> None:
    chunks = client.generate(PROMPT, params(400))
    next(chunks)
    del chunks
    gc.collect()
    fleet.wait_until_free()


def test_close_from_another_thread_ends_a_waiting_next(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, delay_s=0.3) as fleet, connect(fleet, tmp_path) as client:
        chunks = client.generate(PROMPT, params(400))
        timer = threading.Timer(0.1, chunks.close)
        timer.start()
        assert list(chunks) == []
        timer.join()


def test_deadline(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, delay_s=0.02) as fleet, connect(fleet, tmp_path) as client:
        with pytest.raises(DeadlineError, match=r"timeout_s=0\.3"):
            client.complete(PROMPT, params(400, timeout_s=0.3))
        fleet.wait_until_free()


def test_closing_the_client_ends_streams(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, delay_s=0.02) as fleet:
        client = connect(fleet, tmp_path)
        chunks = client.generate(PROMPT, params(400))
        next(chunks)
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            list(chunks)
        with pytest.raises(ClosedError):
            client.complete(PROMPT, params(4))
        fleet.wait_until_free()


def test_abandoned_client_closes_itself(fleet: FakeFleet, tmp_path: Path) -> None:
    assert len(connect(fleet, tmp_path).complete(PROMPT, params(4)).token_ids) == 4
    gc.collect()  # the leak check finds a thread that stayed


# --- event loops -----------------------------------------------------------------------------------------------------


def test_two_event_loops_one_after_another(client: PipelineClient) -> None:
    expected = plain_tokens(PROMPT, 2, 8, ignore_eos=True)
    for _ in range(2):
        assert list(asyncio.run(client.acomplete(PROMPT, params(8))).token_ids) == expected


def test_many_in_one_loop_and_two_loops_at_once(client: PipelineClient) -> None:
    prompts = [[3 + idx, 9] for idx in range(8)]

    async def all_of_them() -> list[list[int]]:
        return [list(one.token_ids) for one in await asyncio.gather(*(client.acomplete(prompt, params(10)) for prompt in prompts))]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: asyncio.run(all_of_them()), range(2))
    assert first == second == [plain_tokens(prompt, 2, 10, ignore_eos=True) for prompt in prompts]


async def test_cancelled_task_stops_the_work(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, delay_s=0.01) as fleet, connect(fleet, tmp_path) as client:
        task = asyncio.create_task(client.acomplete(PROMPT, params(400)))
        await asyncio.sleep(0.1)
        assert fleet.kv_used_tokens
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(fleet.wait_until_free)


async def test_abandoned_async_iterator_stops_the_work(client: PipelineClient, fleet: FakeFleet) -> None:
    chunks = client.agenerate(PROMPT, params(400))
    await anext(chunks)
    del chunks
    gc.collect()
    await asyncio.to_thread(fleet.wait_until_free)


def test_closed_loop_stops_the_work(client: PipelineClient, fleet: FakeFleet) -> None:
    kept = []

    async def leave() -> None:
        kept.append(client.agenerate(PROMPT, params(500)))
        await anext(kept[0])

    asyncio.run(leave())
    fleet.wait_until_free()


# --- admission -------------------------------------------------------------------------------------------------------


def test_batch_of_200_on_a_small_budget(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, capacity=64) as fleet, connect(fleet, tmp_path) as client:
        prompts = [[3 + idx % 60, 4 + idx // 60] for idx in range(200)]
        streams = [client.generate(prompt, params(6)) for prompt in prompts]
        results = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert results == [plain_tokens(prompt, 2, 6, ignore_eos=True) for prompt in prompts]
        fleet.wait_until_free()


def test_queue_timeout_and_bound(tmp_path: Path) -> None:
    with FakeFleet(tmp_path, capacity=64, delay_s=0.02) as fleet, connect(fleet, tmp_path, queue_timeout_s=0.3, max_waiting=1) as client:
        running = client.generate(PROMPT, params(60))
        next(running)
        waiting = client.generate(PROMPT, params(60))
        one_too_many = client.generate(PROMPT, params(60))
        with pytest.raises(CapacityError, match="already wait"):
            next(one_too_many)
        with pytest.raises(CapacityError, match=r"no KV room came free within 0\.3 s"):
            next(waiting)
        running.close()
        assert len(client.complete(PROMPT, params(4)).token_ids) == 4


# --- connecting ------------------------------------------------------------------------------------------------------


def test_connect_refuses_what_is_no_chain(fleet: FakeFleet, tmp_path: Path) -> None:
    with pytest.raises(FleetMismatchError, match="missing: 1; served: 0 at"):
        PipelineClient.connect(fleet.addresses[:1], connect_timeout_s=5)
    with pytest.raises(InvalidOptionError, match="twice"):
        PipelineClient.connect([fleet.addresses[0], fleet.addresses[0]])
    with pytest.raises(InvalidOptionError, match="no list of addresses"):
        PipelineClient.connect(fleet.addresses[0])
    with pytest.raises(InvalidOptionError, match="no address"):
        PipelineClient.connect([fleet.addresses[0], None])  # type: ignore[list-item]
    with pytest.raises(InvalidOptionError, match="no valid host"):
        PipelineClient.connect([fleet.addresses[0], "tcp://*:7000"])
    with pytest.raises(InvalidOptionError, match="port 0"):
        PipelineClient.connect([fleet.addresses[0], "tcp://127.0.0.1:0"])


@pytest.mark.parametrize("prompt", [[1.5], [None], ["a"], None, 7])
def test_prompts_that_are_neither_text_nor_tokens_are_refused(fleet: FakeFleet, tmp_path: Path, prompt: Any) -> None:
    with connect(fleet, tmp_path) as client, pytest.raises(InvalidOptionError, match="neither text nor a sequence of token ids"):
        client.generate(prompt)


def test_addresses_in_any_order_and_cache_is_used(fleet: FakeFleet, tmp_path: Path) -> None:
    options = ClientOptions(cache_dir=tmp_path / "cache")
    with PipelineClient.connect(fleet.addresses[::-1], options=options) as client:
        assert [stage.address for stage in client.chain.stages] == fleet.addresses
        fingerprint = client.manifest.fingerprint
    cached = tmp_path / "cache" / fingerprint / "tokenizer" / "tokenizer.json"
    assert cached.is_file()
    cached.write_bytes(b"damaged")
    with PipelineClient.connect(fleet.addresses, options=options) as client:
        assert client.tokenizer.decode(client.tokenizer.encode("HELLO")) == "HELLO"
    assert cached.read_bytes() != b"damaged"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [fingerprint]


def test_cache_that_cannot_be_written_is_no_error(fleet: FakeFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    with PipelineClient.connect(fleet.addresses, options=ClientOptions(cache_dir=tmp_path / "file" / "cache")) as client:
        assert len(client.complete("HELLO", params(4)).token_ids) == 4
    assert "going on without it" in caplog.text
