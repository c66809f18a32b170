"""The operator's settings: environment variables, and vLLM's --additional-config, which wins."""

import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from akjax.controller import CodeMode
from akjax.cost import CostTable, parse_table
from akjax.fit_file import MOST_BYTES, FitFile, decoded_fit
from akjax.forms import form_named
from akjax.presets import preset, preset_names

from .control_file import PolicyName

PREFIX = "VLLM_ADAPTIVE_K_"
SECTION = "adaptive_k"

# More than any model has; it keeps a slip of the keyboard out of the arithmetic.
_MOST_EXPERTS = 65536


class SettingsError(ValueError):
    """One or more settings that cannot be used; the message names each, what was given and what is allowed."""


def _refusing(validate: Callable[[object], object]) -> BeforeValidator:
    """The validator, what it says of a value as text: pydantic fails over surrogates, which stand for other bytes."""

    def validated(value: object) -> object:
        try:
            return validate(value)
        except ValueError as error:
            raise ValueError(str(error).encode(errors="backslashreplace").decode()) from None

    return BeforeValidator(validated)


def _parse_model(value: object) -> tuple[float, float, float] | FitFile:
    expected = (
        "three numbers of at least 0: ms, ms per expert, ms per token, such as 27.0,0.635,0.542, or the path of a fit"
        f" that ends in .json, or the name of one that comes with akjax: {', '.join(preset_names())}"
    )
    if isinstance(value, str) and value.endswith(".json"):
        return _read_fit(Path(value))
    if value in preset_names():
        return preset(str(value))
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(parts, list | tuple):
            raise TypeError
        base, per_expert, per_token = (float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"must be {expected}") from None
    if not all(math.isfinite(number) and number >= 0 for number in (base, per_expert, per_token)):
        raise ValueError(f"must be {expected}")
    return base, per_expert, per_token


def _read_fit(path: Path) -> FitFile:
    try:
        with path.open("rb") as file:
            return decoded_fit(file.read(MOST_BYTES + 1), str(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _parse_form(value: object) -> object:
    if value != "" and isinstance(value, str):
        form_named(value)
    return value


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


def _parse_log_path(value: object) -> object:
    if str(value).endswith(".zst") and find_spec("zstandard") is None:
        raise ValueError("a compressed step log needs zstandard: pip install zstandard, or leave .zst off")
    return _parse_path(value)


class Settings(BaseSettings):
    """What an operator may set. Read it by `load_settings`, whose errors say where each value came from."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, arbitrary_types_allowed=True)

    policy: PolicyName = Field("default", description="default, or reference for the reference algorithm")
    alpha: float = Field(
        0.25, gt=0, le=1, description="reference: rate of a request's running acceptance, above 0 and at most 1"
    )
    margin: float = Field(0.03, ge=0, le=10, description="reference: least relative gain for a change of k, 0 to 10")
    per_request: bool = Field(False, description="1 for a k for each request, 0 for one k for the batch")
    code_mode: Annotated[CodeMode, BeforeValidator(_parse_code_mode)] = Field(
        "gated",
        description="rates of their own for code and tool calls: gated (if all requests are in one mode), 1 or 0",
    )
    online: bool = Field(True, description="1 for the learned cost model, 0 for the fixed table COST_MS")
    model: Annotated[tuple[float, float, float] | FitFile, NoDecode, _refusing(_parse_model)] = Field(
        (27.0, 0.635, 0.542),
        description="start of the cost model: ms, ms per expert, ms per token; or the path of a fit, ending in .json,"
        " or a name",
    )
    form: Annotated[str, _refusing(_parse_form)] = Field(
        "",
        description="form of the cost model, by name or package.module:name; empty for the policy's own or the fit's",
    )
    cost_ms: Annotated[CostTable, NoDecode, _refusing(_parse_cost)] = Field(  # pyright: ignore[reportAssignmentType]
        "2:47,4:53,8:65", description="the fixed table, tokens:ms,..."
    )
    control: Annotated[Path | None, BeforeValidator(_parse_path)] = Field(None, description="path of the control file")
    step_log: Annotated[Path | None, BeforeValidator(_parse_log_path)] = Field(
        None, description="path of the step log, JSON Lines; compressed if it ends in .zst"
    )
    step_log_mb: float = Field(
        256.0, gt=0, le=1e6, description="MB of the step log after which another file begins, above 0"
    )
    state: Annotated[Path | None, BeforeValidator(_parse_path)] = Field(
        None, description="path of the file that keeps what was learned"
    )
    experts: int | None = Field(
        None, ge=1, le=_MOST_EXPERTS, description="routed experts of a layer, if not the model's"
    )
    top_k: int | None = Field(None, ge=1, le=_MOST_EXPERTS, description="experts a token picks, if not the model's")


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
    given = _given(section)
    faults = [
        f"{what}: no such setting; allowed: {_allowed(what)}" for name, what in given.items() if name not in _NAMES
    ]
    # pydantic-settings has keywords of its own, such as _env_file, which no configuration may reach.
    known = {str(name).lower(): value for name, value in section.items() if str(name).lower() in _NAMES}
    try:
        settings = Settings(**known)
    except ValidationError as error:
        for detail in error.errors():
            name = str(detail["loc"][0])
            reason = str(detail["msg"]).removeprefix("Value error, ")
            faults.append(f"{given[name]}: {reason} ({Settings.model_fields[name].description})")
        raise SettingsError("\n".join(faults)) from None
    if faults:
        raise SettingsError("\n".join(faults))
    return settings


def _given(section: Mapping[Any, Any]) -> dict[str, str]:
    """Everything that was given in the name of a setting, as the operator wrote it, with its value."""
    variables = {
        name[len(PREFIX) :].lower(): f"{name}={text!r}"
        for name, text in os.environ.items()
        if name.upper().startswith(PREFIX)
    }
    keys = {str(name).lower(): f"additional_config[{SECTION!r}][{name!r}]={value!r}" for name, value in section.items()}
    return variables | keys


def _allowed(what: str) -> str:
    """Every setting's name, spelled as the place where `what` stands has it."""
    is_variable = what.upper().startswith(PREFIX)
    return ", ".join(PREFIX + name.upper() if is_variable else name for name in _NAMES)


_NAMES = list(Settings.model_fields)
