"""What is to be said of the engine that serves: to whoever reads its step log, and to its next start."""

import platform
from importlib import metadata
from time import time
from typing import Any
from uuid import uuid4

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from akjax.step_log import LogHeader

from .control_file import PolicyName
from .served_model import Routing

# What a step log's header says of an engine, but for what costs and acceptance do not depend on.
_IDENTITY = (
    "model",
    "method",
    "draft_limit",
    "levels",
    "experts",
    "top_k",
    "captured_sizes",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "device",
)


def header_of(
    vllm_config: VllmConfig,
    policy: PolicyName,
    levels: tuple[int, ...],
    routing: Routing | None,
    sizes: tuple[int, ...],
) -> LogHeader:
    """What a step log says of the engine that wrote it.

    Args:
        vllm_config: of the engine.
        policy: in charge unless the control file names another.
        levels: the draft lengths that it may choose.
        routing: of the served model, None if it is dense.
        sizes: the numbers of tokens that steps are padded to; none if they are not.
    """
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return LogHeader(
        time=time(),
        run=uuid4().hex,
        model=vllm_config.model_config.model,
        method="" if speculation is None else speculation.method or "",
        draft_limit=0 if speculation is None else speculation.num_speculative_tokens,
        levels=list(levels),
        experts=None if routing is None else routing.experts,
        top_k=None if routing is None else routing.top_k,
        captured_sizes=list(sizes),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        device=_device_name(),
        policy=policy,
        versions={
            "akjax": metadata.version("akjax"),
            "vllm": vllm.__version__,
            "jax": metadata.version("jax"),
            "python": platform.python_version(),
        },
    )


def identity_of(vllm_config: VllmConfig, header: LogHeader) -> dict[str, Any]:
    """What two starts of an engine have in common, if what one learned is of use to the other, by name."""
    speculation, model = vllm_config.speculative_config, vllm_config.model_config
    told = {name: getattr(header, name) for name in _IDENTITY}
    return told | {
        "drafter": None if speculation is None else speculation.model,
        "dtype": str(model.dtype),
        "quantization": None if model.quantization is None else str(model.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


def _device_name() -> str:
    try:
        return current_platform.get_device_name()
    except Exception:  # not every platform has names, and a driver may have its own ideas
        return current_platform.device_type
