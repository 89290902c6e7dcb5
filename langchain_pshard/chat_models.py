"""`ChatPShard`: a chat model whose layers run on several machines.

LangChain's calls come in, pipeline requests go out. Prompts, options, replies and connections have modules of their own; here they meet
twice, once for threads and once for event loops, and neither half contains more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, PrivateAttr, model_validator

from langchain_pshard.batches import all_at_once, interruptible
from langchain_pshard.call_options import CallOptions
from langchain_pshard.calls import Call, apieces, awhole, constraint, pieces, prepare, prompt_of, whole
from langchain_pshard.connection import Connection, FleetSettings, Share
from langchain_pshard.core.bundle import Manifest, load_manifest
from langchain_pshard.core.errors import BundleError, InvalidOptionError
from langchain_pshard.core.version import software_version
from langchain_pshard.failures import langchain_errors
from langchain_pshard.pipeline.options import DEFAULT_STEPS_AHEAD, ClientOptions
from langchain_pshard.profile import profile_of
from langchain_pshard.prompt import Prompter
from langchain_pshard.reply import PROVIDER
from langchain_pshard.structured import binding_of, parser_of, with_raw
from langchain_pshard.tokenizer import Tokenizer, tokenizer_of
from langchain_pshard.tools import as_choice, as_tools

_VERSION = software_version()
_LOCAL_ONLY = {"runner": None, "numerics": "fast", "kv_memory": None, "kv_precision": None, "threads": None}


class ChatPShard(CallOptions, BaseChatModel):
    """A chat model served by a fleet of PShard workers, or by worker processes it starts itself.

    ```python
    model = ChatPShard(bundle="gemma-bundle")                        # starts one worker a stage on this machine
    model = ChatPShard(workers=["tcp://10.0.0.5:7000", "tcp://10.0.0.6:7000"])  # workers that run already, in any order
    model.invoke("Why is the sky blue?")
    ```

    Nothing is connected or started before the first call. Models with the same fleet settings share one connection, which closes with
    the last of them: by `close()`, at the end of a `with` block, or when they are garbage. A closed model connects again when used.

    Every field of `CallOptions` can be set here, bound with `bind`, made configurable, or passed to a call; an unknown name is an error.

    Raises (from calls):
        InvalidOptionError, TemplateError: the call cannot be made like this.
        PromptTooLongError: also LangChain's `ContextOverflowError`; raised before any work.
        FleetError: a worker is unreachable, lost, full, too slow, or not of this model; `is_retryable` tells whether to try again.
    """

    model_config = ConfigDict(extra="forbid")

    bundle: Path | None = None
    """Folder that `pshard-export` wrote. Either this or `workers`."""
    workers: list[str] | None = None
    """Addresses of workers that together hold the stages of one model, in any order. Either this or `bundle`."""
    model_name: str | None = None
    """Name in traces and metadata; None takes the model's own."""
    connect_timeout: float = 30.0
    """Longest wait for workers to answer, in seconds."""
    runner: Literal["paged", "stateful"] | None = None
    """Engine of local workers; None is `paged`, or what the bundle says its graphs can run on (Gemma 2: `stateful`)."""
    numerics: Literal["fast", "exact"] = "fast"
    """Precision of local workers: float32 with quantized activations, or float32 throughout, which is slower."""
    kv_memory: str | None = None
    """Memory of each local worker for the state of running texts, such as "1GiB"; None leaves it to the worker."""
    kv_precision: Literal["f16", "f32", "u8"] | None = None
    """Type of that state; None is that of `numerics`. "u8" takes half of "f16" and is not exact with drafts."""
    threads: int | None = None
    """Threads of each local worker; None shares the cores among them."""
    max_steps_ahead: int = DEFAULT_STEPS_AHEAD
    """Most tokens that the workers generate by themselves behind one that was asked for; 0 where the last one cannot reach the first."""
    streaming: bool = False
    """Generate through the streaming path in `invoke` too."""

    _share: Share = PrivateAttr(default_factory=Share)
    _profile_is_own: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _check_and_hold_fleet(self) -> Self:
        if (self.bundle is None) == (self.workers is None):
            raise InvalidOptionError("pass either bundle=PATH, to start workers here, or workers=[ADDRESS, ...], to use running ones")
        if self.workers is not None:
            if not self.workers:
                raise InvalidOptionError("workers is empty; pass the address of every stage's worker")
            changed = [name for name, default in _LOCAL_ONLY.items() if getattr(self, name) != default]
            if changed:
                raise InvalidOptionError(
                    f"{', '.join(changed)} is for workers started with bundle=...; running workers have theirs already"
                )
        self.generation_params()
        self._add_version("langchain-pshard", _VERSION)
        self._share.hold(self._fleet_settings)
        return self

    # --- connection ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the fleet; local workers end when no other model uses them. Safe to call twice."""
        self._share.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        copy = super().__copy__()
        copy._share = Share()
        return copy

    @property
    def _fleet_settings(self) -> FleetSettings:
        return FleetSettings(
            bundle=None if self.bundle is None else self.bundle.expanduser().absolute(),
            workers=frozenset(self.workers or ()),
            connect_timeout_s=self.connect_timeout,
            runner=self.runner,
            numerics=self.numerics,
            kv_memory=self.kv_memory,
            kv_precision=self.kv_precision,
            num_threads=self.threads,
            drafts=self.bundle is not None and self.draft == "model",
            options=ClientOptions(max_steps_ahead=self.max_steps_ahead),
        )

    def _connect(self) -> Connection:
        with langchain_errors():
            connection = self._share.open(self._fleet_settings)
        if self._profile_is_own:
            self.profile = profile_of(connection.client.manifest)
        return connection

    async def _aconnect(self) -> Connection:
        # Opening blocks for as long as workers take to load, so not on the loop; it is done once, by whoever comes first.
        connection = self._share.peek()
        return connection if connection is not None and connection.is_whole else await asyncio.to_thread(self._connect)

    # --- the four ways to generate --------------------------------------------------------------------------------------

    def _call(self, connection: Connection, messages: list[BaseMessage], stop: list[str] | None, changes: dict[str, Any]) -> Call:
        """Everything about a call that is decided before the first token."""
        with langchain_errors():
            return prepare(connection, messages, self._options(stop, changes), self.model_name)

    def _options(self, stop: list[str] | None, changes: dict[str, Any]) -> CallOptions:
        own = {name: value for name, value in changes.items() if name != "stream"}  # LangChain's, and read by it before
        return self.changed(own if stop is None else own | {"stop": stop})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002  # LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(self._connect(), messages, stop, kwargs)
        return call.reply.result(whole(call))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002  # LangChain's signature
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(await self._aconnect(), messages, stop, kwargs)
        return call.reply.result(await awhole(call))

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(self._connect(), messages, stop, kwargs)
        with closing(pieces(call)) as generated:
            for piece in generated:
                if chunk := call.reply.chunk(piece):
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(await self._aconnect(), messages, stop, kwargs)
        async with aclosing(apieces(call)) as generated:
            async for piece in generated:
                if chunk := call.reply.chunk(piece):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    # --- tools and structured output -----------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Args:
            tools: functions with types and a docstring, tools, pydantic or TypedDict classes, or dicts.
            tool_choice: `auto` (the default) leaves it to the model; `any`, `required` or True force exactly one call, the name of a tool a
                call of it; `none` forbids calls. A forced call is valid whatever the model: the fleet generates nothing else.
            strict: as OpenAI means it, in what the model is shown; forced calls follow the schema in any case.
            kwargs: other options of calls, such as `parallel_tool_calls` or `response_format`.

        Raises:
            InvalidOptionError: a tool or choice of no known form, or an unknown option.
        """
        with langchain_errors():
            options = {"tools": as_tools(tools, strict=strict), "tool_choice": as_choice(tool_choice), **kwargs}
            self._check_names(options)
        return super().bind(**options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers that are instances of `schema`: nothing else can be generated.

        Args:
            schema: a pydantic or TypedDict class, a JSON schema, or a tool.
            method: `json_schema` binds the whole answer, `function_calling` forces a call of a tool with that schema; `json_mode` is
                `json_schema`, and without a schema any JSON object.
            include_raw: return a dict of `raw` message, `parsed` and `parsing_error`, and raise no `OutputParserException`.
            strict: as for `bind_tools`.
            kwargs: other options of calls.

        Raises:
            InvalidOptionError: something that is no schema, or an unknown option. From calls: `GrammarError` for a schema that cannot be
                enforced, `OutputParserException` for an answer that `max_tokens` has cut.
        """
        with langchain_errors():
            self._check_names(kwargs)
            model = super().bind(**binding_of(schema, method, strict), **kwargs)
        parser = parser_of(schema, method)
        return with_raw(model, parser) if include_raw else model | parser

    def _check_names(self, options: dict[str, Any]) -> None:
        """Unknown options are errors here already, not at the first call."""
        self.changed({name: value for name, value in options.items() if name != "ls_structured_output_format"})

    # --- batches --------------------------------------------------------------------------------------------------------

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """As LangChain's, but all at once unless `max_concurrency` says otherwise: the fleet serves them in shared steps."""
        spread, batch = all_at_once(config, len(inputs)), super().batch
        return interruptible(lambda: batch(inputs, spread, return_exceptions=return_exceptions, **kwargs))

    def batch_as_completed(  # type: ignore[override]  # one signature for the two overloads
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, AIMessage | Exception]]:
        """See `batch`."""
        spread = all_at_once(config, len(inputs))
        yield from super().batch_as_completed(inputs, spread, return_exceptions=return_exceptions, **kwargs)  # type: ignore[call-overload]

    # --- what LangChain wants to know ---------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "pshard-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        fleet = {"bundle": str(self.bundle)} if self.bundle is not None else {"workers": sorted(self.workers or ())}
        return {
            "model_name": self.model_name,
            "fingerprint": self._fingerprint(),
            **fleet,
            **{name: getattr(self, name) for name in ("runner", "numerics", "kv_precision")},
            **self.text_options(),
        }

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """`dumps` and `load` keep every setting; there are no secrets among them."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where `load` finds the class."""
        return ["langchain_pshard", "chat_models"]

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Settings that are no JSON values by themselves."""
        return {} if self.bundle is None else {"bundle": str(self.bundle)}

    def _resolve_model_profile(self) -> ModelProfile:
        self._profile_is_own = True
        return profile_of(self._manifest())

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Key of the cache. Running workers must be asked which model they serve, lest another one's answers be taken for theirs."""
        if self._fingerprint() is None:
            if _is_on_event_loop():
                return f"not connected yet: {uuid4()}"  # asking would block the loop: this one call is not cached
            self._connect()
        # Not LangChain's way for serializable models: addresses do not tell which model is served there.
        params = {**self._get_invocation_params(stop=stop, **kwargs), **kwargs}
        return str(sorted(params.items()))

    def _fingerprint(self) -> str | None:
        """What tells models apart: the bundle's fingerprint, or None as long as running workers were not asked."""
        connection = self._share.peek()
        manifest = connection.client.manifest if connection else self._manifest()
        return None if manifest is None else str(manifest.fingerprint)

    def _manifest(self) -> Manifest | None:
        """A bundle's own, if it can be read: this is for profile and traces; the call itself will say what is wrong with it."""
        with suppress(BundleError):
            return None if self.bundle is None else load_manifest(self.bundle.expanduser())
        return None

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = PROVIDER
        if "ls_model_name" not in params:
            connection = self._share.peek()
            own_name = PROVIDER if self.bundle is None else self.bundle.name
            params["ls_model_name"] = connection.client.manifest.model_name if connection else own_name
        return params

    # --- counting tokens ----------------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of `text` by the model's own tokenizer, without what the model wants around a prompt. A bundle's is read from its folder;
        running workers send theirs."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._tokenizer().encode(text, add_special_tokens=False)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Length of the prompt that these messages make, in tokens, with `tools` (or else the model's own) in it."""
        with langchain_errors():
            prompter = Prompter(self._tokenizer())
            options = self.changed({} if tools is None else {"tools": tools})
            return len(prompt_of(prompter, messages, constraint(options, prompter)).token_ids)

    def _tokenizer(self) -> Tokenizer:
        settings = self._fleet_settings
        if (connection := self._share.peek()) is None and settings.bundle is not None:
            return tokenizer_of(settings.bundle)
        return (connection or self._connect()).client.tokenizer


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
