"""Rendering of chat templates, and errors of templates."""

from __future__ import annotations

import json
import shutil

import pytest

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.tokenizer import ChatTemplate
from aligner.errors import AlignerError, ConfigError

CONVERSATION = [
    {"role": "system", "content": 'be <brief> & "kind"'},
    {"role": "user", "content": "  1+1? "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?", "tool": {"name": "é"}},
]
# Features that published templates use: special tokens, loop controls, namespaces, block trimming,
# JSON and generation markers.
TEMPLATES = {
    "marked": (
        """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' %}
        {%- continue %}
    {% endif %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
    ),
    "namespace": (
        """{%- set ns = namespace(n=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif -%}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}[{{ ns.n }}]{% endif -%}
{{ message | tojson }}{%- endfor -%}{{ messages[0] | tojson(indent=2) }}"""
    ),
}


@pytest.fixture
def directory(tmp_path):
    return tmp_path


def write(directory, template, **settings):
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, **settings})
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendered_conversation_equals_transformers(tmp_path, name, add_generation_prompt):
    from transformers import AutoTokenizer

    model = prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path / 'run'}"]))
    special = {"bos_token": {"content": "<pad>", "__type": "AddedToken"}, "eos_token": "<eos>"}
    write(model, TEMPLATES[name], tokenizer_class="PreTrainedTokenizerFast", **special)
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert (
        ChatTemplate(model).render(CONVERSATION, add_generation_prompt=add_generation_prompt)
        == expected
    )


def test_template_file_overrides_default_template(directory):
    write(
        directory,
        [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "{{ messages[1].content }}"},
        ],
    )
    assert ChatTemplate(directory).render(CONVERSATION, add_generation_prompt=False) == "  1+1? "
    (directory / "chat_template.jinja").write_text("{{ messages[2].content }}")
    assert ChatTemplate(directory).render(CONVERSATION, add_generation_prompt=False) == "2"


def test_missing_or_invalid_template_is_refused(directory):
    for settings in (
        None,
        {},
        {"chat_template": [{"name": "tools", "template": "x"}]},
        {"chat_template": ["default", 3]},
    ):
        if settings is not None:
            (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match=r"the model has neither chat_template\.jinja nor"):
            ChatTemplate(directory)
    write(directory, "{% for %}")
    with pytest.raises(ConfigError, match=f"{directory}: the chat template is not valid Jinja"):
        ChatTemplate(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not valid JSON"):
        ChatTemplate(directory)


def test_template_runtime_error_is_reported(directory):
    write(directory, "{{ messages[0].content + 1 }}")
    with pytest.raises(AlignerError, match="cannot render the messages: can only concatenate str"):
        ChatTemplate(directory).render(CONVERSATION, add_generation_prompt=False)


def test_template_exceptions_and_sandbox_escapes_are_refused(directory):
    write(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(AlignerError, match="roles must alternate"):
        ChatTemplate(directory).render(CONVERSATION, add_generation_prompt=False)
    for attack in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
    ):
        shutil.rmtree(directory)
        directory.mkdir()
        write(directory, attack)
        with pytest.raises(AlignerError, match="cannot render the messages"):
            ChatTemplate(directory).render(list(CONVERSATION), add_generation_prompt=False)


def test_template_receives_date_of_run(directory):
    write(directory, "{{ strftime_now('%d %b %Y %H:%M') }}")
    for date, expected in (
        ("2024-02-29", "29 Feb 2024 00:00"),
        ("2024-02-29T23:59:30", "29 Feb 2024 23:59"),
    ):
        assert (
            ChatTemplate(directory, date).render(CONVERSATION, add_generation_prompt=False)
            == expected
        )
