"""What the served model's own config says of its experts."""

from typing import Any, NamedTuple

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
_NESTED = ("text_config", "llm_config", "language_config", "ffn_config")


class Routing(NamedTuple):
    """`top_k` of a layer's `experts` routed experts work on each token."""

    experts: int
    top_k: int


def routing_of(hf_config: Any) -> Routing | None:
    """The routing of a model, by the names that configs have for it, in nested text configs too; None if dense."""
    for config in (hf_config, *(getattr(hf_config, name, None) for name in _NESTED)):
        experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
        if experts and top_k:
            return Routing(experts, top_k)
    return None


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of the names that the config has a number for; some configs hold a list, one for each layer."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            value = max((each for each in value if isinstance(each, int)), default=None)
        if isinstance(value, int) and value > 0:
            return value
    return None
