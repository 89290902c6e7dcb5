"""The examples run as they stand, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from langchain_core.messages import AIMessage, ToolMessage

from examples import agent, batch_map, retrieval, structured, tools_agent, two_users
from langchain_pshard import ChatPShard

SHORT = ["--max-tokens", "600", "--temperature", "100", "--seed", "3"]  # random weights end strings only by chance


def test_an_agent_uses_a_tool_and_answers(tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools_agent.main(["What is 2 * 3?", *SHORT, "--workers", *tiny_fleet]) == 0
    printed = capsys.readouterr().out
    assert "Tool Calls:" in printed
    assert "Tool Message" in printed


class Careless:
    """Calls a tool with an argument of another type, then answers."""

    def __init__(self) -> None:
        self.says = [
            AIMessage("", tool_calls=[{"name": "count_letters", "args": {"word": {"type": "string"}}, "id": "1"}]),
            AIMessage("six"),
        ]

    def bind_tools(self, tools: object, *, tool_choice: str) -> Careless:
        return self

    def invoke(self, history: object) -> AIMessage:
        return self.says.pop(0)


def test_an_agent_that_calls_a_tool_wrongly_is_told() -> None:
    *_, told, answer = tools_agent.conversation(cast(ChatPShard, Careless()), "How long is window?")
    assert isinstance(told, ToolMessage)
    assert (told.status, told.tool_call_id) == ("error", "1")
    assert answer.content == "six"


def test_invoices_are_read_into_their_class(tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert structured.main([*SHORT, "--max-tokens", "1600", "--workers", *tiny_fleet]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(structured.Invoice.model_fields)


def test_documents_are_answered_together(tiny_fleet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{name}.txt" for name in ("a", "b")]
    for file in files:
        file.write_text(f"About {file.stem}.", encoding="utf-8")
    assert batch_map.main([*map(str, files), "--max-tokens", "8", "--workers", *tiny_fleet]) == 0
    assert [line[:6] for line in capsys.readouterr().out.split("\n") if line[1:5] == ".txt"] == ["a.txt:", "b.txt:"]


@pytest.mark.parametrize("by", agent.AGENTS)
def test_agents_of_both_frameworks_use_a_tool(by: str, tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main(["What is 2 * 3?", "--by", by, *SHORT, "--workers", *tiny_fleet]) == 0
    printed = [line.strip(" =") for line in capsys.readouterr().out.splitlines() if "=====" in line]
    assert printed[:4] == ["Human Message", "Ai Message", "Tool Message", "Ai Message"]


def test_passages_are_found_by_their_spelling(tiny_fleet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "tides.md").write_text("High water comes twice a day.\n\nThe moon pulls the sea.", encoding="utf-8")
    (tmp_path / "deep" / "lamps.txt").write_text("The keeper lights the lamp at dusk. " * 30, encoding="utf-8")
    (tmp_path / "ships.txt").write_text("A keel is the spine of a ship.", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert {document.metadata["source"] for document in retrieval.passages(tmp_path)} == {"tides.md", "deep/lamps.txt", "ships.txt"}
    assert max(len(document.page_content) for document in retrieval.passages(tmp_path)) == retrieval.PASSAGE_CHARS
    for question, source in (
        ("Who lighted lamps?", "deep/lamps.txt"),
        ("When is the water high?", "tides.md"),
        ("Do ships have keels?", "ships.txt"),
    ):
        assert retrieval.retriever_of(tmp_path).invoke(question)[0].metadata["source"] == source
    options = ["--folder", str(tmp_path), "--max-tokens", "8", "--workers", *tiny_fleet]
    assert retrieval.main(["When is the water high?", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("From: tides.md")
    assert retrieval.main(["Why?", "--folder", str(tmp_path / "nowhere"), "--workers", *tiny_fleet]) == 1
    assert "no text in" in capsys.readouterr().err


@pytest.mark.parametrize("drawing", [[], ["--temperature", "1"]])
def test_two_users_get_what_each_gets_alone(drawing: list[str], tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert two_users.main(["--max-tokens", "40", *drawing, "--workers", *tiny_fleet]) == 0
    printed = capsys.readouterr().out
    assert "both got the same text" in printed
    assert "Ann:" in printed
    assert "Bob:" in printed
