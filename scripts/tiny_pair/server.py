"""vLLM's OpenAI server in a process of its own, serving the tiny pair."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAIR = Path(__file__).parent
MODEL = "tiny"


class Server:
    """A server that was started.

    Attributes:
        process: its own; vLLM's engine is a child of it.
        url: where it listens.
        log: what it and its engine print.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        """Made by `serving`."""
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, seconds: float = 180.0) -> None:
        """Returns once it takes requests.

        Raises:
            RuntimeError: it ended, or takes none after `seconds`; the message has the end of its log.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError("the server did not come up:\n" + self.log.read_text()[-4000:])

    def stop(self, seconds: float = 60.0) -> int:
        """Ends it as an operator does; its exit code.

        Raises:
            TimeoutExpired: it runs on after `seconds`.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=seconds)


@contextmanager
def serving(
    folder: Path,
    speculation: Mapping[str, Any],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = {},
    *,
    seconds_to_end: int = 10,
) -> Iterator[Server]:
    """A server that is starting, with akjax choosing k; whatever is left of it at the end is killed.

    Args:
        folder: for its log.
        speculation: vLLM's speculative config but for the draft model.
        arguments: more of the server's own.
        environment: what differs in it.
        seconds_to_end: that its requests are given when it is told to end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    command = [
        # The `vllm` command itself needs a distribution of that name, which the CPU build has not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(PAIR / "target"), "--served-model-name", MODEL, "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port)),
        # Without it vLLM kills its engine, which then can say no more.
        *("--shutdown-timeout", str(seconds_to_end), "--enforce-eager"),
        *("--speculative-config", json.dumps({"method": "draft_model", "model": str(PAIR / "draft"), **speculation})),
        *("--scheduler-cls", "akjax.scheduler.AdaptiveKScheduler"),
        *arguments,
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Server(process, port, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
