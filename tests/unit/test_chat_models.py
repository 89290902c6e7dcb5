"""The chat model above the pipeline: options, chunks, retries, closing, cache keys."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError as LangChainContextOverflowError
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from langchain_pshard.chat_models import ChatPShard
from langchain_pshard.core.errors import CapacityError, ContextOverflowError, DeadlineError, InvalidOptionError, WorkerLostError
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.prompt import TemplateError
from tests.support.fake_client import WORKERS, FakeClient, Serve, connections


def test_invoke(serve: Serve) -> None:
    client = serve(["Hel", "", "lo"])
    with ChatPShard(workers=WORKERS) as model:
        message = model.invoke("Hi")
    assert message.content == "Hello!"
    num_prompt = message.usage_metadata["input_tokens"]  # type: ignore[index]
    assert message.usage_metadata == {
        "input_tokens": num_prompt,
        "output_tokens": 3,
        "total_tokens": num_prompt + 3,
        "input_token_details": {"cache_read": 2},
    }
    assert message.response_metadata == {
        "finish_reason": "stop",
        "model_name": "fake-model",
        "model_provider": "pshard",
        "timings": {
            "num_steps": 3,
            "queue_ms": 1.0,
            "first_token_ms": 2.0,
            "decode_ms": 4.0,
            "tokens_per_s": 500.0,
            "stage_compute_ms": [1.5],
            "stage_queue_ms": [0.0],
            "hop_ms": 1.0,
            "num_drafted_tokens": 6,
            "num_accepted_tokens": 2,
        },
    }
    assert client.prompts == ["<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]
    assert connections(client) == [(WORKERS, {"connect_timeout_s": 30.0, "on_lost": None, "options": ClientOptions()})]
    assert client.is_closed


def test_stream_has_one_last_chunk_and_no_empty_one(serve: Serve) -> None:
    serve(["Hel", "", "lo"])
    with ChatPShard(workers=WORKERS) as model:
        chunks = list(model.stream("Hi"))
        whole = model.invoke("Hi")
    assert [chunk.content for chunk in chunks] == ["Hel", "lo", "!"]
    assert [chunk.chunk_position for chunk in chunks] == [None, None, "last"]
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False, False, True]
    joined = chunks[0] + chunks[1] + chunks[2]
    assert isinstance(joined, AIMessageChunk)
    assert (joined.content, joined.usage_metadata, joined.response_metadata) == (
        whole.content,
        whole.usage_metadata,
        whole.response_metadata,
    )


async def test_async_says_the_same(serve: Serve) -> None:
    serve(["Hel", "", "lo"])
    with ChatPShard(workers=WORKERS) as model:
        chunks = [chunk async for chunk in model.astream("Hi")]
        whole = await model.ainvoke("Hi")
    assert [chunk.content for chunk in chunks] == ["Hel", "lo", "!"]
    assert whole.content == "Hello!"
    assert chunks[-1].response_metadata == whole.response_metadata


def test_callbacks_hear_every_token(serve: Serve) -> None:
    serve(["a", "b"])

    class Heard(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.tokens.append(token)

    heard = Heard()
    with ChatPShard(workers=WORKERS, streaming=True) as model:
        assert model.invoke("Hi", {"callbacks": [heard]}).content == "ab!"
    assert heard.tokens == ["a", "b", "!"]


async def test_a_rate_limiter_is_asked_before_every_call(serve: Serve) -> None:
    class Counting(BaseRateLimiter):
        num_asked = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            self.num_asked += 1
            return True

        async def aacquire(self, *, blocking: bool = True) -> bool:
            return self.acquire()

    serve()
    limiter = Counting()
    with ChatPShard(workers=WORKERS, rate_limiter=limiter) as model:
        model.invoke("Hi")
        list(model.stream("Hi"))
        await model.ainvoke("Hi")
        assert [chunk.content async for chunk in model.astream("Hi")] == ["Hello", " world", "!"]
    assert limiter.num_asked == 4


def test_an_empty_generation_is_an_empty_message(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve([])
    end = FakeClient._end
    monkeypatch.setattr(FakeClient, "_end", lambda self, prompt: type(end(self, prompt))(text="", token_ids=(), end=end(self, prompt).end))
    with ChatPShard(workers=WORKERS) as model:
        message = model.invoke("Hi")
        chunks = list(model.stream("Hi"))
    assert (type(message), message.content) == (AIMessage, "")
    assert [(chunk.content, chunk.chunk_position) for chunk in chunks] == [("", "last")]
    assert len(client.prompts) == 2


def test_base_models_answer_without_leading_space_and_end_at_the_next_speaker(serve: Serve) -> None:
    client = serve([" ", "\n Hi", " there"], chat_template=None)
    with ChatPShard(workers=WORKERS, stop=["END"]) as model:
        assert model.invoke("Hi").content == "Hi there!"
        assert [chunk.content for chunk in model.stream("Hi")] == ["Hi", " there", "!"]
    assert client.prompts[0] == "<s>User: Hi\n\nAssistant:"
    assert client.params[0].stop == ("END", "\nUser:", "\nSystem:", "\nTool:", "\nAssistant:")


# --- options --------------------------------------------------------------------------------------------------------------

EVERY_OPTION: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "seed": 11,
    "stop": ["X"],
    "timeout": 9.0,
}


def seen(client: FakeClient) -> dict[str, Any]:
    params = client.params[-1]
    sampling = {name: getattr(params.sampling, name) for name in EVERY_OPTION if hasattr(params.sampling, name)}
    return sampling | {"max_tokens": params.max_tokens, "stop": list(params.stop), "timeout": params.timeout_s}


def test_every_option_at_construction_and_per_call(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS, **EVERY_OPTION) as model:
        assert model.invoke("Hi").response_metadata["seed"] == 11
        assert seen(client) == EVERY_OPTION
    with ChatPShard(workers=WORKERS) as model:
        for name, value in EVERY_OPTION.items():
            model.invoke("Hi", **{name: value})
            assert seen(client)[name] == value
            list(model.bind(**{name: value}).stream("Hi"))
            assert seen(client)[name] == value
            asyncio.run(model.ainvoke("Hi", **{name: value}))
            assert seen(client)[name] == value
        model.invoke("Hi")
        assert seen(client)["temperature"] == 0.0


def test_unknown_and_wrong_options_are_errors(serve: Serve) -> None:
    serve()
    with ChatPShard(workers=WORKERS) as model:
        with pytest.raises(InvalidOptionError, match=r"unknown option 'temprature'; a call takes: .*temperature"):
            model.invoke("Hi", temprature=1)
        with pytest.raises(InvalidOptionError, match="temperature='hot'"):
            model.invoke("Hi", temperature="hot")
        with pytest.raises(InvalidOptionError, match=r"top_p=2\.0 is out of range"):
            model.invoke("Hi", top_p=2.0)
        with pytest.raises(ModelInvalidRequestError, match="of no known form"):
            model.invoke("Hi", response_format={"type": "xml"})
    for wrong in (
        {"tmeperature": 1},
        {"temperature": -1},
        {"max_tokens": 0},
        {"runner": "paged2"},
        {"numerics": "exact"},
        {"kv_precision": "f16"},
        {"workers": []},
    ):
        with pytest.raises(ValidationError):
            ChatPShard(**{"workers": WORKERS, **wrong})
    with pytest.raises(ValidationError, match="either bundle"):
        ChatPShard()
    with pytest.raises(ValidationError, match="either bundle"):
        ChatPShard(workers=WORKERS, bundle=Path("x"))


def test_without_a_seed_every_call_draws_its_own(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS, temperature=1.0) as model:
        reported = [model.invoke("Hi").response_metadata["seed"] for _ in range(4)]
    assert len(set(reported)) == 4
    assert [params.sampling.seed for params in client.params] == reported


def test_configurable_fields_share_the_connection(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS) as model:
        flexible = model.configurable_fields(temperature=ConfigurableField(id="t"))
        for temperature in (0.3, 0.6):
            flexible.with_config(configurable={"t": temperature}).invoke("Hi")
            assert client.params[-1].sampling.temperature == temperature
        assert len(connections(client)) == 1
        assert not client.is_closed


# --- faults ---------------------------------------------------------------------------------------------------------------


def test_a_call_that_delivers_at_its_end_is_tried_again_from_the_beginning(serve: Serve) -> None:
    client = serve(["a", WorkerLostError("w1")], ["ok"])
    with ChatPShard(workers=WORKERS, max_retries=1) as model:
        assert model.invoke("Hi").content == "ok!"
        client.scripts = [["a", WorkerLostError("w2")], ["ok"]]
        assert asyncio.run(model.ainvoke("Hi")).content == "ok!"
        seeds = [params.sampling.seed for params in client.params]
        assert (seeds[0], seeds[2]) == (seeds[1], seeds[3])  # the same text, if it is drawn
        client.scripts = [["a", WorkerLostError("late")], ["ok"]]
        model.invoke("Hi", timeout=100)
        first_s, second_s = (params.timeout_s for params in client.params[-2:])
        assert first_s == 100 > second_s > 0  # one timeout for both tries
        client.scripts = [["a", WorkerLostError("late")], ["ok"]]
        with pytest.raises(DeadlineError, match="its timeout of 1e-09 s, all tries together"):
            model.invoke("Hi", timeout=1e-9)
        client.scripts = [["a", WorkerLostError("w3")], ["b", WorkerLostError("w4")], ["ok"]]
        with pytest.raises(WorkerLostError, match="w4"):
            model.invoke("Hi")
        client.scripts = [[CapacityError("never", is_retryable=False)], ["ok"]]
        with pytest.raises(CapacityError):
            model.invoke("Hi")


def test_streams_are_tried_again_only_before_the_first_token(serve: Serve) -> None:
    client = serve([WorkerLostError("w1")], ["ok"])
    with ChatPShard(workers=WORKERS, max_retries=1) as model:
        assert "".join(str(chunk.content) for chunk in model.stream("Hi")) == "ok!"
        client.scripts = [["a", WorkerLostError("w3")], ["ok"]]
        with pytest.raises(WorkerLostError, match="w3"):
            list(model.stream("Hi"))
        client.scripts = [[DeadlineError("late")], ["ok"]]
        with pytest.raises(DeadlineError):
            model.invoke("Hi")
        client.scripts = [[WorkerLostError("w4")], ["ok"]]
        with pytest.raises(WorkerLostError, match="w4"):
            model.invoke("Hi", max_retries=0)


def test_context_overflow_is_langchains_own_too(serve: Serve) -> None:
    serve([ContextOverflowError.of(num_prompt_tokens=9, max_tokens=5, context_length=10)])
    with ChatPShard(workers=WORKERS) as model, pytest.raises(LangChainContextOverflowError, match="has 9 tokens") as caught:
        model.invoke("Hi")
    assert isinstance(caught.value, ContextOverflowError)


def test_a_template_that_fails_names_its_line(serve: Serve) -> None:
    serve(chat_template="{{ bos_token }}\n{{ raise_exception('no such turn') }}")
    with ChatPShard(workers=WORKERS) as model:
        for call in (model.invoke, model.get_num_tokens_from_messages, lambda messages: asyncio.run(model.ainvoke(messages))):
            with pytest.raises(ModelInvalidRequestError, match=r"line 2.*no such turn") as caught:
                call([HumanMessage("Hi")])
            assert isinstance(caught.value, TemplateError)


def test_a_closed_stream_stops_the_work(serve: Serve) -> None:
    client = serve(["a"] * 10)
    with ChatPShard(workers=WORKERS) as model:
        stream = model.stream("Hi")
        assert next(stream).content == "a"
        stream.close()  # type: ignore[attr-defined]
        assert client.num_stopped == 1


async def test_a_cancelled_task_stops_the_work(serve: Serve) -> None:
    client = serve(["a"])
    client.is_endless = True
    with ChatPShard(workers=WORKERS) as model:
        task = asyncio.create_task(model.ainvoke("Hi"))
        while not client.params:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.num_stopped == 1


# --- what LangChain wants to know -------------------------------------------------------------------------------------------


def test_cache_tells_models_and_settings_apart(serve: Serve) -> None:
    client = serve()
    cache = InMemoryCache()
    with ChatPShard(workers=WORKERS, cache=cache) as model:
        model.invoke("Hi")
        model.invoke("Hi")
        assert len(client.params) == 1
        model.invoke("Hi", temperature=0.5, seed=1)
        model.invoke("Hi", stop=["x"])
        assert len(client.params) == 3
    with ChatPShard(workers=WORKERS, cache=cache, max_tokens=5) as model:
        model.invoke("Hi")
        assert len(client.params) == 4
    client.manifest.fingerprint = "e" * 64  # other workers at the same addresses
    with ChatPShard(workers=WORKERS, cache=cache) as model:
        model.invoke("Hi")
        assert len(client.params) == 5


def test_tracing_parameters_follow_the_call(serve: Serve) -> None:
    serve()
    model = ChatPShard(workers=WORKERS, model_name="m", max_tokens=9, stop=["a"])
    assert model._get_ls_params(temperature=0.5, stop=["b"]) == {
        "ls_provider": "pshard",
        "ls_model_name": "m",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 9,
        "ls_stop": ["b"],
    }
    assert ChatPShard(bundle=Path("here/gemma"))._get_ls_params()["ls_model_name"] == "gemma"
    assert model._llm_type == "pshard-chat"


def test_token_counts_are_the_models_own(serve: Serve) -> None:
    client = serve()
    with ChatPShard(workers=WORKERS) as model:
        assert model.get_num_tokens("the") == 1
        prompt = client.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert model.get_num_tokens_from_messages([HumanMessage("Hi")]) == len(prompt)
        assert model.invoke("Hi").usage_metadata["input_tokens"] == len(prompt)  # type: ignore[index]


def test_imports_stay_light() -> None:
    code = (
        "import sys, langchain_pshard; assert not {'langchain_core', 'zmq', 'tokenizers'} & set(sys.modules)\n"
        "from langchain_pshard import ChatPShard\n"
        "ChatPShard(workers=['tcp://127.0.0.1:9'])\n"
        "print(sorted({'openvino', 'torch', 'transformers', 'nncf', 'workers', 'zmq'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_what_changes_the_speed_is_an_option_of_a_call_and_not_of_the_text(serve: Serve) -> None:
    client = serve(["a"])
    with ChatPShard(workers=WORKERS, draft_tokens=4) as model:
        model.invoke("Hi")
        model.invoke("Hi", draft=None)
        model.bind(draft="ngram", draft_tokens="auto").invoke("Hi")
        model.invoke("Hi", draft="model")
        asked = [(params.draft, params.draft_tokens) for params in client.params]
        assert asked == [("auto", 4), (None, 4), ("ngram", "auto"), ("model", 4)]
        model.invoke("Hi", prefix_cache=False)
        assert [params.prefix_cache for params in client.params] == [True, True, True, True, False]
        assert not {"draft", "draft_tokens", "prefix_cache", "max_steps_ahead"} & model._identifying_params.keys()
        assert model.model_copy(update={"prefix_cache": "all"})._identifying_params["prefix_cache"] == "all"
        with pytest.raises(InvalidOptionError, match="draft_tokens=0"):
            model.invoke("Hi", draft_tokens=0)
