from __future__ import annotations

import itertools
import socket

from aligner.config.compose import compose_config
from aligner.launch.endpoints import free_ports, is_ready, pick_endpoints


def test_fixed_ports_are_kept_and_the_others_are_free_and_distinct() -> None:
    config = compose_config(["experiment=tiny_ppo", "critic.ports.grpc=20123"])
    ports = free_ports(config)
    endpoints = pick_endpoints(config, ports)
    masters = list(itertools.islice(ports, 4))
    chosen = [*masters, *(port for end in endpoints.values() for port in (end.http, end.grpc, end.metrics))]
    assert endpoints["critic"].grpc == 20123
    assert len(set(chosen)) == 10
    for port in chosen:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_server_on_every_interface_is_reached_over_loopback() -> None:
    config = compose_config(["experiment=tiny_ppo", "server.interface=0.0.0.0"])
    endpoint = pick_endpoints(config, free_ports(config))["reward"]
    assert endpoint.host == "127.0.0.1"
    assert not is_ready(endpoint, "reward_model")


def test_a_server_that_accepts_but_does_not_answer_is_not_ready() -> None:
    config = compose_config(["experiment=tiny_ppo"])
    endpoint = pick_endpoints(config, free_ports(config))["critic"]
    with socket.socket() as listener:
        listener.bind((endpoint.host, endpoint.http))
        listener.listen()
        assert not is_ready(endpoint, "critic_infer", timeout_s=0.1)
