"""A rollout's variables, and the report of its reward to an event endpoint that is not always there."""

import time

import httpx
import pytest

from empo2.agents.rollout import Rollout


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_reward_is_reported_with_what_goes_with_it(server):
    Rollout.from_env(server.variables).report(0.5, metrics={"turns": 3})
    data = {"value": 0.5, "source": "agent", "metrics": {"turns": 3}}
    assert server.events == [{"event_type": "reward", "data": data}]
    Rollout.from_env({name: value for name, value in server.variables.items() if name != "AGL_KEY"}).report(1)
    assert server.authorizations == {"Bearer secret", None}


def test_a_report_is_sent_again(server):
    server.busy = 3
    Rollout.from_env(server.variables).report(1)
    assert len(server.events) == 4
    assert server.events[0] == server.events[3]


def test_a_report_that_stays_refused_is_an_error(server):
    server.busy = 10
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        Rollout.from_env(server.variables).report(1)
    assert len(server.events) == 4


@pytest.mark.parametrize("variable", ["AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"])
def test_a_missing_address_is_named(server, variable):
    for variables in ({**server.variables, variable: ""}, {name: "x" for name in server.variables if name != variable}):
        with pytest.raises(ValueError, match=f"{variable} is not set"):
            Rollout.from_env(variables)
