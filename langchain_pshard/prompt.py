"""LangChain messages -> the model's chat template -> token ids.

The template comes with the bundle, so it runs in jinja2's immutable sandbox. It decides what a prompt looks like; messages are changed only
after it refused them, and as little as it then takes (see `_ADAPTATIONS`).

Special tokens come from the template's own text alone. Before rendering, places in outside text (contents, names, tool arguments) that
spell a special token, or could complete one together with the template's text, are replaced by placeholder characters of a private plane;
after rendering `Tokenizer.encode_prompt` puts them back as ordinary text. Markers around whole contents would be simpler but break
templates that trim, split or compare contents.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, FunctionMessage, HumanMessage, SystemMessage, ToolMessage

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.template import Template, TemplateError
from langchain_pshard.tokenizer import Tokenizer
from langchain_pshard.tool_formats import format_of
from langchain_pshard.turn import open_reasoning

TemplateMessage = dict[str, Any]
"""One message as chat templates know it: `role`, `content`, and where they apply `name`, `tool_calls`, `tool_call_id`."""

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': 'System', 'user': 'User', 'assistant': 'Assistant', 'tool': 'Tool'}[message.role] }}: {{ message.content | trim }}\n\n"
    "{% endfor %}"
    "Assistant:"
)
"""For base models, which bring no template: a dialogue as plain text."""
DEFAULT_TEMPLATE_STOP = ("\nUser:", "\nSystem:", "\nTool:", "\nAssistant:")
"""A base model goes on with the next speaker's line; this is where its turn ends."""

_ROLES = {"system", "user", "assistant", "tool"}
_ROLE_NAMES = {"human": "user", "ai": "assistant", "developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}
_SKIPPED_BLOCKS = {"reasoning", "thinking", "redacted_thinking", "tool_use", "tool_call", "function_call", "invalid_tool_call"}
"""Not text of the turn: reasoning of earlier turns stays out of the prompt, calls arrive through `tool_calls`."""
_ID_LENGTH = 9
_PLACEHOLDERS = range(0xF0000, 0xFFFFE)
_PLACEHOLDER = re.compile(f"[{chr(_PLACEHOLDERS.start)}-{chr(_PLACEHOLDERS.stop - 1)}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, and where it leaves the answer."""

    token_ids: list[int]
    open_reasoning: str | None
    """The answer begins inside reasoning, which this mark ends."""


class Prompter:
    """Makes prompts for one model. Immutable, usable from any thread.

    Attributes:
        tool_format: how the model writes tool calls.
        stop: strings that end a turn of this template; empty where end tokens do it.
        is_default: the model has no template of its own and `DEFAULT_TEMPLATE` serves.
    """

    def __init__(self, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now) -> None:
        self._tokenizer = tokenizer
        self.is_default = tokenizer.chat_template is None
        self.stop = DEFAULT_TEMPLATE_STOP if self.is_default else ()
        self._template = Template(DEFAULT_TEMPLATE if tokenizer.chat_template is None else tokenizer.chat_template)
        self.tool_format = format_of(tokenizer.chat_template)
        self._now = now

    def encode(self, messages: Sequence[BaseMessage]) -> list[int]:
        """Token ids of `prompt` without tools."""
        return self.prompt(messages).token_ids

    def prompt(
        self, messages: Sequence[BaseMessage], *, tools: Sequence[Mapping[str, Any]] = (), lead_in: str = "", skips_reasoning: bool = False
    ) -> Prompt:
        """The prompt that asks for the assistant's next turn.

        Args:
            tools: in OpenAI's form; shown by the template, or in a system message where it has no place for them.
            lead_in: how that turn begins.
            skips_reasoning: end reasoning that the template begins, for an answer that has to be of a form from its first character on.

        Raises:
            InvalidOptionError: no messages, a role no template knows, or content that is not text.
            TemplateError: the template refuses the messages in every form tried.
        """
        hidden = _Placeholders(self._tokenizer)
        shown = template_messages(messages, hidden.hide)
        known = [_mapped(tool, hidden.hide) for tool in tools]
        if not self._template.knows("tool_calls"):
            shown = _spelled_out(shown)
        if known and not self._template.knows("tools"):
            shown = [{"role": "system", "content": _instructions(known, self.tool_format.arguments_key)}, *shown]
        rendered = self._render(shown, known or None)
        closing = open_reasoning(rendered)
        if closing and skips_reasoning:
            rendered, closing = f"{rendered.rstrip()}\n\n{closing}\n\n", None
        rendered += lead_in
        begin = self._tokenizer.named_tokens.get("bos_token")
        writes_begin = bool(begin) and rendered.lstrip().startswith(str(begin))
        restore = {ord(placeholder): text for text, placeholder in hidden.items()}
        token_ids = self._tokenizer.encode_prompt(rendered, restore, add_special_tokens=self.is_default or not writes_begin)
        return Prompt(token_ids=token_ids, open_reasoning=closing)

    def _render(self, messages: list[TemplateMessage], tools: list[Any] | None) -> str:
        first_refusal: TemplateError | None = None
        for adapt in _ADAPTATIONS:
            adapted = adapt(messages)
            if first_refusal is not None and adapted == messages:
                continue
            try:
                return self._render_as_is(adapted, tools)
            except TemplateError as error:
                first_refusal = first_refusal or error
        assert first_refusal is not None
        raise first_refusal

    def _render_as_is(self, messages: list[TemplateMessage], tools: list[Any] | None) -> str:
        return self._template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            strftime_now=lambda form: self._now().strftime(form),
            **self._tokenizer.named_tokens,
        )


# --- LangChain messages -> template messages ---------------------------------------------------------------------------


def template_messages(messages: Sequence[BaseMessage], hide: Callable[[str], str] = str) -> list[TemplateMessage]:
    """Messages as chat templates know them; `hide` is applied to every string that comes from outside.

    Raises:
        InvalidOptionError: see `Prompter.encode`.
    """
    if not messages:
        raise InvalidOptionError("the list of messages is empty; pass at least one message")
    return [_template_message(message, hide) for message in messages]


def _template_message(message: BaseMessage, hide: Callable[[str], str]) -> TemplateMessage:
    result: TemplateMessage = {"role": _role(message), "content": hide(_text(message))}
    if message.name:
        result["name"] = hide(message.name)
    if isinstance(message, AIMessage) and message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                "id": hide(call["id"] or ""),
                "function": {"name": hide(call["name"]), "arguments": _mapped(call["args"], hide)},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        result["tool_call_id"] = hide(message.tool_call_id)
    return result


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _role(message: BaseMessage) -> str:
    match message:
        case HumanMessage():
            return "user"
        case AIMessage():
            return "assistant"
        case SystemMessage():
            return "system"
        case ToolMessage() | FunctionMessage():
            return "tool"
        case ChatMessage():
            role = _ROLE_NAMES.get(message.role.lower(), message.role.lower())
            if role in _ROLES:
                return role
            raise InvalidOptionError(f"role {message.role!r} is unknown; valid: {', '.join(sorted(_ROLES | set(_ROLE_NAMES)))}")
        case _:
            raise InvalidOptionError(f"a {type(message).__name__} cannot be part of a prompt")


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[Any, Any]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type", "text" if "text" in block else None)
    if kind in ("text", "text-plain", "output_text", "input_text") and isinstance(block.get("text"), str):
        return str(block["text"])
    if kind in _SKIPPED_BLOCKS:
        return ""
    raise InvalidOptionError(
        f"content block of type {kind!r} is not supported: this model reads text only; pass its text as a 'text' block"
    )


# --- what a strict template may need ----------------------------------------------------------------------------------


def _unchanged(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    return messages


def _merged(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Neighbours of one role joined by an empty line; turns with tool calls or results stay apart."""
    result: list[TemplateMessage] = []
    for message in messages:
        last = result[-1] if result else None
        if last is not None and last["role"] == message["role"] and _is_plain(last) and _is_plain(message):
            joined = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            result[-1] = last | {"content": joined}
        else:
            result.append(message)
    return result


def _system_first(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Every system message moved to the front, joined into one."""
    system = [message for message in messages if message["role"] == "system"]
    return _merged([*system, *(message for message in messages if message["role"] != "system")])


def _alternating(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Only user and assistant in turn, the user first: system text opens the first user turn, tool results are the user's."""
    roles = {"system": "user", "tool": "user"}
    ordered = _system_first(messages)
    turns: list[TemplateMessage] = [{"role": roles.get(m["role"], m["role"]), "content": _spoken(m)} for m in ordered]
    if turns[0]["role"] == "assistant":
        turns.insert(0, {"role": "user", "content": ""})
    return _merged(turns)


def _short_ids(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Ids of calls as Mistral's templates want them: nine letters and digits, the same for the call and its result."""

    def short(call_id: str) -> str:
        return call_id if len(call_id) == _ID_LENGTH and call_id.isalnum() else hashlib.sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]

    result: list[TemplateMessage] = []
    for message in messages:
        change: TemplateMessage = {}
        if "tool_calls" in message:
            change["tool_calls"] = [call | {"id": short(call["id"])} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            change["tool_call_id"] = short(message["tool_call_id"])
        result.append(message | change)
    return result


_ADAPTATIONS = (_unchanged, _short_ids, _merged, _system_first, _alternating)


def _is_plain(message: TemplateMessage) -> bool:
    return message["role"] != "tool" and not message.get("tool_calls")


def _spoken(message: TemplateMessage) -> str:
    """Content with tool calls written out, for a template that has no place for them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(text for text in (message["content"], *calls) if text)


def _spelled_out(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Calls as text, for a template that would leave them out."""
    return [{key: value for key, value in message.items() if key != "tool_calls"} | {"content": _spoken(message)} for message in messages]


def _instructions(tools: Sequence[Any], arguments_key: str) -> str:
    """Tools as text, for a template that has no place for them."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    form = f'{{"name": <name of the tool>, "{arguments_key}": <object of its arguments>}}'
    return f"You can use these tools:\n{listed}\n\nTo use one, answer with nothing but JSON of this form: {form}"


# --- hiding special tokens ----------------------------------------------------------------------------------------------


class _Placeholders(dict[str, str]):
    """Piece of outside text -> its placeholder, made up on first access."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def hide(self, text: str) -> str:
        """`text` with its dangerous places replaced."""
        # First what looks like a placeholder already, so that a placeholder in the rendered text is always ours.
        return self._tokenizer.hide_special_tokens(_PLACEHOLDER.sub(lambda match: self[match[0]], text), self)

    def __missing__(self, text: str) -> str:
        if len(self) >= len(_PLACEHOLDERS):
            raise InvalidOptionError(f"the messages spell more than {len(_PLACEHOLDERS)} different special tokens")
        self[text] = chr(_PLACEHOLDERS[len(self)])
        return self[text]
