"""The operator's settings: environment variables, and vLLM's --additional-config, which wins."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from akjax.controller import CodeMode
from akjax.cost import CostTable, parse_table

PREFIX = "VLLM_ADAPTIVE_K_"
SECTION = "adaptive_k"


class SettingsError(ValueError):
    """One or more settings that cannot be used; the message names each, what was given and what is allowed."""


def _parse_model(value: object) -> tuple[float, float, float]:
    expected = "three numbers of at least 0: ms, ms per expert, ms per token, such as 27.0,0.635,0.542"
    parts = value.split(",") if isinstance(value, str) else value
    try:
        base, per_expert, per_token = (float(part) for part in parts)  # pyright: ignore[reportGeneralTypeIssues]
    except (TypeError, ValueError):
        raise ValueError(f"must be {expected}") from None
    if not all(math.isfinite(number) and number >= 0 for number in (base, per_expert, per_token)):
        raise ValueError(f"must be {expected}")
    return base, per_expert, per_token


def _parse_cost(value: object) -> CostTable:
    if not isinstance(value, str):
        raise ValueError("must be text of tokens:ms points, such as 2:47,4:53,8:65")
    try:
        return parse_table(value)
    except ValueError as error:
        raise ValueError(f"must be tokens:ms points, such as 2:47,4:53,8:65: {error}") from None


def _parse_code_mode(value: object) -> object:
    """JSON has numbers and booleans for what the environment can only write as text."""
    return str(int(value)) if isinstance(value, bool | int) else value


def _parse_path(value: object) -> object:
    return None if value == "" else value


class Settings(BaseSettings):
    """What an operator may set. Read it by `load_settings`, whose errors say where each value came from."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, arbitrary_types_allowed=True)

    alpha: float = Field(0.25, gt=0, le=1, description="rate of a request's running acceptance")
    margin: float = Field(0.03, ge=0, le=10, description="least relative gain for a change of k")
    per_request: bool = Field(False, description="1: a k for each request")
    code_mode: Annotated[CodeMode, BeforeValidator(_parse_code_mode)] = Field(
        "gated", description="rates of their own for code and tool calls: gated, 1 or 0"
    )
    online: bool = Field(True, description="0: the fixed table COST_MS instead of the learned model")
    model: Annotated[tuple[float, float, float], NoDecode, BeforeValidator(_parse_model)] = Field(
        (27.0, 0.635, 0.542), description="start of the cost model: ms, ms per expert, ms per token"
    )
    cost_ms: Annotated[CostTable, NoDecode, BeforeValidator(_parse_cost)] = Field(  # pyright: ignore[reportAssignmentType]
        "2:47,4:53,8:65", description="the fixed table, tokens:ms"
    )
    control: Annotated[Path | None, BeforeValidator(_parse_path)] = Field(None, description="the control file")
    experts: int | None = Field(None, ge=1, description="routed experts of a layer, if not as the model's config says")
    top_k: int | None = Field(None, ge=1, description="experts a token picks, if not as the model's config says")

    @model_validator(mode="after")
    def _experts_go_together(self) -> "Settings":
        if (self.experts is None) != (self.top_k is None):
            raise ValueError("experts and top_k must be set together")
        if self.experts is not None and self.top_k is not None and self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must be at most experts={self.experts}")
        return self


def load_settings(additional_config: object = None) -> Settings:
    """The settings of the environment, and those of `additional_config["adaptive_k"]`, which win.

    Args:
        additional_config: vLLM's; anything but a mapping has no section of ours.

    Raises:
        SettingsError: a value that is not allowed, or a name that is no setting.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(section, Mapping):
        raise SettingsError(f"additional_config[{SECTION!r}] must be an object of settings, given {section!r}")
    section = {str(name).lower(): value for name, value in section.items()}
    faults = [f"{PREFIX}{name}: no such setting; allowed: {_names(PREFIX, str.upper)}" for name in _unknown_variables()]
    try:
        settings = Settings(**section)
    except ValidationError as error:
        faults += [_fault(detail, section) for detail in error.errors()]
    else:
        if not faults:
            return settings
    raise SettingsError("\n".join(faults))


def _unknown_variables() -> list[str]:
    names = [name[len(PREFIX) :] for name in os.environ if name.upper().startswith(PREFIX)]
    return [name for name in names if name.lower() not in Settings.model_fields]


def _names(prefix: str, spell: Any) -> str:
    return ", ".join(prefix + spell(name) for name in Settings.model_fields)


def _fault(detail: Any, section: Mapping[str, Any]) -> str:
    """One line: the setting as the operator wrote it, what it was, what is allowed."""
    reason = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:
        return f"{PREFIX}EXPERTS, {PREFIX}TOP_K: {reason}"
    name = str(detail["loc"][0])
    if name not in section:
        variable = PREFIX + name.upper()
        return f"{variable}={os.environ.get(variable, '')!r}: {reason}"
    where = f"additional_config[{SECTION!r}][{name!r}]"
    if name not in Settings.model_fields:
        return f"{where}: no such setting; allowed: {_names('', str)}"
    return f"{where}={section[name]!r}: {reason}"
