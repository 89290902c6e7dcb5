"""Batches above the pipeline: Ctrl-C ends every call of one."""

from __future__ import annotations

import _thread
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from langchain_pshard.chat_models import ChatPShard
from langchain_pshard.pipeline.generation import GenerationChunk
from tests.support.fake_client import WORKERS, Serve


@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupted_batch_ends_its_calls(serve: Serve, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run at their next token, those that wait for a thread before their first."""
    client = serve(["word "] * 1_000_000)
    say, pause, once = client._next, threading.Event(), threading.Lock()

    def slowly(item: str | Exception) -> GenerationChunk:
        pause.wait(0.001)
        if len(client.prompts) == 2 and once.acquire(blocking=False):
            _thread.interrupt_main()
        return say(item)

    monkeypatch.setattr(client, "_next", slowly)
    with ChatPShard(workers=WORKERS, streaming=streaming) as model:
        with pytest.raises(KeyboardInterrupt):
            model.batch(["Hi"] * 5, {"max_concurrency": 2})
        assert (len(client.prompts), client.num_stopped) == (2, 2)
        client.scripts = [["ok"]]
        assert [message.content for message in model.batch(["Hi"] * 3)] == ["ok!"] * 3


def test_a_batch_in_another_thread_runs_as_it_is(serve: Serve) -> None:
    serve(["ok"])
    with ChatPShard(workers=WORKERS) as model, ThreadPoolExecutor(1) as other:
        found = other.submit(model.batch, ["Hi", "Ho"]).result()
    assert [message.content for message in found] == ["ok!", "ok!"]
