"""What the agent's self-test says of a GPU: whether it can be used, and what others set that bounds it."""

from perseus.agent.sidecar.self_test import GpuFindings
from tests.gpu.report import Finding, judged

_SHOWN = {
    "power_limit_w": "power limit, W",
    "workload_power_profiles": "workload power profiles",
    "clock_events": "clock event reasons, now",
}
"""What there is nothing to be expected of, by its name in the self-test."""


def self_test_findings(found: GpuFindings) -> list[Finding]:
    """The verdict, what bounds the GPU, and what could not be answered."""
    text = "usable" if found.is_usable else "not usable"
    answered = {each.name: each.value for each in found.findings if not each.problem}
    return [
        judged("self-test", text, "usable", found.is_usable),
        *(Finding(shown, _text(answered[name])) for name, shown in _SHOWN.items() if name in answered),
        *(
            Finding("self-test, reported", f"{each.name}: {each.problem}")
            for each in found.findings
            if each.problem
        ),
    ]


def _text(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
