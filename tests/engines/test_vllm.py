"""A real vLLM on CPUs, with a tiny model of random weights: it loads the plug-in, whose reports come, and its
metrics have the names that are read. `make test-serving`; skipped where vLLM is not installed."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from perseus.agent.link.packets import MAX_PACKET_BYTES, EngineHello, EngineReport, decode
from perseus.serving.scrape import EngineTotals, interval, parse_metrics
from tests.ports import free_port

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow("vLLM takes a minute to start"), pytest.mark.timeout(600)]

_START_S = 400.0
_WORDS = 254
_PROMPT_TOKENS, _GENERATED_TOKENS = 5, 200


def make_model(folder: Path) -> None:
    """Write a Llama of two layers, whose weights vLLM draws itself, and a tokenizer of 254 words."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": _WORDS + 2,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "bos_token_id": _WORDS, "eos_token_id": _WORDS + 1, "torch_dtype": "float32",
    }  # fmt: skip
    vocabulary = {f"w{index}": index for index in range(_WORDS)} | {"<unk>": _WORDS, "</s>": _WORDS + 1}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    for name, content in (
        ("config", config),
        ("tokenizer", tokenizer),
        ("tokenizer_config", of_tokenizer),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))


@dataclass
class Served:
    """A running vLLM, and the agent's end of its plug-in's connection."""

    url: str
    model: str
    agent: socket.socket

    def totals(self) -> EngineTotals:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return parse_metrics(answer.read().decode())

    def complete(self) -> None:
        asked = {
            "model": self.model,
            "prompt": " ".join(f"w{index}" for index in range(_PROMPT_TOKENS)),
            "max_tokens": _GENERATED_TOKENS,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == _GENERATED_TOKENS


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    make_model(folder)
    path, port = folder / "agent.sock", free_port()
    environment = {
        **os.environ,
        "PERSEUS_AGENT_SOCKET": str(path),
        "PERSEUS_INSTANCE": "tiny",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256",
        "--max-num-seqs", "8", "--enforce-eager", "--dtype", "float32",
    ]  # fmt: skip
    log = folder / "vllm.log"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(1.0)
        end_s = time.monotonic() + _START_S
        try:
            while True:
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end_s, log.read_text()[-4000:]
                try:
                    agent, _ = listener.accept()
                    break
                except TimeoutError:
                    continue
            url = f"http://127.0.0.1:{port}"
            while not _is_up(url):
                assert time.monotonic() < end_s, log.read_text()[-4000:]
                time.sleep(0.2)
            with agent:
                agent.settimeout(10.0)
                yield Served(url, str(folder), agent)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_the_package_brings_the_plug_in() -> None:
    (found,) = entry_points(group="vllm.stat_logger_plugins", name="perseus")
    assert found.value == "perseus.agent.vllm:StatLogger"


def test_the_plug_in_reports_what_vllm_counts_itself(served: Served) -> None:
    assert decode(served.agent.recv(MAX_PACKET_BYTES)) == EngineHello("tiny", 0)
    before = served.totals()
    client = threading.Thread(target=served.complete)
    client.start()
    reports: list[EngineReport] = []
    while client.is_alive() or reports[-1].step_count or reports[-1].running_count:
        report = decode(served.agent.recv(MAX_PACKET_BYTES))
        assert isinstance(report, EngineReport)
        reports.append(report)
    client.join()
    stats = interval(before, served.totals(), 1.0)
    assert stats is not None
    assert stats.contradiction is None
    busy = [each for each in reports if each.step_count]
    assert sum(each.prompt_tokens for each in busy) == stats.prompt_tokens == _PROMPT_TOKENS
    assert sum(each.generation_tokens for each in busy) == stats.generation_tokens == _GENERATED_TOKENS
    assert sum(each.step_count for each in busy) == stats.step_count
    assert sum(sum(each.itl.values()) for each in busy) == sum(each.count for each in stats.itl)
    assert sum(sum(each.ttft.values()) for each in busy) == sum(each.count for each in stats.ttft) == 1
    assert sum(each.itl_sum_s for each in busy) == pytest.approx(stats.itl_sum_s)
    assert max(each.running_count for each in reports) == 1
    assert max(each.kv_usage for each in reports) > 0
