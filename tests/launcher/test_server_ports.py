"""Tests of the ports and endpoints of servers."""

from __future__ import annotations

import itertools
import socket

import pytest

from aligner.cli.rank_processes import ROLES
from aligner.config.compose import compose_config
from aligner.errors import AlignerError
from aligner.launcher.rank_environment import (
    SERVED_MODELS,
    is_healthy,
    local_hosts,
    pick_endpoints,
    reserve_free_ports,
)
from aligner.placement.addresses import Endpoint, select_role_endpoints
from aligner.schema import Config
from aligner.servers import wire_protocol


def endpoints_of(config: Config) -> dict[str, Endpoint]:
    with reserve_free_ports(config) as ports:
        return pick_endpoints(config, local_hosts(config), ports)


def test_ports_are_configured_or_free_and_distinct() -> None:
    config = compose_config(["experiment=tiny_ppo", "critic.ports.grpc=20123"])
    with reserve_free_ports(config) as ports:
        endpoints = pick_endpoints(config, local_hosts(config), ports)
        masters = list(itertools.islice(ports, 4))
    chosen = [
        *masters,
        *(port for end in endpoints.values() for port in (end.http, end.grpc, end.metrics)),
    ]
    assert endpoints["critic"].grpc == 20123
    assert len(set(chosen)) == 10
    for port in chosen:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_port_in_use_on_loopback_is_not_free() -> None:
    config = compose_config(["experiment=tiny_ppo", "server.interface=127.0.0.2"])
    with reserve_free_ports(config) as ports:
        used_port, free = itertools.islice(ports, 2)
    with (
        socket.create_server(("127.0.0.1", used_port)),
        reserve_free_ports(config, [used_port, free]) as ports,
    ):
        assert next(ports) == free
        with pytest.raises(AlignerError):
            next(ports)


def test_configured_port_is_not_offered_as_free() -> None:
    config = compose_config(["experiment=tiny_ppo", "critic.ports.grpc=20123"])
    with reserve_free_ports(config, [20123]) as ports, pytest.raises(AlignerError):
        next(ports)


def test_wildcard_interface_is_reached_over_loopback() -> None:
    config = compose_config(["experiment=tiny_ppo", "server.interface=0.0.0.0"])
    endpoint = endpoints_of(config)["reward"]
    assert endpoint.host == "127.0.0.1"
    assert not is_healthy(config, "reward", endpoint)


def test_server_that_does_not_answer_is_unhealthy() -> None:
    config = compose_config(["experiment=tiny_ppo"])
    endpoint = endpoints_of(config)["critic"]
    with socket.socket() as listener:
        listener.bind((endpoint.host, endpoint.http))
        listener.listen()
        assert not is_healthy(config, "critic", endpoint, timeout_s=0.1)


def test_replicas_have_distinct_ports() -> None:
    ports = ("reward.ports.http=20200", "reward.ports.grpc=20201")
    config = compose_config(["experiment=tiny_ppo", "reward.replicas=3", *ports])
    endpoints = endpoints_of(config)
    assert list(endpoints) == ["critic", "reward", "reward.1", "reward.2"]
    assert [(end.http, end.grpc) for end in select_role_endpoints(endpoints, "reward")] == [
        (20200, 20201),
        (20203, 20204),
        (20206, 20207),
    ]
    assert (
        len({port for end in endpoints.values() for port in (end.http, end.grpc, end.metrics)})
        == 12
    )


def test_every_server_role_has_readiness_endpoint() -> None:
    endpoints = {
        each.name
        for each in vars(wire_protocol).values()
        if isinstance(each, wire_protocol.EndpointSpec)
    }
    assert SERVED_MODELS.keys() == ROLES.keys() - {"prepare", "trainer"}
    assert set(SERVED_MODELS.values()) <= endpoints
