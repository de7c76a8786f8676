"""A stand-in for libnvidia-ml.so.1: NVML over emulated GPUs, for machines without an NVIDIA GPU.

The demo (`perseus demo --nvml stub`) and the tests use it. The library is one C file, compiled with the
system's compiler; `nvml_stub.c` describes its behaviour and its controls. The loader finds it by its name
through LD_LIBRARY_PATH, so the agent and pynvml run on it unmodified.

    Exception
     └─ StubError     no compiler, or the compiler fails
"""

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SOURCE = Path(__file__).with_name("nvml_stub.c")
LIBRARY_NAME = "libnvidia-ml.so.1"
_LOCKS = struct.Struct("=4i")


class StubError(Exception):
    """The library can't be built."""


@dataclass(frozen=True, slots=True)
class Locks:
    """A GPU's locks as requested through NVML: (lowest, highest) clock in MHz, (0, 0) for none."""

    graphics_mhz: tuple[int, int]
    memory_mhz: tuple[int, int]

    @classmethod
    def read(cls, gpu_file: Path) -> Self:
        """Return the locks of a file's emulated GPU; none if the library was never used on it."""
        path = gpu_file.with_name(f".{gpu_file.name}.locks")
        content = path.read_bytes() if path.exists() else b""
        if len(content) != _LOCKS.size:  # created, but not yet filled
            return cls((0, 0), (0, 0))
        lowest_mhz, highest_mhz, memory_lowest_mhz, memory_highest_mhz = _LOCKS.unpack(content)
        return cls((lowest_mhz, highest_mhz), (memory_lowest_mhz, memory_highest_mhz))


NO_LOCKS = Locks((0, 0), (0, 0))


def compiler() -> str | None:
    """Return the system's C compiler; None if there is none."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path) -> Path:
    """Compile the library into `folder`, for `environment`; return its path. StubError if that fails."""
    command = compiler()
    if command is None:
        raise StubError("expected a C compiler (cc, gcc or clang, or its name in CC), found none")
    library = folder / LIBRARY_NAME
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
    done = subprocess.run(
        [command, *flags, f"-Wl,-soname,{LIBRARY_NAME}", "-o", str(library), str(_SOURCE), "-lm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise StubError(f"{_SOURCE.name}: {command} failed: {done.stderr.strip()}")
    return library


def environment(library: Path, gpu_folder: Path) -> dict[str, str]:
    """Return the environment in which a process sees a folder's emulated GPUs through NVML."""
    inherited = os.environ.get("LD_LIBRARY_PATH", "")
    folders = [str(library.parent), *([inherited] if inherited else [])]
    return {
        "LD_LIBRARY_PATH": ":".join(folders),
        "PERSEUS_NVML_STUB": str(gpu_folder),
        "PERSEUS_AGENT_DEVICE_FOLDER": str(_device_nodes(gpu_folder)),
    }


def _device_nodes(gpu_folder: Path) -> Path:
    """Make a folder of links nvidia0, nvidia1 … to the emulated GPUs' files, whose permissions apply."""
    nodes = gpu_folder / ".dev"
    if not gpu_folder.exists():
        return nodes
    nodes.mkdir(exist_ok=True)
    for minor, path in enumerate(sorted(gpu_folder.glob("[!.]*"))):
        node = nodes / f"nvidia{minor}"
        if not node.is_symlink():
            node.symlink_to(path.resolve())
    return nodes


def instruct(gpu_folder: Path, instructions: Iterable[str]) -> None:
    """Give the library new instructions, in every process that uses it on these GPUs."""
    draft = gpu_folder / ".nvml-draft"
    draft.write_text("".join(f"{instruction}\n" for instruction in instructions))
    # The library detects a new text by its modification time, which the kernel advances only every few ms.
    now_ns = time.time_ns()
    os.utime(draft, ns=(now_ns, now_ns))
    draft.replace(gpu_folder / ".nvml")
