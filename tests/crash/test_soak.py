"""Hundreds of blows at drawn moments: whatever is struck, what is finished in the end is what was never struck.

`make soak` deals 200 (SOAK=500 for more, SOAK_SEED to draw others) over drawn ranks, ZeRO stages, vocabulary groups,
texts packed or not, read into memory or prepared on disk, and over every phase: the start, its calibration, a step, an
evaluation, a save, the deletion of old checkpoints, `prepare` by two processes at once, `export`, `report`. Most blows
are SIGKILL; some are SIGTERM, SIGHUP, or SIGSTOP for a second. A third of the runs have a mirror, and lose their disk
after a blow now and then. Some starts have one rank with another seed, and are refused. Every run's feature cache is a
link to a folder with a stranger's files, and its checkpoints lie beside a stranger's copy of one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from crash.harness import ALL, OTHER_SEED, POINTS, SEEN, STOPPED, Blow, command, crash_config, result_of
from support.ranks import fork_server

from cqwen_dist.checkpoint.manifest import list_checkpoints, verify
from cqwen_dist.run.files import file_record
from cqwen_dist.run.status import read_status

MARK = f"CQWEN_SOAK={os.getpid()}"  # in the environment of every process that a test of this file starts
os.environ.update([MARK.split("=")])  # now: they have what the fork server was started with
BLOWS_A_RUN = 4
SPREADS = [
    (1, ()),
    (2, ("parallel.zero_stage=1",)),
    (2, ("parallel.zero_stage=2", "parallel.vocab_group_size=2")),
    (2, ("parallel.zero_stage=3", "parallel.vocab_group_size=2")),
    (3, ("parallel.zero_stage=2",)),
]
TEXTS = [(), ("data.pack=true",), ("data.cache_dir={}",), ("data.cache_dir={}", "data.pack=true")]
SIGNALS = [signal.SIGKILL] * 7 + [signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP]
OF_RUNS = [*POINTS, "figures", "setup", "start", "prune", "prepare"]


class Layout(NamedTuple):
    world: int
    options: tuple[str, ...]


class Soak:
    """Runs that are struck, and the ones of the same layouts that are left alone."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.config = crash_config(folder, stages__0__train=["heads"])  # from the feature cache
        self.alone: dict[Layout, tuple[Path, dict[str, Any]]] = {}
        self.fallen: dict[str, int] = {}
        self.runs = self.lost_disks = self.refused = 0

    def layout(self) -> Layout:
        world, spread = self.draw.choice(SPREADS)
        cache = self.folder / f"prepared-{self.draw.randrange(10**6)}"
        return Layout(world, (*spread, *(text.format(cache) for text in self.draw.choice(TEXTS))))

    def reference(self, layout: Layout) -> tuple[Path, dict[str, Any]]:
        """The run of this layout that is left alone; wherever its texts were prepared."""
        key = Layout(layout.world, tuple(option for option in layout.options if "cache_dir" not in option))
        if key not in self.alone:
            run = self.folder / f"alone-{len(self.alone)}"
            ended = command(self.config, *key.options, f"run.dir={run}", world=key.world)
            assert ended.codes == [0] * key.world, ended.said
            self.alone[key] = run, result_of(run)
        return self.alone[key]

    def count(self, what: str) -> None:
        self.fallen[what] = self.fallen.get(what, 0) + 1
        assert others() == [], f"left in the process table after {what}"

    def strike_a_run(self, most: int) -> None:
        """One run under a few blows, gone on with to its end and compared."""
        layout = self.layout()
        _, expected = self.reference(layout)
        run = self.folder / f"run-{self.runs}"
        self.runs += 1
        strangers = prepare_folder(run)
        options, blows = (*layout.options, f"run.dir={run}"), []
        mirrored = self.draw.random() < 0.33
        if mirrored:
            options = (*options, f"run.mirror=file://{run}-mirror")
        for _ in range(min(BLOWS_A_RUN, most)):
            point = self.draw.choice(OF_RUNS)
            blow = Blow.drawn_at(self.draw, point, layout.world, self.draw.choice(SIGNALS))
            if point in ("setup", "prepare") and blow.number in (signal.SIGTERM, signal.SIGHUP):
                blow = replace(blow, rank=ALL)  # as launchers send it; a rank alone is lost to the others there
            blows.append(blow)
            ended = command(self.config, *options, blow=blow, world=layout.world)
            if ended.struck:
                self.count(f"{signal.Signals(blow.number).name} in {point}")
            allowed = ("running", "unknown") if ended.killed else ("preempted", "done", "running", "unknown")
            assert read_status(run)["status"] in allowed, (blow, read_status(run), ended.said)
            in_order = {0, STOPPED} if blow.number != signal.SIGKILL else {0, 1, -signal.SIGKILL}
            assert set(ended.codes) <= in_order, (blow, ended.codes, ended.said)
            for folder in list_checkpoints(run):
                assert verify(folder) == [], f"{folder} is damaged after {blow}"
            if read_status(run)["status"] == "done":
                break
            if layout.world > 1 and self.draw.random() < 0.2:
                self.start_with_other_seeds(layout, options)
            if mirrored and self.draw.random() < 0.5:
                lose_disk(run)
                self.lost_disks += 1
        else:
            ended = command(self.config, *options, world=layout.world)
        assert ended.codes == [0] * layout.world, ended.said
        assert differences(result_of(run), expected) == [], (layout, blows, run)
        assert strangers() == [], "a stranger's files were touched"
        each_sample_once(run)
        shutil.rmtree(run)
        shutil.rmtree(f"{run}-mirror", ignore_errors=True)

    def start_with_other_seeds(self, layout: Layout, options: tuple[str, ...]) -> None:
        """A start that must change nothing: its last rank has another seed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OTHER_SEED, str(layout.world - 1))
            ended = command(self.config, *options, world=layout.world)
        assert set(ended.codes) == {2}, (ended.codes, ended.said)
        self.refused += 1

    def strike_a_process(self, what: str) -> None:
        """`prepare` twice at once, `export` or `report`: struck, done again, compared."""
        run, _ = self.reference(Layout(1, ()))
        work: Callable[..., None] = {"prepare": _prepare, "export": _export, "report": _report}[what]
        out, good = self.folder / f"struck-{what}-{sum(self.fallen.values())}", self.folder / f"whole-{what}"
        if not good.exists():
            began = time.monotonic()
            assert process_ends(work, self.config, run, good) == 0
            self.seconds = {**getattr(self, "seconds", {}), what: time.monotonic() - began}
        after = self.draw.uniform(0.0, self.seconds[what])
        code = process_ends(work, self.config, run, out, after, twice=what == "prepare")
        if code == -signal.SIGKILL:
            self.count(f"SIGKILL in {what}")
        else:
            assert code == 0
        if not (what != "prepare" and out.exists()):
            assert process_ends(work, self.config, run, out) == 0
        assert contents(out) == contents(good), what
        shutil.rmtree(out) if out.is_dir() else out.unlink()


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[Any]:
    """What is not equal, by step and name where it is a metric."""
    pairs = zip(found["figures"], wanted["figures"], strict=True)
    of_steps = [(a["step"], k, a.get(k), b.get(k)) for a, b in pairs for k in {**a, **b} if a.get(k) != b.get(k)]
    return of_steps + [
        (key, found[key], wanted[key]) for key in found if key != "figures" and found[key] != wanted[key]
    ]


def prepare_folder(run: Path) -> Callable[[], list[str]]:
    """A run's folder with a stranger's files in it; returns what finds those that are gone or changed."""
    away = run.with_name(run.name + "-away")
    there = [away / "mine" / "z-0.arrow", away / ("0" * 24) / "manifest.json", run / "checkpoints" / "step-9.bak" / "x"]
    for path in there:
        path.parent.mkdir(parents=True)
        path.write_text("a stranger's", encoding="utf-8")
    (run / "feature_cache").symlink_to(away)

    def changed() -> list[str]:
        wrong = [str(path) for path in there if not path.is_file() or path.read_text() != "a stranger's"]
        shutil.rmtree(away, ignore_errors=True)
        return wrong

    return changed


def lose_disk(run: Path) -> None:
    """Delete what the package wrote; the tests' own record and a stranger's files stay."""
    for path in [*run.iterdir(), *(run / "checkpoints").glob("*step-[0-9]*")]:
        if path.name not in (SEEN, "feature_cache", "checkpoints", "step-9.bak"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def each_sample_once(run: Path) -> None:
    """Within every whole epoch of the run, steps taken again counted once."""
    lines = [json.loads(line) for line in (run / SEEN).read_text(encoding="utf-8").splitlines()]
    last = {line["step"]: line["samples"] for line in lines}
    assert sorted(last) == list(range(1, 11))
    total = 1 + max(max(samples) for samples in last.values())
    per_epoch = -(-total // 12)
    for begin in range(1, 11 - per_epoch + 1, per_epoch):
        seen = [sample for step in range(begin, begin + per_epoch) for sample in last[step]]
        assert sorted(seen) == list(range(total)), f"epoch from step {begin}"


def others() -> list[int]:
    """Processes that carry the mark and are neither of multiprocessing's own."""
    own = {os.getpid(), forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return [pid for pid in marked() if pid not in own]


def marked() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
            except OSError:  # it has just ended
                continue


def contents(path: Path) -> dict[str, Any]:
    """What must be equal in the end: of a folder its data, of a report that it is whole."""
    if path.is_file():
        return {"whole": path.read_text(encoding="utf-8").rstrip().endswith("</html>")}
    found = sorted(file for file in path.rglob("*") if file.suffix in (".arrow", ".npy", ".safetensors", ".json"))
    drop = {"training.json", "manifest.json"}  # they hold times and places
    digests = {file.name: file_record(file)["sha256"] for file in found if file.name not in drop}
    assert digests
    return digests


def process_ends(
    work: Callable[..., None], config: Path, run: Path, out: Path, after: float | None = None, twice: bool = False
) -> int:
    """The exit code of a process that does the work, killed after so many seconds; another may do it meanwhile."""
    processes = [fork_server().Process(target=work, args=(str(config), str(run), str(out))) for _ in range(1 + twice)]
    for process in processes:
        process.start()
    if after is not None:
        processes[0].join(after)
        if processes[0].is_alive():
            os.kill(processes[0].pid, signal.SIGKILL)
    for process in processes:
        process.join(120)
        assert process.exitcode is not None, "it hangs"
    assert all(process.exitcode == 0 for process in processes[1:]), "the other one's death is none of its business"
    return int(processes[0].exitcode)


def _prepare(config: str, run: str, out: str) -> None:
    from cqwen_dist.config import load_config
    from cqwen_dist.data.prepare import prepare
    from cqwen_dist.data.tokenizer import NumericalAwareTokenizer

    data = load_config(config, [f"data.cache_dir={out}"]).data
    prepare(data, NumericalAwareTokenizer.from_pretrained(Path(run) / "base", vocab_size=291))


def _export(config: str, run: str, out: str) -> None:
    from cqwen_dist.tools.export.export import export

    export(run, out)


def _report(config: str, run: str, out: str) -> None:
    from cqwen_dist.tools.report.html import write_report

    write_report([Path(run)], Path(out))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_interrupted_at_random_moments_equal_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SEEN, "1")
    wanted = int(os.environ.get("SOAK", "200"))
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"\n{wanted} blows, SOAK_SEED={seed}")
    soak, began, tries = Soak(tmp_path, seed), time.monotonic(), 0
    while (done := sum(soak.fallen.values())) < wanted:
        tries += 1
        assert tries < 3 * wanted, "blows miss"
        if tries % 4:
            soak.strike_a_run(wanted - done)
        else:
            for what in ("prepare", "export", "report"):
                soak.strike_a_process(what)
        print(f"  {sum(soak.fallen.values()):4} blows, {soak.runs} runs, {time.monotonic() - began:.0f} s", flush=True)
    for what, count in sorted(soak.fallen.items()):
        print(f"  {count:4} {what}")
    print(f"  {soak.lost_disks} disks lost beside a mirror; {soak.refused} starts refused: one rank had another seed")
    print(
        f"  {done} of {done} blows over {soak.runs} runs: equal to the bit, each sample once an epoch, no process left"
    )
