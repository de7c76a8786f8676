from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def restore_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Agents that a test starts keep their records here, and not where this machine's agents do."""
    folder = tmp_path / "restore"
    monkeypatch.setenv("PERSEUS_AGENT_RESTORE_FOLDER", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder
