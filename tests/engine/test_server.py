"""vLLM's OpenAI server with the scheduler switched on by the command line alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

PAIR = Path(__file__).parents[2] / "scripts" / "tiny_pair"
READY_SECONDS = 180
SPECULATION = {
    "method": "draft_model",
    "model": str(PAIR / "draft"),
    "num_speculative_tokens": 6,
    "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 4, 3]],
}


class Server:
    """A running server: where it listens, and where its log is."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError("the server did not come up:\n" + self.log.read_text()[-4000:])

    def complete(self, prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["text"]

    def stop(self) -> str:
        """Ends the server as an operator does; the whole log."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        return self.log.read_text()


@pytest.fixture(params=["fork", "spawn"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose engine is a process that was made in either way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path / "log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(PAIR / "target"), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        # Without it vLLM kills its engine, which then can say no more.
        *("--shutdown-timeout", "10"),
        *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--speculative-config", json.dumps(SPECULATION)),
        *("--scheduler-cls", "akjax.scheduler.AdaptiveKScheduler"),
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": request.param,
        "VLLM_ADAPTIVE_K_MODEL": "3.0,0.1,0.1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Server(process, port, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def test_the_servers_log_shows_what_the_scheduler_does(server: Server) -> None:
    server.wait_until_ready()
    assert len(server.complete("```python\ndef main():\n")) > 0
    log = server.stop()
    assert "adaptive k: chooses k from 3, 6 (K=6); cost model: base 3 ms" in log
    assert "adaptive k: fault" not in log
    shown = [line for line in log.splitlines() if "adaptive k: cost model" in line]
    assert shown, "what was learned is logged when the server ends"
