"""Batch jobs on a real Slurm: granted their GPUs, trained under plans, and back at stock however they end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Hello
from perseus.agent.restore.records import Record, RecordFolder
from perseus.demo import nvml_stub
from tests.agent.other_users import NOBODY, needs_root, passable_folder, start_as
from tests.nvml.other_users import claim
from tests.slurm.cluster import NODE_COUNT, SlurmCluster, gpu_uuid, missing

pytestmark = [
    pytest.mark.slow("real batch jobs"),
    needs_root,
    pytest.mark.skipif(bool(missing()), reason=f"needs {', '.join(missing())}: tests/slurm/install"),
    pytest.mark.skipif(nvml_stub.compiler() is None, reason="no C compiler here to build the NVML stub with"),
    pytest.mark.timeout(600),
]

_NOT_GRANTED = "GPU_NOT_GRANTED"


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with passable_folder() as folder:
        library = nvml_stub.build(folder)
        with SlurmCluster(folder, library) as cluster:
            yield cluster


def as_nobody(path: str, gpu: str) -> None:
    print(claim(path, Hello(Rank("others", 0, 0, 0), gpu)), flush=True)


def claim_of_nobody(slurm: SlurmCluster, node: int, index: int) -> str:
    """What an agent says to another user who claims a GPU: the reason of its refusal, "" if there is none."""
    arguments = [str(slurm.socket(node)), gpu_uuid(node, index)]
    done = start_as(NOBODY, "tests.slurm.test_slurm", "as_nobody", arguments)
    return done.communicate(timeout=60)[0].strip()


def claim_of_root(slurm: SlurmCluster, node: int, index: int) -> str:
    """The same, of root's."""
    return claim(str(slurm.socket(node)), Hello(Rank("roots", 0, 0, 0), gpu_uuid(node, index)))


def training(slurm: SlurmCluster) -> tuple[str, str]:
    """A job whose clocks are being set, on both nodes."""
    number, job_id = slurm.submit_training()
    slurm.until(lambda: {node for node, _ in slurm.locked()} == {*range(NODE_COUNT)}, "locked clocks")
    return number, job_id


def until_over(slurm: SlurmCluster, number: str, state: str) -> None:
    """Until a job has ended as it should, its epilogs have run, and the nodes are free for others."""
    slurm.until(lambda: slurm.job_state(number) == state, f"job {state}")
    slurm.until(slurm.is_at_stock, f"stock after {state}")
    slurm.until(lambda: not any(map(slurm.grants, range(NODE_COUNT))), "the end of its grants")
    slurm.until(lambda: all(slurm.node_state(n) == "IDLE" for n in range(NODE_COUNT)), "idle nodes")
    assert slurm.is_at_stock(), "stock lasts"


def test_a_job_has_its_own_gpus_and_no_others(slurm: SlurmCluster) -> None:
    number = slurm.submit("#!/bin/sh\nexec sleep 600\n", "--uid=nobody", "--nodelist=node1", "--gres=gpu:1")
    slurm.until(lambda: slurm.has_agent(1), "an agent, which the prolog has started")
    grants = slurm.grants(1)
    assert list(grants) == [f"slurm-{number}"]
    user, gpu, *labels = grants[f"slurm-{number}"].split()
    assert (user, gpu) == (f"{NOBODY}:", gpu_uuid(1, 0))
    assert f"slurm-job={number}" in labels
    assert claim_of_root(slurm, 1, 0) == _NOT_GRANTED
    assert claim_of_nobody(slurm, 1, 1) == _NOT_GRANTED
    assert claim_of_nobody(slurm, 1, 0) == "accepted"
    slurm.run("scancel", number)
    until_over(slurm, number, "CANCELLED")
    assert claim_of_root(slurm, 1, 0) == "accepted"


def test_four_tasks_train_under_a_plan(slurm: SlurmCluster) -> None:
    number, job_id = training(slurm)
    slurm.until(lambda: "planned" in slurm.ask("jobs", "list"), "a plan")
    shown = slurm.ask("jobs", "show", job_id)
    assert f"slurm-account=physics, slurm-job={number}" in shown
    assert claim_of_nobody(slurm, 0, 0) == _NOT_GRANTED
    slurm.stop_training(job_id)
    until_over(slurm, number, "COMPLETED")


def test_a_job_that_is_cancelled(slurm: SlurmCluster) -> None:
    number, _ = training(slurm)
    slurm.run("scancel", number)
    until_over(slurm, number, "CANCELLED")


def test_a_job_whose_agents_were_killed(slurm: SlurmCluster) -> None:
    """The epilog brings the clocks back from the records, and the next prolog starts new agents."""
    number, _ = training(slurm)
    for node in range(NODE_COUNT):
        slurm.end_agent(node, signal.SIGKILL)
    assert not slurm.is_at_stock(), "nobody is left who would see to it"
    slurm.run("scancel", number)
    until_over(slurm, number, "CANCELLED")
    assert not any(map(slurm.has_agent, range(NODE_COUNT)))
    number, job_id = training(slurm)
    slurm.stop_training(job_id)
    until_over(slurm, number, "COMPLETED")


def test_a_node_daemon_that_is_killed(slurm: SlurmCluster) -> None:
    """Its tasks live on for a moment, without anybody who would run an epilog: that comes with its return."""
    number, _ = training(slurm)
    slurm.kill_slurmd(1)
    slurm.until(lambda: "DOWN" in slurm.node_state(1), "the node, given up")
    slurm.until(slurm.is_at_stock, "stock after a node was given up")
    slurm.start_slurmd(1)
    until_over(slurm, number, "NODE_FAIL")


def test_a_gpu_that_is_not_given_back_drains_its_node(slurm: SlurmCluster) -> None:
    number = slurm.submit("#!/bin/sh\nexec sleep 600\n", "--nodelist=node0", "--gres=gpu:1")
    slurm.until(lambda: bool(slurm.grants(0)), "the grant")
    held = RecordFolder(slurm.node_folder(0) / "restore").write(Record(gpu_uuid(0, 0), None))
    slurm.run("scancel", number)
    slurm.until(lambda: "DRAIN" in slurm.node_state(0), "the node, drained")
    assert f"GPU {gpu_uuid(0, 0)}: not back at stock: an agent holds it" in slurm.hooks_log(0)
    held.remove()
    slurm.run("scontrol", "update", "nodename=node0", "state=resume")
    until_over(slurm, number, "CANCELLED")


def test_the_daemons_are_on_loopback(slurm: SlurmCluster) -> None:
    found = Path("/proc/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split() for line in found]
    inodes = {fields[9]: fields[1] for fields in sockets if fields[3] == "0A"}
    own = {
        os.readlink(path).removeprefix("socket:[").removesuffix("]")
        for pid in slurm.pids()
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path).startswith("socket:")
    }
    addresses = {inodes[inode].partition(":")[0] for inode in own & inodes.keys()}
    assert addresses == {"0100007F"}
