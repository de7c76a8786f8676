"""The sidecar on a GPU node: clocks, energy, the local socket; and the probe in the training process.

What is imported here is what a trainer needs, and it is standard library only.
"""

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.client import NamedSchedule, Probe

__all__ = ["Computation", "Kind", "NamedSchedule", "Probe"]
