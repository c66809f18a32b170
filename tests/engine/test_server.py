"""vLLM's OpenAI server with the scheduler switched on by the command line alone."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_pair.server import MODEL, Server, serving

pytestmark = pytest.mark.engine

SPECULATION = {"num_speculative_tokens": 6, "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 4, 3]]}


def complete(server: Server, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


@pytest.fixture(params=["fork", "spawn"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose engine is a process that was made in either way."""
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": request.param, "VLLM_ADAPTIVE_K_MODEL": "3.0,0.1,0.1"}
    with serving(tmp_path, SPECULATION, ("--max-model-len", "512", "--max-num-seqs", "4"), environment) as started:
        yield started


def test_the_servers_log_shows_what_the_scheduler_does(server: Server) -> None:
    server.wait_until_ready()
    assert len(complete(server, "```python\ndef main():\n")) > 0
    server.stop()
    log = server.log.read_text()
    assert "adaptive k: chooses k from 3, 6 (K=6); cost model: base 3 ms" in log
    assert "adaptive k: fault" not in log
    shown = [line for line in log.splitlines() if "adaptive k: cost model" in line]
    assert shown, "what was learned is logged when the server ends"
