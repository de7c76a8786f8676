"""The published measurements of inference engines."""

import csv

from benchmarks.harness import DATA
from perseus.serving.model import MeasuredStep

PROFILES = {
    "Qwen2.5-14B, A100 PCIe": "batches-qwen2.5-14b-a100-pcie-tp1.csv",
    "Qwen2.5-32B (one of two stages), 2 × A100 SXM": "batches-qwen2.5-32b-a100-sxm-tp2-pp2.csv",
}


def measured_steps(name: str) -> list[MeasuredStep]:
    """Return the measured steps of one of PROFILES.

    Its column `decode_tokens` is 60 throughout, also in batches of one token: prompts' and decoding tokens
    can't be distinguished, so all count as tokens of prompts.
    """
    with (DATA / "serving" / PROFILES[name]).open(encoding="utf-8", newline="") as file:
        return [
            MeasuredStep(
                clock_mhz=int(row["clock"]),
                prefill_tokens=float(row["batch_size"]),
                decoding_count=0.0,
                context_tokens=float(row["total_ctx_len"]),
                time_s=float(row["time_taken"]),
                energy_j=float(row["energy_consumption"]) / 1e3,
            )
            for row in csv.DictReader(file)
            if row["valid"] == "1"
        ]
