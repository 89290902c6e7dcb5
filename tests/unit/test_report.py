"""Benchmark reports: figures, bounds, and the file they are stored in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import Figure, Report, Samples, show, write_json


def report_with(figure: Figure) -> Report:
    samples = Samples(name="two workers", unit="tok/s", values=(70.0, 75.0, 71.0))
    return Report(bench="split", question="how much", figures=(figure,), samples=(samples,), settings={"users": 1})


@pytest.mark.parametrize(
    ("figure", "is_met", "target"),
    [
        (Figure(key="ratio", value=0.85, at_least=0.85), True, ">= 0.85"),
        (Figure(key="ratio", value=0.849, at_least=0.85), False, ">= 0.85"),
        (Figure(key="idle_cpu", value=2.5, at_most=2), False, "<= 2"),
        (Figure(key="share", value=0.5, at_least=0.4, at_most=0.6), True, ">= 0.4 and <= 0.6"),
        (Figure(key="tok_s", value=70.0), True, ""),
    ],
)
def test_bounds(figure: Figure, is_met: bool, target: str) -> None:
    assert figure.is_met is is_met
    assert figure.target == target
    assert report_with(figure).is_met is is_met


def test_the_json_file_holds_figure_samples_and_origin(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "split.json"
    write_json(report_with(Figure(key="ratio", value=0.9, at_least=0.85)), path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["ratio"] == 0.9
    assert stored["ok"] is True
    assert stored["samples"]["two workers"] == {
        "unit": "tok/s",
        "repetitions": 3,
        "median": 71.0,
        "min": 70.0,
        "max": 75.0,
        "values": [70.0, 75.0, 71.0],
    }
    assert stored["settings"] == {"users": 1}
    assert set(stored["versions"]) >= {"python", "openvino", "langchain-pshard"}
    assert stored["hardware"]["cores"] >= 1


def test_tables_are_shown_and_stored_under_their_keys(tmp_path: Path) -> None:
    rows = [{"mode": "int8", "ratio": 1.001}, {"mode": "fp32", "ratio": 1.0}]
    report = Report(bench="perplexity", question="which", figures=(), tables={"modes": rows})
    console = Console(width=100)
    with console.capture() as captured:
        show(report, console)
    assert [line.split("│")[1:3] for line in captured.get().splitlines() if "int8" in line] == [[" int8 ", " 1.001 "]]
    write_json(report, tmp_path / "perplexity.json")
    stored = json.loads((tmp_path / "perplexity.json").read_text(encoding="utf-8"))
    assert (stored["modes"], stored["ok"]) == (rows, True)
