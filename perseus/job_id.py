"""The rules for job identifiers and slots, which training, agents, coordinators and simulation share."""

import re
import zlib

JOB_ID_RULE = "1 to 63 of a–z, A–Z, 0–9, '-', '_' and '.', beginning with a letter or digit"
"""For error messages. Identifiers that differ in case are different jobs."""

MAX_SLOT_COUNT = 1024
"""More slots than any fleet has: callers look at no more of them, whatever a coordinator claims."""

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def is_job_id(text: str) -> bool:
    """Return whether a text is a valid job identifier."""
    return _JOB_ID.fullmatch(text) is not None


def slot_of(job_id: str, slot_count: int) -> int:
    """Return which slot of a fleet's jobs a job belongs to, from 0 (`Welcome.slot_count`)."""
    return zlib.crc32(job_id.encode()) % slot_count
