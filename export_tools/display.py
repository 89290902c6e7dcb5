"""How an export shows: bars and a closing summary for a person, JSON for a program."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.text import Text

from langchain_pshard.core.bundle import DraftEntry, Manifest, Verification

_JSON_INTERVAL_S = 1.0
_WORTH_A_LINE_S = 1.0


class RichProgress:
    """`export_tools.progress.Progress` on rich bars; from `rich_progress`.

    Only what runs is a bar: an export has more steps than a terminal has lines. What has run and took a while stays as a line above.
    """

    def __init__(self, bars: RichBars, clock: Callable[[], float] = time.monotonic) -> None:
        self._bars = bars
        self._clock = clock

    @contextmanager
    def task(self, description: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """See `Progress.task`; one that fails stays as it is."""
        started_s = self._clock()
        task_id = self._bars.add_task(description, total=total, reached_s=0.0)
        yield lambda amount: self._bars.update(task_id, advance=amount, reached_s=self._clock() - started_s)
        self._bars.remove_task(task_id)
        elapsed_s = self._clock() - started_s
        if elapsed_s >= _WORTH_A_LINE_S:
            rate = "" if total is None else f", {decimal(total)}, {decimal(int(total / elapsed_s))}/s"
            self._bars.console.print(f"[green]done[/] {escape(description)} ({elapsed_s:.0f} s{rate})", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)


class _BytesColumn(ProgressColumn):
    """Bytes done and to do, rate and time left, for tasks that count bytes.

    The rate is that of the whole task up to its last step: an export as a whole moves on only stage by stage.
    """

    def render(self, task: Task) -> Text:
        """See `ProgressColumn.render`."""
        if task.total is None:
            return Text("")
        parts = [f"{decimal(int(task.completed))} of {decimal(int(task.total))}"]
        reached_s = task.fields["reached_s"]
        if task.completed and reached_s:
            rate = task.completed / reached_s
            left_s = (task.total - task.completed) / rate - ((task.elapsed or reached_s) - reached_s)
            parts += [f"{decimal(int(rate))}/s", f"{max(0.0, left_s):.0f} s left"]
        return Text(", ".join(parts), no_wrap=True)


@contextmanager
def rich_progress(console: Console) -> Iterator[RichProgress]:
    """Bars on `console` for the length of the block."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=10), _BytesColumn(), TimeElapsedColumn())
    with RichBars(*columns, console=console) as bars:
        yield RichProgress(bars)


class JsonProgress:
    """`export_tools.progress.Progress` as one JSON object a line: begin, at most once a second how far, end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock

    @contextmanager
    def task(self, description: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """See `Progress.task`."""
        started = last = self._clock()
        done = 0
        self._write(event="begin", task=description, total_bytes=total)

        def advance(amount: int) -> None:
            nonlocal done, last
            done += amount
            now = self._clock()
            if now - last < _JSON_INTERVAL_S or total is None:
                return
            last = now
            rate = done / (now - started)
            left_s = (total - done) / rate if rate else None
            self._write(event="progress", task=description, done_bytes=done, total_bytes=total, bytes_per_s=rate, left_s=left_s)

        yield advance
        self._write(event="end", task=description, elapsed_s=self._clock() - started)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._write(event="note", text=text)

    def _write(self, **fields: Any) -> None:
        self._stream.write(json.dumps(fields) + "\n")
        self._stream.flush()


def worker_lines(manifest: Manifest, bundle: Path) -> list[str]:
    """The commands that start the bundle's workers."""
    runner = "" if manifest.best_runner == "paged" else f" --runner {manifest.best_runner}"
    return [worker_line(bundle, f"--stage {idx}{runner}") for idx in range(manifest.num_stages)]


def worker_line(bundle: Path, role: str) -> str:
    """The command that starts a worker with one role, such as `--stage 0` or `--draft`."""
    quoted = subprocess.list2cmdline([str(bundle)]) if os.name == "nt" else shlex.quote(str(bundle))
    return f"pshard-worker {quoted} {role}"


def summary(manifest: Manifest, bundle: Path) -> str:
    """What was made, how well it agrees with the model, and the lines that start its workers."""
    mode = (
        manifest.weight_mode.value + (f", group {manifest.group_size}" if manifest.group_size else "") + (", awq" if manifest.awq else "")
    )
    what = f"{manifest.model_name} ({manifest.architecture}, {mode})"
    lines = [f"{what} in {_count(manifest.num_stages, 'stage')}, fingerprint {manifest.fingerprint[:12]}"]
    lines += [
        f"  stage {idx}: layers {stage.span}, {stage.num_bytes / 2**20:.1f} MiB"
        + (f", {stage.cost.decode_ms:.2f} ms a token here" if stage.cost else "")
        for idx, stage in enumerate(manifest.stages)
    ]
    if manifest.costs is None:
        lines.append("  costs were not measured (--no-measure): a cut that was not given balances weight bytes")
    if (draft := manifest.draft) is not None:
        lines.append(f"  draft: {draft.model_name} ({draft.architecture}, {draft.weight_mode.value}), {draft.num_bytes / 2**20:.1f} MiB")
    lines += ["", _verification(manifest.verification)]
    if manifest.draft is not None and manifest.draft.verification is not None:
        lines.append(f"Draft. {_verification(manifest.draft.verification)}")
    if manifest.best_runner != "paged":
        lines += [f"The attention of {manifest.architecture} has no paged form: its workers use the {manifest.best_runner} runner."]
    lines += [
        "",
        "Start one worker for each stage, on this machine or on any that has the folder (there with --listen tcp://ADDRESS:PORT):",
    ]
    lines += [f"  {line}" for line in worker_lines(manifest, bundle)]
    if manifest.draft is not None:
        lines += ["and let one of them serve the draft too, or another worker alone:", f"  {_draft_line(manifest.draft, bundle)}"]
    return "\n".join(lines)


def as_json(manifest: Manifest, bundle: Path) -> str:
    """The same for a program: one JSON object."""
    stages = [
        {
            "span": [stage.span.start, stage.span.end],
            "num_bytes": stage.num_bytes,
            "decode_ms": stage.cost.decode_ms if stage.cost else None,
            "worker": worker,
        }
        for stage, worker in zip(manifest.stages, worker_lines(manifest, bundle), strict=True)
    ]
    document = {
        "bundle": str(bundle),
        "fingerprint": manifest.fingerprint,
        "model_name": manifest.model_name,
        "architecture": manifest.architecture,
        "weights": manifest.weight_mode.value,
        "embedding": manifest.embedding_mode.value,
        "head": manifest.head_mode.value,
        "awq": manifest.awq,
        "runners": list(manifest.runners),
        "stages": stages,
        "costs": msgspec.to_builtins(manifest.costs),
        "verification": msgspec.to_builtins(manifest.verification),
        "draft": None if manifest.draft is None else _draft(manifest.draft, bundle),
    }
    return json.dumps(document, indent=1)


def _draft(draft: DraftEntry, bundle: Path) -> dict[str, Any]:
    return {
        "model_name": draft.model_name,
        "architecture": draft.architecture,
        "weights": draft.weight_mode.value,
        "num_bytes": draft.num_bytes,
        "verification": msgspec.to_builtins(draft.verification),
        "worker": _draft_line(draft, bundle),
    }


def _draft_line(draft: DraftEntry, bundle: Path) -> str:
    return worker_line(bundle, "--draft") + ("" if "paged" in draft.runners else f" --runner {draft.runners[0]}")


def _verification(found: Verification | None) -> str:
    if found is None:
        return "Not verified against the unsplit model (--no-verify)."
    return (
        f"Against the unsplit model over {found.num_tokens} tokens: the same most likely token in {found.token_agreement:.1%},"
        f"\n  largest logit difference {found.max_logit_difference:.2g} (logits reach {found.largest_logit:.3g}),"
        f" perplexity {found.perplexity_before:.4g} before, {found.perplexity_after:.4g} after."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
