"""The sidecar on a GPU node and the probe in the training process: a folder per process, and what they share.

    torch, megatron, deepspeed, torchtitan
                                training process: the hooks into frameworks, one line each
    probe                       training process: the probe, marks at the device's time
    link                        both: the local protocol, where the two sides meet
    sidecar                     agent process: the shell, the local socket, threads around a GPU, settings
    rank, clocks, energy        agent process, pure: a rank's session; when to set clocks; watts from counters
    stream                      agent process: the gRPC stream to the coordinator
    restore                     agent process and its supervisor: records, bringing GPUs back
    gpu                         agent process: GPUs, through NVML; what is asked of them is in `perseus.gpu`

Here is what a trainer needs, and it is standard library only. `Probe` marks at the host's time, which under
CUDA is that of the launches; the hooks mark at the device's (`probe.torch_marks`). Of the agent's rooms
`clocks` and `energy` know no other but `gpu`, `rank` knows these and `link`, `stream` knows `rank`, `restore`
knows `gpu`, and `sidecar` knows all.
"""

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import NamedSchedule

__all__ = ["Computation", "Kind", "NamedSchedule", "Probe"]
