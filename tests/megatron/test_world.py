"""Process groups of a world: their threads, their timeout, and the deterministic mode."""

from __future__ import annotations

import pytest

from tests.megatron import families, jobs
from tests.worker_pool import free_port


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama2", {"tensor": 2}, {}),
        ("llama2", {"data": 2}, {"optimizer": {"distributed": True}}),
        ("mixtral", {"data": 2, "expert": 2}, {}),
    ],
)
def test_world_shutdown_ends_process_group_threads(pool, tmp_path, family, layout, settings):
    directory = families.save(family, tmp_path)
    for before, after in pool.run(
        families.threads_around_training,
        2,
        str(directory),
        layout,
        free_port(),
        fresh=True,
        **settings,
    ):
        assert after == before


def test_process_group_timeout_is_as_configured(pool):
    assert pool.run(jobs.group_timeout_s, 2, 119.0) == [119.0, 119.0]


@pytest.mark.promise("deterministic-mode-changes-nothing-on-cpu")
@pytest.mark.parametrize("family", ["llama2", "mixtral"])
def test_deterministic_kernels_change_nothing_on_cpu(pool, tmp_path, family):
    directory, layout = str(families.save(family, tmp_path)), {"data": 2}
    expected = pool.run(families.family_steps, 2, directory, layout)
    found = pool.run(families.deterministic_steps, 2, directory, layout)
    for one, other in zip(found, expected, strict=True):
        families.assert_same_bits(one, other)
