"""One call of the chat model: all that is decided before its first token, and the loop over its pieces, for threads and event loops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from typing import NoReturn

from langchain_core.messages import BaseMessage

from langchain_pshard.batches import check_interrupted
from langchain_pshard.call_options import CallOptions
from langchain_pshard.connection import Connection
from langchain_pshard.constraints import Constraint, constraint_of
from langchain_pshard.core.errors import DeadlineError, PShardError
from langchain_pshard.failures import as_langchain
from langchain_pshard.pipeline.generation import GenerationChunk, GenerationParams
from langchain_pshard.prompt import Prompt, Prompter
from langchain_pshard.reply import Reply

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, ready for the pipeline."""

    connection: Connection
    prompt: list[int]
    params: GenerationParams
    reply: Reply
    max_retries: int


def constraint(options: CallOptions, prompter: Prompter) -> Constraint:
    """How the options bind the answer of this model."""
    return constraint_of(
        tools=options.tools or (),
        tool_choice=options.tool_choice,
        response_format=options.response_format,
        form=prompter.tool_format,
        is_parallel=options.parallel_tool_calls is not False,
    )


def prompt_of(prompter: Prompter, messages: Sequence[BaseMessage], bound: Constraint) -> Prompt:
    """The prompt that asks for an answer so bound."""
    return prompter.prompt(messages, tools=bound.tools, lead_in=bound.lead_in, skips_reasoning=bound.grammar is not None)


def prepare(connection: Connection, messages: Sequence[BaseMessage], options: CallOptions, model_name: str | None) -> Call:
    """
    Raises:
        InvalidOptionError, GrammarError, TemplateError: the call cannot be made like this.
    """
    prompter = connection.prompter
    bound = constraint(options, prompter)
    prompt = prompt_of(prompter, messages, bound)
    plan = bound.plan if prompt.open_reasoning is None else bound.plan.within(prompt.open_reasoning)
    params = options.generation_params(
        template_stop=() if bound.grammar else prompter.stop,  # such a text ends by itself
        grammar=bound.grammar,
        marks=plan.marks,
    )
    reply = Reply(
        model_name=model_name or connection.client.manifest.model_name,
        sampling=params.sampling,
        strips_start=prompter.is_default,
        tokenizer=connection.client.tokenizer,
        plan=plan,
    )
    return Call(connection=connection, prompt=prompt.token_ids, params=params, reply=reply, max_retries=options.max_retries)


def whole(call: Call) -> list[GenerationChunk]:
    """All that the fleet generates. After a fault it begins again where that is allowed, also in the middle: nobody has seen any of it."""
    tries = _Tries(call)
    while True:
        try:
            return list(_generated(call, tries.params))
        except PShardError as error:
            tries.failed(error)
            call.connection.mend()


async def awhole(call: Call) -> list[GenerationChunk]:
    """`whole` for event loops."""
    tries = _Tries(call)
    while True:
        try:
            async with aclosing(call.connection.client.agenerate(call.prompt, tries.params)) as generated:
                return [piece async for piece in generated]
        except PShardError as error:
            tries.failed(error)
            await asyncio.to_thread(call.connection.mend)


def pieces(call: Call) -> Generator[GenerationChunk, None, None]:
    """What the fleet generates, as it comes; tried again where that is allowed, until the first piece. Closing it stops the work."""
    tries = _Tries(call)
    while True:
        try:
            with closing(_generated(call, tries.params)) as generated:
                for piece in generated:
                    tries.delivered()
                    yield piece
            return
        except PShardError as error:
            tries.failed(error)
            call.connection.mend()


async def apieces(call: Call) -> AsyncGenerator[GenerationChunk, None]:
    """`pieces` for event loops."""
    tries = _Tries(call)
    while True:
        try:
            async with aclosing(call.connection.client.agenerate(call.prompt, tries.params)) as generated:
                async for piece in generated:
                    tries.delivered()
                    yield piece
            return
        except PShardError as error:
            tries.failed(error)
            await asyncio.to_thread(call.connection.mend)


def _generated(call: Call, params: GenerationParams) -> Generator[GenerationChunk, None, None]:
    """One try, which ends when the batch that it is part of is interrupted."""
    check_interrupted()
    with closing(call.connection.client.generate(call.prompt, params)) as generated:
        for piece in generated:
            yield piece
            check_interrupted()


class _Tries:
    """How often a call may still be tried, and for how long: its timeout is one for all tries."""

    def __init__(self, call: Call) -> None:
        self.params = call.params  # of the next try
        self._num_left = call.max_retries
        self._timeout_s = call.params.timeout_s
        self._started_s = time.monotonic()

    def delivered(self) -> None:
        """The caller has some of the text, which cannot be taken back."""
        self._num_left = 0

    def failed(self, error: PShardError) -> None:
        """Count a try; raises an error when there is to be no other."""
        if self._num_left == 0 or not error.is_retryable or isinstance(error, DeadlineError):
            _raise(error)
        if self._timeout_s is not None:
            left_s = self._timeout_s - (time.monotonic() - self._started_s)
            if left_s <= 0:
                _raise(DeadlineError(f"the call took longer than its timeout of {self._timeout_s:g} s, all tries together: {error}"))
            self.params = replace(self.params, timeout_s=left_s)
        _log.warning("trying again after a fault of the fleet: %s", error)
        self._num_left -= 1


def _raise(error: PShardError) -> NoReturn:
    """As LangChain's class too."""
    twin = as_langchain(error)
    raise twin from (None if twin is error else error)
