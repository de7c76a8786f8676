"""Checks with their findings and advice, and the rules that need only figures."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from perseus.clock_skew import MAX_SKEW_S, clock_ahead_s
from perseus.tls.files import EXPIRY_WARNING_S

BAD_SKEW_S = 60.0
"""Skew beyond which certificates and budgets begin and end at noticeably different times."""


class Verdict(enum.Enum):
    """The verdict of a check."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        subject: what was checked, in few words.
        verdict: the result.
        found: the finding, in one sentence.
        advice: what to do; empty if there is nothing to do.
    """

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def clock_check(sent_s: float, reported_s: float, received_s: float) -> Check:
    """Compare this machine's clock, at the request and the response, with the coordinator's reported one."""
    ahead_s = clock_ahead_s(sent_s, reported_s, received_s)
    skew_s = abs(ahead_s)
    subject = "clocks"
    if skew_s <= MAX_SKEW_S:
        return Check(subject, Verdict.GOOD, "this machine and the coordinator agree on the time")
    found = f"the coordinator's clock is {'ahead' if ahead_s > 0 else 'behind'} by {skew_s:.1f} s"
    verdict = Verdict.WARNING if skew_s <= BAD_SKEW_S else Verdict.BAD
    return Check(subject, verdict, found, "keep both by NTP (chronyc tracking, timedatectl)")


def version_check(ours: str, theirs: str) -> Check:
    """Compare this release with a coordinator's: neighbouring releases work together (docs/versions.md)."""
    subject = "versions"
    if ours == theirs:
        return Check(subject, Verdict.GOOD, f"both sides are perseus {ours}")
    if ours.partition("+")[0] == theirs.partition("+")[0]:
        return Check(
            subject, Verdict.GOOD, f"this is perseus {ours}, the coordinator another build, {theirs}"
        )
    return Check(
        subject,
        Verdict.WARNING,
        f"this is perseus {ours}, the coordinator {theirs}",
        "bring both to the same release: first the coordinator, then the agents",
    )


def expiry_checks(expiries_s: Mapping[str, float], now_s: float) -> list[Check]:
    """Check how long certificates still last; `expiries_s` by file, Unix times."""
    checks = []
    for file, expiry_s in sorted(expiries_s.items()):
        left_d = (expiry_s - now_s) / 86400
        subject = f"certificate {file}"
        if left_d <= 0:
            checks.append(Check(subject, Verdict.BAD, "it has expired", _RENEW))
        elif expiry_s - now_s < EXPIRY_WARNING_S:
            checks.append(Check(subject, Verdict.WARNING, f"it expires in {left_d:.1f} days", _RENEW))
        else:
            checks.append(Check(subject, Verdict.GOOD, f"it lasts for {left_d:.0f} days"))
    return checks


_RENEW = "renew it in place: running processes pick it up (perseus certificates server or client)"
