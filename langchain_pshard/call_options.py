"""Options that a chat model has at construction and every call may change."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.core.grammar import Grammar
from langchain_pshard.core.sampling import SamplingParams
from langchain_pshard.pipeline.generation import Draft, GenerationParams, PrefixCache
from langchain_pshard.tools import as_choice, as_response_format, as_tools

_SEED_BITS = 31
_TEXT_DOES_NOT_DEPEND_ON = ("timeout", "max_retries", "draft", "draft_tokens", "prefix_cache")


class CallOptions(BaseModel):
    """What shapes the text of one call, and how long it may take."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    """Most tokens to generate; None leaves it to the context, up to 1,024."""
    temperature: float = 0.0
    """0 always takes the most likely token, so that the same prompt gives the same text."""
    top_k: int = 0
    """Draw among the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together reach this probability; 1 is off."""
    min_p: float = 0.0
    """Leave out tokens less likely than this times the most likely one; 0 is off."""
    repetition_penalty: float = 1.0
    """Makes tokens of prompt and answer less likely when above 1."""
    presence_penalty: float = 0.0
    """Makes tokens that the answer has used less likely when above 0."""
    frequency_penalty: float = 0.0
    """The same, for every time a token was used."""
    seed: int | None = None
    """Decides the draws; None takes a new one for each call and reports it in `response_metadata["seed"]`."""
    draft: Draft = "auto"
    """What guesses tokens ahead for the model to verify; changes the speed, never the text. "ngram" looks the text up in itself, "auto"
    does so where the fleet verifies exactly, "model" asks the fleet's draft model, None is off."""
    draft_tokens: int | Literal["auto"] = "auto"
    """Guesses per step; "auto" sends as many as pay."""
    prefix_cache: PrefixCache = True
    """Whether the workers may reuse what they computed for prompts that begin alike, and keep it of this one; changes the time to the first
    token, never the text. "all" reuses generated text as well, such as the last answer in a chat: quicker still, and not exact."""
    stop: list[str] | None = None
    """Strings that end the text and are not part of it."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the model may call, in any form LangChain knows; see `ChatPShard.bind_tools`."""
    tool_choice: str = "auto"
    """`auto`, `any` or `required` (exactly one call, certainly), the name of a tool (a call of it), or `none`."""
    parallel_tool_calls: bool | None = None
    """False: at most one call in an answer."""
    response_format: dict[str, Any] | None = None
    """Form of the whole answer: a JSON schema (or class), any JSON object, a regular expression, or a Lark grammar."""
    logprobs: bool = False
    """Report log-probabilities of the answer's tokens in `response_metadata["logprobs"]`."""
    top_logprobs: int | None = None
    """The same, with those of the n most likely tokens at every place."""
    timeout: float | None = None
    """Longest time of a call in seconds; None is no limit."""
    max_retries: int = Field(default=0, ge=0)
    """How often a call is tried again after a fault of the fleet that struck before any text was delivered, in `invoke` at its end."""

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_stop_string(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("tools", mode="before")
    @classmethod
    def _accept_any_tool(cls, value: Any) -> Any:
        return value if value is None else as_tools(value)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _accept_any_choice(cls, value: Any) -> Any:
        return as_choice(value)

    @field_validator("response_format", mode="before")
    @classmethod
    def _accept_any_format(cls, value: Any) -> Any:
        return as_response_format(value)

    def changed(self, changes: Mapping[str, Any]) -> CallOptions:
        """These options with those of one call.

        Raises:
            InvalidOptionError: an unknown name, or a value of the wrong type.
        """
        own = {name: getattr(self, name) for name in CallOptions.model_fields}
        unknown = changes.keys() - own.keys()
        if unknown:
            raise InvalidOptionError(
                f"unknown option {', '.join(map(repr, sorted(unknown)))}; a call takes: {', '.join(CallOptions.model_fields)}"
            )
        try:
            return CallOptions.model_validate(own | dict(changes))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors())
            raise InvalidOptionError(wrong) from error

    def text_options(self) -> dict[str, Any]:
        """Those that the text of a call depends on, by name: a cache of answers tells calls apart by them."""
        options = {name: getattr(self, name) for name in CallOptions.model_fields if name not in _TEXT_DOES_NOT_DEPEND_ON}
        if self.prefix_cache == "all":  # the one value that is not exact
            options["prefix_cache"] = self.prefix_cache
        return options

    def generation_params(
        self, *, template_stop: tuple[str, ...] = (), grammar: Grammar | None = None, marks: tuple[str, ...] = ()
    ) -> GenerationParams:
        """The same for the pipeline; a missing seed is drawn here.

        Raises:
            InvalidOptionError: a value out of range.
        """
        return GenerationParams(
            max_tokens=self.max_tokens,
            stop=tuple(dict.fromkeys([*(self.stop or ()), *template_stop])),
            timeout_s=self.timeout,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            prefix_cache=self.prefix_cache,
            grammar=grammar,
            marks=marks,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=secrets.randbits(_SEED_BITS) if self.seed is None else self.seed,
                top_logprobs=self.top_logprobs if self.top_logprobs is not None or not self.logprobs else 0,
            ),
        )
