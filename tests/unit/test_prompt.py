"""Messages to token ids: what templates see, what they may need, and that user text never turns into a special token."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from tokenizers import decoders, models, normalizers, pre_tokenizers

from langchain_pshard.core.errors import InvalidOptionError
from langchain_pshard.prompt import Prompter, TemplateError, template_messages
from langchain_pshard.tokenizer import Tokenizer
from tests.support.tokenizers import CHATML, byte_fallback_tokenizer, byte_level_tokenizer

STRICT = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Everything in the ids, special tokens spelled out."""
    return tokenizer._fast.decode(ids, skip_special_tokens=False)


def special_in(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    names = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    return [names[token_id] for token_id in ids if token_id in names]


def rendered(template: str | None, *messages: BaseMessage) -> str:
    tokenizer = byte_level_tokenizer(chat_template=template)
    return text_of(tokenizer, Prompter(tokenizer).encode(messages))


def test_own_template() -> None:
    found = rendered(CHATML, SystemMessage("Be brief."), HumanMessage(" Hi "))
    assert found == "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_begin_token_is_not_doubled() -> None:
    assert rendered("{{ bos_token }}{{ messages[0].content }}", HumanMessage("x")) == "<s>x"
    assert rendered("{{ messages[0].content }}", HumanMessage("x")) == "<s>x"


def test_default_template_for_base_models() -> None:
    tokenizer = byte_level_tokenizer(chat_template=None)
    prompter = Prompter(tokenizer)
    ids = prompter.encode([SystemMessage("Be brief."), HumanMessage("Hi"), AIMessage("Hello."), HumanMessage("Why?")])
    assert text_of(tokenizer, ids) == "<s>System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Why?\n\nAssistant:"
    assert "\nUser:" in prompter.stop
    assert Prompter(byte_level_tokenizer()).stop == ()


def test_lenient_template_gets_messages_unchanged() -> None:
    found = rendered(CHATML, HumanMessage("a"), HumanMessage("b"), AIMessage("c"), SystemMessage("d"))
    assert found.count("<|im_start|>user") == 2
    assert found.index("\nc<") < found.index("\nd<")


def test_strict_template_gets_what_it_needs() -> None:
    found = rendered(
        STRICT,
        SystemMessage("S1"),
        SystemMessage("S2"),
        HumanMessage("a"),
        HumanMessage("b"),
        AIMessage("c"),
        AIMessage("d"),
        HumanMessage("e"),
    )
    assert found == (
        "<s><|im_start|>user\nS1\n\nS2\n\na\n\nb<|im_end|>\n<|im_start|>assistant\nc\n\nd<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    )


def test_history_may_begin_with_the_assistant_or_end_with_a_tool() -> None:
    call = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}])
    found = rendered(STRICT, AIMessage("Hello"), HumanMessage("a"), call, ToolMessage("2", tool_call_id="1"))
    assert found == (
        "<s><|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1}}<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n'
    )


def test_message_fields_reach_the_template() -> None:
    call = AIMessage("ok", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "7"}])
    assert template_messages([HumanMessage("x", name="ann"), call, ToolMessage([{"type": "text", "text": "2"}], tool_call_id="7")]) == [
        {"role": "user", "content": "x", "name": "ann"},
        {
            "role": "assistant",
            "content": "ok",
            "tool_calls": [{"type": "function", "id": "7", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "7"},
    ]


def test_content_blocks() -> None:
    blocks: list[str | dict[str, Any]] = [{"type": "text", "text": "a"}, "b", {"type": "reasoning", "reasoning": "hmm"}]
    assert template_messages([AIMessage(blocks)])[0]["content"] == "ab"


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "input_audio", "video", "file"])
def test_other_media_are_named(kind: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"'{kind}' is not supported"):
        template_messages([HumanMessage([{"type": kind, "url": "x"}])])


def test_no_messages() -> None:
    with pytest.raises(InvalidOptionError, match="empty"):
        rendered(CHATML)


def test_roles() -> None:
    assert template_messages([ChatMessage("x", role="developer")])[0]["role"] == "system"
    with pytest.raises(InvalidOptionError, match=r"'im_end' is unknown; valid: .*user"):
        template_messages([ChatMessage("x", role="im_end")])


def test_template_failures_carry_the_templates_words() -> None:
    with pytest.raises(TemplateError, match="only cats"):
        rendered("{{ raise_exception('only cats') }}", HumanMessage("x"))
    with pytest.raises(TemplateError, match="line 2"):
        Prompter(byte_level_tokenizer(chat_template="{% if x %}\n{% endfor %}"))
    with pytest.raises(TemplateError, match=r"line 2.*unsafe"):
        rendered("x\n{{ ''.__class__.__mro__ }}", HumanMessage("x"))
    with pytest.raises(TemplateError, match="append"):
        rendered("{{ messages.append(1) }}", HumanMessage("x"))


def test_what_templates_of_the_field_use() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') }}{% generation %}g{% endgeneration %}"
    )
    tokenizer = byte_level_tokenizer(chat_template=template)
    ids = Prompter(tokenizer, now=lambda: datetime(2031, 1, 2)).encode([HumanMessage("é<"), HumanMessage("no")])
    assert text_of(tokenizer, ids) == '<s>{"role": "user", "content": "é<"}2031g'


HOSTILE = [
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "<s>",
    "<|im_",
    "end|>",
    "<",
    "<|",
    ">",
    "|>",
    " ",
    "\n",
    "x",
    "\U000f0000",
    "s>",
    "/s>",
    "im_end",
    "m_e",
]


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("template", [CHATML, STRICT, None, "<|{{ messages[0].content | trim }}|>", "<{{ messages[0].content }}>"])
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(HOSTILE), max_size=6).map("".join), min_size=1, max_size=3))
def test_user_text_never_becomes_special(make: Any, template: str | None, texts: list[str]) -> None:
    tokenizer = make(chat_template=template)
    prompter = Prompter(tokenizer)
    harmless = prompter.encode([HumanMessage("x") for _ in texts])
    ids = prompter.encode([HumanMessage(text) for text in texts])
    assert special_in(tokenizer, ids) == special_in(tokenizer, harmless)
    for text in texts if "messages[0]" not in (template or "") else texts[:1]:
        assert text.strip() in text_of(tokenizer, ids)


def test_user_text_keeps_its_meaning() -> None:
    tokenizer = byte_level_tokenizer()
    ids = Prompter(tokenizer).encode([HumanMessage("What is <|im_end|>?")])
    assert special_in(tokenizer, ids) == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert "user\nWhat is <|im_end|>?<|im_end|>\n" in text_of(tokenizer, ids)


def test_very_many_special_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    ids = Prompter(tokenizer).encode([HumanMessage("<|im_end|></s>" * 3000)])
    assert special_in(tokenizer, ids) == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert text_of(tokenizer, ids).count("<|im_end|></s>") == 3000


def test_tool_arguments_are_outside_text_too() -> None:
    tokenizer = byte_level_tokenizer(chat_template="{{ messages | tojson }}")
    call = AIMessage("", tool_calls=[{"name": "</s>", "args": {"<s>": ["<|im_end|>"]}, "id": "<s>"}])
    assert special_in(tokenizer, Prompter(tokenizer).encode([call])) == ["<s>"]


def test_word_marker_only_at_the_start() -> None:
    """Tokenizers that mark the start of a text must not mark the pieces around a special token a user spelled."""
    alphabet = sorted({*"▁useraintHx<|_d>\n"})
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    fast = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    fast.add_special_tokens(special)
    tokenizer = Tokenizer(fast, chat_template=CHATML, named_tokens={"unk_token": "<unk>"})
    ids = Prompter(tokenizer).encode([HumanMessage("is <|im_end|> é")])
    assert [token for token in special_in(tokenizer, ids) if token != "<unk>"] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert "".join(fast.id_to_token(token_id) for token_id in ids).startswith("<|im_start|>user\nis▁<|")


def test_a_normalizer_cannot_make_special_tokens() -> None:
    """Full-width letters become ASCII under NFKC, and the vocabulary may hold the special string as an entry of its own."""
    special = ["<s>", "</s>"]
    pieces = [("<unk>", 0.0), *((token, 0.0) for token in special), *((char, -5.0) for char in "<s>/ab")]
    fast = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    fast.normalizer = normalizers.NFKC()
    fast.add_special_tokens(special)
    tokenizer = Tokenizer(fast, chat_template="<s>{{ messages[0].content }}", named_tokens={"bos_token": "<s>"})
    assert fast.encode("\uff1cs\uff1e").ids == [1]
    assert special_in(tokenizer, Prompter(tokenizer).encode([HumanMessage("a\uff1c/s\uff1eb")])) == ["<s>"]


# --- tools ------------------------------------------------------------------------------------------------------------

ADD = {"type": "function", "function": {"name": "add", "description": "Sum </s>", "parameters": {"type": "object", "properties": {}}}}
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}use <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prompted(template: str | None, *messages: BaseMessage, **options: Any) -> tuple[str, str | None]:
    tokenizer = byte_level_tokenizer(chat_template=template)
    prompt = Prompter(tokenizer).prompt(messages, **options)
    return tokenizer._fast.decode(prompt.token_ids, skip_special_tokens=False), prompt.open_reasoning


def test_tools_go_where_the_template_wants_them() -> None:
    text, _ = prompted(HERMES_TEMPLATE, HumanMessage("Hi"), tools=[ADD], lead_in="<tool_call>\n")
    assert text == (
        f"<s><|im_start|>system\n{json.dumps(ADD)}\nuse <tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
    )


def test_tools_and_calls_are_spelled_out_for_a_template_that_knows_none() -> None:
    call = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "7"}])
    text, _ = prompted(None, HumanMessage("Hi"), call, ToolMessage("2", tool_call_id="7"), tools=[ADD])
    assert text == (
        f"<s>System: You can use these tools:\n{json.dumps(ADD['function'])}\n\nTo use one, answer with nothing but JSON of this form:"
        ' {"name": <name of the tool>, "arguments": <object of its arguments>}\n\nUser: Hi\n\n'
        'Assistant: {"name": "add", "arguments": {"a": 1}}\n\nTool: 2\n\nAssistant:'
    )


def test_no_special_token_comes_from_a_tool() -> None:
    tokenizer = byte_level_tokenizer(chat_template=HERMES_TEMPLATE)
    hostile = {"type": "function", "function": {"name": "<|im_end|>", "description": "</s>", "parameters": {"<|im_start|>": "<pad>"}}}
    with_it = Prompter(tokenizer).prompt([HumanMessage("Hi")], tools=[hostile]).token_ids
    special = [token for token in with_it if token in tokenizer.special_tokens.values()]
    plain = [
        token
        for token in Prompter(tokenizer).prompt([HumanMessage("Hi")], tools=[ADD]).token_ids
        if token in tokenizer.special_tokens.values()
    ]
    assert special == plain


def test_a_template_may_insist_on_short_ids() -> None:
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ c.id }} "
        "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    call = AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "call_0123456789"}, {"name": "add", "args": {}, "id": "abcdefghi"}])
    text, _ = prompted(strict, HumanMessage("Hi"), call, ToolMessage("2", tool_call_id="call_0123456789"))
    first, second, result = text.removeprefix("<s>").split()
    assert (first, second) == (result, "abcdefghi")
    assert len(first) == 9


def test_reasoning_that_the_template_begins() -> None:
    thinking = "{{ messages[0].content }}<think>\n"
    assert prompted(thinking, HumanMessage("Hi")) == ("<s>Hi<think>", "</think>")
    assert prompted(thinking, HumanMessage("Hi"), skips_reasoning=True) == ("<s>Hi<think>\n\n</think>\n\n", None)
