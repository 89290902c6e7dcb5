"""What every benchmark hands back, and how it is shown and stored: figures with the settings, versions and hardware behind them."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("langchain-pshard", "openvino", "openvino-genai", "pyzmq", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Repeated measurements of one thing."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest value."""
        return min(self.values), max(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One result, under the key that the JSON file uses, with the bound it must keep if it has one."""

    key: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        is_high_enough = self.at_least is None or self.value >= self.at_least
        is_low_enough = self.at_most is None or self.value <= self.at_most
        return is_high_enough and is_low_enough

    @property
    def target(self) -> str:
        bounds = [f">= {self.at_least:g}"] if self.at_least is not None else []
        bounds += [f"<= {self.at_most:g}"] if self.at_most is not None else []
        return " and ".join(bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one benchmark."""

    bench: str
    question: str
    figures: tuple[Figure, ...]
    samples: tuple[Samples, ...] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """What is not a repeated measurement, under the keys that the JSON file uses; the rows of a table have the same columns."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        """Whether every figure keeps its bound."""
        return all(figure.is_met for figure in self.figures)


def cpu_name() -> str:
    """The processor's marketing name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """The machine that a figure was measured on."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """The software that a figure was measured with."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data; every figure stands at the top level under its own key."""
    return {
        "bench": report.bench,
        "ok": report.is_met,
        **{figure.key: figure.value for figure in report.figures},
        **report.tables,
        "targets": {figure.key: figure.target for figure in report.figures if figure.target},
        "samples": {
            samples.name: {
                "unit": samples.unit,
                "repetitions": len(samples.values),
                "median": samples.median,
                "min": samples.spread[0],
                "max": samples.spread[1],
                "values": list(samples.values),
            }
            for samples in report.samples
        },
        "settings": report.settings,
        "versions": versions(),
        "hardware": hardware(),
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report to `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _samples_table(samples: Sequence[Samples]) -> Table:
    table = Table()
    for heading in ("", "unit", "runs", "median", "min", "max"):
        table.add_column(heading, justify="left" if heading in {"", "unit"} else "right")
    for one in samples:
        low, high = one.spread
        table.add_row(one.name, one.unit, str(len(one.values)), f"{one.median:.2f}", f"{low:.2f}", f"{high:.2f}")
    return table


def _plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for heading, value in rows[0].items():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def show(report: Report, console: Console) -> None:
    """Print the report for a person; the last lines are the verdicts."""
    console.print(f"{report.bench}: {report.question}", highlight=False)
    if report.samples:
        console.print(_samples_table(report.samples))
    for rows in report.tables.values():
        console.print(_plain_table(rows))
    console.print(f"settings: {_pairs(report.settings)}", highlight=False)
    console.print(f"versions: {_pairs(versions())}", highlight=False)
    console.print(f"hardware: {_pairs(hardware())}", highlight=False)
    for figure in report.figures:
        verdict = f"  {'PASS' if figure.is_met else 'FAIL'} (target {figure.target})" if figure.target else ""
        console.print(f"{figure.key} = {figure.value:.3f}{verdict}", highlight=False)
