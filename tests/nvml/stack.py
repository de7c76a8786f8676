"""A whole node with its coordinator, in real processes that can be killed individually and restarted.

Each stack has its own emulated GPU behind the NVML stub, agent with supervisor, trainer and coordinator:
stacks are independent, so several can run at once.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from perseus.agent.link.computation import Kind
from perseus.agent.restore.supervisor import SILENCE_S
from perseus.agent.sidecar.clock_worker import LEASE_S
from perseus.demo import nvml_stub
from perseus.demo.nvml_stub import NO_LOCKS, Locks
from perseus.demo.security import Security
from perseus.demo.trainer import RankTask
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.agent.other_users import command_as

UUID = "GPU-0"
COORDINATOR_LEASE_S = 2.0
START_TIMEOUT_S = 60.0
# Few clocks and a fast counter, so that a job is profiled and planned within a second or two.
MODEL = replace(A100_SXM.with_clocks(4), counter_period_s=0.02)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_POLL_S = 0.01
_LAST_LINES = 20
_LASTING_S = 1.0


class Stack:
    """Everything from GPU to coordinator, in a folder. `start` starts absent processes.

    The trainer runs as the tests' user, or as `trainer_uid`.
    """

    def __init__(self, folder: Path, library: Path, trainer_uid: int | None = None) -> None:
        self.folder = folder
        self.gpu_folder = folder / "gpus"
        self.gpu_folder.mkdir(parents=True)
        self.socket = folder / "agent.sock"
        self._trainer_uid = trainer_uid
        self.gpu_file = self.gpu_folder / "gpu-0"
        self.restore_folder = folder / "restore"
        self._gpu = EmulatedGpu.create(self.gpu_file, MODEL, UUID)
        self.security = Security(folder / "security")
        self._environment = {
            **nvml_stub.environment(library, self.gpu_folder),
            "PYTHONPATH": str(Path(__file__).parent / "hangs"),
            **self.security.of_agent(),
        }
        if trainer_uid is not None:
            # The device is open to all; only its user records the processes that compute on it.
            self.gpu_file.chmod(0o666)
            os.chown(self.gpu_folder, trainer_uid, trainer_uid)
        self._port = 0
        self._job_count = 0
        self.outputs: dict[str, int] = {}
        """File descriptors for the output of processes by name, in place of their logs."""
        self.trainers_have_children = False
        """Set the trainers started from now on; children outlive their trainer."""
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.trainer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.trainer, self.supervisor, self.coordinator):
            if process is not None and process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)
                process.wait()
        self._gpu.close()

    @property
    def job_id(self) -> str:
        """The trainer's current or latest job."""
        return f"job-{self._job_count}"

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start absent processes; a trainer without its agent restarts with a new job."""
        if not _runs(self.coordinator):
            self.start_coordinator()
        if not _runs(self.supervisor):
            self._end_trainer()
            self.start_agent()
        if not _runs(self.trainer):
            self._start_trainer()

    def start_agent(self, *flags: str, **environment: str) -> None:
        """Start the agent under its supervisor, and wait until it serves its socket."""
        self.supervisor = self._start(
            "agent",
            "perseus.cli",
            *["agent", f"--coordinator={self.address}", f"--socket={self.socket}"],
            *[f"--restore-folder={self.restore_folder}", "--log-format=json", *flags],
            **self._environment,
            **environment,
        )
        self.until(self.socket.exists, "agent")

    def run_agent_command(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """Run `perseus agent` with flags with which it ends by itself."""
        command = [sys.executable, "-m", "perseus.cli", "agent", f"--restore-folder={self.restore_folder}"]
        return subprocess.run(
            [*command, *flags],
            env={**os.environ, **self._environment, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
            timeout=START_TIMEOUT_S,
        )

    def agent_pid(self) -> int:
        """The agent itself, the supervisor's only child."""
        assert self.supervisor is not None
        pid = self.supervisor.pid
        found: list[str] = []

        def has_child() -> bool:
            found[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return bool(found)

        self.until(has_child, "agent's process")
        return int(found[0])

    def signal_agent(self, number: signal.Signals) -> None:
        """Kill the agent, or let it hang; its supervisor lives."""
        os.kill(self.agent_pid(), number)
        self.socket.unlink(missing_ok=True)  # to wait for the next agent's

    def is_locked(self) -> bool:
        """Whether the GPU is under any lock."""
        return Locks.read(self.gpu_file) != NO_LOCKS

    def has_record(self) -> bool:
        """Whether a restore record is on disk."""
        return self.restore_folder.exists() and any(self.restore_folder.glob("*.json"))

    def is_at_stock(self) -> bool:
        """Whether the GPU is unlocked at its highest clock, without a restore record."""
        clock_mhz = self._gpu.sm_clock_mhz()
        return not self.is_locked() and clock_mhz == MODEL.highest_clock_mhz and not self.has_record()

    def until(self, is_true: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait; return the seconds it took. AssertionError after `timeout_s`."""
        begun_s = time.monotonic()
        while not is_true():
            waited_s = time.monotonic() - begun_s
            assert waited_s < timeout_s, f"{what}: not within {timeout_s:g} s\n{self._state()}"
            time.sleep(_POLL_S)
        return time.monotonic() - begun_s

    def until_lasting_stock(self, what: str, timeout_s: float) -> float:
        """Wait for lasting stock; return the seconds until it began. AssertionError after `timeout_s`."""
        begun_s = time.monotonic()
        while True:
            came_after_s = time.monotonic() - begun_s + self.until(self.is_at_stock, what, timeout_s)
            while self.is_at_stock():
                if time.monotonic() - begun_s > came_after_s + _LASTING_S:
                    return came_after_s
                time.sleep(_POLL_S)
            assert time.monotonic() - begun_s < timeout_s, (
                f"{what}: not within {timeout_s:g} s\n{self._state()}"
            )

    def _state(self) -> str:
        """Return all logs after a failed wait, since the folder is deleted."""
        logs = [
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            for path in sorted(self.folder.glob("*.log"))
        ]
        clock_mhz, locks = self._gpu.sm_clock_mhz(), Locks.read(self.gpu_file)
        return "\n".join([f"{locks}, at {clock_mhz} MHz, a record: {self.has_record()}", *logs])

    def log(self, name: str) -> list[dict[str, object]]:
        """Return a process's log so far."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def events(self) -> list[str]:
        """Return the messages of the job's events so far."""
        return [str(entry["message"]) for entry in self.log("coordinator") if entry["event"] == "job event"]

    def start_coordinator(self) -> None:
        self.coordinator = self._start(
            "coordinator",
            "perseus.cli",
            *["coordinator", f"--listen={self.address}", f"--database={self.folder / 'perseus.db'}"],
            "--log-format=json",
            **self.security.of_coordinator(),
            PERSEUS_COORDINATOR_LEASE_S=str(COORDINATOR_LEASE_S),
            PERSEUS_COORDINATOR_BASELINE_ITERATIONS="2",
            PERSEUS_COORDINATOR_PROFILE_ITERATIONS="2",
            # Iterations of 60 ms on a busy host: the guard would soon leave such a job at stock for good.
            PERSEUS_COORDINATOR_GUARD_TOLERANCE_PERCENT="100",
        )

        def listens() -> bool:
            addresses = [entry for entry in self.log("coordinator") if entry["event"] == "listening"]
            if addresses:
                self._port = int(str(addresses[-1]["address"]).rpartition(":")[2])
            return bool(addresses)

        self.until(listens, "coordinator")
        self.security.admit_agents(self.address)

    def _start_trainer(self) -> None:
        self._job_count += 1
        (self.folder / self.job_id).mkdir()
        microbatches = 2
        task = RankTask(
            run_dir=str(self.folder / self.job_id),
            agent_socket=str(self.socket),
            gpu_file=str(self.gpu_file),
            job_id=self.job_id,
            pipeline=0,
            pipeline_count=1,
            stage=0,
            stage_count=1,
            microbatch_count=microbatches,
            order=[(kind, each) for each in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)],
            forward=(0.008, 0.002, 0.85),
            backward=(0.016, 0.004, 0.95),
            optimizer_s=0.005,
        )
        if self._trainer_uid is None:
            module = (
                "tests.nvml.trainer_with_children" if self.trainers_have_children else "perseus.demo.trainer"
            )
            self.trainer = self._start("trainer", module, task.to_json())
        else:
            os.chown(self.folder / self.job_id, self._trainer_uid, self._trainer_uid)
            self.trainer = self._run(
                "trainer",
                command_as(self._trainer_uid, "tests.nvml.other_users", "train", [task.to_json()]),
            )

    def have_trainer(self, *, with_children: bool) -> None:
        """Replace the trainer at the next `start`, with or without children."""
        if with_children != self.trainers_have_children:
            self.trainers_have_children = with_children
            self._end_trainer()
            self.until(self.is_at_stock, "the end of another trainer")

    def _end_trainer(self) -> None:
        if self.trainer is not None and self.trainer.poll() is None:
            self.trainer.kill()
            self.trainer.wait()
            # Work in progress runs to its end, like queued kernels; the next trainer needs a free GPU.
            time.sleep(0.1)

    def _start(
        self, name: str, module: str, *arguments: str, **environment: str
    ) -> "subprocess.Popen[bytes]":
        return self._run(name, [sys.executable, "-m", module, *arguments], **environment)

    def _run(self, name: str, command: list[str], **environment: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.outputs.get(name, log),
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ONE_THREAD, **environment},
            )


def _runs(process: "subprocess.Popen[bytes] | None") -> bool:
    return process is not None and process.poll() is None


# --- Kills --------------------------------------------------------------------------------------------------


def _kill(process: "subprocess.Popen[bytes] | None") -> None:
    assert process is not None
    process.kill()


def agent_sigkill(stack: Stack) -> None:
    stack.signal_agent(signal.SIGKILL)


def agent_sigterm(stack: Stack) -> None:
    assert stack.supervisor is not None
    stack.supervisor.terminate()


def agent_sigstop(stack: Stack) -> None:
    stack.signal_agent(signal.SIGSTOP)


def agent_holds_gil(stack: Stack) -> None:
    stack.signal_agent(signal.SIGUSR1)  # see the folder `hangs`


def agent_loop_hangs(stack: Stack) -> None:
    assert stack.supervisor is not None
    stack.supervisor.send_signal(signal.SIGSTOP)  # the agent's other thread has to let go of the clock
    stack.signal_agent(signal.SIGUSR2)


def trainer_sigkill(stack: Stack) -> None:
    _kill(stack.trainer)


def trainer_with_children_sigkill(stack: Stack) -> None:
    _kill(stack.trainer)


def trainer_hangs(stack: Stack) -> None:
    assert stack.trainer is not None
    # A real GPU would not stand still with it: stop it while it does not hold the emulated one's lock.
    with stack._gpu._state():
        stack.trainer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stack.trainer.pid, os.WSTOPPED | os.WNOWAIT)


def coordinator_sigkill(stack: Stack) -> None:
    _kill(stack.coordinator)


def all_sigkill(stack: Stack) -> None:
    _kill(stack.coordinator)
    _kill(stack.trainer)
    stack.signal_agent(signal.SIGKILL)


# kill → seconds within which the GPU must be at stock.
KILLS: dict[str, tuple[Callable[[Stack], None], float]] = {
    "agent SIGKILL": (agent_sigkill, 5.0),
    "agent SIGTERM": (agent_sigterm, 5.0),
    "agent SIGSTOP": (agent_sigstop, SILENCE_S + 10.0),
    "agent holds its GIL": (agent_holds_gil, SILENCE_S + 10.0),
    "agent's loop hangs, without supervisor": (agent_loop_hangs, LEASE_S + 5.0),
    "trainer SIGKILL": (trainer_sigkill, 5.0),
    "trainer SIGKILL, children live on": (trainer_with_children_sigkill, 5.0),
    "trainer hangs": (trainer_hangs, 5.0),
    "coordinator SIGKILL": (coordinator_sigkill, COORDINATOR_LEASE_S + 1.0),
    "all at once, SIGKILL": (all_sigkill, 5.0),
}
_MAX_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One kill: whether the GPU was locked at that moment, and how long until it was at stock."""

    was_locked: bool
    restored_after_s: float


def try_kill(stack: Stack, name: str, delay_s: float) -> Outcome:
    """Kill as named, `delay_s` after the job has locked the GPU for the first time, and wait for stock."""
    kill, limit_s = KILLS[name]
    stack.have_trainer(with_children=kill is trainer_with_children_sigkill)
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    assert stack.has_record() or not stack.is_locked(), "a clock was locked without a record"
    time.sleep(delay_s)
    was_locked = stack.is_locked()
    kill(stack)
    if (
        kill is coordinator_sigkill
    ):  # training continues, possibly at stock for a moment before the lease ends
        restored_after_s = stack.until_lasting_stock(f"stock after {name}", limit_s)
    else:
        restored_after_s = stack.until(stack.is_at_stock, f"stock after {name}", limit_s)
    if kill in (agent_sigkill, agent_sigterm, all_sigkill, agent_sigstop, agent_holds_gil, agent_loop_hangs):
        assert stack.supervisor is not None
        stack.supervisor.send_signal(signal.SIGCONT)
        status = stack.supervisor.wait(SILENCE_S + 10.0)
        assert status == (0 if kill is agent_sigterm else 128 + signal.SIGKILL)
    if kill in (trainer_sigkill, trainer_with_children_sigkill, all_sigkill):
        assert stack.trainer is not None
        stack.trainer.wait(10)
        time.sleep(0.1)  # work in progress ends
    if kill in (coordinator_sigkill, all_sigkill):
        assert stack.coordinator is not None
        stack.coordinator.wait(10)
    assert stack.is_at_stock(), "stock lasts"
    if kill is trainer_hangs:
        assert stack.trainer is not None
        stack.trainer.send_signal(signal.SIGCONT)
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
