"""EOS tokens of config.json and generation_config.json, and end-of-turn tokens of templates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.agents.generate import plan_job
from aligner.cli import main
from aligner.data.examples import open_demonstrations
from aligner.data.export import Source
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import Tokenizer, check_end_tokens, report_end_tokens
from aligner.data.tokenizer_files import read_tokenizer_files
from aligner.errors import ConfigError
from aligner.schema import DataConfig
from tests.data.tokenizer_kinds import CHATML, KINDS, write_kind

ENDOFTEXT, IM_START, IM_END = 0, 1, 2
QUESTION = {"role": "user", "content": "1+1?"}


def model(directory: Path, eos: Any, generation: Any = None, **settings: Any) -> Path:
    """Write the directory of a tiny Qwen model; `eos` is the `eos_token_id` of its config.json."""
    files = KINDS["qwen"]()
    files["tokenizer_config.json"] |= settings
    files["config.json"] |= {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "vocab_size": len(files["tokenizer.json"]["model"]["vocab"]),
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    if generation is not None:
        files["generation_config.json"] = {"eos_token_id": generation}
    write_kind(directory, files)
    return directory


@pytest.mark.promise("generation-stops-at-every-eos")
@pytest.mark.parametrize(
    ("eos", "generation", "ids"),
    [
        (0, [2, 0], (0, 2)),
        ([0], 2, (0, 2)),
        (None, [2, 0], (2, 0)),
        ([2, 1], None, (2, 1)),
        (2, [], (2,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_those_of_both_files(
    tmp_path: Path, eos: Any, generation: Any, ids: tuple[int, ...]
) -> None:
    assert read_shape(model(tmp_path, eos, generation)).eos_token_ids == ids
    assert Tokenizer(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": 999}', "eos_token_id=999: must be at least 0 and less than vocab_size="),
        ('{"eos_token_id": [2, -1]}', "eos_token_id=-1: must be"),
        ('{"eos_token_id": "2"}', "eos_token_id='2': must be a token id or a list"),
        ('{"eos_token_id": [2.0]}', "must be a token id or a list"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
    ],
)
def test_wrong_eos_ids_are_refused_by_file_and_entry(
    tmp_path: Path, content: str, message: str
) -> None:
    (model(tmp_path, 0) / "generation_config.json").write_text(content)

    with pytest.raises(ConfigError) as error:
        read_shape(tmp_path)
    assert message in str(error.value)
    assert "generation_config.json" in str(error.value)


def test_stored_models_generate_until_any_eos_id(tmp_path: Path) -> None:
    model(tmp_path, 0, [2, 0])
    config = json.loads((tmp_path / "config.json").read_text())
    source = Source(config, (), lambda name: torch.empty(0), tmp_path, "vocabulary", tmp_path, "X")

    job = plan_job(source, [], samples=1, seed=1, stop_at_eos=True, max_new_tokens=4)
    assert job.options.stop_token_ids == (0, 2)


def learned(directory: Path, record: dict[str, Any]) -> str:
    """Return the text of a demonstration's response tokens."""
    file = directory / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    tokenizer = Tokenizer(directory)
    data = DataConfig(path=str(file), max_prompt_tokens=100)
    (row,) = open_demonstrations(data, tokenizer, 1).take(0, 1)
    return tokenizer.decode(row.tokens[row.prompt_length :], skip_special_tokens=False)


@pytest.mark.promise("generation-stops-at-every-eos")
@pytest.mark.parametrize(("eos", "generation"), [(0, [2, 0]), (0, None), (2, None), (None, None)])
def test_sft_ends_with_the_templates_end_of_turn(tmp_path: Path, eos: Any, generation: Any) -> None:
    model(tmp_path, eos, generation)
    chat = {"messages": [QUESTION, {"role": "assistant", "content": "a"}]}

    assert learned(tmp_path, chat) == "a<|im_end|>"


def test_sft_of_plain_text_ends_with_eos_token(tmp_path: Path) -> None:
    model(tmp_path, 0, [2, 0], eos_token="<|endoftext|>", chat_template=None)

    assert learned(tmp_path, {"prompt": "q", "response": " a"}) == " a<|endoftext|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, IM_END),
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", IM_END),
        ("{% for m in messages %}{{ m.content }}<|endoftext|><|im_end|>{% endfor %}", ENDOFTEXT),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }} END<|im_end|>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[0].content }}<|im_end|>", None),
        (None, None),
    ],
)
def test_end_of_turn_is_the_token_after_an_answer(
    tmp_path: Path, template: str | None, end: int | None
) -> None:
    model(tmp_path, 0, chat_template=template)

    assert Tokenizer(tmp_path).end_of_turn_id == end


def test_report_lists_eos_ids_with_texts(tmp_path: Path) -> None:
    lines = report_end_tokens(model(tmp_path, 0, [2, 0]), (0, 2))

    assert lines == ["EOS tokens: 0 '<|endoftext|>', 2 '<|im_end|>'"]
    assert "none" in report_end_tokens(tmp_path, ())[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "ends an assistant's message with the token 2 '<|im_end|>', which is not an EOS"),
        ({"chat_template": None}, "eos_token of the tokenizer is 2 '<|im_end|>', which is not"),
        ({"chat_template": None, "eos_token": "<|endoftext|>"}, None),
    ],
)
def test_end_token_that_is_not_eos_is_reported_once(
    tmp_path: Path, settings: dict[str, Any], message: str | None
) -> None:
    model(tmp_path, 0, **settings)
    warnings = check_end_tokens(tmp_path, (0,), read_tokenizer_files(tmp_path))

    assert len(warnings) == (message is not None)
    assert all(str(message) in warning for warning in warnings)


@pytest.mark.parametrize(("generation", "is_warned"), [([2, 0], False), (None, True)])
def test_validate_prints_eos_ids_and_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], generation: Any, is_warned: bool
) -> None:
    directory = model(tmp_path, 0, generation, model_max_length=64)
    path = f"model.path={directory}"

    with pytest.raises(SystemExit, match="0"):
        main(["validate", "experiment=tiny_ppo", "model.source=directory", path])
    printed = capsys.readouterr().out
    assert "EOS tokens: 0 '<|endoftext|>'" in printed
    assert ("warning: " in printed) == is_warned
    assert "2 '<|im_end|>'" in printed
