"""The documents say what is true: their Python runs against a real fleet, and their tables name what exists, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from langchain_core.language_models import BaseChatModel

from benchmarks.__main__ import BENCHES
from export_tools.cli import main as export_command
from export_tools.plan_command import plan
from langchain_pshard import ChatPShard
from langchain_pshard.call_options import CallOptions
from langchain_pshard.core import errors, messages
from langchain_pshard.prompt import TemplateError
from tests.support.bundles import TinyBundle
from workers.cli import command as worker_command
from workers.measure import measure

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, click.Command] = {"pshard-worker": worker_command, "pshard-export": export_command}
WORDS: dict[str, click.Command] = {"pshard-worker": measure, "pshard-export": plan}
"""What a first word makes of the commands: `pshard-worker measure`, `pshard-export plan`."""
REFERENCES = {"pshard-worker": "docs/operations.md", "pshard-export": "docs/export.md"}

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(path.read_text(encoding="utf-8")) if found == language]


def first_cells(text: str, pattern: str) -> set[str]:
    """What `pattern` finds in the first cells of all tables."""
    return {match for line in text.splitlines() if line.startswith("| ") for match in re.findall(pattern, line.split("|")[1])}


def all_commands(command: click.Command) -> list[click.Command]:
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return [command, *(found for child in below for found in all_commands(child))]


def options(command: click.Command) -> tuple[set[str], set[str]]:
    """The names that a document has to give, one an option, and all names that it may."""
    params = [param for each in all_commands(command) for param in each.params if isinstance(param, click.Option) and not param.hidden]
    needed = {next(name for name in param.opts if name.startswith("--")) for param in params}
    return needed, {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}


# --- Python ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/langchain.md", "docs/operations.md"])
def test_snippets_run(name: str, tiny_bundle: TinyBundle, tiny_fleet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny_bundle("llama", num_stages=2)
    stands_for = {"tcp://127.0.0.1:7000": tiny_fleet[0], "tcp://127.0.0.1:7001": tiny_fleet[1], "gemma-bundle": bundle.as_posix()}
    snippets = blocks(ROOT / name, "python")
    assert snippets
    names: dict[str, Any] = {}
    for snippet in snippets:
        for written, real in stands_for.items():
            snippet = snippet.replace(f'"{written}"', f'"{real}"')
        exec(compile(snippet, f"a snippet of {name}", "exec"), names)
        for value in names.values():
            if isinstance(value, ChatPShard):
                value.close()  # it connects again when a later snippet uses it
    assert capsys.readouterr().out.strip()


# --- command lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", COMMANDS)
def test_option_tables_are_complete_and_true(program: str) -> None:
    documented = first_cells(read(REFERENCES[program]), r"`(--[a-z-]+)")
    needed, known = options(COMMANDS[program])
    assert needed - documented == set(), f"{REFERENCES[program]} does not explain them"
    assert documented - known == set(), f"{REFERENCES[program]} explains what does not exist"


@pytest.mark.parametrize("program", COMMANDS)
def test_commands_in_documents_use_options_that_exist(program: str) -> None:
    known = options(COMMANDS[program])[1] | options(WORDS[program])[1]
    lines = [line for path in DOCUMENTS for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(f"{program} ")]
    assert lines
    unknown = {option for line in lines for option in _OPTION.findall(line.partition("#")[0])} - known
    assert unknown == set()


# --- tables --------------------------------------------------------------------------------------------------------------


def test_every_option_of_the_chat_model_is_documented() -> None:
    ours = set(ChatPShard.model_fields) - set(BaseChatModel.model_fields) | set(CallOptions.model_fields)
    documented = first_cells(read("docs/langchain.md"), r"`(\w+)`")
    assert ours - documented == set()


def test_every_example_is_listed() -> None:
    listed = first_cells(read("docs/langchain.md"), r"python -m examples\.(\w+)")
    assert listed == {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__", "demo", "fleet_option"}


def test_every_bench_is_told_of() -> None:
    named = set(re.findall(r"`([a-z0-9-]+)`", read("docs/benchmarks.md")))
    assert set(BENCHES) - named == set()


def test_every_error_code_has_its_class_and_remedy() -> None:
    table = dict(re.findall(r"^\| `([a-z][a-z-]*)` \| `(\w+)`", read("docs/operations.md"), re.MULTILINE))
    kinds = {code: kind for code, kind in errors._tree(errors.PShardError).items() if not kind.__module__.startswith("tests.")}
    assert kinds["template"] is TemplateError  # it lives outside the core, and is known once it is imported
    assert table == {code: kind.__name__ for code, kind in kinds.items()}


def test_every_json_event_is_documented() -> None:
    written = set(re.findall(r'"event": "(\w+)"', read("workers/report.py")))
    assert written
    assert first_cells(read("docs/operations.md").partition("## Logs")[2].partition("##")[0], r"`(\w+)`") == written


def test_every_message_and_field_is_in_the_protocol() -> None:
    text = read("docs/protocol.md")
    named = set(re.findall(r"`(\w+)`", text)) | {
        word for call in re.findall(r"`\w+\(([^`)]*)\)`", text) for word in re.findall(r"\w+", call)
    }
    for message in get_args(messages.Message):
        assert re.search(rf"\b{message.__name__}\b", text), f"{message.__name__} is not described"
        missing = set(message.__struct_fields__) - named
        assert missing == set(), f"fields of {message.__name__} are not described"


def test_links_and_named_rooms_exist() -> None:
    for path in DOCUMENTS:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8"))
        assert [target for target in targets if not (path.parent / target).exists()] == [], f"broken links in {path.name}"
    folder = ROOT
    for line in next(body for body in blocks(ROOT / "CONTRIBUTING.md", "") if body.startswith("langchain_pshard/")).splitlines():
        names = line.split("  ")[1 if line.startswith("  ") else 0].split()
        folder = ROOT if not line.startswith("  ") else folder
        for name in names:
            assert (folder / name).exists(), f"CONTRIBUTING.md names {name} in {folder}"
        if not line.startswith("  "):
            folder = ROOT / names[0]
