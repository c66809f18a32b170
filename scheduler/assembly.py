"""Puts the parts together as a vLLM configuration and the operator's settings say."""

from collections.abc import Callable, Sequence

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from akjax.acceptance import RunningRates
from akjax.compiled_controller import CompiledController
from akjax.controller import Controller
from akjax.controllers import default_controller, reference_controller
from akjax.cost import UNEVEN, AbstractCostModel, dense_cost, reference_cost, serving_cost

from .control_file import ControlFile, PolicyName
from .cuda_graphs import captured_sizes
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
    routing = routing_of_model(settings, routing_of(vllm_config.model_config.hf_text_config))
    sizes = captured_sizes(vllm_config)
    vocabulary = None if settings.code_mode == "0" else _vocabulary(vllm_config)
    if settings.code_mode != "0" and vocabulary is None:
        log("this engine has no tokenizer, so code and tool calls cannot be told from prose: code mode is off")
        settings = settings.model_copy(update={"code_mode": "0"})
    # The control file may name the other policy at any time, and nothing is compiled while serving.
    policies: list[PolicyName] = [settings.policy]
    if settings.control is not None:
        policies.append("reference" if settings.policy == "default" else "default")
    rules: dict[PolicyName, Controller] = {
        policy: controller_of(policy, settings, draft_limit, levels) for policy in policies
    }
    costs = {policy: cost_model(policy, settings, routing, levels, sizes) for policy in rules}
    keep_to_cpu()
    controllers: dict[PolicyName, CompiledController] = {
        policy: CompiledController(rules[policy], costs[policy], vllm_config.scheduler_config.max_num_seqs)
        for policy in rules
    }
    chosen_from = ", ".join(map(str, rules[settings.policy].policy.levels))
    log(f"chooses k from {chosen_from} (K={draft_limit}); {describe_cost(controllers[settings.policy])}")
    if unreachable := out_of_reach(levels, schedule):
        log(
            f"k {', '.join(map(str, unreachable))} cannot be chosen: the schedule has it for more requests than"
            f" max_num_seqs={vllm_config.scheduler_config.max_num_seqs} only"
        )
    modes = None if vocabulary is None else ModeTracker(vocabulary)
    return Pilot(controllers, ControlFile(settings.control, draft_limit, min(levels[0], 1)), modes, Reports(log))


def controller_of(policy: PolicyName, settings: Settings, draft_limit: int, levels: tuple[int, ...]) -> Controller:
    """The rules of a policy; the reference's know no draft length of 0."""
    if policy == "default":
        return default_controller(
            draft_limit=draft_limit,
            levels=levels,
            per_request=settings.per_request,
            # It keeps prose apart from code and tool calls in any case, so there is nothing to gate.
            code_mode="0" if settings.code_mode == "0" else "1",
            learns_cost=settings.online,
        )
    return reference_controller(
        RunningRates(alpha=settings.alpha),
        draft_limit=draft_limit,
        levels=tuple(level for level in levels if level > 0),
        margin=settings.margin,
        per_request=settings.per_request,
        code_mode=settings.code_mode,
        learns_cost=settings.online,
    )


def cost_model(
    policy: PolicyName, settings: Settings, routing: Routing | None, levels: tuple[int, ...], sizes: tuple[int, ...]
) -> AbstractCostModel:
    """The cost model that a policy starts with.

    Args:
        policy: that it is for.
        settings: of the operator.
        routing: of the served model, None if it is dense.
        levels: the draft lengths that may be chosen.
        sizes: the numbers of tokens that steps are padded to; none if they are not.

    Raises:
        SettingsError: no base, which the default policy learns in its logarithm.
    """
    if not settings.online:
        return settings.cost_ms
    base, per_expert, per_token = settings.model
    experts, top_k = (None, None) if routing is None else (routing.experts, routing.top_k)
    if policy == "default":
        if base == 0:
            raise SettingsError(f"{PREFIX}MODEL={settings.model}: the first number, ms of any step, must be above 0")
        return serving_cost(
            base,
            per_expert,
            per_token,
            lengths=levels,
            experts=experts,
            top_k=top_k,
            sizes=sizes,
            uneven=UNEVEN if settings.per_request else None,
        )
    if experts is None or top_k is None:
        return dense_cost(base, per_token)
    return reference_cost(base, per_expert, per_token, experts=experts, top_k=top_k)


def routing_of_model(settings: Settings, routing: Routing | None) -> Routing | None:
    """How tokens are routed, None if all read the same weights; the settings go before the served model's config.

    Raises:
        SettingsError: only one of experts and top_k is set, and the model's config does not have the other.
    """
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
        return None
    return Routing(experts, top_k)


def _vocabulary(vllm_config: VllmConfig) -> Vocabulary | None:
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    return None if tokenizer is None else vocabulary_of(tokenizer.get_vocab())
