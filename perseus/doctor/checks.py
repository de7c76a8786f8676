"""What was looked at, found, and is to be done about it; and the rules that need nothing but figures."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from perseus.tls.files import EXPIRY_WARNING_S

MAX_SKEW_S = 1.0
"""Between two clocks that are kept by NTP, whatever the network adds being known."""

BAD_SKEW_S = 60.0
"""Certificates and budgets begin and end at other times then."""


class Verdict(enum.Enum):
    """What a check comes to."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        subject: what, in few words.
        verdict: what it comes to.
        found: what was found, in one sentence.
        advice: what to do; empty where nothing is.
    """

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def clock_check(sent_s: float, reported_s: float, received_s: float) -> Check:
    """Compare this machine's clock with a coordinator's: when it was asked, what it told, when that came."""
    late_s = reported_s - (sent_s + received_s) / 2
    skew_s = max(0.0, abs(late_s) - (received_s - sent_s) / 2)  # what the way may have taken is no skew
    subject = "clocks"
    if skew_s <= MAX_SKEW_S:
        return Check(subject, Verdict.GOOD, "this machine and the coordinator agree on the time")
    found = f"the coordinator's clock is {'ahead' if late_s > 0 else 'behind'} by {skew_s:.1f} s"
    verdict = Verdict.WARNING if skew_s <= BAD_SKEW_S else Verdict.BAD
    return Check(subject, verdict, found, "keep both by NTP (chronyc tracking, timedatectl)")


def version_check(ours: str, theirs: str) -> Check:
    """Compare this release with a coordinator's: neighbouring ones understand each other, as is promised."""
    subject = "versions"
    if ours == theirs:
        return Check(subject, Verdict.GOOD, f"both sides are perseus {ours}")
    return Check(
        subject,
        Verdict.WARNING,
        f"this is perseus {ours}, the coordinator {theirs}",
        "bring both to the same release: first the coordinator, then the agents",
    )


def expiry_checks(expiries_s: Mapping[str, float], now_s: float) -> list[Check]:
    """Look at how long certificates still last; `expiries_s` by file, Unix times."""
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


_RENEW = "renew it in place: running processes take the new one (perseus certificates server or client)"
