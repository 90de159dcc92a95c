"""`cqwen doctor`: examines a machine or every node in a job, and reports faults with their remedies.

Each node collects facts separately. Then the ranks compare them and measure together. Only `findings` decides
whether a fact is a fault. A preflight sends only two message sizes.
"""

import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cqwen_dist.cluster.rank import has_gpu
from cqwen_dist.run.files import OPTIONAL, free_bytes, git_commit, versions, write_atomically

SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
QUICK_SIZES = (2**20, 16 * 2**20)
LOW_DISK_GIB = 5.0
WAIT_FOR_FILE_S = 30.0
ROUNDS = 5  # of an all-reduce


def examine(folder: Path, quick: bool = False) -> dict[str, Any] | None:
    """Returns the results on rank 0 and None on other ranks. quick: two message sizes. Collective under a launcher."""
    from cqwen_dist.parallel.collectives import gather_objects
    from cqwen_dist.parallel.runtime import distributed

    join_srun()
    facts = node_facts(folder)
    with distributed(60.0) as runtime:
        world = runtime.world_size
        nodes: dict[str, dict[str, Any]] = {}
        for each in gather_objects(facts):
            nodes.setdefault(each["host"], each)
        together: dict[str, Any] = {"ranks": world, "folder_seen_s": None, "folder_unseen": []}
        if all(node["folder"]["error"] is None for node in nodes.values()):
            together |= _shared(folder, facts["host"], runtime.is_main)
        if world > 1:
            times = all_reduce_seconds(QUICK_SIZES if quick else SIZES, runtime.device, world)
            together["backend"] = "nccl" if runtime.device.type == "cuda" else "gloo"
            together["all_reduce"] = [
                {"bytes": size, "seconds": s, "gib_per_s": bus_bandwidth(size, s, world) / 2**30}
                for size, s in times.items()
            ]
        if not runtime.is_main:
            return None
    document = {"nodes": list(nodes.values()), "together": together}
    return {**document, "red": findings(document)}


def _shared(folder: Path, host: str, main: bool) -> dict[str, Any]:
    """Seconds until all hosts see a file from rank 0, and the hosts that never see it. Collective."""
    from cqwen_dist.parallel.collectives import barrier, gather_objects

    token = folder / f".cqwen-doctor-{gather_objects(secrets.token_hex(4))[0]}"
    if main:
        token.touch(exist_ok=False)  # security: fails if a link exists, instead of following it
    barrier()
    seen = gather_objects((host, _seconds_until(token)))
    if main:
        token.unlink()
    return {
        "folder_seen_s": max((seconds for _, seconds in seen if seconds is not None), default=None),
        "folder_unseen": sorted({name for name, seconds in seen if seconds is None}),
    }


def join_srun() -> None:
    """Under srun without a master address, use the first host in the job step for the rendezvous.

    The batch script is not a job step: its SLURM variables describe ranks that do not exist, so they are removed.
    """
    if "MASTER_ADDR" in os.environ or "SLURM_PROCID" not in os.environ:
        return
    if "SLURM_STEP_NODELIST" not in os.environ:
        del os.environ["SLURM_PROCID"]
        return
    names = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    os.environ.update(MASTER_ADDR=hosts[0], MASTER_PORT=str(20000 + (job * 37 + step) % 12000))


def node_facts(folder: Path) -> dict[str, Any]:
    """Collects the facts about this machine."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)})
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": versions(),
        "commit": git_commit(),
        "driver": has_gpu(),
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        "gpus": gpus,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "disk_gib": {str(path): _free_gib(path) for path in dict.fromkeys((folder, Path("/tmp"), Path.home()))},
        "folder": _try_folder(folder),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "GLOO_", "OMP_", "DS_", "CUDA_VISIBLE", "TORCH_EXTENSIONS"))
        },
    }


def all_reduce_seconds(sizes: Sequence[int], device: Any, world: int) -> dict[int, float]:
    """{bytes of the buffer: median seconds of an all-reduce on the slowest rank}. Collective."""
    import torch

    from cqwen_dist.parallel.collectives import barrier, gather_objects, sum_over

    found = {}
    for size in sizes:
        values = torch.zeros(world * max(1, size // (4 * world)), device=device)
        times = []
        for _ in range(ROUNDS + 1):
            barrier()
            began = time.perf_counter()
            sum_over(values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
        found[size] = max(gather_objects(sorted(times[1:])[ROUNDS // 2]))  # the first round opens connections
    return found


def bus_bandwidth(size: int, seconds: float, world: int) -> float:
    """Bytes/s on each rank's link in a ring, which an all-reduce has carry (n-1)/n of the buffer twice."""
    return 2 * (world - 1) / world * size / seconds


def findings(document: dict[str, Any]) -> list[dict[str, str]]:
    """The faults, each with host and remedy."""
    nodes, together = document["nodes"], document["together"]
    red: list[tuple[str, str, str]] = []
    for node in nodes:
        red += [(node["host"], *found) for found in (*_wrong_alone(node), *_unlike(node, nodes[0]))]
    for host in together["folder_unseen"]:
        unseen = f"does not see {nodes[0]['folder']['path']} of {nodes[0]['host']}"
        red.append((host, unseen, "a folder on a shared file system"))
    return [{"where": where, "what": what, "remedy": remedy} for where, what, remedy in red]


def _wrong_alone(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if node["driver"] and not node["gpus"] and node["environment"].get("DS_ACCELERATOR") != "cpu":
        remedy = "torch for this driver's CUDA version; in a SLURM job also --gpus-per-node, without which it gets none"
        yield "an NVIDIA driver, and torch sees no GPU", remedy
    for name, version in node["packages"].items():
        if version == "not installed" and name not in OPTIONAL:
            yield f"{name} is not installed", f"{node['executable']} -m pip install {name}"
    if (error := node["folder"]["error"]) is not None:
        yield f"{node['folder']['path']}: {error}", "a folder that every node may write: run.dir, or --folder"
    for path, free in node["disk_gib"].items():
        if free is not None and free < LOW_DISK_GIB:
            yield f"{free:.1f} GiB free in {path}", "make room: a checkpoint that does not fit fails the run"


def _unlike(node: dict[str, Any], first: dict[str, Any]) -> Iterator[tuple[str, str]]:
    pairs = {key: (node[key], first[key]) for key in ("python", "commit", "cuda", "nccl")}
    for name, version in node["packages"].items():
        other = first["packages"].get(name)
        if "not installed" not in (version, other):
            pairs[name] = (version, other)
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            yield f"{name} {mine}, on {first['host']} {theirs}", "the same environment on every node"
    if len(node["gpus"]) != len(first["gpus"]):
        count = f"{len(node['gpus'])} GPUs, on {first['host']} {len(first['gpus'])}"
        yield count, "nodes of one kind: --constraint, --exclude"


def page(document: dict[str, Any]) -> Group:
    """Nodes in columns, then the common measurements, then the faults."""
    nodes, together = document["nodes"], document["together"]
    table = Table("", *(node["host"] for node in nodes), box=None, pad_edge=False)
    packages = dict.fromkeys(name for node in nodes for name in node["packages"])
    columns = [_column(node, packages) for node in nodes]
    for name in columns[0]:
        values = [column[name] for column in columns]
        if any(values):
            same = len(set(values)) == 1 and len(values) > 1
            table.add_row(name, *([values[0], *["same"] * (len(values) - 1)] if same else values))
    parts: list[RenderableType] = [table]
    if together["ranks"] > 1:
        parts.append(_measured(together))
    parts += [
        Text(f"\n{line['where']}: {line['what']}; remedy: {line['remedy']}", "bold red") for line in document["red"]
    ]
    if not document["red"]:
        parts.append(Text("\nnothing wrong was found", "green"))
    return Group(*parts)


def _column(node: dict[str, Any], packages: Iterable[str]) -> dict[str, str]:
    kinds = dict.fromkeys(f"{gpu['name']} {gpu['memory_gib']:.0f} GiB" for gpu in node["gpus"])
    return {
        "python": node["python"],
        **{name: node["packages"].get(name, "") for name in packages},
        "commit": (node["commit"] or "")[:12],
        "CUDA, NCCL": " ".join(filter(None, (node["cuda"], node["nccl"]))),
        "GPUs": f"{len(node['gpus'])} x {', '.join(kinds)}" if kinds else "none",
        "cores, memory": f"{node['cpus']}, {node['memory_gib']:.0f} GiB",
        "free disk": ", ".join(f"{path} {free} GiB" for path, free in node["disk_gib"].items()),
        "run folder": node["folder"]["error"] or f"written in {1e3 * node['folder']['write_s']:.1f} ms",
        "environment": " ".join(f"{name}={value}" for name, value in node["environment"].items()),
    }


def _measured(together: dict[str, Any]) -> Group:
    table = Table("all-reduce", "time", "bandwidth of a link", box=None, pad_edge=False)
    for line in together["all_reduce"]:
        size = f"{line['bytes'] // 2**20} MiB" if line["bytes"] >= 2**20 else f"{line['bytes'] // 2**10} KiB"
        table.add_row(size, f"{1e3 * line['seconds']:.2f} ms", f"{line['gib_per_s']:.2f} GiB/s")
    words = f"\n{together['ranks']} ranks over {together['backend']}"
    if (seen := together["folder_seen_s"]) is not None:
        words += f"; a file of the first is seen by the others after {1e3 * seen:.0f} ms"
    return Group(Text(words), table)


def _try_folder(folder: Path) -> dict[str, Any]:
    """Seconds to write a small file durably (write, fsync, rename)."""
    mine = folder / f".cqwen-doctor-{platform.node()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        write_atomically(mine, "x" * 4096)
        seconds = time.monotonic() - began
        mine.unlink()
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}
    return {"path": str(folder), "error": None, "write_s": seconds}


def _seconds_until(path: Path) -> float | None:
    """Seconds until a file from a remote host appears here; None if it takes longer than WAIT_FOR_FILE_S."""
    began = time.monotonic()
    while not path.exists():
        if time.monotonic() - began > WAIT_FOR_FILE_S:
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def _free_gib(path: Path) -> float | None:
    try:
        return round(free_bytes(path) / 2**30, 1)
    except OSError:
        return None
