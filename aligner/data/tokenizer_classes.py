"""The tokenizer classes of transformers 5 that rebuild a tokenizer from its vocabulary.

Such a class uses the vocabulary, the merges and the post-processor of tokenizer.json, and its own
normalizer, pre-tokenizer and decoder. `select_tokenizer_class` returns the class that AutoTokenizer
selects; its builder follows `transformers/models/*/tokenization_*.py`.
"""

import base64
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from aligner.errors import ConfigError

_log = logging.getLogger(__name__)
# Maximum number of sentinel tokens of T5, which has 100.
_MAX_SENTINELS = 10_000
# Content of tokenizer.json.
_Content = Mapping[str, Any]
# Entries of tokenizer_config.json, or of config.json.
_Entries = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TokenizerClass:
    """A tokenizer class of transformers, with the function that builds its tokenizers."""

    name: str
    model: str = ""
    """Type of the model in tokenizer.json that the class requires."""
    build: Callable[[_Content, _Entries], tokenizers.Tokenizer] = lambda content, entries: (
        _unsupported()
    )
    """Function that returns the tokenizer of a tokenizer.json and the entries of
    tokenizer_config.json."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Special tokens that the class uses if the files do not name them."""
    has_vocabulary_files: bool = False
    """Whether the class can also be built from vocab.json and merges.txt."""
    marks_special_tokens: bool = False
    """Whether special tokens lose the other flags that the files give them."""
    replaces_post_processor: bool = False
    """Whether the class ignores the post-processor of tokenizer.json."""
    template: Callable[[_Entries], tuple[list[str], list[str]]] | None = None
    """Function that returns the tokens before and after a text; None if the class does not fix
    them."""


def _unsupported() -> tokenizers.Tokenizer:
    raise NotImplementedError


PLAIN = TokenizerClass("TokenizersBackend")
"""Class that uses tokenizer.json unchanged (TokenizersBackend, PreTrainedTokenizerFast)."""


def select_tokenizer_class(
    directory: Path, settings: _Entries, config: _Entries, content: _Content
) -> TokenizerClass:
    """Return the class that AutoTokenizer selects for a model directory.

    Args:
        directory: The model directory.
        settings: The entries of tokenizer_config.json.
        config: The entries of config.json.
        content: The content of tokenizer.json.

    Raises:
        ConfigError: The class is not supported, or it is Python code of the directory.
    """
    file = directory / "tokenizer_config.json"
    automatic = settings.get("auto_map")
    if automatic is not None and (not isinstance(automatic, dict) or "AutoTokenizer" in automatic):
        raise ConfigError(
            f"{file}: auto_map={automatic!r}: tokenizers in Python code of a model directory are"
            " not supported; remove the entry if tokenizer.json describes the tokenizer completely"
        )
    name = _find_class_name(settings, config, content)
    if name in UNSUPPORTED:
        raise ConfigError(
            f"{file}: tokenizer_class={name}: not supported; set"
            " tokenizer_class=PreTrainedTokenizerFast if tokenizer.json describes the tokenizer"
            f" completely; supported classes: {', '.join(CLASSES)}"
        )
    selected_class = CLASSES.get(name, PLAIN)

    # `content` without tokenizer.json is the content of vocab.json and merges.txt.
    has_tokenizer_json = (directory / "tokenizer.json").is_file()
    if not has_tokenizer_json and content and not selected_class.has_vocabulary_files:
        supported_names = [
            candidate.name for candidate in CLASSES.values() if candidate.has_vocabulary_files
        ]
        raise ConfigError(
            f"{file}: tokenizer_class={name}: cannot be built from vocab.json and merges.txt"
            f" without tokenizer.json; classes that can: {', '.join(supported_names)}; or"
            " convert the tokenizer with"
            " `AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)` of transformers"
        )
    model = _find_model_type(content)
    if has_tokenizer_json and selected_class is not PLAIN and model != selected_class.model:
        declared = settings.get("tokenizer_class")
        if declared is None or _remove_fast(declared) not in _PLAIN_NAMES:
            _warn_of_model_type(directory / "tokenizer.json", model, selected_class)
        return PLAIN
    return selected_class


@cache
def _warn_of_model_type(file: Path, model: str, selected_class: TokenizerClass) -> None:
    """Log once that transformers would build another, unusable tokenizer from a file.

    `cache` prevents a second log of the same warning.
    """
    _log.warning(
        "%s: model.type=%s: the class %s that transformers selects for this model requires %s; the"
        " file is used as it is; set tokenizer_class=PreTrainedTokenizerFast in"
        " tokenizer_config.json so that transformers does the same",
        file,
        model,
        selected_class.name,
        selected_class.model,
    )


def apply_class_defaults(selected_class: TokenizerClass, entries: _Entries) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json, completed with the defaults of the class."""
    complete = {**selected_class.defaults, **entries}
    if selected_class.name == "T5Tokenizer":
        # T5 adds numbered sentinel tokens, unless the files list their own.
        count = int(entries.get("extra_ids", 100))
        if count > _MAX_SENTINELS:
            raise ConfigError(
                f"tokenizer_config.json: extra_ids={count}: must be at most {_MAX_SENTINELS}"
            )
        sentinels = [f"<extra_id_{number}>" for number in range(count)]
        extra = entries.get("extra_special_tokens")
        additional = list(entries.get("additional_special_tokens") or [])
        has_sentinels = any("<extra_id_" in _text(token) for token in additional)
        if extra is None:
            complete["extra_special_tokens"] = sentinels
        elif isinstance(extra, dict) and not has_sentinels:
            complete["additional_special_tokens"] = additional + sentinels
    return complete


def _find_class_name(settings: _Entries, config: _Entries, content: _Content) -> str:
    """Return the name of the class that AutoTokenizer selects, without the suffix Fast."""
    model_type = config.get("model_type")
    registered = REGISTERED.get(str(model_type))
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(declared, str):
        return registered or PLAIN.name
    declared = _remove_fast(declared)

    is_overruled = model_type in OVERRULED
    is_byte_level = "ByteLevel" in str(
        [content.get(key) for key in ("pre_tokenizer", "decoder", "post_processor", "normalizer")]
    )
    # Llama 3 declares the class of Llama 2, but has a byte-level tokenizer.
    if declared == "LlamaTokenizer" and not is_overruled and is_byte_level:
        return PLAIN.name
    if registered is None or registered == declared:
        return declared
    if registered == PLAIN.name:
        return PLAIN.name
    return registered if is_overruled else declared


def _remove_fast(name: str) -> str:
    """Return a class name without its suffix Fast."""
    return name.removesuffix("Fast")


def _find_model_type(content: _Content) -> str:
    """Return the type of the model in tokenizer.json; older files with merges lack the type."""
    model = content.get("model")
    if not isinstance(model, dict):
        return "unknown"
    if "type" in model:
        return str(model["type"])
    return "BPE" if "merges" in model else "unknown"


def _build_bpe(content: _Content, **options: Any) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer without normalizer, pre-tokenizer and decoder."""
    model = content["model"]
    merges: list[Any] = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    return tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **options))


# Options of byte-level BPE.
_BYTE_LEVEL = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}


def _build_gpt2(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _build_bpe(content, **_BYTE_LEVEL)
    add_prefix_space = bool(entries.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_gpt_neox(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _build_gpt2(content, entries)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _qwen_builder(letters: str) -> Callable[[_Content, _Entries], tokenizers.Tokenizer]:
    r"""Return the builder of a Qwen tokenizer.

    Args:
        letters: The character classes of a word, such as `\p{L}\p{M}`.
    """
    # The pattern splits contractions, words, single digits, punctuation and whitespace.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
        + (rf"[{letters}]+" if "M" in letters else rf"{letters}+")
        + rf"|\p{{N}}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def build(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
        """Return a byte-level BPE tokenizer that splits text by the pattern."""
        tokenizer = _build_bpe(content, **_BYTE_LEVEL)
        add_prefix_space = bool(entries.get("add_prefix_space"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    return build


def _build_llama(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _build_bpe(content, fuse_unk=True, byte_fallback=True)
    entry = entries.get("add_prefix_space")
    add_prefix_space = True if entry is None else bool(entry)
    scheme = "never"
    if add_prefix_space:
        scheme = "always" if entries.get("legacy") else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip_steps = [decoders.Strip(content=" ", left=1)] if add_prefix_space else []
    tokenizer.decoder = decoders.Sequence([*steps, *strip_steps])
    return tokenizer


def _build_gemma(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    unknown = _text(entries.get("unk_token"))
    tokenizer = _build_bpe(content, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _unigram_builder(unknown_id: int, prefix: str | None) -> Callable[..., tokenizers.Tokenizer]:
    """Return the builder of a Unigram tokenizer.

    Args:
        unknown_id: The id of the unknown token.
        prefix: The scheme of the space before a text: `always`, `first` or `never`. None uses the
            entry `add_prefix_space`.
    """

    def build(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
        """Return a unigram tokenizer with the pieces of a tokenizer.json."""
        pieces = [tuple(piece) for piece in content["model"]["vocab"]]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown_id))
        charsmap = _read_charsmap(content.get("normalizer"))
        if charsmap is not None:
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
        scheme = prefix or ("always" if entries.get("add_prefix_space", True) else "never")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", scheme)]
        )
        tokenizer.decoder = decoders.Metaspace("▁", scheme)
        return tokenizer

    return build


def _read_charsmap(normalizer: Any) -> bytes | None:
    """Return SentencePiece's normalization table in tokenizer.json; None without one."""
    if not isinstance(normalizer, dict):
        return None
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    for step in steps:
        if step.get("type") == "Precompiled" and "precompiled_charsmap" in step:
            return base64.b64decode(step["precompiled_charsmap"])
    return None


def _build_bert(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    model = models.WordPiece(content["model"]["vocab"], unk_token=_text(entries.get("unk_token")))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=entries.get("tokenize_chinese_chars", True),
        strip_accents=entries.get("strip_accents"),
        lowercase=entries.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _text(token: Any) -> str:
    """Return the text of a token in a JSON file, which is a text or an object."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template(before: str | None, after: str) -> Callable[[_Entries], tuple[list[str], list[str]]]:
    """Return the function for `TokenizerClass.template`.

    Args:
        before: The entry of the token before a text; None for no token.
        after: The entry of the token after a text.
    """

    def tokens(entries: _Entries) -> tuple[list[str], list[str]]:
        return ([_text(entries[before])] if before else [], [_text(entries[after])])

    return tokens


# Special tokens that the classes use if the files do not name them.
_END_OF_TEXT = "<|endoftext|>"
_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_QWEN = {
    "unk_token": _END_OF_TEXT,
    "bos_token": None,
    "eos_token": _END_OF_TEXT,
    "pad_token": _END_OF_TEXT,
}
_ROBERTA = {
    **_SENTENCEPIECE,
    "sep_token": "</s>",
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_GEMMA = {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_GPT2 = {
    "unk_token": _END_OF_TEXT,
    "bos_token": _END_OF_TEXT,
    "eos_token": _END_OF_TEXT,
    "pad_token": None,
}

_SUPPORTED = (
    TokenizerClass("GPT2Tokenizer", "BPE", _build_gpt2, _GPT2, has_vocabulary_files=True),
    TokenizerClass(
        "GPTNeoXTokenizer",
        "BPE",
        _build_gpt_neox,
        {**_GPT2, "pad_token": "<|padding|>"},
        has_vocabulary_files=True,
        replaces_post_processor=True,
    ),
    TokenizerClass(
        "Qwen2Tokenizer",
        "BPE",
        _qwen_builder(r"\p{L}"),
        _QWEN,
        has_vocabulary_files=True,
        marks_special_tokens=True,
    ),
    TokenizerClass("Qwen3_5Tokenizer", "BPE", _qwen_builder(r"\p{L}\p{M}"), _QWEN),
    TokenizerClass("LlamaTokenizer", "BPE", _build_llama, _SENTENCEPIECE),
    TokenizerClass("GemmaTokenizer", "BPE", _build_gemma, _GEMMA),
    TokenizerClass(
        "T5Tokenizer",
        "Unigram",
        _unigram_builder(2, "always"),
        {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"},
        template=_template(None, "eos_token"),
    ),
    TokenizerClass(
        "XLMRobertaTokenizer",
        "Unigram",
        _unigram_builder(3, None),
        _ROBERTA,
        template=_template("bos_token", "eos_token"),
    ),
    TokenizerClass(
        "BertTokenizer",
        "WordPiece",
        _build_bert,
        _BERT,
        template=_template("cls_token", "sep_token"),
    ),
)

CLASSES: Mapping[str, TokenizerClass] = {supported.name: supported for supported in _SUPPORTED}
"""Supported classes that rebuild a tokenizer, by name."""

# Declarations of `PLAIN` in tokenizer_config.json, without the suffix Fast.
_PLAIN_NAMES = ("TokenizersBackend", "PreTrainedTokenizer")

REGISTERED: Mapping[str, str] = {
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "glm4": PLAIN.name,
    "glm4_moe": PLAIN.name,
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "granite": PLAIN.name,
    "minimax_m2": PLAIN.name,
    "mistral": PLAIN.name,
    "mixtral": PLAIN.name,
    "olmo2": PLAIN.name,
    "olmo3": PLAIN.name,
    "olmoe": "GPTNeoXTokenizer",
    "phi3": PLAIN.name,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen3_5_text": "Qwen3_5Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
"""Tokenizer class that transformers registers for each `model_type`."""

OVERRULED = frozenset({"minimax_m2", "phi3", "qwen2", "qwen3_5_moe_text"})
"""`model_type`s whose declared class transformers replaces by the registered one."""

_UNSUPPORTED_NAMES = """
AlbertTokenizer BartTokenizer BarthezTokenizer BartphoTokenizer BertGenerationTokenizer
BertJapaneseTokenizer BertweetTokenizer BigBirdTokenizer BioGptTokenizer
BlenderbotSmallTokenizer BlenderbotTokenizer ByT5Tokenizer CLIPTokenizer CTRLTokenizer
CamembertTokenizer CanineTokenizer ClvpTokenizer CodeGenTokenizer CodeLlamaTokenizer CohereTokenizer
CpmAntTokenizer CpmTokenizer DPRContextEncoderTokenizer DPRQuestionEncoderTokenizer
DPRReaderTokenizer DebertaTokenizer DebertaV2Tokenizer DiaTokenizer DistilBertTokenizer
EsmTokenizer EsmcTokenizer FSMTTokenizer FastSpeech2ConformerTokenizer FlaubertTokenizer
FunnelTokenizer GPTNeoXJapaneseTokenizer GPTSw3Tokenizer HerbertTokenizer LEDTokenizer
LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer LayoutXLMTokenizer LukeTokenizer
LxmertTokenizer M2M100Tokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer
MPNetTokenizer MarianTokenizer MarkupLMTokenizer MgpstrTokenizer MobileBertTokenizer
MvpTokenizer MyT5Tokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer PLBartTokenizer
PegasusTokenizer PerceiverTokenizer PhobertTokenizer Pop2PianoTokenizer ProphetNetTokenizer
RagTokenizer ReformerTokenizer RemBertTokenizer RoCBertTokenizer RoFormerTokenizer
RobertaTokenizer SeamlessM4TTokenizer Siglip2Tokenizer SiglipTokenizer Speech2TextTokenizer
SpeechT5Tokenizer SplinterTokenizer SqueezeBertTokenizer TapasTokenizer Tipsv2Tokenizer
UdopTokenizer VideoPrismTokenizer VitsTokenizer Wav2Vec2CTCTokenizer
Wav2Vec2PhonemeCTCTokenizer WhisperTokenizer XGLMTokenizer XLMTokenizer XLNetTokenizer
"""

UNSUPPORTED = frozenset(_UNSUPPORTED_NAMES.split())
"""Unsupported classes of transformers that do not use tokenizer.json unchanged."""
