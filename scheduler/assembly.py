"""Puts the parts together as a vLLM configuration and the operator's settings say."""

from collections.abc import Callable, Sequence
from functools import partial

from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from akjax.acceptance import RunningRates
from akjax.compiled_controller import CompiledController
from akjax.controller import Controller
from akjax.controllers import default_controller, reference_controller
from akjax.cost import UNEVEN, AbstractCostModel
from akjax.fit_file import CostStart, FitFile, start_of
from akjax.forms import Engine, form_named

from .control_file import ControlFile, PolicyName
from .cuda_graphs import captured_sizes
from .drafters import check_drafter, is_rigid
from .jax_process import keep_to_cpu, run_on_the_callers_thread
from .levels import levels_of_schedule, out_of_reach
from .modes import ModeTracker, Vocabulary
from .pilot import Pilot
from .reports import Reports, describe_cost
from .served_engine import header_of, identity_of
from .served_model import Routing, routing_of
from .settings import PREFIX, Settings, SettingsError, load_settings
from .state_keeper import StateKeeper
from .step_log import LogFiles, LogWriter, StepLog
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
    check_drafter(vllm_config, levels, draft_limit, per_request=settings.per_request)
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
    # A fit's parameters are JAX's work already.
    keep_to_cpu()
    run_on_the_callers_thread()
    starts = {policy: cost_start(policy, settings, routing, levels, sizes) for policy in rules}
    if unmatched := starts[settings.policy].unmatched:
        log(f"only one of the fit and this engine's cost model has {', '.join(unmatched)}: no start from the fit there")
    controllers: dict[PolicyName, CompiledController] = {
        policy: CompiledController(
            rules[policy],
            starts[policy].model,
            vllm_config.scheduler_config.max_num_seqs,
            covariance=starts[policy].covariance,
        )
        for policy in rules
    }
    chosen_from = rules[settings.policy].policy.levels
    header = header_of(vllm_config, settings.policy, chosen_from, routing, sizes)
    state = None
    if settings.state is not None:
        state = StateKeeper(
            settings.state,
            identity_of(vllm_config, header),
            partial(form_name, settings),
            controllers,
            header.versions,
            log,
        )
        state.resume()
    in_charge = controllers[settings.policy]
    log(f"chooses k from {', '.join(map(str, chosen_from))} (K={draft_limit}); {describe_cost(in_charge)}")
    if unreachable := out_of_reach(levels, schedule):
        log(
            f"k {', '.join(map(str, unreachable))} cannot be chosen: the schedule has it for more requests than"
            f" max_num_seqs={vllm_config.scheduler_config.max_num_seqs} only"
        )
    modes = None if vocabulary is None else ModeTracker(vocabulary)
    step_log = None
    if settings.step_log is not None:
        step_log = StepLog(LogWriter(LogFiles(settings.step_log, header, round(settings.step_log_mb * 1e6)), log))
    control = ControlFile(settings.control, draft_limit, draft_limit if is_rigid(vllm_config) else min(levels[0], 1))
    return Pilot(controllers, control, modes, Reports(log), step_log, state)


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


def cost_start(
    policy: PolicyName, settings: Settings, routing: Routing | None, levels: tuple[int, ...], sizes: tuple[int, ...]
) -> CostStart:
    """The cost model that a policy starts with, and how sure it is of it.

    Args:
        policy: that it is for.
        settings: of the operator.
        routing: of the served model, None if it is dense.
        levels: the draft lengths that may be chosen.
        sizes: the numbers of tokens that steps are padded to; none if they are not.

    Raises:
        SettingsError: no base, which the default policy learns in its logarithm; a fit that cannot be used, or a form
            that does not make a cost model.
    """
    if not settings.online:
        return CostStart(settings.cost_ms)
    engine = Engine(
        lengths=levels,
        experts=routing and routing.experts,
        top_k=routing and routing.top_k,
        sizes=sizes,
        uneven=UNEVEN if settings.per_request else None,
    )
    if isinstance(settings.model, FitFile):
        if settings.form not in ("", settings.model.form):
            raise SettingsError(
                f"{PREFIX}FORM={settings.form}: the fit of {PREFIX}MODEL has {settings.model.form}; leave one out"
            )
        try:
            return start_of(settings.model, engine, runs=settings.form)
        except ValueError as error:
            raise SettingsError(f"{PREFIX}MODEL: {error} ({PREFIX}FORM)") from None
    base, per_expert, per_token = settings.model
    if policy == "default" and base == 0:
        raise SettingsError(f"{PREFIX}MODEL={settings.model}: the first number, ms of any step, must be above 0")
    name = form_name(settings, policy)
    model = form_named(name)(engine._replace(base=base, per_expert=per_expert, per_token=per_token))
    if not isinstance(model, AbstractCostModel):
        raise SettingsError(f"{PREFIX}FORM={name}: it made a {type(model).__name__}, which is no cost model")
    return CostStart(model)


def form_name(settings: Settings, policy: PolicyName) -> str:
    """The form of a policy's cost model."""
    if not settings.online:
        return "COST_MS"
    if isinstance(settings.model, FitFile):
        return settings.model.form
    return settings.form or ("serving" if policy == "default" else "reference")


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
