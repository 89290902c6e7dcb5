"""What several tests of the chat model share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from langchain_pshard.pipeline.client import PipelineClient
from tests.support.fake_client import FakeClient, Serve
from tests.support.tokenizers import byte_level_tokenizer


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(*scripts)`: what connects from now on gets this fake; connections are counted on it."""

    def start(*scripts: Any, chat_template: str | None = "", tokenizer: Any = None) -> FakeClient:
        template = {} if chat_template == "" else {"chat_template": chat_template}
        client = FakeClient(tokenizer or byte_level_tokenizer(**template), *scripts)
        client.connected = []  # type: ignore[attr-defined]

        def connect(workers: Any, **options: Any) -> FakeClient:
            client.connected.append((workers, options))  # type: ignore[attr-defined]
            return client

        monkeypatch.setattr(PipelineClient, "connect", connect)
        return client

    yield start
    gc.collect()
