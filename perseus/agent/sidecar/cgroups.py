"""In which cgroups a process is that can deny it a device, and where these are as folders.

Devices are denied by the controller `devices` of cgroup v1 and by programs on cgroups of v2; a node may have
both. Pure but for `of_process` and `mounts`.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_V2 = "cgroup2"
_V1_CONTROLLER = "devices"


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted hierarchy: `root` is what of it is mounted at `folder`."""

    is_v2: bool
    root: PurePosixPath
    folder: Path


def parse_mounts(mountinfo: str) -> list[Mount]:
    """The hierarchies that can deny devices, by /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_v2 = kinds[0] == _V2
        if is_v2 or (kinds[0] == "cgroup" and _V1_CONTROLLER in kinds[2].split(",")):
            found.append(Mount(is_v2, PurePosixPath(fields[3]), Path(fields[4])))
    return found


def parse_memberships(cgroup: str) -> dict[bool, PurePosixPath]:
    """The cgroups of a process in these hierarchies (`is_v2` → path), by /proc/PID/cgroup."""
    found = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found[True] = PurePosixPath(path)
        elif _V1_CONTROLLER in controllers.split(","):
            found[False] = PurePosixPath(path)
    return found


def to_enter(
    mounts: list[Mount], own: dict[bool, PurePosixPath], others: dict[bool, PurePosixPath]
) -> list[Path] | None:
    """The cgroups that a process must enter to be where another one is; None if one is out of reach."""
    folders = []
    for is_v2, path in others.items():
        if own.get(is_v2) == path:
            continue
        folder = next(
            (mount.folder / inside for mount in mounts if (inside := _inside(mount, is_v2, path))), None
        )
        if folder is None:
            return None
        folders.append(folder)
    return folders


def _inside(mount: Mount, is_v2: bool, path: PurePosixPath) -> PurePosixPath | None:
    if mount.is_v2 != is_v2 or not path.is_relative_to(mount.root):
        return None
    inside = path.relative_to(mount.root)
    # What is outside of the agent's own cgroup namespace begins with "/..".
    return None if ".." in inside.parts else inside


def of_process(pid: int | str) -> dict[bool, PurePosixPath]:
    """The cgroups of a process. OSError if there is none."""
    return parse_memberships(Path(f"/proc/{pid}/cgroup").read_text())


def mounts() -> list[Mount]:
    """The hierarchies that the agent has at hand."""
    return parse_mounts(Path("/proc/self/mountinfo").read_text())
