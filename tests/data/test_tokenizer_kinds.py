"""Tokenizers of published kinds equal those of AutoTokenizer, or are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from aligner.data.chat_template import ChatTemplate
from aligner.data.tokenizer import Tokenizer
from aligner.data.tokenizer_classes import CLASSES, OVERRULED, REGISTERED, UNSUPPORTED
from aligner.data.tokenizer_files import read_chat_templates, read_tokenizer_files
from aligner.errors import ConfigError
from aligner.models.architectures import ARCHITECTURES
from aligner.models.vocabulary import read_vocabulary
from tests.data.tokenizer_kinds import KINDS, TEXTS, write_kind

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.promise("tokenizer-equals-auto-tokenizer")
@pytest.mark.parametrize("name", KINDS)
def test_tokenizers_equal_those_of_auto_tokenizer(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    write_kind(tmp_path, KINDS[name]())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = read_tokenizer_files(tmp_path)
    ours = files.tokenizer

    assert ours.get_vocab() == theirs.get_vocab()
    assert files.special_tokens == theirs.special_tokens_map
    for token in ("bos", "eos", "pad", "unk"):
        text = files.special_tokens.get(f"{token}_token")
        id = None if text is None else ours.token_to_id(text)
        assert id == getattr(theirs, f"{token}_token_id")

    special = [str(token) for token in theirs.added_tokens_encoder]
    texts = [*TEXTS, *(f"a {token} b{token}\n{token}" for token in special), "".join(special)]
    for text in texts:
        for adds in (False, True):
            ids = ours.encode(text, add_special_tokens=adds).ids
            assert ids == theirs(text, add_special_tokens=adds)["input_ids"], text
            for skips in (False, True):
                decoded = ours.decode(ids, skip_special_tokens=skips)
                expected = theirs.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
                assert decoded == expected

    if theirs.chat_template is not None:
        template = ChatTemplate(tmp_path)
        for tools in (None, TOOLS):
            for add in (False, True):
                rendered = template.render(MESSAGES, tools, add_generation_prompt=add)
                assert rendered == theirs.apply_chat_template(
                    MESSAGES, tools=tools, tokenize=False, add_generation_prompt=add
                )


def test_decoding_cleans_up_spaces_as_auto_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_kind(tmp_path, KINDS["bert plain"]())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 300}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)

    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_sentencepiece_adds_no_second_leading_space(tmp_path: Path) -> None:
    """The normalizer in tokenizer.json would add a second space before a leading one."""
    write_kind(tmp_path, KINDS["llama2"]())
    loaded = read_tokenizer_files(tmp_path).tokenizer
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert loaded.encode("a b").ids == file.encode("a b").ids
    assert loaded.encode("▁odd").ids != file.encode("▁odd").ids


def test_tokenizer_classes_equal_transformers_registry() -> None:
    from transformers.models.auto.tokenization_auto import (
        MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
        TOKENIZER_MAPPING_NAMES,
    )

    # Without the package mistral-common, transformers uses tokenizer.json unchanged.
    theirs = {
        name: str(of_class).replace("MistralCommonBackend", "TokenizersBackend")
        for name, of_class in TOKENIZER_MAPPING_NAMES.items()
        if of_class is not None
    }
    assert {name: theirs[name] for name in REGISTERED} == REGISTERED
    overruled = MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & set(REGISTERED)
    assert overruled == OVERRULED
    supported = {str(architecture.model_type) for architecture in ARCHITECTURES}
    assert {name for name in supported if name in theirs} <= set(REGISTERED)


def test_other_transformers_classes_are_listed_as_unsupported() -> None:
    import transformers
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for name in dir(transformers):
        if not name.endswith("Tokenizer") or name in CLASSES | {"AutoTokenizer": None}:
            continue
        of_class = tokenizer_class_from_name(name)
        is_file_as_it_is = of_class is None or of_class.__name__ in ("PythonBackend",)
        if isinstance(of_class, type) and issubclass(of_class, transformers.TokenizersBackend):
            is_file_as_it_is = "__init__" not in of_class.__dict__
        helpers = ("BasicTokenizer", "CharacterTokenizer", "MecabTokenizer", "WordpieceTokenizer")
        assert is_file_as_it_is or name in UNSUPPORTED or name in helpers, name


def refused(directory: Path, **files: Any) -> str:
    """Return the error of loading a Llama 3 tokenizer with changed files."""
    kind = KINDS["llama3"]() | {name.replace("__", "."): entry for name, entry in files.items()}
    write_kind(directory, {name: entry for name, entry in kind.items() if entry is not None})
    with pytest.raises(ConfigError) as error:
        read_tokenizer_files(directory)
    return str(error.value)


@pytest.mark.promise("tokenizer-equals-auto-tokenizer")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split_special_tokens": True}, "split_special_tokens=true: not supported"),
        ({"tokenizer_class": "CLIPTokenizer"}, "tokenizer_class=CLIPTokenizer: not supported"),
        ({"auto_map": {"AutoTokenizer": [None, "code.Own"]}}, "auto_map="),
        (
            {"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]},
            r"fast_tokenizer_files=\['tokenizer.4.0.0.json'\]",
        ),
        ({"eos_token": 3}, "eos_token=3: must be a token"),
        (
            {"added_tokens_decoder": {"999": {"content": "<x>"}}},
            "added token '<x>' has id 999, but AutoTokenizer gives it",
        ),
        ({"added_tokens_decoder": {"0": {"contents": "<x>"}}}, "added_tokens_decoder.0"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder: must map token ids"),
        ({"extra_special_tokens": "<x>"}, "extra_special_tokens='<x>': must be a list"),
    ],
)
def test_entries_that_cannot_be_reproduced_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    error = refused(tmp_path, tokenizer_config__json=settings)

    assert str(tmp_path / "tokenizer_config.json") in error
    assert re.search(message, error), error


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "tiktoken.model"])
def test_unsupported_file_formats_are_refused_with_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a")

    with pytest.raises(ConfigError, match=f"{name} is not supported; convert it with") as error:
        read_tokenizer_files(tmp_path)
    assert "save_pretrained" in str(error.value)


def test_vocabulary_files_of_wrong_class_are_refused(tmp_path: Path) -> None:
    files = KINDS["gpt2 files"]() | {"config.json": {"model_type": "llama"}}
    write_kind(tmp_path, files | {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}})

    with pytest.raises(ConfigError, match="tokenizer_class=LlamaTokenizer: cannot be built from"):
        read_tokenizer_files(tmp_path)


def test_read_vocabulary_equals_tokenizer_vocabulary(tmp_path: Path) -> None:
    write_kind(tmp_path, KINDS["qwen files"]())
    tokens = read_tokenizer_files(tmp_path).tokenizer.get_vocab()

    assert read_vocabulary(tmp_path) == {id: text for text, id in tokens.items()}


def test_mismatched_tokenizer_model_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_kind(tmp_path, KINDS["words"]() | {"config.json": {"model_type": "gpt2"}})
    for _ in range(2):
        loaded = read_tokenizer_files(tmp_path).tokenizer

    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.get_vocab() == file.get_vocab()
    (record,) = caplog.records
    assert "model.type=WordLevel" in record.getMessage()


def test_class_tokens_beyond_vocab_size_are_not_added(tmp_path: Path) -> None:
    files = KINDS["gemma"]()
    content = files["tokenizer.json"]
    content["added_tokens"] = [e for e in content["added_tokens"] if e["content"] != "<mask>"]
    content["model"]["vocab"]["plain"] = content["model"]["vocab"].pop("<mask>")
    size = len(content["model"]["vocab"])
    write_kind(tmp_path, files)
    for vocabulary, has_mask in ((size, False), (size + 1, True)):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
        tokens = read_tokenizer_files(tmp_path).tokenizer.get_vocab()
        assert ("<mask>" in tokens) == has_mask


def test_null_bos_token_renders_as_empty_text(tmp_path: Path) -> None:
    write_kind(tmp_path, KINDS["qwen"]())

    text = ChatTemplate(tmp_path).render(MESSAGES[1:2], add_generation_prompt=False)
    assert text == "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"


def test_processor_template_is_used_if_no_other_exists(tmp_path: Path) -> None:
    template = tmp_path / "chat_template.json"
    template.write_text(json.dumps({"chat_template": "processor"}))
    assert read_chat_templates(tmp_path) == {"default": "processor"}

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "settings"}))
    assert read_chat_templates(tmp_path) == {"default": "settings"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    with pytest.raises(ConfigError, match=r"found only: tool_use"):
        read_chat_templates(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{% set x = m.role %}{{ loop.index }}"
        "{% endgeneration %}{{ x }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% generation %}{% set ns.a = 2 %}{% endgeneration %}{{ ns.a }}",
        "{{ dict(a=1) | tojson(separators=(',', ':')) }}{{ {'b': 1, 'a': 'ä<'} | tojson(sort_keys=true) }}",
        "{{ unknown }}{{ messages[0].unknown }}{{ bos_token is defined }}{{ tools is none }}"
        "{{ documents is none }}{{ strftime_now('%Y') | length }}",
    ],
)
def test_jinja_extensions_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import AutoTokenizer

    write_kind(tmp_path, KINDS["words"]() | {"chat_template.jinja": template})
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES, tokenize=False)

    assert ChatTemplate(tmp_path).render(MESSAGES, add_generation_prompt=False) == expected
