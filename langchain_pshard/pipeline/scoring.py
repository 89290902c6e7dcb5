"""Whole logits of a prompt, gathered chunk by chunk: to compare a fleet with another implementation, never to serve anybody."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from langchain_pshard.core.codec import Tensor
from langchain_pshard.core.errors import PShardError
from langchain_pshard.pipeline.iterators import MakeRequest
from langchain_pshard.pipeline.reactor import Reactor
from langchain_pshard.pipeline.stream import Delivery


def gather_logits(reactor: Reactor, make_request: MakeRequest) -> npt.NDArray[np.float32]:
    """The logits of every position of a request's prompt, [tokens, vocab].

    Raises:
        PShardError: what the stream ends with.
    """
    inbox: queue.SimpleQueue[Delivery | PShardError] = queue.SimpleQueue()

    def sink(item: Delivery | PShardError) -> bool:
        inbox.put(item)
        return True

    stream_id = reactor.submit(replace(make_request(sink), returns_logits=True))
    parts: list[Tensor] = []
    try:
        while True:
            item = reactor.take(inbox)
            if isinstance(item, PShardError):
                raise item
            assert item.logits is not None  # the stream refuses an answer without
            parts.append(item.logits)
            if item.finish_reason is not None:
                return np.concatenate(parts)
    finally:
        reactor.cancel(stream_id)
