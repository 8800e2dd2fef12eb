"""Settings: values that are refused, and settings that contradict one another."""

from __future__ import annotations

import pytest

from shared.errors import InvalidInput
from shared.names import is_name
from shared.settings.model import ORDERS, Order, Settings, read_settings


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"UNICRON_{name.upper()}", raising=False)


def test_the_defaults_agree() -> None:
    settings = read_settings()
    assert [order for order in ORDERS if order.problem(settings) is not None] == []


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("heartbeat_interval_s", 1.5, "node_timeout_s"),
        ("node_timeout_s", 60.0, "command_timeout_s"),
        ("command_timeout_s", 300.0, "resume_timeout_s"),
        ("hang_floor_s", 2.1, "collective_floor_s"),
        ("stop_floor_s", 0.6, "hang_floor_s"),
        ("stop_factor", 3.1, "hang_factor"),
        ("collective_floor_s", 121.0, "slow_region_timeout_s"),
        ("slow_region_timeout_s", 300.0, "resume_timeout_s"),
        ("collective_timeout_s", 120.0, "slow_region_timeout_s"),
        ("restart_window_s", 120.0, "slow_region_timeout_s"),
    ],
)
def test_a_contradiction_is_refused_by_name(
    name: str, value: float, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"UNICRON_{name.upper()}", str(value))
    with pytest.raises(InvalidInput) as caught:
        read_settings()
    (problem,) = caught.value.extra["errors"]
    assert problem["field"] in {name, other}
    for expected in (name, f"{value:g}", other, f"{Settings.model_fields[other].default:g}"):
        assert expected in caught.value.detail
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: f"{order.lower}-{order.upper}")
def test_every_rule_holds_up_to_its_limit(order: Order) -> None:
    settings = Settings()
    upper = getattr(settings, order.upper)
    equal = settings.model_copy(update={order.lower: upper})
    assert (order.problem(equal) is None) == (order.relation == "equal")
    assert order.problem(settings.model_copy(update={order.lower: upper * 1.001})) is not None
    assert order.problem(settings.model_copy(update={order.lower: upper * 0.999})) is None


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_settings(heartbeat_interval_s=100.0, hang_floor_s=50.0)
    assert [problem["field"] for problem in caught.value.extra["errors"]] == ["heartbeat_interval_s", "hang_floor_s"]


def test_a_value_that_is_not_allowed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_PORT", "none")
    with pytest.raises(InvalidInput, match=r"port: .*given: 'none'") as caught:
        read_settings()
    assert caught.value.extra["errors"][0]["field"] == "port"


def test_a_refusal_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_LOG_URL", "postgresql://unicron:secret@db/unicron")
    with pytest.raises(InvalidInput) as caught:
        read_settings(heartbeat_interval_s=2.0)
    assert "secret" not in str(caught.value.problem())


def test_a_node_is_called_by_its_host_name_up_to_the_first_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node7.rack2.example.org")
    assert read_settings().node == "node7"


def test_a_host_name_that_is_no_node_name_refuses_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the agent uses it; the agent refuses it (``tests/agent/test_main.py``)."""
    monkeypatch.setattr("socket.gethostname", lambda: "my_host")
    assert read_settings().node == "my_host"


@pytest.mark.parametrize("name", ["", "N0", "a.b", "a/b", "-a", "a_b", "a\n", "a" * 64])
def test_names_of_nodes_follow_the_pattern_of_task_names(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_settings(node=name)
    assert caught.value.extra["errors"][0]["field"] == "node"
    assert not is_name(name)


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        ("nats://one:4222", ["nats://one:4222"]),
        (
            "tls://one:4222, tls://two:4223,tls://[::1]:4222",
            ["tls://one:4222", "tls://two:4223", "tls://[::1]:4222"],
        ),
    ],
)
def test_nats_may_have_several_servers(given: str, servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_NATS_URL", given)
    assert read_settings().nats_servers == servers


@pytest.mark.parametrize("wrong", ["", "one:4222", "http://one:4222", "nats://", "nats://one:port", "nats://one:70000"])
def test_a_server_that_is_none_is_refused_by_name(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICRON_NATS_URL", f"nats://right:4222,{wrong}")
    with pytest.raises(InvalidInput) as caught:
        read_settings()
    (problem,) = caught.value.extra["errors"]
    assert problem["field"] == "nats_url"
    assert repr(wrong) in problem["problem"]
    assert "nats://HOST:PORT" in problem["problem"]
