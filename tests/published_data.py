"""Location of the published measurements: beside the checkout, not in it."""

from pathlib import Path

PUBLISHED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
