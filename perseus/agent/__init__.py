"""The sidecar on a GPU node and the probe in the training process: one package per process, and shared ones.

    torch, megatron, deepspeed, torchtitan, transformers, lightning
                                training process: the hooks into frameworks, one line each
    probe                       training process: the probe, marks at the device's time
    link                        both: the local protocol, where the two sides meet
    sidecar                     agent process: the shell, the local socket, threads around a GPU, settings
    rank, clocks, energy        agent process, pure: a rank's session; when to set clocks; watts from counters
    stream                      agent process: the gRPC stream to the coordinator
    restore                     agent process and its supervisor: records, bringing GPUs back
    gpu                         agent process: GPUs, through NVML; their interface is in `perseus.gpu`

This package exports what a trainer needs, with the standard library only. `Probe` marks at host time, which
under CUDA is the time of the launches; the hooks mark at device time (`probe.torch_marks`). Among the agent's
packages, `clocks` and `energy` import only `gpu`, `rank` imports these and `link`, `stream` imports `rank`,
`restore` imports `gpu`, and `sidecar` imports all.
"""

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import NamedSchedule

__all__ = ["Computation", "Kind", "NamedSchedule", "Probe"]
