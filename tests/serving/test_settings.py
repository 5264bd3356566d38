"""Settings come from the environment, and a bad one is named."""

from typing import get_args

import pytest

from reclaim.data.errors import ConfigError
from reclaim.serving.settings import ServingSettings, read_settings


def test_defaults_serve_the_champion_at_the_widest_margin() -> None:
    settings = read_settings()
    assert (settings.model, settings.margin, settings.max_tasks) == ("reclaim@champion", "baseline", 1_000)


def test_the_clock_is_this_machines_unless_that_of_a_trace_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECLAIM_CLOCK")
    assert (read_settings().clock, read_settings().ahead) == ("unix", 300.0)
    monkeypatch.setenv("RECLAIM_CLOCK", "trace")
    assert (read_settings().clock, read_settings().ahead) == ("trace", 3_600.0)
    monkeypatch.setenv("RECLAIM_CLOCK", "free")
    with pytest.raises(ConfigError, match="RECLAIM_CLOCK: Input should be 'unix' or 'trace'"):
        read_settings()


def test_the_environment_sets_each_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECLAIM_MARGIN", "aggressive")
    monkeypatch.setenv("RECLAIM_MAX_TASKS", "7")
    assert (read_settings().margin, read_settings().max_tasks) == ("aggressive", 7)


def test_a_setting_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECLAIM_MAX_TASKS", "none")
    monkeypatch.setenv("RECLAIM_MAX_BODY_BYTES", "-1")
    with pytest.raises(ConfigError, match=r"RECLAIM_MAX_TASKS: .*RECLAIM_MAX_BODY_BYTES: ") as refusal:
        read_settings()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("name", "value"), [("FORGET_S", "1e300"), ("MONDAY_US", "9" * 23)])
def test_a_setting_without_end_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"RECLAIM_{name}", value)
    with pytest.raises(ConfigError, match=f"RECLAIM_{name}: Input should be"):
        read_settings()


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_number_below_zero_and_what_is_no_number_are_refused_for_every_setting(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    numbers = [
        name
        for name, field in ServingSettings.model_fields.items()
        if {int, float} & {field.annotation, *get_args(field.annotation)}
    ]
    assert len(numbers) > 20
    for name in numbers:
        monkeypatch.setenv(f"RECLAIM_{name.upper()}", value)
    with pytest.raises(ConfigError) as refusal:
        read_settings()
    assert [name for name in numbers if f"RECLAIM_{name.upper()}: Input should be" not in str(refusal.value)] == []


@pytest.mark.parametrize("name", sorted(ServingSettings.model_fields))
def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(f"RECLAIM_{name.upper()}", raising=False)
    unset = getattr(read_settings(), name)
    monkeypatch.setenv(f"RECLAIM_{name.upper()}", "")
    assert getattr(read_settings(), name) == unset


def test_an_empty_model_is_one_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECLAIM_MODEL", "")
    assert (read_settings().model, read_settings().may_fall_back) == ("reclaim@champion", True)
    monkeypatch.setenv("RECLAIM_MODEL", "builtin")
    assert (read_settings().model, read_settings().may_fall_back) == ("builtin", False)


def test_a_variable_that_is_almost_a_setting_is_refused_and_those_of_a_kubernetes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_3000_TCP", "PORT_3000_TCP_ADDR",
                 "PORT_3000_TCP_PROTO", "PREPARED"):  # fmt: skip
        monkeypatch.setenv(f"RECLAIM_{name}", "tcp://10.0.0.1:3000")
    read_settings()
    for wrong, right in (
        ("LATENES_S", "LATENESS_S"), ("STATES", "STATE"), ("MAX_TRACKD", "MAX_TRACKED"), ("TOKEN", "TOKEN_FILE"),
        ("latenes_s", "LATENESS_S"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(f"RECLAIM_{wrong}", "5")
            with pytest.raises(ConfigError, match=f"RECLAIM_{wrong} is no setting of the service; RECLAIM_{right} is"):
                read_settings()
