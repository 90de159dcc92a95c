"""Kubernetes' Job and SkyPilot's task: valid, and the Job's command on two hosts with a network of their own."""

import math
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

from cqwen_dist.config import UserError, load_config
from cqwen_dist.run.status import read_status
from cqwen_dist.tools.slurm.clouds import render_cloud
from cqwen_dist.tools.slurm.resources import JobOptions, Resources

ALONE = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]  # so that all of a pod ends at once
BIN = str(Path(sys.executable).parent)
OF_TWO = Resources(nodes=2, gpus_per_node=8, constraint="H100", time="1-00:00:00", cpus_per_task=64)


def rendered(
    to: str, config: Path, *overrides: str, resources: Resources = OF_TWO, **options: Any
) -> tuple[list[Any], str]:
    """The documents of the file, and the command that starts it."""
    text, _, start = render_cloud(config, overrides, resources, JobOptions(to=to, **options))
    return [*yaml.safe_load_all(text)], start


def job_of(documents: list[Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A Job, its pod, its container."""
    job = documents[-1]
    pod = job["spec"]["template"]["spec"]
    return job, pod, pod["containers"][0]


@pytest.mark.parametrize("gpus", [8, 0])
def test_the_job_follows_kubernetes_schema_and_the_values_of_submit(tmp_path: Path, gpus: int) -> None:
    """And what stands at two places is the same."""
    config = write_config(tmp_path, run__dir="runs/wine 7b!")
    given = Resources(nodes=3, gpus_per_node=gpus, constraint="H100" if gpus else None, time="90", mem="200G")
    documents, start = rendered(
        "kubernetes", config, "train.seed=3", resources=given, container="r/cq:1", max_restarts=2
    )
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in documents:
        validate(document, "1.30", strict=True)
    mapped, service, _ = documents
    job, pod, container = job_of(documents)
    (tmp_path / "copy.yaml").write_text(mapped["data"]["run.yaml"], encoding="utf-8")
    assert load_config(tmp_path / "copy.yaml", []) == load_config(config, ["train.seed=3"])
    assert job["metadata"]["name"] == "cqwen-wine-7b"
    assert start == "kubectl apply -f cqwen-wine-7b.kubernetes.yaml"
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (5400, 6)
    named = {variable["name"]: variable["value"] for variable in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(named["NODES"]) == 3
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    assert int(named["RANKS"]) == (gpus or 1)
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"] == "200Gi"
    assert (named.get("DS_ACCELERATOR"), pod.get("nodeSelector")) == (
        (None, {"nvidia.com/gpu.product": "H100"}) if gpus else ("cpu", None)
    )
    assert named["FIRST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"] == mapped["metadata"]["name"]
    assert int(named["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert f"--master-port={service['spec']['ports'][0]['port']}" in container["args"][0]
    assert container["image"] == "r/cq:1"


def test_the_request_has_the_memory_that_the_planner_counts(tmp_path: Path) -> None:
    """A rank's host memory: its base while it loads, 4 GiB, and what is offloaded."""
    config = write_config(tmp_path, model={"name_or_path": "Qwen/Qwen2.5-7B"}, train__precision="bf16")
    *_, pod = job_of(rendered("kubernetes", config)[0])
    counted = math.ceil(8 * (4 + 7_615_616_512 * 2 / 2**30))
    assert pod["resources"]["requests"]["memory"] == f"{counted}Gi"
    offloaded = rendered("kubernetes", config, "parallel.offload=optimizer")[0]
    assert int(job_of(offloaded)[2]["resources"]["requests"]["memory"][:-2]) > counted
    (task,), _ = rendered(
        "skypilot", config, "run.mirror=s3://b/r", resources=Resources(gpus_per_node=8, constraint="A100")
    )
    assert f"{task['resources']['memory'][:-1]}Gi" == pod["resources"]["requests"]["memory"]


def test_the_task_is_one_that_skypilot_loads(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, run__dir="runs/wine", run__mirror="s3://bucket/run", data__text_template="a: {b}\n\n  c"
    )
    given = Resources(gpus_per_node=4, constraint="H100", mem="64G", time="2:00:00")
    (task,), start = rendered("skypilot", config, resources=given, setup=["pip install s3fs"])
    assert start == "sky jobs launch cqwen-wine.skypilot.yaml"
    assert task["resources"] | {"accelerators": "H100:4", "cpus": "16+", "memory": "64+"} == task["resources"]
    assert task["setup"].startswith("pip install s3fs\npip install torch==")
    copied = re.search("<< 'END-OF-CONFIG'\n(.*\n)END-OF-CONFIG\n", task["run"], re.S)
    (tmp_path / "copy.yaml").write_text(copied[1], encoding="utf-8")  # type: ignore[index]
    assert load_config(tmp_path / "copy.yaml", []) == load_config(config, [])
    assert "exec timeout --kill-after=120 7200 torchrun" in task["run"]
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    sky = pytest.importorskip("sky", reason="SkyPilot is not here, so its own loader does not read the task")
    assert sky.Task.from_yaml_config(task).num_nodes == 1


@pytest.mark.parametrize(
    ("to", "overrides", "given", "options", "said"),
    [
        ("kubernetes", [], {"partition": "gpu"}, {}, r"--partition: found 'gpu', allowed: no value with --to"),
        ("kubernetes", [], {}, {"setup": ["x"]}, "--setup: found"),
        ("kubernetes", [], {}, {"name": "7b"}, "--name: found '7b', allowed: at most 50 small letters"),
        ("kubernetes", [], {"mem": "much"}, {}, "--mem: found 'much'"),
        ("kubernetes", ["run.resume=never"], {}, {}, "run.resume"),
        ("kubernetes", ["parallel.vocab_group_size=3"], {}, {}, "vocab_group_size"),
        ("skypilot", ["run.dir=runs/x"], {}, {}, "run.mirror: found None, allowed: a store"),
        ("skypilot", ["run.dir=runs/x", "run.mirror=s3://b/r"], {"nodes": 2}, {}, "run.dir: found 'runs/x', allowed"),
        ("skypilot", ["run.mirror=s3://b/r"], {"gpus_per_node": 8}, {}, "--constraint: found None, allowed: the kind"),
        ("nomad", [], {}, {}, "--to: found 'nomad', allowed: slurm, kubernetes or skypilot"),
        ("skypilot", [], {}, {"setup": ["two\nlines"]}, "a value of the job"),
    ],
)
def test_what_a_cloud_has_not_is_refused(tmp_path, to, overrides, given, options, said) -> None:
    with pytest.raises(UserError, match=said):
        rendered(to, write_config(tmp_path), *overrides, resources=Resources(**given), **options)


def test_submit_writes_the_file_and_says_how_to_start_it(tmp_path, monkeypatch, cqwen) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", write_config(tmp_path), "--to", "kubernetes", "--nodes", 2]
    done = cqwen(*words)
    assert (done.returncode, done.stderr) == (0, "")
    written = tmp_path / "cqwen-run.kubernetes.yaml"
    assert done.stdout == f"wrote {written.name}; to start it: kubectl apply -f {written.name}\n"
    assert cqwen(*words, "--dry-run").stdout == written.read_text(encoding="utf-8")


def test_both_start_the_same_command(tmp_path: Path) -> None:
    config = write_config(tmp_path, run__mirror="s3://bucket/run")
    (task,), _ = rendered("skypilot", config)
    command = task["run"].rpartition("END-OF-CONFIG\n")[2].replace("timeout --kill-after=120 86400 ", "")
    lines = [
        re.sub(r'\\\n|"', " ", text).split()
        for text in (job_of(rendered("kubernetes", config)[0])[2]["args"][0], command)
    ]
    for line in lines:
        assert line[:2] == ["exec", "torchrun"]
        assert line[-4:-1] == ["-m", "cqwen_dist", "train"]


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
    """The Job's command on each host, with the environment and the config of its pod."""
    documents, _ = rendered("kubernetes", config, f"run.dir={run}", resources=Resources(nodes=2))
    mounted = run.with_suffix(".yaml")
    mounted.write_text(documents[0]["data"]["run.yaml"], encoding="utf-8")
    *_, container = job_of(documents)
    given: dict[str, Any] = {variable["name"]: variable["value"] for variable in container["env"]}
    given |= {"FIRST": "10.78.0.1", "CONFIG": str(mounted), "GLOO_SOCKET_IFNAME": "eth0"}
    given["PATH"] = f"{BIN}:{os.environ['PATH']}"
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *ALONE, *container["command"], *container["args"]],
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
