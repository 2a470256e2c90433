"""Published configurations are read, and unsupported ones are refused with the entry named."""

from __future__ import annotations

import pytest

from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.proof.shrink import shrink_config
from aligner.schema import ParallelConfig
from tests.models.published_configs import PUBLISHED, SUPPORTED, without_quantization


def test_table_has_forty_supported_models_with_sources():
    assert len(SUPPORTED) >= 40
    assert all(row["source"].startswith("https://") for row in PUBLISHED.values())


@pytest.mark.parametrize("name", SUPPORTED)
def test_published_config_is_read_and_shrunk(name):
    config = SUPPORTED[name]
    shape = read_config(config, name)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    assert (shape.num_layers, shape.vocab_size) == (layers, config["vocab_size"])
    small = read_config(shrink_config(config, [ParallelConfig()], name), name)
    assert small.num_layers <= 8 and small.hidden_size <= 1024


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - SUPPORTED.keys()))
def test_unsupported_published_config_is_refused_with_entry(name):
    row = PUBLISHED[name]
    expected = row.get("refused") or row["config"]["architectures"][0]
    config = row["config"]
    if expected != "quantization_config":
        config = without_quantization(config)
    with pytest.raises(ConfigError) as caught:
        read_config(config, name)
    assert str(caught.value).startswith(f"{name}: ") and expected in str(caught.value)
