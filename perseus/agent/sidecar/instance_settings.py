"""An inference engine's instance, in the agent's TOML file: `[instances.NAME]`."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from perseus.serving.stats import LatencyObjective, Objectives
from perseus.tls.address import host_and_port


class InstanceSettings(BaseModel):
    """One instance, its GPUs and objectives."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: tuple[str, ...] = Field(
        min_length=1, max_length=64, description="All its GPUs, by index or UUID; they hold one clock."
    )
    user: str = Field(
        min_length=1, max_length=256, description="User whose processes run on these GPUs, by name or number."
    )
    ttft: str = Field(description="Objective for the time to first token, such as p99 <= 2 s.")
    itl: str = Field(description="Objective for the inter-token latency, such as p95 <= 100 ms.")
    profile: Path = Field(description="CSV file with its measured steps, as docs/serving.md describes.")
    max_batched_tokens: int = Field(
        ge=1, le=10**7, description="Most tokens in a step (vLLM: --max-num-batched-tokens)."
    )
    kv_capacity_tokens: int = Field(
        ge=1, le=10**10, description="Tokens that its KV cache holds (vLLM logs the GPU KV cache size)."
    )
    metrics: str | None = Field(
        None, description="HOST:PORT of its /metrics; without it, vLLM's plug-in reports."
    )

    @field_validator("ttft", "itl")
    @classmethod
    def _is_objective(cls, text: str) -> str:
        LatencyObjective.parse(text)
        return text

    @field_validator("metrics")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None and host_and_port(address) is None:
            raise ValueError("expected HOST:PORT")
        return address

    @property
    def objectives(self) -> Objectives:
        """Both objectives."""
        return Objectives(LatencyObjective.parse(self.ttft), LatencyObjective.parse(self.itl))
