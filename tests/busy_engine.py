"""An engine that all sorts of requests come to, the same for tests that choose them and for long runs at random."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from vllm.v1.core.sched.interface import PauseState

from akjax.scheduler import AdaptiveKScheduler
from control_lines import put_line
from harness import Clock, FakeEngine, Turn, make_config
from invariants import Invariants

DRAFT_LIMIT = 6
# The tokens of a few prompts, so that many begin alike.
PREFIXES = [[10 * number + place % 7 for place in range(200)] for number in range(4)]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How an engine serves.

    Attributes:
        requests: that run at once, at most.
        settings: of the scheduler; code mode, a control file and a step log are on in any case.
        schedule: whether there is a dynamic schedule.
        asynchronous: whether a step is scheduled before the output of the one before has come.
        v2: vLLM's second model runner.
        prefixes: whether prompts that begin alike are computed once.
        blocks: of 16 tokens in the KV cache, for each request that can run; None for enough, so that none is preempted.
        sessions: whether there are requests that go on with more of their prompt. vLLM loses those that end while they
            are preempted, and counts their tokens right with async scheduling alone.
        most_tokens: of a step.
        drafter_gives: of the drafts that it is asked for, the part that the drafter gives at least.
    """

    requests: int = 8
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: bool = True
    asynchronous: bool = True
    v2: bool = True
    prefixes: bool = False
    blocks: float | None = None
    sessions: bool = False
    most_tokens: int = 256
    drafter_gives: float = 1.0


class BusyEngine:
    """Actions on an engine; `step` asserts the invariants after each of its turns.

    Attributes:
        engine: that it is.
        counts: of what happened, by name.
        sound: whether every turn so far ended as it should.
    """

    def __init__(self, serving: Serving, folder: Path, seed: int, clock: Clock) -> None:
        """Made inside `serving_in`."""
        self.serving = serving
        self.control = folder / "control"
        self.step_log = folder / "steps.jsonl"
        self.counts = dict.fromkeys(
            ("steps", "requests", "preemptions", "aborts", "cuts", "failed_loads", "resumed"), 0
        )
        self.sound = True
        self._rng = Random(seed)
        self._spent: list[str] = []
        self._named = 0
        settings = {
            "control": str(self.control),
            "step_log": str(self.step_log),
            "step_log_mb": 64,
            "code_mode": "1",
            **serving.settings,
        }
        most = serving.requests
        schedule = [(1, 1, 6), (2, 2, 4), (3, 3, 2), (4, 4, 0), (5, most, 1)][: min(most, 5)]
        config = make_config(
            num_speculative_tokens=DRAFT_LIMIT,
            schedule=schedule if serving.schedule else None,
            async_scheduling=serving.asynchronous,
            max_num_seqs=most,
            max_num_batched_tokens=max(serving.most_tokens, 2 * most),
            max_model_len=256,
            enable_prefix_caching=serving.prefixes,
            tokenizer=str(Path(__file__).parents[1] / "scripts/tiny_pair/target"),
            additional_config={"adaptive_k": settings},
        )
        least = -(-(256 + DRAFT_LIMIT) // 16) + 1
        self.engine = FakeEngine(
            AdaptiveKScheduler,
            config,
            accept=self._accepted,
            drafts_given=self._drafts_given,
            allows=lambda request_id, proposed: self._rng.randint(0, proposed),
            seed=seed,
            num_blocks=None if serving.blocks is None else max(round(serving.blocks * most), least),
            clock=clock,
            step_ms=self._step_ms,
            log_stats=True,
            v2_model_runner=serving.v2,
        )
        # With a step in flight nothing can be computed again.
        self.engine.scheduler.recompute_kv_load_failures = not serving.asynchronous
        assert isinstance(self.engine.scheduler, AdaptiveKScheduler)
        self.invariants = Invariants(self.engine.scheduler, self.engine.world.token)

    @property
    def living(self) -> list[str]:
        """The requests that have not ended."""
        return list(self.engine.scheduler.requests)

    def join(
        self,
        prompt: int,
        max_tokens: int,
        *,
        prefix: int | None = None,
        structured: bool = False,
        stops: int = 0,
        session: bool = False,
        again: bool = False,
    ) -> str:
        """A request comes.

        Args:
            prompt: its tokens, 1 to 199.
            max_tokens: of its output.
            prefix: which of `PREFIXES` the prompt is the beginning of; None for a prompt of its own.
            structured: whether a grammar cuts its drafts.
            stops: how many of the 512 tokens end it.
            session: whether it waits for more at its end, where there are sessions.
            again: whether it takes the id of one that is gone.
        """
        request_id = self._spent.pop() if again and self._spent else f"request-{self._named}"
        self._named += request_id == f"request-{self._named}"
        self.engine.add(
            prompt if prefix is None else PREFIXES[prefix][:prompt],
            max_tokens,
            request_id,
            structured=structured,
            session=session and self.serving.sessions,
            stop_token_ids=list(range(100, 100 + stops)),
        )
        self.invariants.begin(request_id)
        self.counts["requests"] += 1
        return request_id

    def leave(self, request_id: str, *, late: bool = False) -> None:
        """A request's client leaves; `late`, while the engine waits for the model."""
        self.engine.abort(request_id, late=late)
        self.counts["aborts"] += 1

    def resume(self, request_id: str, prompt: int, max_tokens: int) -> None:
        """A session that waits gets more of its prompt, or ends where there is no room."""
        if self.engine.requests[request_id].num_tokens + prompt >= 256:
            self.leave(request_id)
            return
        self.engine.resume(request_id, prompt, max_tokens)
        self.invariants.begin(request_id)
        self.counts["resumed"] += 1

    def fail_load(self, request_id: str) -> None:
        """A request's cached prompt turns out not to be there, if it has any by now."""
        if self.engine.scheduler.requests[request_id] in self.engine.scheduler.running:
            self.engine.fail_load(request_id)
            self.counts["failed_loads"] += 1

    def reset_cache(self) -> None:
        """All that run are preempted at once, and computed anew."""
        if not self.serving.sessions:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def pause(self, state: PauseState) -> None:
        """vLLM is paused, or goes on."""
        self.engine.scheduler.set_pause_state(state)

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.engine.clock.now += seconds

    def say(self, line: bytes | None) -> None:
        """Writes the control file; None removes it."""
        put_line(self.control, line)

    def step(self) -> Turn:
        """One turn of the engine's loop, after which all of the invariants hold."""
        self.sound = False
        turn = self.engine.step()
        self.invariants.after(turn)
        self.sound = True
        self.counts["steps"] += turn.delivered is not None and bool(turn.delivered.num_scheduled_tokens)
        if turn.scheduled is not None:
            self.counts["preemptions"] += len(turn.scheduled.preempted_req_ids or ())
        if turn.delivered is not None:
            self.counts["cuts"] += sum((turn.delivered.num_invalid_spec_tokens or {}).values())
            ended = self.engine.forget_ended()
            in_flight = turn.scheduled.num_scheduled_tokens if turn.scheduled is not None else {}
            self._spent = [*self._spent[-8:], *(request_id for request_id in ended if request_id not in in_flight)]
        return turn

    def end(self) -> None:
        """Lets all requests end; nothing is left of them."""
        self.pause(PauseState.UNPAUSED)
        while self.engine.has_work or self.engine.waiting_sessions():
            for request_id in self.engine.waiting_sessions():
                self.leave(request_id)
            self.step()
        self.invariants.at_the_end()
        self.engine.scheduler.shutdown()

    def _accepted(self, request_id: str, drafts: int, rng: Random) -> int:
        # Some are easy, some hard, and the rest in between.
        chance = 0.2 + 0.7 * (sum(request_id.encode()) % 5) / 4
        return next((place for place in range(drafts) if rng.random() >= chance), drafts)

    def _drafts_given(self, request_id: str, asked: int) -> int:
        return self._rng.randint(round(self.serving.drafter_gives * asked), asked)

    def _step_ms(self, step: Any) -> float:
        ms = (20.0 + 0.5 * step.total_num_scheduled_tokens) * self._rng.lognormvariate(0.0, 0.03)
        return ms * (30.0 if self._rng.random() < 0.002 else 1.0)


@contextmanager
def serving_in(folder: Path, serving: Serving, seed: int) -> Iterator[BusyEngine]:
    """An engine that keeps its files in `folder` and is watched."""
    clock = Clock(100.0)
    with patch("akjax.scheduler.adaptive_k.monotonic", clock):
        busy = BusyEngine(serving, folder, seed, clock)
        with busy.invariants.watching():
            yield busy
