"""Kubernetes' Job and SkyPilot's task: valid, and the Job's command on two hosts with a network of their own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.runs import command_environment, losses, train_run, wait_for, write_config

from cqwen_dist.run.status import read_status

LAUNCH = Path(__file__).parents[2] / "launch"
SERVICE, JOB = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ALONE = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]  # so that all of a pod ends at once
BIN = str(Path(sys.executable).parent)


def test_the_job_follows_kubernetes_schema() -> None:
    """And what stands at two places is the same."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in (SERVICE, JOB):
        validate(document, "1.30", strict=True)
    given = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(given["NODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(given["GPUS"])
    assert given["FIRST"] == f"{JOB['metadata']['name']}-0.{POD['subdomain']}"
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < POD["terminationGracePeriodSeconds"]
    assert f"--master-port={SERVICE['spec']['ports'][0]['port']}" in CONTAINER["args"][0]


def test_the_task_is_one_that_skypilot_loads() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config({**TASK, "envs": {**TASK["envs"], "MIRROR": "s3://bucket/run"}})
    assert task.num_nodes == 1


def test_both_start_the_same_command() -> None:
    lines = [re.sub(r'\\\n|"', " ", text).split() for text in (CONTAINER["args"][0], TASK["run"])]
    for line in lines:
        assert line[:2] == ["exec", "torchrun"]
        assert [word for word in line if word.startswith("-m") or word in ("cqwen_dist", "train")] == [
            "-m", "cqwen_dist", "train",
        ]  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with 10.78.0.1 and 10.78.0.2 on a cable between them. Needs root and iproute2."""
    names = [f"cqwen-{os.getpid()}-{index}" for index in (0, 1)]
    cable = [*["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns"], names[1]]
    lines = [["netns", "add", name] for name in names] + [["-n", names[0], *cable]]
    for index, name in enumerate(names):
        words = ("link set lo up", f"addr add 10.78.0.{index + 1}/24 dev eth0", "link set eth0 up")
        lines += [["-n", name, *line.split()] for line in words]
    try:
        for line in lines:
            done = subprocess.run(["ip", *line], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"may not make namespaces: {done.stderr.strip()}")
        yield names
    except FileNotFoundError:
        pytest.skip("not installed: iproute2")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def pods(hosts: list[str], config: Path, run: Path) -> list[subprocess.Popen[bytes]]:
    """The Job's command on each host, with the environment of its pod."""
    given: dict[str, Any] = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    given |= {"GPUS": "1", "FIRST": "10.78.0.1", "CONFIG": str(config), "RUN": str(run), "GLOO_SOCKET_IFNAME": "eth0"}
    given["PATH"] = f"{BIN}:{os.environ['PATH']}"
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *ALONE, *CONTAINER["command"], *CONTAINER["args"]],
            env=command_environment(**given, JOB_COMPLETION_INDEX=str(index)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index, host in enumerate(hosts)
    ]


@pytest.mark.slow
def test_two_pods_train_lose_one_and_go_on(hosts: list[str], tmp_path: Path) -> None:
    """The second pod is killed in mid run; its peer ends, and new pods under the same indices come to the same run."""
    config, run = write_config(tmp_path, stages__0__steps=40), tmp_path / "pods"
    train_run(config, "run.dir=" + str(tmp_path / "whole"), world=2)
    first = pods(hosts, config, run)
    wait_for("a checkpoint", lambda: list(run.glob("checkpoints/*/manifest.json")), every=0.02)
    first[1].kill()
    assert first[0].wait(120) != 0
    assert read_status(run)["status"] != "done"
    for pod in pods(hosts, config, run):
        assert pod.wait() == 0
    assert read_status(run)["status"] == "done"
    assert losses(run) == losses(tmp_path / "whole")
