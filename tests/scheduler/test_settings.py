"""Where the operator's settings come from, and what is said of one that cannot be used."""

import math
import os
import sys
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax.presets import preset
from akjax.scheduler.settings import Settings, SettingsError, load_settings

PREFIX = "VLLM_ADAPTIVE_K_"
NAMES = (
    "POLICY",
    "ALPHA",
    "MARGIN",
    "PER_REQUEST",
    "CODE_MODE",
    "ONLINE",
    "MODEL",
    "FORM",
    "COST_MS",
    "CONTROL",
    "STEP_LOG",
    "STEP_LOG_MB",
    "STATE",
    "EXPERTS",
    "TOP_K",
)

# Name, what is given, and a word that says what would be allowed.
BAD = [
    ("POLICY", "best", "'reference' or 'default'"),
    ("POLICY", "Reference", "default, or reference"),
    ("POLICY", "", "default, or reference"),
    ("MODEL", "1,2", "three numbers"),
    ("MODEL", "1,2,3,4", "three numbers"),
    ("MODEL", "a,b,c", "three numbers"),
    ("MODEL", "", "three numbers"),
    ("MODEL", "nan,1,1", "three numbers"),
    ("MODEL", "inf,1,1", "three numbers"),
    ("MODEL", "-1,1,1", "at least 0"),
    ("MODEL", "no/such/fit.json", "cannot be read"),
    ("MODEL", "\udc80/fit.json", "cannot be read"),  # how an operating system hands over what is no UTF-8
    ("MODEL", "glm", "path of a fit that ends in .json, or the name of one that comes with akjax: default, glm-4.5"),
    ("FORM", "best", "serving, reference"),
    ("FORM", "no.such:form", "cannot be imported"),
    ("FORM", "math:pi", "makes a cost model"),
    ("ALPHA", "2", "1"),
    ("ALPHA", "0", "greater than 0"),
    ("ALPHA", "-0.1", "greater than 0"),
    ("ALPHA", "nan", "1"),
    ("ALPHA", "x", "number"),
    ("ALPHA", "", "number"),
    ("CODE_MODE", "yes", "gated"),
    ("CODE_MODE", "", "gated"),
    ("CODE_MODE", "2", "gated"),
    ("COST_MS", "", "2:47,4:53,8:65"),
    ("COST_MS", ",", "2:47,4:53,8:65"),
    ("COST_MS", "2:x", "2:47,4:53,8:65"),
    ("COST_MS", "2", "2:47,4:53,8:65"),
    ("COST_MS", "0:1", "positive"),
    ("COST_MS", "2:-1", "positive"),
    ("COST_MS", "2:inf", "finite"),
    ("COST_MS", "nan:1", "finite"),
    ("COST_MS", "2:3:4", "tokens:ms"),
    ("MARGIN", "-1", "greater than or equal to 0"),
    ("MARGIN", "nan", "0"),
    ("PER_REQUEST", "maybe", "boolean"),
    ("PER_REQUEST", "2", "boolean"),
    ("ONLINE", "", "boolean"),
    ("STEP_LOG_MB", "0", "greater than 0"),
    ("STEP_LOG_MB", "nan", "above 0"),
    ("STEP_LOG_MB", "inf", "above 0"),
    ("STEP_LOG_MB", "", "number"),
]


def clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(PREFIX):
            monkeypatch.delenv(name)


def loaded(environment: Mapping[str, str], section: object = None) -> Settings:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clear(monkeypatch)
        for name, text in environment.items():
            monkeypatch.setenv(PREFIX + name, text)
        return load_settings(None if section is None else {"adaptive_k": section})


def refused(environment: Mapping[str, str], section: object = None) -> str:
    with pytest.raises(SettingsError) as error:
        loaded(environment, section)
    assert isinstance(error.value, ValueError)
    return str(error.value)


def value_of(settings: Settings, name: str) -> Any:
    """A setting in plain data."""
    value = getattr(settings, name)
    return list(zip(value.tokens, value.ms.tolist(), strict=True)) if name == "cost_ms" else value


def test_defaults() -> None:
    settings = load_settings()
    defaults = {
        "policy": "default",
        "alpha": 0.25,
        "margin": 0.03,
        "per_request": False,
        "code_mode": "gated",
        "online": True,
        "model": (27.0, 0.635, 0.542),
        "cost_ms": [(2, 47), (4, 53), (8, 65)],
        "control": None,
        "step_log": None,
        "step_log_mb": 256.0,
        "state": None,
        "experts": None,
        "top_k": None,
    }
    assert {name: value_of(settings, name) for name in defaults} == defaults
    assert {name.upper() for name in Settings.model_fields} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("POLICY", "reference", "reference"),
        ("POLICY", "default", "default"),
        ("ALPHA", "0.5", 0.5),
        ("ALPHA", "1", 1.0),
        ("MARGIN", "0", 0.0),
        ("PER_REQUEST", "1", True),
        ("PER_REQUEST", "0", False),
        ("CODE_MODE", "gated", "gated"),
        ("CODE_MODE", "1", "1"),
        ("CODE_MODE", "0", "0"),
        ("ONLINE", "0", False),
        ("ONLINE", "1", True),
        ("MODEL", "40.5,0,1e-1", (40.5, 0.0, 0.1)),
        ("MODEL", " 1, 2 ,3 ", (1.0, 2.0, 3.0)),
        ("MODEL", "glm-4.5-air", preset("glm-4.5-air")),
        ("COST_MS", "8:65,2:47", [(2, 47), (8, 65)]),
        ("COST_MS", "2:47", [(2, 47)]),
        ("COST_MS", "4:50,4:60", [(4, 50), (4, 60)]),
        ("CONTROL", "/run/adaptive_k", Path("/run/adaptive_k")),
        ("CONTROL", "", None),
        ("STEP_LOG", "/var/log/steps.jsonl", Path("/var/log/steps.jsonl")),
        ("STEP_LOG", "/var/log/steps.jsonl.zst", Path("/var/log/steps.jsonl.zst")),
        ("STEP_LOG", "", None),
        ("STATE", "/var/lib/state.json", Path("/var/lib/state.json")),
        ("STATE", "", None),
        ("STEP_LOG_MB", "0.5", 0.5),
    ],
)
def test_each_setting_is_read_from_the_environment_and_from_the_config(name: str, text: str, value: Any) -> None:
    assert value_of(loaded({name: text}), name.lower()) == value
    assert value_of(loaded({}, {name.lower(): text}), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "text", "given_value", "value"),
    [
        ("POLICY", "reference", "default", "default"),
        ("POLICY", "best", "reference", "reference"),
        ("ALPHA", "0.5", 0.75, 0.75),
        ("MARGIN", "0.5", 0, 0.0),
        ("PER_REQUEST", "1", False, False),
        ("CODE_MODE", "1", 0, "0"),
        ("ONLINE", "0", True, True),
        ("MODEL", "1,2,3", [4, 5.5, 6], (4.0, 5.5, 6.0)),
        ("COST_MS", "2:47", "3:50", [(3, 50)]),
        ("CONTROL", "/a", "/b", Path("/b")),
        ("CONTROL", "/a", "", None),
        ("ALPHA", "2", 0.75, 0.75),
    ],
)
def test_the_config_wins(name: str, text: str, given_value: Any, value: Any) -> None:
    assert value_of(loaded({name: text}, {name.lower(): given_value}), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("code_mode", 1, "1"),
        ("code_mode", 0, "0"),
        ("code_mode", True, "1"),
        ("code_mode", False, "0"),
        ("code_mode", "gated", "gated"),
        ("per_request", True, True),
        ("per_request", 1, True),
        ("per_request", 0, False),
        ("online", False, False),
        ("online", 0, False),
        ("alpha", 1, 1.0),
        ("model", [27, 0.5, 0], (27.0, 0.5, 0.0)),
        ("model", (27, 0.5, 0), (27.0, 0.5, 0.0)),
        ("cost_ms", "2:47,4:53", [(2, 47), (4, 53)]),
        ("control", None, None),
    ],
)
def test_the_config_may_use_the_types_of_json(name: str, given_value: Any, value: Any) -> None:
    assert value_of(loaded({}, {name: given_value}), name) == value


def test_experts_and_top_k_may_come_from_either() -> None:
    assert loaded({"EXPERTS": "64", "TOP_K": "64"}).top_k == 64
    both = loaded({"EXPERTS": "64"}, {"top_k": 6})
    assert (both.experts, both.top_k) == (64, 6)


@pytest.mark.parametrize("config", [None, {}, object(), [], "adaptive_k", {"adaptive_k": {}}, {"other": {"alpha": 2}}])
def test_a_config_without_our_section_changes_nothing(config: object) -> None:
    assert load_settings(config).alpha == 0.25


def test_any_mapping_serves_as_the_config() -> None:
    assert load_settings(UserDict({"adaptive_k": UserDict(alpha=0.5)})).alpha == 0.5


@pytest.mark.parametrize("section", ["alpha=0.5", [], [["alpha", 0.5]], 1, True])
def test_a_section_that_is_no_mapping_is_refused(section: object) -> None:
    message = refused({}, section)
    assert "adaptive_k" in message
    assert repr(section) in message


@pytest.mark.parametrize(("name", "text", "allowed"), BAD)
def test_a_bad_value_is_named_as_written_with_what_is_allowed(name: str, text: str, allowed: str) -> None:
    message = refused({name: text})
    assert f"{PREFIX}{name}={text!r}" in message
    assert allowed in message
    assert "\n" not in message

    message = refused({}, {name.lower(): text})
    assert f"'adaptive_k']['{name.lower()}']={text!r}" in message
    assert allowed in message
    assert PREFIX not in message


@pytest.mark.parametrize(
    ("name", "given_value"),
    [
        ("model", [1, 2]),
        ("model", [1, 2, None]),
        ("model", 1),
        ("model", None),
        ("model", {"1": "ms", "2": "ms per expert", "3": "ms per token"}),
        ("model", [10**400, 1, 1]),
        ("alpha", [0.5]),
        ("alpha", None),
        ("alpha", 10**400),
        ("policy", None),
        ("policy", 1),
        ("code_mode", 2),
        ("code_mode", None),
        ("code_mode", []),
        ("per_request", None),
        ("per_request", 2),
        ("cost_ms", 47),
        ("cost_ms", [[2, 47]]),
        ("cost_ms", {"2": 47}),
        ("control", 1),
        ("experts", 8.5),
        ("experts", 0),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, given_value: Any) -> None:
    message = refused({}, {name: given_value})
    assert f"'{name}']={given_value!r}" in message


def test_a_fault_shows_only_what_the_operator_wrote() -> None:
    """Not the number that a lone token count was read as."""
    assert "nan" not in refused({"COST_MS": "2"})


def test_a_variable_in_lower_case_is_shown_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("vllm_adaptive_k_alpha", "2")
    with pytest.raises(SettingsError, match=r"(?i)vllm_adaptive_k_alpha(='2'|: no such setting)"):
        load_settings()


def test_a_key_of_the_config_is_shown_as_it_is_spelled() -> None:
    assert "'Alpha'" in refused({}, {"Alpha": 2})


def test_an_unknown_variable_is_refused_with_those_allowed() -> None:
    message = refused({"FOO": "1"})
    assert f"{PREFIX}FOO" in message
    assert all(PREFIX + name in message for name in NAMES)


@pytest.mark.parametrize("name", ["foo", "", "VLLM_ADAPTIVE_K_ALPHA", "model_config", "self"])
def test_an_unknown_key_is_refused_with_those_allowed(name: str) -> None:
    message = refused({}, {name: 1})
    assert repr(name) in message
    assert all(allowed.lower() in message for allowed in NAMES)
    assert f"allowed: {PREFIX}" not in message


def test_a_key_that_is_no_text_is_refused() -> None:
    assert "1" in refused({}, {1: 1})


@pytest.mark.parametrize(
    "name", ["_env_file", "_env_prefix", "_case_sensitive", "_secrets_dir", "_cli_parse_args", "_bogus"]
)
def test_a_key_with_an_underscore_reaches_no_machinery(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are names of settings, whatever else the class that reads them takes."""
    monkeypatch.setattr(sys, "argv", ["serve", "--alpha", "0.9"])
    file = tmp_path / "env"
    file.write_text(f"{PREFIX}ALPHA=0.9\n")
    assert name in refused({}, {name: name == "_cli_parse_args" or str(file)})


def test_all_faults_are_named_at_once() -> None:
    message = refused({"ALPHA": "2", "MARGIN": "-1", "FOO": "1"}, {"code_mode": "yes", "bar": 1})
    for name in (f"{PREFIX}ALPHA", f"{PREFIX}MARGIN", f"{PREFIX}FOO", "'code_mode'", "'bar'"):
        assert name in message
    assert len(message.splitlines()) == 5


def test_an_unknown_variable_is_refused_even_if_all_else_is_right() -> None:
    assert "FOO" in refused({"FOO": "1"}, {"alpha": 0.5})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().alpha = 0.5


# What an environment can hold: any bytes but NUL, and texts that nearly mean something.
TEXTS = st.one_of(
    st.binary(max_size=20).filter(lambda value: b"\0" not in value).map(os.fsdecode),
    st.text(alphabet="0123456789.,:-+e naif_", max_size=12),
    st.sampled_from(["gated", "true", "off", "1", "0", "0.5", "1,2,3", "2:47,4:53"]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def assert_usable(settings: Settings) -> None:
    assert settings.policy in ("default", "reference")
    assert 0 < settings.alpha <= 1
    assert 0 <= settings.margin < math.inf
    assert settings.code_mode in ("gated", "1", "0")
    assert all(0 <= number < math.inf for number in settings.model)
    assert settings.cost_ms.tokens
    assert all(0 < tokens < math.inf and 0 < ms < math.inf for tokens, ms in value_of(settings, "cost_ms"))
    assert settings.experts is None or settings.experts >= 1
    assert settings.top_k is None or settings.top_k >= 1


def fault_of(environment: Mapping[str, str], section: object = None) -> str | None:
    """What is wrong with the settings; None if they load, and then each is within its bounds."""
    try:
        assert_usable(loaded(environment, section))
    except SettingsError as error:
        return str(error)
    return None


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1, max_size=3))
def test_any_text_loads_or_is_refused(environment: dict[str, str]) -> None:
    fault = fault_of(environment)
    assert fault is None or any(PREFIX + name in fault for name in environment)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([name.lower() for name in NAMES]), JSON, min_size=1, max_size=3))
def test_any_json_loads_or_is_refused(section: dict[str, Any]) -> None:
    fault = fault_of({}, section)
    assert fault is None or any(f"'{name}'" in fault for name in section)


def test_a_compressed_step_log_needs_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akjax.scheduler.settings.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"needs zstandard: pip install zstandard, or leave .zst off"):
        loaded({"STEP_LOG": "/var/log/steps.jsonl.zst"})
    assert loaded({"STEP_LOG": "/var/log/steps.jsonl"}).step_log is not None
