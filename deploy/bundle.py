"""Pack the offline bundle: `python deploy/bundle.py DIST`, called by `make dist`.

DIST contains the wheel of Perseus, its bill of materials, and all wheels in `wheels`. The output is beside
them: `perseus-energy-VERSION-PYTHON-PLATFORM.tar.gz`, a folder of that name with the wheels, the licences
that they bring, the bill, `install` and the rest of deploy/. The same wheels make the same file: entries are
sorted, owned by root and undated.
"""

import gzip
import io
import re
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_DEPLOY = Path(__file__).parent
_LICENCE = re.compile(
    r"([^/]+)\.dist-info/(?:licenses/)?((?:.*/)?(?:licen[cs]e|copying|notice|authors)[^/]*)", re.I
)
_NOT_SHIPPED = {"bundle.py", "__pycache__"}


def pack(dist: Path) -> Path:
    """Pack the bundle, and return its path. ValueError unless DIST contains exactly one wheel of Perseus."""
    found = [*dist.glob("perseus_energy-*.whl")]
    if len(found) != 1:
        raise ValueError(f"{dist}: expected one wheel of Perseus, found {len(found)}")
    version = found[0].name.split("-")[1]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"perseus-energy-{version}-{python}-{sysconfig.get_platform().replace('-', '_')}"
    wheels = sorted((dist / "wheels").glob("*.whl"))
    files = {path: f"wheels/{path.name}" for path in wheels}
    files |= {
        dist / "perseus-energy.cdx.json": "perseus-energy.cdx.json",
        _DEPLOY.parent / "NOTICE": "NOTICE",
    }
    for path in _DEPLOY.rglob("*"):
        inside = path.relative_to(_DEPLOY)
        if path.is_file() and not _NOT_SHIPPED & set(inside.parts):
            files[path] = str(inside)
    bundle = dist / f"{name}.tar.gz"
    with (
        bundle.open("wb") as output,
        gzip.GzipFile("", "wb", fileobj=output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path, place in sorted(files.items(), key=lambda each: each[1]):
            archive.add(path, f"{name}/{place}", filter=_without_traces)
        for licence, text in licences(wheels):
            entry = tarfile.TarInfo(f"{name}/{licence}")
            entry.size = len(text)
            archive.addfile(_without_traces(entry), io.BytesIO(text))
    return bundle


def licences(wheels: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield (path in the bundle, text) of the licences that wheels bring."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            for inside in sorted(opened.namelist()):
                if found := _LICENCE.fullmatch(inside):
                    yield f"licences/{found[1]}/{found[2]}", opened.read(inside)


def _without_traces(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
