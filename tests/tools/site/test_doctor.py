"""What the doctor calls wrong, each with a remedy, and its page; what `cqwen accept` passes."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.devices import WITHOUT_TWO
from support.ranks import run_ranks
from support.runs import cqwen, cqwen_forked

from cqwen_dist.tools.site.accept import layouts
from cqwen_dist.tools.site.doctor import all_reduce_seconds, bus_bandwidth, findings, node_facts, page


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two healthy nodes: this machine's facts, twice."""
    facts = node_facts(tmp_path_factory.mktemp("runs"))
    facts["disk_gib"] = {"/scratch": 100.0}
    nodes = [{**copy.deepcopy(facts), "host": host} for host in ("node1", "node2")]
    together = {
        "ranks": 2,
        "folder_seen_s": 0.01,
        "folder_unseen": [],
        "backend": "gloo",
        "all_reduce": [{"bytes": 2**20, "seconds": 0.001, "gib_per_s": 0.98}],
    }
    return {"nodes": nodes, "together": together}


def test_healthy_nodes_have_no_failed_check(two_nodes: dict[str, Any]) -> None:
    assert findings(two_nodes) == []


Change = Callable[[dict[str, Any], dict[str, Any]], object]
FAULTS: list[tuple[Change, str, str, str]] = [
    (lambda n, t: n.update(driver=True, environment={}), "node2", "torch sees no GPU", "CUDA"),
    (lambda n, t: n["packages"].update(deepspeed="not installed"), "node2", "deepspeed is not", "pip install"),
    (lambda n, t: n.update(gpus=[{"name": "x", "memory_gib": 1}]), "node2", "1 GPUs, on node1 0", "--constraint"),
    (lambda n, t: n.update(folder={"path": "/r", "error": "Read-only"}), "node2", "Read-only", "every node may write"),
    (lambda n, t: n["disk_gib"].update({"/scratch": 1.0}), "node2", "1.0 GiB free in /scratch", "make room"),
    (lambda n, t: t.update(folder_unseen=["node2"]), "node2", "does not see", "shared file system"),
]


@pytest.mark.parametrize(("change", "where", "what", "remedy"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_each_fault_is_one_failed_check(two_nodes, change, where, what, remedy) -> None:
    document = copy.deepcopy(two_nodes)
    change(document["nodes"][1], document["together"])
    (line,) = findings(document)
    assert line["where"] == where
    assert what in line["what"]
    assert remedy in line["remedy"]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page({**document, "red": [line]}))
    assert line["what"] in console.export_text()


def test_doctor_json_prints_one_document(tmp_path: Path) -> None:
    done = cqwen_forked("doctor", "--quick", "--json", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["together"]["ranks"] == 1
    assert document["nodes"][0]["folder"]["error"] is None
    assert not list(tmp_path.iterdir()), "nothing stays behind"


def times() -> list[float]:
    return list(all_reduce_seconds([4096, 1 << 20], torch.device("cpu"), 2).values())


def test_collectives_are_timed_alike_on_every_rank() -> None:
    one, two = run_ranks(times, 2)
    assert one == two, "the slowest rank's median"
    assert all(seconds > 0 for seconds in one)
    assert bus_bandwidth(100, 2.0, 4) == 2 * 0.75 * 50


def test_layouts_cover_every_stage_and_a_group_that_divides_the_ranks() -> None:
    assert layouts(1) == [(1, 1)]
    assert layouts(2) == [(1, 1), (2, 2), (3, 2)]
    assert layouts(12) == [(1, 1), (2, 6), (3, 6)]
    assert layouts(64) == [(1, 1), (2, 8), (3, 8)]


def test_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis").touch()
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path)
    assert done.returncode == 2
    assert "--folder" in done.stderr
    assert "empty" in done.stderr
    done = cqwen_forked("accept", "--ranks", 2, "--folder", tmp_path / "thesis" / "x")
    assert (done.returncode, "--folder: found" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpus, WITHOUT_TWO])],
)
def test_accept_passes_on_two_ranks_of_this_machine(tmp_path: Path, device: str) -> None:
    done = cqwen("accept", "--ranks", 2, "--folder", tmp_path / "site", "--json", DS_ACCELERATOR=device)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "site" / "accept.json").read_text())
    by_name = {row["what"]: row for row in found["rows"]}
    assert len(by_name) == 3 + 1
    assert [name for name, row in by_name.items() if row["passed"] is False] == []
    assert by_name["killed and gone on with"]["found"].endswith("equal")
