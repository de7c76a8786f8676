"""The images: built from `make dist` by a builder without a daemon, and run.

They are based on Debian's Python here, instead of that of the registry: as root, `make test-images`.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy/containers").glob("*.Containerfile"))
BASE = "docker.io/library/python:3.11-slim"

pytestmark = [
    pytest.mark.slow("makes a Debian, and builds images on it"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("buildah") or not [*(ROOT / "dist").glob("*.whl")],
        reason="needs `make test-images`, by root",
    ),
    pytest.mark.timeout(900),
]


def run(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return a container of each image, by the image's name; images and containers are gone afterwards."""
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        patch.setenv("STORAGE_DRIVER", "vfs")
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        packages = "--include=python3,python3-venv,ca-certificates"
        run("debootstrap", "--variant=minbase", packages, "bookworm", folder / "debian")
        base = run("buildah", "from", "scratch")
        run("buildah", "add", "--quiet", base, folder / "debian", "/")
        run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", base)
        run("buildah", "run", base, "--", "ln", "-s", "/usr/bin/python3", "/usr/local/bin/python")
        run("buildah", "commit", "--quiet", base, BASE)
        containers = {}
        for file in FILES:
            built = run("buildah", "bud", "--quiet", "--pull=never", "--file", file, ROOT)
            containers[file.stem] = run("buildah", "from", built)
        yield containers
        run("buildah", "rm", "--all")
        run("buildah", "rmi", "--all", "--force")


def test_the_agents_image_has_no_solver(images: dict[str, str]) -> None:
    inside = ("buildah", "run", images["agent"], "--")
    assert run(*inside, "/opt/perseus/bin/perseus", "--version").startswith("perseus ")
    has = "from importlib.util import find_spec; print(bool(find_spec('grpc')), bool(find_spec('igraph')))"
    assert run(*inside, "/opt/perseus/bin/python", "-c", has) == "True False"


def test_the_coordinators_image_serves_as_an_unprivileged_user(images: dict[str, str]) -> None:
    inside = ("buildah", "run", images["coordinator"], "--")
    assert run(*inside, "id", "--user") == "10001"
    script = (
        "cd /tmp; /opt/perseus/bin/perseus coordinator "
        "--listen 127.0.0.1:0 --insecure --log-format json 2>log & "
        "for i in $(seq 100); do sleep 0.2; "
        """address=$(sed -n 's/.*"address": "\\([^"]*\\)", "event": "listening".*/\\1/p' log); """
        'test -n "$address" && break; done; '
        "PERSEUS_COORDINATOR=$address /opt/perseus/bin/perseus health --timeout-s 10; kill $!; wait $!"
    )
    assert run(*inside, "sh", "-c", script) == "SERVING"
