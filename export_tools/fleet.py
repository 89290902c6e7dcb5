"""The fleet file: what machines there are. docs/planning.md documents it; `pshard-worker measure` writes a node's part of it."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from export_tools.placement import MAX_NODES, LinkEnd, Node, NodeCost
from langchain_pshard.core.errors import FleetFileError

DEFAULT_LATENCY_MS = 0.2
DEFAULT_BANDWIDTH_MBIT = 1000.0
"""A link nobody measured is taken for a wired one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines that may serve stages, and how the client is connected."""

    nodes: tuple[Node, ...]
    client: LinkEnd


class _Client(msgspec.Struct, forbid_unknown_fields=True):
    latency_ms: float = DEFAULT_LATENCY_MS
    bandwidth_mbit: float = DEFAULT_BANDWIDTH_MBIT


class _DecodeCost(msgspec.Struct, forbid_unknown_fields=True):
    layer: float
    head: float
    embedding: float = 0.0


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    memory_gib: float
    decode_speed: float | None = None
    prefill_speed: float | None = None
    decode_cost_ms: _DecodeCost | None = None
    latency_ms: float = DEFAULT_LATENCY_MS
    bandwidth_mbit: float = DEFAULT_BANDWIDTH_MBIT
    device: str = "CPU"
    cores: int | None = None
    """Device and cores are for people: the speeds already tell what they do."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    nodes: list[_Node]
    client: _Client = msgspec.field(default_factory=_Client)


def load_fleet(path: Path) -> Fleet:
    """Read a fleet file.

    Raises:
        FleetFileError: missing, no TOML, an unknown or missing field, or a value out of range; the message names file, node and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetFileError(f"cannot read the fleet file {path}: {error}; `pshard-worker measure` prints a node's part of one") from error
    return parse_fleet(text, origin=str(path))


def parse_fleet(text: str, *, origin: str) -> Fleet:
    """Parse and check the text of a fleet file. Pure; `origin` goes into the errors.

    Raises:
        FleetFileError: see `load_fleet`.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        found = msgspec.convert(raw, _File)
    except tomllib.TOMLDecodeError as error:
        raise FleetFileError(f"{origin} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise FleetFileError(f"{origin}: {error}; docs/planning.md lists the fields of a fleet file") from error
    if not 1 <= len(found.nodes) <= MAX_NODES:
        raise FleetFileError(f"{origin} has {len(found.nodes)} nodes: a plan is made for 1 to {MAX_NODES}")
    doubled = [name for name, times in Counter(node.name for node in found.nodes).items() if times > 1]
    if doubled:
        raise FleetFileError(f"{origin} has two nodes named {doubled[0]!r}: give each its own name")
    client = LinkEnd(
        latency_ms=_number(found.client.latency_ms, "latency_ms", "client", origin, zero=True),
        bandwidth_mbit=_number(found.client.bandwidth_mbit, "bandwidth_mbit", "client", origin),
    )
    return Fleet(nodes=tuple(_node(node, origin) for node in found.nodes), client=client)


def _node(node: _Node, origin: str) -> Node:
    where = f"node {node.name!r}"

    def number(field: str, value: float, *, zero: bool = False) -> float:
        return _number(value, field, where, origin, zero=zero)

    cost = None
    if node.decode_cost_ms is not None:
        if node.decode_speed is not None or node.prefill_speed is not None:
            raise FleetFileError(f"{origin}: {where} has decode_cost_ms and a speed: give the measured costs or the speeds, not both")
        cost = NodeCost(
            layer=number("decode_cost_ms.layer", node.decode_cost_ms.layer),
            head=number("decode_cost_ms.head", node.decode_cost_ms.head, zero=True),
            embedding=number("decode_cost_ms.embedding", node.decode_cost_ms.embedding, zero=True),
        )
    elif node.decode_speed is None:
        raise FleetFileError(
            f"{origin}: {where} has neither decode_speed nor decode_cost_ms: `pshard-worker measure` there tells its speed"
        )
    decode_speed = 1.0 if node.decode_speed is None else number("decode_speed", node.decode_speed)
    return Node(
        name=node.name,
        memory_bytes=int(number("memory_gib", node.memory_gib) * 2**30),
        decode_speed=decode_speed,
        prefill_speed=decode_speed if node.prefill_speed is None else number("prefill_speed", node.prefill_speed),
        cost=cost,
        link=LinkEnd(
            latency_ms=number("latency_ms", node.latency_ms, zero=True), bandwidth_mbit=number("bandwidth_mbit", node.bandwidth_mbit)
        ),
    )


def _number(value: float, field: str, where: str, origin: str, *, zero: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise FleetFileError(f"{origin}: {where} has {field} = {value:g}; valid: {'0 or more' if zero else 'more than 0'}")
    return value
