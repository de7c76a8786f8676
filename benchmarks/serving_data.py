"""The published measurements of inference engines, and requests for replays."""

import csv
from datetime import datetime

import numpy as np

from benchmarks.harness import DATA
from perseus.serving.engine import Request
from perseus.serving.model import MeasuredStep, ProfileKey

QWEN_14B = ProfileKey("Qwen2.5-14B", "A100 PCIe 80 GB", 1, 1, "as published by BEAM")
QWEN_32B_STAGE = ProfileKey("Qwen2.5-32B, one stage", "A100 SXM", 2, 2, "as published by BEAM")
PROFILES = {
    QWEN_14B: "batches-qwen2.5-14b-a100-pcie-tp1.csv",
    QWEN_32B_STAGE: "batches-qwen2.5-32b-a100-sxm-tp2-pp2.csv",
}
HOURS = {"conversations": "requests-m-small-08h.csv", "code": "requests-azure-2023-code.csv"}
HOUR_S = 3600.0
_SHIFT_S = 30.0
"""Repeated requests come up to half a minute before or after the original: the hour keeps its minutes."""


def measured_steps(profile: ProfileKey) -> list[MeasuredStep]:
    """Return the measured steps of one of PROFILES.

    Its column `decode_tokens` is 60 throughout, also in batches of one token: prompts' and decoding tokens
    can't be distinguished, so all count as tokens of prompts.
    """
    with (DATA / "serving" / PROFILES[profile]).open(encoding="utf-8", newline="") as file:
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


def requests(name: str, factor: float, length_s: float = HOUR_S) -> list[Request]:
    """Return the requests of one of HOURS at `factor` times their rate: dropped or repeated at random."""
    generator = np.random.default_rng(1)
    found = []
    with (DATA / "serving" / HOURS[name]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times_s = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    for row, time_s in zip(rows, times_s, strict=True):
        count = int(factor) + int(generator.random() < factor % 1)
        for copy in range(count):
            shift_s = generator.uniform(-_SHIFT_S, _SHIFT_S) if copy else 0.0
            arrival_s = abs(time_s - times_s[0] + shift_s)
            if arrival_s < length_s:
                tokens = (max(1, round(float(row[c]))) for c in ("ContextTokens", "GeneratedTokens"))
                found.append(Request(arrival_s, *tokens))
    return sorted(found, key=lambda request: request.arrival_s)
