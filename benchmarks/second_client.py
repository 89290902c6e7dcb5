"""A second client process on the same fleet: `python -m benchmarks.second_client ADDRESS ...`.

A request has the fields of `Task` and `Setting`, and the answers; what comes back are the fields of an `Outcome`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.cases import Clients, Outcome, Setting, Task
from benchmarks.processes import READY_TIMEOUT_S, JsonProcess, serve_requests, started


@contextlib.contextmanager
def second_client(addresses: Sequence[str]) -> Iterator[JsonProcess]:
    """Start it, and stop it at the end.

    Raises:
        ProcessError: it ended early or was not ready in time.
    """
    with started([sys.executable, "-m", "benchmarks.second_client", *addresses], name="second client") as process:
        process.wait_for("ready", READY_TIMEOUT_S)
        yield process


def ask(process: JsonProcess, task: Task, setting: Setting, answers: Sequence[Sequence[int]]) -> None:
    """Have it generate; `outcome` waits for what it says."""
    process.tell(
        {"task": dataclasses.asdict(task), "setting": dataclasses.asdict(setting), "answers": [list(answer) for answer in answers]}
    )


def outcome(process: JsonProcess) -> Outcome:
    """What it generated.

    Raises:
        ProcessError: it ended, or did not answer in time.
    """
    return Outcome(**process.answer()["outcome"])


def main() -> None:
    """The second client's own process."""
    with Clients(sys.argv[1:]) as clients:

        def reply(request: dict[str, Any]) -> dict[str, Any]:
            found = clients.generate(Task(**request["task"]), Setting(**request["setting"]), request["answers"])
            return {"outcome": dataclasses.asdict(found)}

        serve_requests(reply)


if __name__ == "__main__":
    main()
