"""Puts the parts together as a vLLM configuration and the operator's settings say."""

from collections.abc import Callable, Sequence

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from akjax.acceptance import RunningRates
from akjax.compiled_controller import CompiledController
from akjax.controller import Controller
from akjax.cost import AbstractCostModel, dense_cost, reference_cost

from .control_file import ControlFile
from .jax_process import keep_to_cpu
from .levels import levels_of_schedule, out_of_reach
from .modes import ModeTracker, Vocabulary
from .pilot import Pilot
from .reports import Reports, describe_cost
from .served_model import Routing, routing_of
from .settings import PREFIX, Settings, SettingsError, load_settings
from .vocabulary import vocabulary_of


def assemble(vllm_config: VllmConfig, lookup: Sequence[int] | None, log: Callable[[str], object]) -> Pilot | None:
    """The pilot of an engine, compiled and ready; None if the engine has to run without one.

    Args:
        vllm_config: of the engine.
        lookup: the dynamic schedule as vLLM's scheduler holds it, None if there is none.
        log: takes a line for the engine's log.

    Raises:
        ValueError: no speculative decoding, or a schedule or setting that cannot be used.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        raise ValueError(
            "AdaptiveKScheduler chooses draft lengths, but this engine has no --speculative-config; give it one,"
            " or serve without --scheduler-cls"
        )
    settings = load_settings(vllm_config.additional_config)
    if vllm_config.parallel_config.data_parallel_size > 1:
        # Ranks that draft different numbers of tokens wait for each other for ever.
        log("data-parallel ranks must all draft alike, so k stays as it is configured")
        return None
    draft_limit = speculation.num_speculative_tokens
    schedule = speculation.num_speculative_tokens_per_batch_size
    levels = levels_of_schedule(lookup, schedule, draft_limit)
    cost = cost_model(settings, routing_of(vllm_config.model_config.hf_text_config))
    vocabulary = None if settings.code_mode == "0" else _vocabulary(vllm_config)
    if settings.code_mode != "0" and vocabulary is None:
        log("this engine has no tokenizer, so code and tool calls cannot be told from prose: code mode is off")
    keep_to_cpu()
    controller = CompiledController(
        Controller(
            RunningRates(alpha=settings.alpha),
            draft_limit=draft_limit,
            levels=levels,
            margin=settings.margin,
            per_request=settings.per_request,
            code_mode="0" if vocabulary is None else settings.code_mode,
            learns_cost=settings.online,
        ),
        cost,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
    )
    log(f"chooses k from {', '.join(map(str, levels))} (K={draft_limit}); {describe_cost(controller)}")
    if unreachable := out_of_reach(levels, schedule):
        log(
            f"k {', '.join(map(str, unreachable))} cannot be chosen: the schedule has it for more requests than"
            f" max_num_seqs={vllm_config.scheduler_config.max_num_seqs} only"
        )
    modes = None if vocabulary is None else ModeTracker(vocabulary)
    return Pilot(controller, ControlFile(settings.control, draft_limit), modes, Reports(log))


def cost_model(settings: Settings, routing: Routing | None) -> AbstractCostModel:
    """The cost model that serving starts with; the settings' experts and top_k go before the served model's.

    Raises:
        SettingsError: only one of experts and top_k is set, and the model's config does not have the other.
    """
    if not settings.online:
        return settings.cost_ms
    base, per_expert, per_token = settings.model
    experts = settings.experts or (routing and routing.experts)
    top_k = settings.top_k or (routing and routing.top_k)
    if (experts is None) != (top_k is None):
        known, unknown = ("EXPERTS", "TOP_K") if top_k is None else ("TOP_K", "EXPERTS")
        raise SettingsError(
            f"{PREFIX}{known}={experts or top_k}: the served model's config does not say {unknown.lower()}, so set"
            f" {PREFIX}{unknown} too"
        )
    # With top_k of all experts every token reads the same weights, as in a dense model.
    if experts is None or top_k is None or top_k >= experts:
        return dense_cost(base, per_token)
    return reference_cost(base, per_expert, per_token, experts=experts, top_k=top_k)


def _vocabulary(vllm_config: VllmConfig) -> Vocabulary | None:
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    return None if tokenizer is None else vocabulary_of(tokenizer.get_vocab())
