"""The tokenizer classes of transformers 5 that rebuild a tokenizer from its vocabulary.

Such a class uses vocabulary, merges and post-processor of tokenizer.json, and its own normalizer,
pre-tokenizer and decoder. The builders follow `transformers/models/*/tokenization_*.py`.
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
_Content = Mapping[str, Any]
_Entries = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TokenizerClass:
    """How a tokenizer class builds a tokenizer."""

    name: str
    model: str = ""
    """The type of the model in tokenizer.json."""
    build: Callable[[_Content, _Entries], tokenizers.Tokenizer] = lambda content, entries: (
        _unsupported()
    )
    """Return the tokenizer of a tokenizer.json and the entries of tokenizer_config.json."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Special tokens where the files do not name them."""
    has_vocabulary_files: bool = False
    """Whether it is also built from vocab.json and merges.txt."""
    marks_special_tokens: bool = False
    """Whether its special tokens lose the other flags that the files give them."""
    replaces_post_processor: bool = False
    """Whether it ignores the post-processor of tokenizer.json."""
    template: Callable[[_Entries], tuple[list[str], list[str]]] | None = None
    """The tokens before and after a text, if the class fixes them."""


def _unsupported() -> tokenizers.Tokenizer:
    raise NotImplementedError


PLAIN = TokenizerClass("TokenizersBackend")
"""The tokenizer as tokenizer.json describes it (TokenizersBackend, PreTrainedTokenizerFast)."""


def tokenizer_class(
    directory: Path, settings: _Entries, config: _Entries, content: _Content
) -> TokenizerClass:
    """Return the class that AutoTokenizer selects for a model directory.

    Args:
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
    name = _class_name(settings, config, content)
    if name in UNSUPPORTED:
        raise ConfigError(
            f"{file}: tokenizer_class={name}: not supported; set"
            " tokenizer_class=PreTrainedTokenizerFast if tokenizer.json describes the tokenizer"
            f" completely; supported classes: {', '.join(CLASSES)}"
        )
    of_class = CLASSES.get(name, PLAIN)

    is_file = (directory / "tokenizer.json").is_file()
    if not is_file and content and not of_class.has_vocabulary_files:
        able = [each.name for each in CLASSES.values() if each.has_vocabulary_files]
        raise ConfigError(
            f"{file}: tokenizer_class={name}: cannot be built from vocab.json and merges.txt"
            f" without tokenizer.json; classes that can: {', '.join(able)}; or convert the"
            " tokenizer with `AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)`"
            " of transformers"
        )
    model = _model_type(content)
    if is_file and of_class is not PLAIN and model != of_class.model:
        declared = settings.get("tokenizer_class")
        if declared is None or _without_fast(declared) not in _PLAIN_NAMES:
            _warn_of_model_type(directory / "tokenizer.json", model, of_class)
        return PLAIN
    return of_class


@cache
def _warn_of_model_type(file: Path, model: str, of_class: TokenizerClass) -> None:
    """Log once that transformers would make another tokenizer of a file, which fits no text."""
    _log.warning(
        "%s: model.type=%s: the class %s that transformers selects for this model requires %s; the"
        " file is used as it is; set tokenizer_class=PreTrainedTokenizerFast in"
        " tokenizer_config.json so that transformers does the same",
        file,
        model,
        of_class.name,
        of_class.model,
    )


def with_class_defaults(of_class: TokenizerClass, entries: _Entries) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json, completed by the defaults of the class."""
    complete = {**of_class.defaults, **entries}
    if of_class.name == "T5Tokenizer":
        numbered = [f"<extra_id_{number}>" for number in range(int(entries.get("extra_ids", 100)))]
        extra = entries.get("extra_special_tokens")
        given = list(entries.get("additional_special_tokens") or [])
        has_numbered = any("<extra_id_" in _text(token) for token in given)
        if extra is None:
            complete["extra_special_tokens"] = numbered
        elif isinstance(extra, dict) and not has_numbered:
            complete["additional_special_tokens"] = given + numbered
    return complete


def _class_name(settings: _Entries, config: _Entries, content: _Content) -> str:
    """Return the name of the class that AutoTokenizer selects, without the suffix Fast."""
    model_type = config.get("model_type")
    registered = REGISTERED.get(str(model_type))
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(declared, str):
        return registered or PLAIN.name
    declared = _without_fast(declared)

    is_overruled = model_type in OVERRULED
    is_byte_level = "ByteLevel" in str(
        [content.get(key) for key in ("pre_tokenizer", "decoder", "post_processor", "normalizer")]
    )
    # Llama 3 declares the class of Llama 2.
    if declared == "LlamaTokenizer" and not is_overruled and is_byte_level:
        return PLAIN.name
    if registered is None or registered == declared:
        return declared
    if registered == PLAIN.name:
        return PLAIN.name
    return registered if is_overruled else declared


def _without_fast(name: str) -> str:
    return name.removesuffix("Fast")


def _model_type(content: _Content) -> str:
    model = content.get("model")
    if not isinstance(model, dict):
        return "unknown"
    if "type" in model:
        return str(model["type"])
    return "BPE" if "merges" in model else "unknown"


def _bpe(content: _Content, **options: Any) -> tokenizers.Tokenizer:
    model = content["model"]
    merges: list[Any] = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
        for merge in model["merges"]
    ]
    return tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, **options))


_BYTES = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}


def _gpt2(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _bpe(content, **_BYTES)
    spaced = bool(entries.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt_neox(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _gpt2(content, entries)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _qwen(letters: str) -> Callable[[_Content, _Entries], tokenizers.Tokenizer]:
    """Return the builder of a Qwen tokenizer; `letters` are the character classes of a word."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
        + (rf"[{letters}]+" if "M" in letters else rf"{letters}+")
        + rf"|\p{{N}}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def build(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
        tokenizer = _bpe(content, **_BYTES)
        spaced = bool(entries.get("add_prefix_space"))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    return build


def _llama(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    tokenizer = _bpe(content, fuse_unk=True, byte_fallback=True)
    spaced = entries.get("add_prefix_space")
    is_spaced = True if spaced is None else bool(spaced)
    scheme = "never"
    if is_spaced:
        scheme = "always" if entries.get("legacy") else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    stripped = [decoders.Strip(content=" ", left=1)] if is_spaced else []
    tokenizer.decoder = decoders.Sequence([*steps, *stripped])
    return tokenizer


def _gemma(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
    unknown = _text(entries.get("unk_token"))
    tokenizer = _bpe(content, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _unigram(unknown: int, prefix: str | None) -> Callable[..., tokenizers.Tokenizer]:
    """Return the builder of a Unigram tokenizer with an id of the unknown token; `prefix` is the
    scheme of the space before a text, None: the entry add_prefix_space decides."""

    def build(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
        pieces = [tuple(piece) for piece in content["model"]["vocab"]]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unknown))
        charsmap = _charsmap(content.get("normalizer"))
        if charsmap is not None:
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
        scheme = prefix or ("always" if entries.get("add_prefix_space", True) else "never")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", scheme)]
        )
        tokenizer.decoder = decoders.Metaspace("▁", scheme)
        return tokenizer

    return build


def _charsmap(normalizer: Any) -> bytes | None:
    """Return SentencePiece's normalization table, if tokenizer.json has one."""
    if not isinstance(normalizer, dict):
        return None
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    for step in steps:
        if step.get("type") == "Precompiled" and "precompiled_charsmap" in step:
            return base64.b64decode(step["precompiled_charsmap"])
    return None


def _bert(content: _Content, entries: _Entries) -> tokenizers.Tokenizer:
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
    """Return the text of a token of a JSON file."""
    return str(token["content"] if isinstance(token, dict) else token)


def _around(before: str | None, after: str) -> Callable[[_Entries], tuple[list[str], list[str]]]:
    def tokens(entries: _Entries) -> tuple[list[str], list[str]]:
        return ([_text(entries[before])] if before else [], [_text(entries[after])])

    return tokens


_END = "<|endoftext|>"
_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_QWEN = {"unk_token": _END, "bos_token": None, "eos_token": _END, "pad_token": _END}
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
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END, "pad_token": None}

_ALL = (
    TokenizerClass("GPT2Tokenizer", "BPE", _gpt2, _GPT2, has_vocabulary_files=True),
    TokenizerClass(
        "GPTNeoXTokenizer",
        "BPE",
        _gpt_neox,
        {**_GPT2, "pad_token": "<|padding|>"},
        has_vocabulary_files=True,
        replaces_post_processor=True,
    ),
    TokenizerClass(
        "Qwen2Tokenizer",
        "BPE",
        _qwen(r"\p{L}"),
        _QWEN,
        has_vocabulary_files=True,
        marks_special_tokens=True,
    ),
    TokenizerClass("Qwen3_5Tokenizer", "BPE", _qwen(r"\p{L}\p{M}"), _QWEN),
    TokenizerClass("LlamaTokenizer", "BPE", _llama, _SENTENCEPIECE),
    TokenizerClass("GemmaTokenizer", "BPE", _gemma, _GEMMA),
    TokenizerClass(
        "T5Tokenizer",
        "Unigram",
        _unigram(2, "always"),
        {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"},
        template=_around(None, "eos_token"),
    ),
    TokenizerClass(
        "XLMRobertaTokenizer",
        "Unigram",
        _unigram(3, None),
        _ROBERTA,
        template=_around("bos_token", "eos_token"),
    ),
    TokenizerClass(
        "BertTokenizer", "WordPiece", _bert, _BERT, template=_around("cls_token", "sep_token")
    ),
)

CLASSES: Mapping[str, TokenizerClass] = {each.name: each for each in _ALL}
"""The classes that rebuild a tokenizer and are supported, by name."""

_PLAIN_NAMES = ("TokenizersBackend", "PreTrainedTokenizer")

REGISTERED: Mapping[str, str] = {
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "mistral": PLAIN.name,
    "mixtral": PLAIN.name,
    "olmo2": PLAIN.name,
    "phi3": PLAIN.name,
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
"""The tokenizer class that transformers registers for a `model_type`."""

OVERRULED = frozenset({"phi3", "qwen2"})
"""The `model_type`s whose declared class transformers replaces by the registered one."""

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
"""Classes of transformers that do not use tokenizer.json as it is, and that are not supported."""
