"""The source itself: no way to run code from data, no registry host, no path of a developer's machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("langchain_pshard", "workers", "export_tools")

FORBIDDEN_MODULES = frozenset({"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"})
FORBIDDEN_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
FORBIDDEN_CALLS = frozenset(
    {
        ("torch", "load"),
        ("yaml", "load"),
        ("yaml", "unsafe_load"),
        ("yaml", "full_load"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("os", "system"),
    }
)
FORBIDDEN_METHODS = frozenset({"send_pyobj", "recv_pyobj"})  # pyzmq's shorthand for pickle
FORBIDDEN_TRUE_KEYWORDS = frozenset({"allow_pickle", "trust_remote_code", "shell"})


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if module.split(".")[0] in FORBIDDEN_MODULES:
            yield module
        yield from (f"{module}.{alias.name}" for alias in node.names if (module, alias.name) in FORBIDDEN_CALLS)


def _calls(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    match node.func:
        case ast.Name(id=name) if name in FORBIDDEN_BUILTINS:
            yield f"{name}()"
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_CALLS:
            yield f"{owner}.{name}()"
        case ast.Attribute(attr=name) if name in FORBIDDEN_METHODS:
            yield f".{name}()"
    for keyword in node.keywords:
        is_true = isinstance(keyword.value, ast.Constant) and bool(keyword.value.value)
        if keyword.arg in FORBIDDEN_TRUE_KEYWORDS and is_true:
            yield f"{keyword.arg}=True"


def dangerous_constructs(source: str) -> list[str]:
    """Every import or call in `source` that can turn data into code."""
    return [f"line {node.lineno}: {what}" for node in ast.walk(ast.parse(source)) for what in (*_imports(node), *_calls(node))]  # type: ignore[attr-defined]


def _tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode("utf-8")
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["line 1: pickle"]),
        ("from marshal import loads", ["line 1: marshal"]),
        ("from torch import load", ["line 1: torch.load"]),
        ("torch.load(path)", ["line 1: torch.load()"]),
        ("yaml.load(text)", ["line 1: yaml.load()"]),
        ("x = 1\neval(x)", ["line 2: eval()"]),
        ("exec(code)", ["line 1: exec()"]),
        ("socket.recv_pyobj()", ["line 1: .recv_pyobj()"]),
        ("np.load(f, allow_pickle=True)", ["line 1: allow_pickle=True"]),
        ("model.eval()\nyaml.safe_load(t)\nre.compile(p)\ncore.compile_model(m)\nnp.load(f, allow_pickle=False)", []),
    ],
)
def test_the_walk_finds_what_it_should(source: str, found: list[str]) -> None:
    assert dangerous_constructs(source) == found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_can_turn_data_into_code(package: str) -> None:
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    found = {str(path.relative_to(ROOT)): constructs for path in sources if (constructs := dangerous_constructs(path.read_text("utf-8")))}
    assert found == {}


# Put together here, so that this file does not hold what it forbids.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("conda", "anaconda", "org"),
    )
)
MACHINE_PATH = re.compile(r"(?<![\w./-])(?:/(?:work|root|home|Users|opt)/\w|[A-Za-z]:[\\/]{1,2}Users[\\/])")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("see /" + "home/ann/x", True),
        ('"/' + 'work/main"', True),
        ("C:\\" + "Users\\ann", True),
        ("net/work/x", False),
        ("BUNDLE/stage-0", False),
    ],
)
def test_the_path_pattern(text: str, is_found: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is is_found


def test_no_tracked_file_names_a_registry_host_or_a_machine_path() -> None:
    found = []
    for path in _tracked_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for line_number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or any(host in line.lower() for host in REGISTRY_HOSTS):
                found.append(f"{path.relative_to(ROOT)}:{line_number}: {line.strip()[:120]}")
    assert found == []
