"""What plans are compared with, and a cluster to try them on: for offline studies, no running job uses it.

Built on :mod:`perseus.solver`, which never imports it.
"""

from perseus.solver.study.baselines import envpipe, zeus_global, zeus_per_stage
from perseus.solver.study.emulation import (
    EmulatedComputation,
    EmulatedIteration,
    EmulatedPipeline,
    Replicas,
    emulate,
)

__all__ = [
    "EmulatedComputation",
    "EmulatedIteration",
    "EmulatedPipeline",
    "Replicas",
    "emulate",
    "envpipe",
    "zeus_global",
    "zeus_per_stage",
]
