"""Lets a process hang on a signal; imported by every Python that has this folder in PYTHONPATH."""

import ctypes
import signal
import time
from types import FrameType

_HANG_S = 300


def _hold_gil(_number: int, _frame: FrameType | None) -> None:
    ctypes.PyDLL(None).sleep(_HANG_S)


def _hang(_number: int, _frame: FrameType | None) -> None:
    time.sleep(_HANG_S)


signal.signal(signal.SIGUSR1, _hold_gil)
signal.signal(signal.SIGUSR2, _hang)
