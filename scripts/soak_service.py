"""vLLM's server with akjax and more clients than it can run at once: they come, leave midway, and stay to the end.

What was served is compared, token by token, with what the engine makes of the same prompts without speculation.
"""

import asyncio
import re
import subprocess
import sys
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

from openai import APIError, AsyncOpenAI

import akjax
import akjax.scheduler
from akjax.fits.reading import read_log
from akjax.scheduler.settings import PREFIX
from akjax.state_file import decoded_state
from control_lines import LINES, put_line
from engine_process import serve, tokens_of
from measuring import SECONDS_BETWEEN_LINES, say, working
from tiny_pair.prompts import PROMPTS
from tiny_pair.server import MODEL, Server, serving

CLIENTS = 64
# Fewer than there are clients, in a cache that is too small for them, so that requests wait and are preempted.
MOST_RUNNING, BLOCKS = 48, 160
SPECULATION = {
    "num_speculative_tokens": 6,
    "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 8, 4], [9, 16, 2], [17, 32, 0], [33, MOST_RUNNING, 1]],
}
MOST_TOKENS = 128
END_OF_TEXT = 256
# For a machine that is busy with other things.
SECONDS_TO_START = 600
SECONDS_TO_END = 60
SECONDS_BETWEEN_CHANGES = 1.0
ARGUMENTS = (
    *("--max-model-len", "512", "--max-num-seqs", str(MOST_RUNNING)),
    *("--block-size", "32", "--num-gpu-blocks-override", str(BLOCKS)),
)
EVERY_PROMPT = [prompt for prompts in PROMPTS.values() for prompt in prompts]


@dataclass
class Asked:
    """A request, and what came of it.

    Attributes:
        prompt: of it.
        max_tokens: of its output.
        past_the_end: whether it goes on where the model ends its text.
        leaves_after: tokens after which its client leaves; None for a client that stays.
        tokens: that came.
        end: how it ended; None while it runs.
    """

    prompt: str
    max_tokens: int
    past_the_end: bool
    leaves_after: int | None
    tokens: list[int] = field(default_factory=list)
    end: Literal["completed", "left", "cut off"] | None = None

    async def run(self, api: AsyncOpenAI) -> None:
        """Asks, and takes the answer as it comes.

        Raises:
            APIError: the server refused it or broke off.
        """
        more = {"ignore_eos": self.past_the_end, "return_token_ids": True}
        stream = await api.completions.create(
            model=MODEL,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            temperature=0.0,
            stream=True,
            extra_body=more,
        )
        async with stream:
            if self.leaves_after == 0:
                self.end = "left"
                return
            async for chunk in stream:
                for choice in chunk.choices:
                    self.tokens += getattr(choice, "token_ids", None) or ()
                    if choice.finish_reason is not None:
                        self.end = "completed"
                if self.end is None and self.leaves_after is not None and len(self.tokens) >= self.leaves_after:
                    self.end = "left"
                    return

    def matches(self, without_speculation: Sequence[int]) -> bool:
        """Whether its tokens are those of the engine without speculation, and all of them if it completed."""
        expected = list(without_speculation[: self.max_tokens])
        if not self.past_the_end and END_OF_TEXT in expected:
            expected = expected[: expected.index(END_OF_TEXT) + 1]
        return self.tokens == (expected if self.end == "completed" else expected[: len(self.tokens)])


class Clients:
    """Keeps so many requests at the server at any time.

    Attributes:
        asked: all requests so far.
        ending: set once the server was told to end, from when on it may refuse and cut off.
    """

    def __init__(self, server: Server, seed: int) -> None:
        """Of `server`; what they ask follows from `seed`, whatever the server does."""
        self.asked: list[Asked] = []
        self.ending = False
        self._server, self._seed = server, seed

    @property
    def midway(self) -> int:
        """How many requests have had some of their output by now and wait for more."""
        return sum(asked.end is None and bool(asked.tokens) for asked in self.asked[-4 * CLIENTS :])

    async def run(self) -> None:
        """Returns when the server serves no more.

        Raises:
            APIError: it served no more before it was told to end.
        """
        # A process may be paused for minutes; no request is tried again.
        async with (
            AsyncOpenAI(base_url=f"{self._server.url}/v1", api_key="none", timeout=600.0, max_retries=0) as api,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(CLIENTS):
                clients.create_task(self._client(api, Random(f"{self._seed}/{number}")))

    async def _client(self, api: AsyncOpenAI, rng: Random) -> None:
        while not self.ending:
            max_tokens = rng.randint(1, MOST_TOKENS)
            asked = Asked(
                prompt=rng.choice(EVERY_PROMPT),
                max_tokens=max_tokens,
                past_the_end=rng.random() < 0.5,
                leaves_after=rng.randrange(max_tokens) if rng.random() < 1 / 3 else None,
            )
            self.asked.append(asked)
            error: Exception | None = None
            try:
                await asked.run(api)
            except APIError as broken:
                error = broken
            if asked.end is None:
                if not self.ending:
                    raise error or RuntimeError(f"an answer ended after {len(asked.tokens)} tokens, without a reason")
                asked.end = "cut off"


async def use(server: Server, control: Path, seconds: float, seed: int) -> tuple[list[Asked], dict[str, Any]]:
    """Loads the server for so long, then ends it while clients are at work; what was asked, and what happened.

    Raises:
        Exception: a client had an error before the end.
    """
    clients, rng = Clients(server, seed), Random(seed)
    work = asyncio.create_task(clients.run())
    changes = preemptions = 0
    began = said = time.monotonic()
    while (now := time.monotonic()) < began + seconds and not work.done():
        put_line(control, rng.choice(LINES))
        changes += 1
        if now > said + SECONDS_BETWEEN_LINES:
            said = now
            say(f"service: {now - began:.0f} of {seconds:.0f} s, {len(clients.asked):,} requests")
        await asyncio.wait([work], timeout=rng.uniform(0.5, 1.5) * SECONDS_BETWEEN_CHANGES)
    if not work.done():
        preemptions = await asyncio.to_thread(counted, server, "vllm:num_preemptions_total")
    while clients.midway < CLIENTS // 4 and not work.done():
        await asyncio.wait([work], timeout=0.02)
    served_for = time.monotonic() - began
    midway = clients.midway
    clients.ending = True
    with working("service: ending the server"):
        code = await asyncio.to_thread(server.stop, 5 * SECONDS_TO_END)
        await work
    ends = Counter(asked.end for asked in clients.asked)
    return clients.asked, {
        "requests": len(clients.asked),
        "completed": ends["completed"],
        "disconnected": ends["left"],
        "midway_at_the_end": midway,
        "cut_off": ends["cut off"],
        "tokens": sum(len(asked.tokens) for asked in clients.asked),
        "preemptions": preemptions,
        "control_changes": changes,
        "exit_code": code,
        "seconds": served_for,
    }


def counted(server: Server, name: str) -> int:
    """One of the counters that vLLM tells."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=600) as response:
        told = response.read().decode()
    return round(sum(float(number) for number in re.findall(rf"^{name}\{{.*\}} (\S+)$", told, re.MULTILINE)))


def compared(asked: Sequence[Asked]) -> dict[str, Any]:
    """How much of the output is what the engine makes of the prompts without speculation."""
    with working("service: the same prompts without speculation"):
        job = {"speculation": "none", "max_tokens": MOST_TOKENS, "phases": [{"prompts": EVERY_PROMPT}]}
        (served,) = serve(job)["phases"]
    expected = dict(zip(EVERY_PROMPT, tokens_of(served), strict=True))
    divergent = [one for one in asked if not one.matches(expected[one.prompt])]
    return {"compared": len(asked), "divergent": len(divergent), "first_divergent": [*map(vars, divergent[:3])]}


def logged(step_log: Path) -> dict[str, Any]:
    """What the step log holds, which our readers have to take whole."""
    log = read_log(f"{step_log}*")
    program = Path(sys.executable).with_name("akjax")
    command = [str(program), "convert", f"{step_log}*", str(step_log.with_suffix(".parquet"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if log.refused or done.returncode or not read_log(step_log.with_suffix(".parquet")).steps.equals(log.steps):
        raise RuntimeError(f"the step log is refused: {log.refused}, {done.stdout}{done.stderr}")
    forced = log.steps.filter(log.steps["forced"])["k"].unique().sort().to_list()
    return {"steps_logged": len(log.steps), "forced": forced, "k": log.steps["k"].unique().sort().to_list()}


def faults_in(log: str) -> Iterator[str]:
    """Lines of the server's log that tell of a fault: any until it is told to end, and then those of ours.

    A request that vLLM has not handed to its engine by then ends in an error of vLLM's own.
    """
    ours = ["adaptive k: fault", *akjax.__path__, *akjax.scheduler.__path__]
    until, _, after = log.partition("[shutdown]")
    for line in until.splitlines():
        if any(sign in line for sign in (*ours, "Traceback", "ERROR", "CRITICAL")):
            yield line
    for line in after.splitlines():
        if any(sign in line for sign in ours):
            yield line


def service(seconds: float, seed: int) -> dict[str, Any]:
    """The server under load for so long: what happened, and what went wrong, if anything did."""
    report: dict[str, Any] = {"fault": None}
    faults: list[str] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        control, step_log, state = folder / "control", folder / "steps.jsonl", folder / "state.json"
        try:
            with serving(
                folder, SPECULATION, ARGUMENTS, environment(control, step_log, state), seconds_to_end=SECONDS_TO_END
            ) as server:
                with working("service: starting the server"):
                    server.wait_until_ready(SECONDS_TO_START)
                asked, happened = asyncio.run(use(server, control, seconds, seed))
            report |= happened
            # What is there when all is over.
            faults += faults_in(server.log.read_text())
            report |= logged(step_log)
            report["taught"] = taught(state)
            report |= compared(asked)
        except Exception as error:
            faults.append("".join(traceback.format_exception(error)))
    return {"tiny pair": report | {"faults": len(faults), "fault": "\n".join(faults) or None}}


def taught(state: Path) -> dict[str, int]:
    """How many steps had taught each policy, as the state file has it."""
    policies = decoded_state(state.read_bytes()).policies
    return {name: round(policy.numbers["cost.taught"][0]) for name, policy in policies.items()}


def environment(control: Path, step_log: Path, state: Path) -> dict[str, str]:
    """Of the server: all of ours at work."""
    settings = {
        "control": str(control),
        "step_log": str(step_log),
        "state": str(state),
        "per_request": "1",
        "code_mode": "1",
        "model": "3.0,0.1,0.1",
    }
    return {"VLLM_LOGGING_LEVEL": "INFO", **{PREFIX + name.upper(): value for name, value in settings.items()}}
