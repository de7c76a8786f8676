"""A whole node with its coordinator, in real processes that can be killed individually and restarted.

Each stack has its own emulated GPU behind the NVML stub, agent with supervisor, trainer and coordinator:
stacks are independent, so several can run at once.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from perseus.agent.restore.supervisor import SILENCE_S
from perseus.agent.sidecar.clock_worker import LEASE_S
from perseus.demo import nvml_stub
from perseus.demo.nvml_stub import NO_LOCKS, Locks
from perseus.demo.processes import Agent, Coordinator, Process, end, entries, until
from perseus.demo.security import Security
from perseus.demo.tasks import rank_tasks
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
from tests.agent.other_users import command_as
from tests.processes import agent_pid, tails
from tests.workloads import QUICK_GPU

UUID = "GPU-0"
COORDINATOR_LEASE_S = 2.0
MODEL = QUICK_GPU
_JOB = Workload(
    job_id="job",
    pipeline_count=1,
    stage_weights=(1.0,),
    microbatch_count=2,
    forward=Work(0.008, 0.002, 0.85),
    backward=Work(0.016, 0.004, 0.95),
    optimizer_s=0.005,
    gpu=MODEL,
)
_SETTINGS = {
    "PERSEUS_COORDINATOR_LEASE_S": str(COORDINATOR_LEASE_S),
    "PERSEUS_COORDINATOR_BASELINE_ITERATIONS": "2",
    "PERSEUS_COORDINATOR_PROFILE_ITERATIONS": "2",
    # Iterations of 60 ms on a busy host: the guard would soon leave such a job at stock for good.
    "PERSEUS_COORDINATOR_GUARD_TOLERANCE_PERCENT": "100",
}
_LASTING_S = 1.0


class Stack:
    """Everything from GPU to coordinator, in a folder. `start` starts absent processes.

    The trainer runs as the tests' user, or as `trainer_uid`.
    """

    def __init__(self, folder: Path, library: Path, trainer_uid: int | None = None) -> None:
        self.folder = folder
        self.gpu_folder = folder / "gpus"
        self.gpu_folder.mkdir(parents=True)
        self.gpu_file = self.gpu_folder / "gpu-0"
        self.restore_folder = folder / "restore"
        self._gpu = EmulatedGpu.create(self.gpu_file, MODEL, UUID)
        self._trainer_uid = trainer_uid
        self._job_count = 0
        self._security = Security(folder / "security")
        self._environment = {
            **nvml_stub.environment(library, self.gpu_folder),
            **self._security.of_agent(),
            "PYTHONPATH": str(Path(__file__).parent / "hangs"),
        }
        self.coordinator = Coordinator(
            folder, folder / "perseus.db", environment={**self._security.of_coordinator(), **_SETTINGS}
        )
        if trainer_uid is not None:
            # The device is open to all; only its user records the processes that compute on it.
            self.gpu_file.chmod(0o666)
            os.chown(self.gpu_folder, trainer_uid, trainer_uid)
        self.trainers_have_children = False
        """Set the trainers started from now on; children outlive their trainer."""
        self.agent = self._agent()
        self.trainer = Process(folder / "trainer.log")

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        end(self.trainer, self.agent, self.coordinator)
        self._gpu.close()

    @property
    def socket(self) -> Path:
        return self.agent.socket

    @property
    def job_id(self) -> str:
        """The trainer's current or latest job."""
        return f"job-{self._job_count}"

    def start(self) -> None:
        """Start absent processes; a trainer without its agent restarts with a new job."""
        if not self.coordinator.is_running:
            self.start_coordinator()
        if not self.agent.is_running:
            self._end_trainer()
            self.start_agent()
        if not self.trainer.is_running:
            self._start_trainer()

    def start_coordinator(self) -> None:
        self.coordinator.start()
        self._security.admit_agents(self.coordinator.address)

    def start_agent(self, *flags: str, output: int | None = None) -> None:
        """Start the agent under its supervisor, and wait until it serves its socket."""
        self.agent = self._agent(*flags)
        self.agent.launch(output)
        self.agent.await_socket()

    def restore(self) -> tuple[int, str]:
        """Run `perseus agent --restore`; return its exit status and output."""
        command = ["-m", "perseus.cli", "agent", f"--restore-folder={self.restore_folder}", "--restore"]
        log = self.folder / "restore.log"
        log.unlink(missing_ok=True)
        done = Process(log, *command, environment={**self._environment, "COLUMNS": "200"})
        done.launch()
        return done.wait(), log.read_text()

    def signal_agent(self, number: signal.Signals) -> None:
        """Kill the agent, or let it hang; its supervisor lives."""
        os.kill(agent_pid(self.agent), number)

    def is_locked(self) -> bool:
        """Whether the GPU is under any lock."""
        return Locks.read(self.gpu_file) != NO_LOCKS

    def has_record(self) -> bool:
        """Whether a restore record is on disk."""
        return any(self.restore_folder.glob("*.json"))

    def is_at_stock(self) -> bool:
        """Whether the GPU is unlocked at its highest clock, without a restore record."""
        clock_mhz = self._gpu.sm_clock_mhz()
        return not self.is_locked() and clock_mhz == MODEL.highest_clock_mhz and not self.has_record()

    def until(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait; return the seconds it took."""
        return until(is_so, what, state=self._state)

    def until_lasting_stock(self, what: str) -> float:
        """Wait for lasting stock; return the seconds until it began."""
        begun_s = time.monotonic()
        stock_s = begun_s

        def lasts() -> bool:
            nonlocal stock_s
            if not self.is_at_stock():
                stock_s = time.monotonic()
            return time.monotonic() > stock_s + _LASTING_S

        self.until(lasts, what)
        return stock_s - begun_s

    def stop_gpu(self, number: signal.Signals) -> None:
        """Stop the trainer while it does not use the GPU: a real one would not stand still with it."""
        with self._gpu._state():
            self.trainer.signal(number)
            os.waitid(os.P_PID, self.trainer.pid, os.WSTOPPED | os.WNOWAIT)

    def have_trainer(self, *, with_children: bool) -> None:
        """Replace the trainer at the next `start`, with or without children."""
        if with_children != self.trainers_have_children:
            self.trainers_have_children = with_children
            self._end_trainer()
            self.until(self.is_at_stock, "the end of another trainer")

    def _state(self) -> str:
        clock_mhz, locks = self._gpu.sm_clock_mhz(), Locks.read(self.gpu_file)
        return f"{locks}, at {clock_mhz} MHz, a record: {self.has_record()}\n{tails(self.folder)}"

    def _agent(self, *flags: str) -> Agent:
        return Agent(
            self.folder / "agent.log",
            self.folder / "agent.sock",
            self.coordinator.address,
            f"--restore-folder={self.restore_folder}",
            *flags,
            environment=self._environment,
        )

    def _start_trainer(self) -> None:
        self._job_count += 1
        (own := self.folder / self.job_id).mkdir()
        (task,) = rank_tasks(
            replace(_JOB, job_id=self.job_id), own, lambda _: self.socket, lambda *_: self.gpu_file
        )
        if self._trainer_uid is None:
            children = self.trainers_have_children
            module = "tests.nvml.trainer_with_children" if children else "perseus.demo.trainer"
            command = [sys.executable, "-m", module, task.to_json()]
        else:
            os.chown(own, self._trainer_uid, self._trainer_uid)
            command = command_as(self._trainer_uid, "tests.nvml.other_users", "train", [task.to_json()])
        self.trainer = Process(self.folder / "trainer.log", program=command)
        self.trainer.launch()

    def _end_trainer(self) -> None:
        if self.trainer.is_running:
            self.trainer.kill()
            # Work in progress runs to its end, like queued kernels; the next trainer needs a free GPU.
            time.sleep(0.1)

    def events(self) -> list[str]:
        """Return the messages of the job's events so far."""
        logged = entries(self.coordinator.log)
        return [str(entry["message"]) for entry in logged if entry["event"] == "job event"]


# --- Kills --------------------------------------------------------------------------------------------------


def agent_loop_hangs(stack: Stack) -> None:
    stack.agent.signal(signal.SIGSTOP)  # the agent's other thread has to let go of the clock
    stack.signal_agent(signal.SIGUSR2)


def all_sigkill(stack: Stack) -> None:
    stack.coordinator.signal(signal.SIGKILL)
    stack.trainer.signal(signal.SIGKILL)
    stack.signal_agent(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Kill:
    """How to kill, and the seconds within which the GPU should be at stock on an idle machine.

    `ends`: the processes that end by it, with the agent's exit status.
    """

    strike: Callable[[Stack], None]
    limit_s: float
    ends: tuple[str, ...] = ()
    agent_status: int = 128 + signal.SIGKILL


CHILDREN = "trainer SIGKILL, children live on"
HANGING_TRAINER = "trainer hangs"
COORDINATOR = "coordinator SIGKILL"
# Signals of the folder `hangs`: SIGUSR1 holds the GIL, SIGUSR2 the event loop.
KILLS = {
    "agent SIGKILL": Kill(lambda stack: stack.signal_agent(signal.SIGKILL), 5.0, ("agent",)),
    "agent SIGTERM": Kill(lambda stack: stack.agent.signal(signal.SIGTERM), 5.0, ("agent",), 0),
    "agent SIGSTOP": Kill(lambda stack: stack.signal_agent(signal.SIGSTOP), SILENCE_S + 10.0, ("agent",)),
    "agent holds its GIL": Kill(
        lambda stack: stack.signal_agent(signal.SIGUSR1), SILENCE_S + 10.0, ("agent",)
    ),
    "agent's loop hangs, without supervisor": Kill(agent_loop_hangs, LEASE_S + 5.0, ("agent",)),
    "trainer SIGKILL": Kill(lambda stack: stack.trainer.signal(signal.SIGKILL), 5.0, ("trainer",)),
    CHILDREN: Kill(lambda stack: stack.trainer.signal(signal.SIGKILL), 5.0, ("trainer",)),
    HANGING_TRAINER: Kill(lambda stack: stack.stop_gpu(signal.SIGSTOP), 5.0),
    COORDINATOR: Kill(
        lambda stack: stack.coordinator.signal(signal.SIGKILL), COORDINATOR_LEASE_S + 1.0, ("coordinator",)
    ),
    "all at once, SIGKILL": Kill(all_sigkill, 5.0, ("agent", "trainer", "coordinator")),
}
_MAX_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One kill: whether the GPU was locked at that moment, and how long until it was at stock."""

    was_locked: bool
    restored_after_s: float


def try_kill(stack: Stack, name: str, delay_s: float) -> Outcome:
    """Kill as named, `delay_s` after the job has locked the GPU for the first time, and wait for stock."""
    kill = KILLS[name]
    stack.have_trainer(with_children=name == CHILDREN)
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    assert stack.has_record() or not stack.is_locked(), "a clock was locked without a record"
    time.sleep(delay_s)
    was_locked = stack.is_locked()
    kill.strike(stack)
    if name == COORDINATOR:  # training continues, possibly at stock for a moment before the lease ends
        restored_after_s = stack.until_lasting_stock(f"stock after {name}")
    else:
        restored_after_s = stack.until(stack.is_at_stock, f"stock after {name}")
    if "agent" in kill.ends:
        stack.agent.signal(signal.SIGCONT)
        assert stack.agent.wait() == kill.agent_status
    if "trainer" in kill.ends:
        stack.trainer.wait()
        time.sleep(0.1)  # work in progress ends
    if "coordinator" in kill.ends:
        stack.coordinator.wait()
    assert stack.is_at_stock(), "stock lasts"
    if name == HANGING_TRAINER:
        stack.trainer.signal(signal.SIGCONT)
        stack.until(stack.is_locked, "a clock for the trainer, which continues")
    return Outcome(was_locked, restored_after_s)


def try_kills(
    folder: Path, library: Path, names: Sequence[str], count: int, seed: int, at_a_time: int
) -> dict[str, list[Outcome]]:
    """`count` of each kill at random points, on `at_a_time` stacks at once."""
    chance = random.Random(seed)
    kills = [(name, chance.uniform(0, _MAX_DELAY_S)) for name in names for _ in range(count)]
    with ExitStack() as stacks, ThreadPoolExecutor(at_a_time) as pool:
        ours = [stacks.enter_context(Stack(folder / str(index), library)) for index in range(at_a_time)]

        def work(index: int) -> list[tuple[str, Outcome]]:
            return [(name, try_kill(ours[index], name, delay_s)) for name, delay_s in kills[index::at_a_time]]

        outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        for done in pool.map(work, range(at_a_time)):
            for name, outcome in done:
                outcomes[name].append(outcome)
    return outcomes
