"""Which GPUs of a node CUDA_VISIBLE_DEVICES leaves visible, by the rules of the CUDA programming guide."""

from collections.abc import Sequence


def visible_uuids(visible_devices: str, uuids: Sequence[str]) -> list[str]:
    """The UUIDs among `uuids` (in the order of their bus numbers) that `visible_devices` names, in its order.

    Devices are named by index or by a UUID's beginning that fits only one. The first name that is none hides
    itself and all after it, and so does -1; a device that is named twice hides all. An index counts in the
    order of bus numbers: with CUDA_DEVICE_ORDER=PCI_BUS_ID, and on nodes whose GPUs are of one model, that is
    CUDA's own order.
    """
    visible: list[str] = []
    for name in (part.strip() for part in visible_devices.split(",")):
        if name.isdecimal():
            named = list(uuids[int(name) : int(name) + 1])
        else:
            named = [uuid for uuid in uuids if name and uuid.startswith(name)]
        if len(named) != 1:
            break
        visible += named
    return visible if len(set(visible)) == len(visible) else []
