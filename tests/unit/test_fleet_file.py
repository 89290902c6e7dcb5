"""The fleet file: what it means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from export_tools.fleet import load_fleet, parse_fleet
from export_tools.placement import MAX_NODES, LinkEnd, Node, NodeCost
from langchain_pshard.core.bundle import MachineSpeed
from langchain_pshard.core.errors import FleetFileError
from workers.measure import LinkFigures, node_table

NODE = '[[nodes]]\nname = "a"\nmemory_gib = 2\n'
FAST = NODE + "decode_speed = 1.5\n"


def test_every_field_has_its_meaning() -> None:
    fleet = parse_fleet(
        """
        [client]
        latency_ms = 0.5
        bandwidth_mbit = 100

        [[nodes]]
        name = "desktop"
        memory_gib = 1.5
        decode_speed = 2
        prefill_speed = 3.0
        latency_ms = 0
        bandwidth_mbit = 2500
        device = "GPU.0"
        cores = 8

        [[nodes]]
        name = "laptop"
        memory_gib = 4
        decode_cost_ms = { layer = 0.4, head = 6.1, embedding = 0.01 }
        """,
        origin="fleet.toml",
    )
    assert fleet.client == LinkEnd(latency_ms=0.5, bandwidth_mbit=100)
    assert fleet.nodes == (
        Node(
            name="desktop",
            memory_bytes=3 << 29,
            decode_speed=2.0,
            prefill_speed=3.0,
            link=LinkEnd(latency_ms=0.0, bandwidth_mbit=2500),
        ),
        Node(name="laptop", memory_bytes=4 << 30, cost=NodeCost(layer=0.4, head=6.1, embedding=0.01)),
    )


def test_what_is_left_out_has_a_default() -> None:
    fleet = parse_fleet(FAST, origin="fleet.toml")
    assert fleet.client == LinkEnd(latency_ms=0.2, bandwidth_mbit=1000)
    assert fleet.nodes[0].prefill_speed == 1.5
    assert fleet.nodes[0].link == LinkEnd(latency_ms=0.2, bandwidth_mbit=1000)


def test_a_measured_node_is_a_fleet_file() -> None:
    table = node_table(
        'die "Kiste"', "CPU", 4, 3 << 29, MachineSpeed(decode=1.25, prefill=0.5), LinkFigures(latency_ms=0.3, bandwidth_mbit=940.4)
    )
    assert parse_fleet(table, origin="printed").nodes == (
        Node(
            name='die "Kiste"',
            memory_bytes=3 << 29,
            decode_speed=1.25,
            prefill_speed=0.5,
            link=LinkEnd(latency_ms=0.3, bandwidth_mbit=940),
        ),
    )
    for link in (None, LinkFigures(latency_ms=0.3, bandwidth_mbit=None)):
        table = node_table("a", "CPU", 4, 1 << 30, MachineSpeed(decode=1, prefill=1), link)
        assert parse_fleet(table, origin="printed").nodes[0].link.bandwidth_mbit == 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = [", ["is not TOML"]),
        ("", ["nodes"]),
        ("nodes = []", ["0 nodes", f"1 to {MAX_NODES}"]),
        ("\n".join(FAST.replace('"a"', f'"n{idx}"') for idx in range(MAX_NODES + 1)), [f"{MAX_NODES + 1} nodes"]),
        (FAST + FAST, ["two nodes named 'a'"]),
        (FAST + "colour = 1", ["colour", "nodes", "docs/planning.md"]),
        ('[[nodes]]\nname = "a"\ndecode_speed = 1', ["memory_gib"]),
        (NODE, ["'a'", "neither decode_speed nor decode_cost_ms", "measure"]),
        (FAST + "decode_cost_ms = { layer = 1.0, head = 1.0 }", ["'a'", "not both"]),
        (NODE + "decode_cost_ms = { layer = 0.0, head = 1.0 }", ["decode_cost_ms.layer = 0", "more than 0"]),
        (NODE + "decode_cost_ms = { head = 1.0 }", ["layer"]),
        (NODE + 'decode_speed = "fast"', ["decode_speed", "str"]),
        (NODE + "decode_speed = nan", ["decode_speed = nan", "more than 0"]),
        (FAST + "bandwidth_mbit = 0", ["bandwidth_mbit = 0"]),
        (FAST + "latency_ms = -1", ["latency_ms = -1", "0 or more"]),
        (FAST + "[client]\nlatency_ms = inf", ["client", "latency_ms = inf"]),
    ],
)
def test_mistakes_are_named(text: str, words: list[str]) -> None:
    with pytest.raises(FleetFileError) as caught:
        parse_fleet(text, origin="fleet.toml")
    assert str(caught.value).startswith("fleet.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FleetFileError, match=r"nowhere\.toml.*pshard-worker measure"):
        load_fleet(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FleetFileError, match=r"binary\.toml"):
        load_fleet(tmp_path / "binary.toml")
