"""The examples run as they stand, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import batch_map, structured, tools_agent

SHORT = ["--max-tokens", "600", "--temperature", "100", "--seed", "3"]  # random weights end strings only by chance


def test_an_agent_uses_a_tool_and_answers(tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools_agent.main(["What is 2 * 3?", *SHORT, "--workers", *tiny_fleet]) == 0
    printed = capsys.readouterr().out
    assert "Tool Calls:" in printed
    assert "Tool Message" in printed


def test_invoices_are_read_into_their_class(tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert structured.main([*SHORT, "--max-tokens", "1600", "--workers", *tiny_fleet]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(structured.Invoice.model_fields)


def test_documents_are_answered_together(tiny_fleet: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{name}.txt" for name in ("a", "b")]
    for file in files:
        file.write_text(f"About {file.stem}.", encoding="utf-8")
    assert batch_map.main([*map(str, files), "--max-tokens", "8", "--workers", *tiny_fleet]) == 0
    assert [line[:6] for line in capsys.readouterr().out.split("\n") if line[1:5] == ".txt"] == ["a.txt:", "b.txt:"]
