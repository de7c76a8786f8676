"""A real Slurm on loopback: munged, slurmctld, and two slurmd that say they are nodes with two GPUs each.

The GPUs are emulated ones behind the NVML stub; their device files are what gres.conf names. Prolog and
epilog are those of deploy/slurm; they start the nodes' agents, whose coordinator runs beside.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from perseus.agent.sidecar.health_client import ask_health
from perseus.demo import nvml_stub
from perseus.demo.nvml_stub import NO_LOCKS, Locks
from perseus.demo.processes import TIMEOUT_S, ClusterError, Coordinator, Process, end, until
from perseus.demo.security import Security
from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import STOP_FILE
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
from tests.ports import free_port
from tests.processes import is_gone, tails
from tests.workloads import QUICK_GPU

REPOSITORY = Path(__file__).parent.parent.parent
NODE_COUNT = 2
GPU_COUNT = 2
DAEMONS = ("munged", "slurmctld", "slurmd")
_JOB = Workload(
    job_id="trained",
    pipeline_count=NODE_COUNT,
    stage_weights=(0.5, 1.0),
    microbatch_count=2,
    forward=Work(0.016, 0.004, 0.85),
    backward=Work(0.032, 0.008, 0.95),
    optimizer_s=0.005,
    gpu=QUICK_GPU,
)
_SLURMD_TIMEOUT_S = 5
_SETTINGS = {
    "PERSEUS_COORDINATOR_LEASE_S": "2",
    "PERSEUS_COORDINATOR_BASELINE_ITERATIONS": "2",
    "PERSEUS_COORDINATOR_PROFILE_ITERATIONS": "2",
    # Short iterations on a busy host: the guard would soon leave such a job at stock for good.
    "PERSEUS_COORDINATOR_GUARD_TOLERANCE_PERCENT": "100",
}

_SLURM_CONF = """
ClusterName=perseus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout_s}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
KillWait=2
Prolog={folder}/prolog
Epilog={folder}/epilog
PrologFlags=Alloc
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""

_HOOK = """#!/bin/sh
export LD_LIBRARY_PATH={library} PERSEUS_NVML_STUB={folder}/$SLURMD_NODENAME/gpus
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
export perseus={folder}/perseus perseus_config={folder}/$SLURMD_NODENAME/agent.toml
export perseus_log={folder}/$SLURMD_NODENAME/hooks.log perseus_start_agent={folder}/$SLURMD_NODENAME/agent.log
exec {hook}
"""


class SlurmCluster:
    """All of it, in a folder. Leaving the context ends what was started."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self._library = library
        self._security = Security(folder / "security")
        self._coordinator = Coordinator(
            folder, folder / "perseus.db", environment={**self._security.of_coordinator(), **_SETTINGS}
        )
        self._processes: dict[str, Process] = {}
        self._job_count = 0
        self._gpus = {
            (node, index): self._make_gpu(node, index)
            for node in range(NODE_COUNT)
            for index in range(GPU_COUNT)
        }
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
        }

    def _make_gpu(self, node: int, index: int) -> EmulatedGpu:
        path = self.gpu_file(node, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        return EmulatedGpu.create(path, QUICK_GPU, gpu_uuid(node, index))

    # --- Files ----------------------------------------------------------------------------------------------

    def node_folder(self, node: int) -> Path:
        return self.folder / f"node{node}"

    def gpu_file(self, node: int, index: int) -> Path:
        return self.node_folder(node) / "gpus" / f"gpu-{index}"

    def socket(self, node: int) -> Path:
        return self.node_folder(node) / "agent.sock"

    def grants(self, node: int) -> dict[str, str]:
        """What is granted on a node now, by file."""
        return {path.name: path.read_text() for path in self.node_folder(node).glob("grants/[!.]*")}

    def hooks_log(self, node: int) -> str:
        """What prolog and epilog have said on a node."""
        return (self.node_folder(node) / "hooks.log").read_text()

    def _write_files(self, coordinator: str) -> None:
        controller_port, *ports = (free_port() for _ in range(1 + NODE_COUNT))
        nodes, gres = [], []
        host = socket.gethostname().partition(".")[0]
        for node, port in enumerate(ports):
            gpus = self.gpu_file(node, 0).parent
            devices = nvml_stub.environment(self._library, gpus)["PERSEUS_AGENT_DEVICE_FOLDER"]
            layout = f"NodeAddr=127.0.0.1 Port={port} CPUs={GPU_COUNT} Gres=gpu:{GPU_COUNT}"
            nodes.append(f"NodeName=node{node} NodeHostname={host} {layout}")
            gres.append(
                f"NodeName=node{node} Name=gpu File={self._make_devices(node)}/nvidia[0-{GPU_COUNT - 1}]"
            )
            (self.node_folder(node) / "spool").mkdir()
            self._write_agent_settings(node, coordinator, devices)
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(
            _SLURM_CONF.format(
                folder=self.folder,
                host=host,
                controller_port=controller_port,
                slurmd_timeout_s=_SLURMD_TIMEOUT_S,
                nodes="\n".join(nodes),
            )
        )
        (self.folder / "gres.conf").write_text("\n".join(gres) + "\n")
        self._write_script(
            "perseus", f'#!/bin/sh\nPYTHONPATH={REPOSITORY} exec {sys.executable} -m perseus.cli "$@"\n'
        )
        for name in ("prolog", "epilog"):
            hook = REPOSITORY / "deploy" / "slurm" / name
            self._write_script(
                name, _HOOK.format(library=self._library.parent, folder=self.folder, hook=hook)
            )

    def _make_devices(self, node: int) -> Path:
        """Device files as Slurm wants them, of what does nothing; their numbers are those of the GPUs'."""
        folder = self.node_folder(node) / "dev"
        folder.mkdir()
        for index in range(GPU_COUNT):
            os.mknod(folder / f"nvidia{index}", stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
        return folder

    def _write_agent_settings(self, node: int, coordinator: str, devices: str) -> None:
        folder = self.node_folder(node)
        settings = {
            "coordinator": coordinator,
            "tls_ca": self._security.ca,
            "tls_certificate": self._security.client_certificate,
            "tls_key": self._security.client_key,
            "token_file": self._security.agent_token_file,
            "socket": self.socket(node),
            "socket_mode": "0666",
            "grants": folder / "grants",
            "restore_folder": folder / "restore",
            "device_folder": devices,
            "log_format": "json",
        }
        lines = [f"{name} = {json.dumps(str(value))}" for name, value in settings.items()]
        (folder / "agent.toml").write_text("\n".join(lines) + "\n")

    def _write_script(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    # --- Daemons --------------------------------------------------------------------------------------------

    def __enter__(self) -> "SlurmCluster":
        with ExitStack() as stack:
            stack.push(self.__exit__)
            self._coordinator.start()
            self._security.admit_agents(self._coordinator.address)
            self._write_files(self._coordinator.address)
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            for node in range(NODE_COUNT):
                self.start_slurmd(node)
            self.until(lambda: all(self.node_state(n) == "IDLE" for n in range(NODE_COUNT)), "idle nodes")
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._processes:
            for node in range(NODE_COUNT):  # one that was killed, for what it has left
                if f"slurmd{node}" not in self._processes:
                    self.start_slurmd(node)
            for user in ("root", "nobody"):
                self.run("scancel", f"--user={user}")
            with suppress(ClusterError):
                self.until(lambda: not self.run("squeue", "--noheader"), "the end of all jobs")
        for node in range(NODE_COUNT):
            self.end_agent(node, signal.SIGTERM)
        end(*reversed(self._processes.values()), self._coordinator)
        for gpu in self._gpus.values():
            gpu.close()

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o755)
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        flags = [f"--{flag}={folder / name}" for flag, name in files.items()]
        self._start("munged", "munged", "--foreground", *flags)
        self.until((folder / "socket").exists, "munged")

    def start_slurmd(self, node: int) -> None:
        self._start(f"slurmd{node}", "slurmd", "-D", "-N", f"node{node}")

    def pids(self) -> list[int]:
        """Those of Slurm's daemons, that run."""
        return [process.pid for name, process in self._processes.items() if name.startswith("slurm")]

    def kill_slurmd(self, node: int) -> None:
        """SIGKILL: neither the tasks that it has started nor its epilog know of it."""
        self._processes.pop(f"slurmd{node}").kill()

    def end_agent(self, node: int, number: int) -> None:
        """Send a signal to a node's agent and its supervisor, if they run, and wait until they are gone."""
        pid = self._agent_pid(node)
        if pid is None:
            return
        supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(supervisor, number)
        if number == signal.SIGKILL:
            os.kill(pid, number)
        self.until(lambda: is_gone(pid), "the agent's end")

    def _agent_pid(self, node: int) -> int | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            try:
                line.connect(str(self.socket(node)))
            except OSError:
                return None
            credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    # --- Jobs -----------------------------------------------------------------------------------------------

    def submit_training(self) -> tuple[str, str]:
        """A batch job of four tasks: two pipelines of two stages. Its number with Slurm, its name with us."""
        self._job_count += 1
        job_id = f"trained-{self._job_count}"
        folder = self.folder / job_id
        folder.mkdir()
        tasks = rank_tasks(replace(_JOB, job_id=job_id), folder, self.socket, self.gpu_file)
        for number, task in enumerate(tasks):
            (folder / f"task-{number}.json").write_text(task.to_json())
        train = f'exec {sys.executable} -m perseus.demo.trainer "$(cat {folder}/task-$SLURM_PROCID.json)"'
        script = f"#!/bin/sh\nexport OMP_NUM_THREADS=1\nexec srun --kill-on-bad-exit=1 sh -c '{train}'\n"
        submitted = self.submit(
            script,
            *[f"--nodes={NODE_COUNT}", f"--ntasks={NODE_COUNT * GPU_COUNT}", f"--gres=gpu:{GPU_COUNT}"],
            *["--account=physics", f"--output={folder}/output"],
        )
        return submitted, job_id

    def stop_training(self, job_id: str) -> None:
        """Let the tasks finish their iteration and end."""
        (self.folder / job_id / STOP_FILE).touch()

    def submit(self, script: str, *flags: str) -> str:
        """A batch job; its number."""
        return self.run(
            "sbatch", "--parsable", "--no-requeue", "--chdir=/", "--output=/dev/null", *flags, script=script
        ).strip()

    def job_state(self, number: str) -> str:
        return self._field(self.run("scontrol", "--oneliner", "show", "job", number), "JobState")

    def node_state(self, node: int) -> str:
        return self._field(self.run("scontrol", "--oneliner", "show", "node", f"node{node}"), "State")

    @staticmethod
    def _field(text: str, name: str) -> str:
        return next((word.partition("=")[2] for word in text.split() if word.startswith(f"{name}=")), "")

    def ask(self, *command: str) -> str:
        """What a command of ours answers, asked of the coordinator."""
        environment = {
            **self.environment,
            **self._security.of_operator(),
            "PERSEUS_COORDINATOR": self._coordinator.address,
        }
        return subprocess.run(
            [sys.executable, "-m", "perseus.cli", *command],
            env=environment, capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
        ).stdout  # fmt: skip

    # --- GPUs -----------------------------------------------------------------------------------------------

    def locked(self) -> list[tuple[int, int]]:
        """The GPUs, (node, index), that are under a lock."""
        return [gpu for gpu in self._gpus if Locks.read(self.gpu_file(*gpu)) != NO_LOCKS]

    def is_at_stock(self) -> bool:
        """All GPUs unlocked, at their highest clock, and nothing left to restore."""
        records = [
            path for node in range(NODE_COUNT) for path in self.node_folder(node).glob("restore/*.json")
        ]
        clocks_mhz = {gpu.sm_clock_mhz() for gpu in self._gpus.values()}
        return not self.locked() and not records and clocks_mhz == {QUICK_GPU.highest_clock_mhz}

    def has_agent(self, node: int) -> bool:
        try:
            return ask_health(self.socket(node), 5.0).ok
        except OSError:
            return False

    # --- Processes ------------------------------------------------------------------------------------------

    def run(self, *command: str, script: str = "") -> str:
        """What a command of Slurm's says; "" if it fails."""
        done = subprocess.run(
            command,
            env=self.environment,
            input=script,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        return done.stdout if done.returncode == 0 else ""

    def _start(self, name: str, *command: str) -> None:
        process = Process(self.folder / f"{name}.log", environment=self.environment, program=command)
        self._processes[name] = process
        process.launch()

    def until(self, is_so: Callable[[], bool], what: str) -> float:
        """Wait; return the seconds that it took."""
        return until(is_so, what, state=self._state)

    def _state(self) -> str:
        slurms = [self.run("squeue", "--all"), self.run("sinfo", "--Node", "--long")]
        return "\n".join([*slurms, tails(self.folder)])


def gpu_uuid(node: int, index: int) -> str:
    """The GPU's identity."""
    return f"GPU-node{node}-{index}"


def missing() -> list[str]:
    """What of Slurm is not installed here."""
    return [name for name in DAEMONS if shutil.which(name) is None]
