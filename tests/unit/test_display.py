"""What an export shows while it runs: bars for what runs, a line for what took a while, JSON for programs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress as RichBars
from rich.progress import Task, TaskID

from export_tools.display import JsonProgress, RichProgress, _BytesColumn, worker_line
from export_tools.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def shown(clock: Clock) -> Iterator[tuple[RichProgress, Callable[[], list[str]]]]:
    """The progress of a person, and the lines it has left."""
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    with RichBars(console=console, auto_refresh=False, disable=True) as bars:
        yield RichProgress(bars, clock), lambda: stream.getvalue().splitlines()


def work(progress: Progress, clock: Clock, seconds: float, *, total: int | None = None) -> None:
    with progress.task("stage 0 of 2, layers 0-16: reading [float32]", total=total) as advance:
        clock.now_s += seconds
        if total is not None:
            advance(total)


def test_what_took_a_while_leaves_a_line_and_nothing_else_does() -> None:
    clock = Clock()
    with shown(clock) as (progress, lines):
        work(progress, clock, 0.2)
        assert lines() == []
        work(progress, clock, 4.0)
        work(progress, clock, 2.0, total=1_000_000_000)
        progress.note("kept [as it was]")
    assert lines() == [
        "done stage 0 of 2, layers 0-16: reading [float32] (4 s)",
        "done stage 0 of 2, layers 0-16: reading [float32] (2 s, 1.0 GB, 500.0 MB/s)",
        "kept [as it was]",
    ]


def test_no_bar_is_left_of_what_has_run() -> None:
    """An export of many stages has more steps than a terminal has lines."""
    bars = RichBars(console=Console(file=io.StringIO()), auto_refresh=False, disable=True)
    progress = RichProgress(bars, Clock())
    with progress.task("export", total=10) as advance:
        for _ in range(100):
            with progress.task("step"):
                assert [task.description for task in bars.tasks] == ["export", "step"]
        advance(10)
        assert bars.tasks[0].completed == 10
    assert bars.tasks == []


def test_what_is_left_counts_down_between_steps() -> None:
    task = Task(TaskID(0), "export", 400, 100, _get_time=lambda: 130.0, fields={"reached_s": 20.0})  # at 5 bytes a second
    task.start_time = 100.0
    assert _BytesColumn().render(task).plain == "100 bytes of 400 bytes, 5 bytes/s, 50 s left"
    task.fields["reached_s"] = 0.0
    assert _BytesColumn().render(task).plain == "100 bytes of 400 bytes"


def test_a_program_hears_bytes_rate_and_what_is_left() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = JsonProgress(stream, clock)
    with progress.task("reading", total=300) as advance:
        clock.now_s += 2.0
        advance(100)
        advance(50)  # within the same second: not told
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert events == [
        {"event": "begin", "task": "reading", "total_bytes": 300},
        {
            "event": "progress",
            "task": "reading",
            "done_bytes": 100,
            "total_bytes": 300,
            "bytes_per_s": pytest.approx(50.0),
            "left_s": pytest.approx(4.0),
        },
        {"event": "end", "task": "reading", "elapsed_s": pytest.approx(2.0)},
    ]


@pytest.mark.skipif(os.name == "nt", reason="quotes as POSIX shells read them")
def test_a_worker_line_can_be_pasted_into_a_shell() -> None:
    assert worker_line(Path("bundle"), "--stage 0") == "pshard-worker bundle --stage 0"
    assert worker_line(Path("it's $HOME"), "--draft") == "pshard-worker 'it'\"'\"'s $HOME' --draft"
