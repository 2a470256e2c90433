"""Damaged weight files, damaged indexes and heads that differ from tied embeddings are refused with
their names, from the files' headers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.checkpoint_files import derive_model_config
from aligner.data.export import export, find_source
from aligner.data.model_directory import prepare_model
from aligner.errors import ConfigError
from aligner.models.hugging_face import config_notes, read_config
from aligner.models.model_source import stored_model_notes
from aligner.models.weight_headers import read_header, tensor_files, weight_problems
from aligner.models.weight_slices import weight_table
from tests.models.test_families import CONFIGS

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights are in two files."""
    run = tmp_path_factory.mktemp("run")
    directory = prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"]))
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    index = {name: f"model-{part % 2}.safetensors" for part, name in enumerate(sorted(weights))}
    for file in sorted(set(index.values())):
        part = {name: tensor for name, tensor in weights.items() if index[name] == file}
        save_file(part, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))
    return directory


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "model")


def validate(directory: Path) -> None:
    prompts = directory.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    check(
        compose_config(
            [
                "experiment=tiny_ppo",
                "model.source=directory",
                f"model.path={directory}",
                f"data.path={prompts}",
                f"run.dir={directory.parent / 'run'}",
            ]
        )
    )


def rewrite_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((directory / INDEX).read_text())
    change(content["weight_map"])
    (directory / INDEX).write_text(json.dumps(content))


def test_sharded_weights_pass_validate(copy):
    validate(copy)


@pytest.mark.promise("weight-files-are-checked-by-validate")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "weight_map: must be an object"),
        ("{}", "weight_map: must be an object"),
        ('{"weight_map": {}}', "weight_map: must be an object"),
        ('{"weight_map": {"lm_head.weight": 3}}', "weight_map['lm_head.weight']=3: must be"),
        ('{"weight_map": {"a": "../model-0.safetensors"}}', "must be the name of a file"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "do not exist: absent.safetensors"),
    ],
)
def test_broken_index_is_refused_by_validate(copy, content, message):
    (copy / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json") as caught:
        validate(copy)
    assert message in str(caught.value)


def test_tensor_missing_from_index_is_refused(copy):
    rewrite_index(copy, lambda files: files.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight \(64,\) is missing"):
        validate(copy)


def test_tensor_outside_its_indexed_file_is_refused(copy):
    files = {"model-0.safetensors": "model-1.safetensors"}
    rewrite_index(
        copy,
        lambda names: names.update(
            {"model.norm.weight": files.get(names["model.norm.weight"], "model-0.safetensors")}
        ),
    )
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is not in model-"):
        validate(copy)


@pytest.mark.promise("weight-files-are-checked-by-validate")
@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_weight_file_is_refused_by_validate(copy, keep):
    file = copy / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model-0\.safetensors cannot be read"):
        validate(copy)


def test_git_lfs_pointer_is_refused_as_a_weight_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 4)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_header(file)


def test_single_file_takes_precedence_over_index(copy):
    weights = {
        name: tensor
        for part in (0, 1)
        for name, tensor in load_file(copy / f"model-{part}.safetensors").items()
    }
    save_file(weights, copy / "model.safetensors")
    assert set(tensor_files(copy).values()) == {copy / "model.safetensors"}


def test_quantized_tensor_without_quantization_config_is_refused(copy):
    file = copy / "model-0.safetensors"
    weights = load_file(file)
    name = min(weights)
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(ConfigError, match=f"tensor {name} has type F8_E4M3; supported: F64"):
        validate(copy)


@pytest.mark.parametrize("is_equal", [True, False])
def test_stored_head_must_equal_tied_embeddings(copy, is_equal):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if is_equal:
        files = tensor_files(copy)
        embedding = load_file(files["model.embed_tokens.weight"])["model.embed_tokens.weight"]
        file = files["lm_head.weight"]
        save_file(load_file(file) | {"lm_head.weight": embedding.clone()}, file)
        validate(copy)
        return
    message = r"tie_word_embeddings=true, but tensor lm_head\.weight differs"
    for checked in (validate, _prepare):
        with pytest.raises(ConfigError, match=message):
            checked(copy)


def _prepare(directory: Path) -> None:
    prepare_model(
        compose_config(["experiment=tiny_ppo", "model.source=directory", f"model.path={directory}"])
    )


@pytest.mark.promise("weight-files-are-checked-by-validate")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method='gptq'"),
        ({"eos_token_id": [2, 32007]}, r"eos_token_id=\[2, 32007\]: must be"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_validate_refuses_unsupported_entry_with_directory(copy, change, message):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=f"model.path={copy}: .*{message}"):
        validate(copy)


def test_pad_token_id_of_minus_one_passes_validate(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    validate(copy)


def test_validate_lists_entries_unknown_to_transformers(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"logit_scale": 2, "n_ctx": 8}))
    composed = compose_config(
        ["experiment=tiny_ppo", "model.source=directory", f"model.path={copy}"]
    )
    assert list(stored_model_notes(composed, {})) == [
        f"model.path={copy}: config.json: ignored entries that transformers' LlamaConfig does not"
        " know: logit_scale, n_ctx"
    ]


def test_validate_lists_unknown_entries_of_a_random_model():
    composed = compose_config(["experiment=tiny_ppo", "+model.config.hiden_size=8"])
    (note,) = stored_model_notes(composed, {})
    assert note.startswith("model.config: ") and note.endswith("know: hiden_size")


def test_tensors_that_the_transformers_class_ignores_are_allowed(tmp_path):
    config = {"architectures": ["Qwen3NextForCausalLM"], **CONFIGS["Qwen3NextForCausalLM"]}
    table = weight_table(read_config(config, "test"))
    tensors = {spec.stored_range.name: torch.zeros(spec.stored_range.shape) for spec in table}
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_problems(tmp_path, table) == []

    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert "tensor mtp.fc.weight (2,) is not part of the model" in weight_problems(tmp_path, table)


def test_layers_of_multi_token_prediction_are_allowed_and_named(tmp_path):
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **CONFIGS["Glm4MoeForCausalLM"],
    }
    table = weight_table(read_config(config, "test"))
    tensors = {spec.stored_range.name: torch.zeros(spec.stored_range.shape) for spec in table}
    save_file(
        tensors | {"model.layers.2.eh_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    path = tmp_path / "config.json"

    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert weight_problems(tmp_path, table) == []
    assert config_notes(json.loads(path.read_text())) == [
        "config.json: num_nextn_predict_layers=1: layers of multi-token prediction are not trained,"
        " and checkpoints and exported models do not contain them"
    ]
    assert derive_model_config(tmp_path, "vocabulary", 2)["num_nextn_predict_layers"] == 0

    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert weight_problems(tmp_path, table) == [
        "tensor model.layers.2.eh_proj.weight (2,) is not part of the model"
    ]


def test_correction_biases_are_exported_in_float32(tmp_path):
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **CONFIGS["Glm4MoeForCausalLM"],
    }
    table = weight_table(read_config(config, "test"))
    source = tmp_path / "source"
    source.mkdir()
    tensors = {spec.stored_range.name: torch.randn(spec.stored_range.shape) for spec in table}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    export(find_source(source), tmp_path / "output", dtype="bfloat16")
    exported = load_file(tmp_path / "output" / "model.safetensors")
    for name, tensor in exported.items():
        is_bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_bias else torch.bfloat16), name
        assert not is_bias or torch.equal(tensor, tensors[name])


def write_header(directory: Path, text: str, length: int | None = None) -> Path:
    file = directory / "model.safetensors"
    size = len(text) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + text.encode() + bytes(32))
    return file


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype": "F32", "shape": [1e400], "data_offsets": [0, 32]}',
        '{"dtype": "F32", "shape": [8], "data_offsets": [0, 1e400]}',
        '{"dtype": "F32", "shape": [8], "data_offsets": [-8, 32]}',
        '{"dtype": "F32", "shape": [8], "data_offsets": [32, 0]}',
        '{"dtype": "F32", "shape": "8", "data_offsets": [0, 32]}',
        '{"dtype": "F32", "shape": [true], "data_offsets": [0, 32]}',
        '{"dtype": null, "shape": [8], "data_offsets": [0, 32]}',
        "[]",
    ],
)
def test_header_with_wrong_entry_names_file_and_tensor(tmp_path: Path, entry: str) -> None:
    file = write_header(tmp_path, f'{{"norm.weight": {entry}}}')
    with pytest.raises(ConfigError) as raised:
        read_header(file)
    assert str(raised.value).startswith(str(file)) and "tensor 'norm.weight'" in str(raised.value)


def test_deep_and_large_safetensors_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nested more than 128 levels deep"):
        read_header(write_header(tmp_path, "[" * 100_000))
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((200_000_000).to_bytes(8, "little"))
        stream.truncate(300_000_000)
    with pytest.raises(ConfigError, match="its header has 200000000 bytes, allowed: 100000000"):
        read_header(file)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 4096"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers=1000"),
        ({"hidden_size": 10**400}, "must be at most 2147483647"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers=1000000000"),
    ],
)
def test_config_with_huge_numbers_is_refused(entries: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(
            CONFIGS["LlamaForCausalLM"] | {"architectures": ["LlamaForCausalLM"]} | entries,
            "model.path",
        )


def test_config_with_too_many_experts_is_refused() -> None:
    entries = {"num_hidden_layers": 4000, "num_local_experts": 4000, "num_experts": 4000}
    with pytest.raises(ConfigError, match="4000 layers with 4000 experts each"):
        read_config(
            CONFIGS["MixtralForCausalLM"] | {"architectures": ["MixtralForCausalLM"]} | entries,
            "model.path",
        )


def test_index_with_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(ConfigError, match="must be the name of a file"):
        tensor_files(tmp_path)
