"""Masking of secrets in text that other people may read: logs, errors, terminals and web pages.

`mask_secrets` hides the values of environment variables that contain secrets, the values that a
configuration reads from the environment, passwords in URLs, headers such as `Authorization`, and
API keys with a known form. The sinks of text call it: `AlignerError`, the formatters of logs,
`aligner.terminal`, and `aligner.schema.keys.get_masked_values` for configurations.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TextIO, cast
from urllib.parse import quote, quote_plus

MASK = "***"
"""Text that replaces secret values."""

# A shorter value occurs in ordinary text, and would be masked there too.
_MIN_SECRET_LENGTH = 8
# The same for a single line of a value of several lines, such as a private key.
_MIN_LINE_LENGTH = 16
_SECRET_VARIABLE = re.compile(
    r"(^|_)(\w*KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|AUTH|AUTHORIZATION)(_|$)"
)
# Names that match the pattern, but contain no secret.
_PUBLIC_VARIABLE = re.compile(r"SSH_AUTH_SOCK|GPG_KEY|.*_(FILE|PATH|DIR|VARIABLE|NAME)$")
_SECRET_ENTRY = re.compile(
    r"(.*[_-])?(api[_-]?key|secret([_-]?key)?|access[_-]?key|private[_-]?key|password|passwd"
    r"|authorization|(access|auth|api|bearer|refresh)[_-]?token)",
    re.IGNORECASE,
)
# Variables that name a user or a machine, not a secret.
_IDENTITY_VARIABLES = frozenset({"USER", "LOGNAME", "HOSTNAME", "HOME", "PWD", "SHELL", "TMPDIR"})

_SECRET_PARAMETERS = (
    r"(?:api[-_]?key|key|(?:access[-_]?|auth[-_]?)?token|password|passwd|secret|sig|signature)"
)
# An interpolation such as ${oc.env:NAME} is not the secret itself, and *** is masked already.
_NO_REFERENCE = r"(?!\$\{|\*\*\*)"
# In code and messages, `api_key=None` contains no secret.
_NO_CONSTANT = r"(?!(?:none|null|true|false)\b)"
_URL_PASSWORD = re.compile(rf"(?<=://)([^\s/?#@:\"'$]*):{_NO_REFERENCE}([^\s/?#@\"']+)@")
# An access token takes the place of the user in the URLs of some services.
_URL_TOKEN = re.compile(
    rf"(?:(?<=https://)|(?<=http://)){_NO_REFERENCE}([^\s/?#@:\"'$]{{{_MIN_SECRET_LENGTH},}})@"
)
_URL_PARAMETER = re.compile(
    rf"(?<=[?&])({_SECRET_PARAMETERS})=({_NO_REFERENCE}[^\s&#\"'<>)]+)", re.IGNORECASE
)
_HEADER_NAMES = r"((?:proxy-)?authorization|(?:x-)?api[-_]?key|triton-access-token)"
_QUOTE = r"(?:b?\\?[\"'])?"
# `api_key: value` and `api_key=value`. After a dot, as in `environment.arguments.api_key: …`, a
# colon ends the name of a configuration key in an error.
_HEADER = re.compile(
    rf"(?:(?<![\w.]){_HEADER_NAMES}({_QUOTE}\s{{0,2}}[:=]\s{{0,2}}{_QUOTE}|[\"'],\s?{_QUOTE})"
    rf"|(?<=\.){_HEADER_NAMES}(={_QUOTE}))((?:bearer|basic|token)\s+)?"
    rf"{_NO_REFERENCE}{_NO_CONSTANT}(?!(?:bearer|basic|token)\s)([^\s\"',;)}}\\]{{4,}})",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(Bearer|Basic)(\s+)(?=[\w.~+/=-]*[\d=])[\w.~+/=-]{8,}", re.IGNORECASE)
# API keys of OpenAI, Anthropic, Hugging Face, GitHub, GitLab, AWS, Slack and Google, and JSON web
# tokens. A web token begins only at the beginning of a word: the search would otherwise take
# quadratic time for a word with many beginnings of tokens.
_KNOWN_KEYS = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})"
)
# The netrc format: machine HOST login USER password SECRET.
_NETRC = re.compile(rf"(\blogin\s+\S+\s+password\s+){_NO_REFERENCE}(\S+)", re.IGNORECASE)

_READ_VARIABLES = "ALIGNER_READ_VARIABLES"
"""Environment variable with the names of the variables that the configuration of a run has read.

Child processes, such as those of a reward function, inherit it and mask the same values.
"""


def register_read_variable(name: str) -> None:
    """Make `mask_secrets` show the value of an environment variable as its interpolation.

    The function is called when a configuration reads the variable, and applies to this process and
    to the processes that it starts from now on.
    """
    names = os.environ.get(_READ_VARIABLES, "").split()
    if name not in names and name not in _IDENTITY_VARIABLES and " " not in name:
        os.environ[_READ_VARIABLES] = " ".join([*names, name])


def mask_secrets(text: str) -> str:
    """Return a text in which secrets are replaced by `***` or by their interpolation.

    Args:
        text: Any text, of one or several lines.
    """
    for value, shown in _find_known_values():
        if value in text:
            text = text.replace(value, shown)
    if "://" in text:
        text = _mask_url_parts(text)
    text = _HEADER.sub(rf"\1\2\3\4\5{MASK}", text)
    text = _SCHEME.sub(rf"\1\2{MASK}", text)
    text = _NETRC.sub(rf"\1{MASK}", text)
    return _KNOWN_KEYS.sub(MASK, text)


def mask_standard_streams() -> None:
    """Mask secrets in everything that Python code of this process prints from now on.

    Processes that execute the user's code call this function. Their output goes directly to the log
    of a rank.
    """
    sys.stdout = cast(TextIO, _MaskedStream(sys.stdout))
    sys.stderr = cast(TextIO, _MaskedStream(sys.stderr))


class _MaskedStream:
    """A text stream that masks secrets; other attributes are those of the original stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._unfinished = threading.local()  # each thread's unfinished line

    def write(self, text: str) -> int:
        """Write all lines that the text completes."""
        lines, newline, rest = (getattr(self._unfinished, "line", "") + text).rpartition("\n")
        self._unfinished.line = rest
        if newline:
            self._stream.write(mask_secrets(lines) + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write the unfinished line of this thread."""
        rest = getattr(self._unfinished, "line", "")
        self._unfinished.line = ""
        if rest:
            self._stream.write(mask_secrets(rest))
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def find_url_secret(text: str) -> str | None:
    """Return which part of a URL in a text is a secret, such as `password`; None if none is.

    Interpolations are no secrets: `https://user:${oc.env:KEY}@host` contains none.
    """
    if "://" not in text:
        return None
    if _URL_PASSWORD.search(text):
        return "password"
    if _URL_TOKEN.search(text):
        return "access token"
    match = _URL_PARAMETER.search(text)
    return f"secret parameter ({match[1]})" if match else None


def is_secret_entry(name: str) -> bool:
    """Return whether the name of an entry of a mapping says that its value is a secret.

    Names of headers and settings count, such as `api_key` and `Authorization`, and names of
    environment variables, such as `HF_TOKEN`.
    """
    is_variable = name.isupper() and is_secret_variable(name)
    return is_variable or _SECRET_ENTRY.fullmatch(name) is not None


@lru_cache(4096)
def is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable says that its value is a secret."""
    upper_name = name.upper()
    return (
        _SECRET_VARIABLE.search(upper_name) is not None
        and _PUBLIC_VARIABLE.fullmatch(upper_name) is None
    )


def _mask_url_parts(text: str) -> str:
    """Return a text whose URLs have no passwords, tokens or secret parameters."""
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    text = _URL_TOKEN.sub(f"{MASK}@", text)
    return _URL_PARAMETER.sub(rf"\1={MASK}", text)


def _find_known_values() -> list[tuple[str, str]]:
    """Return the secret values that this process knows, with their replacements, longest first."""
    values = {
        form: MASK
        for name, value in os.environ.items()
        if is_secret_variable(name)
        for form in _list_forms(value)
    }
    for name in os.environ.get(_READ_VARIABLES, "").split():
        for form in _list_forms(os.environ.get(name, "")):
            values[form] = f"${{oc.env:{name}}}"
    return sorted(values.items(), key=lambda item: len(item[0]), reverse=True)


@lru_cache(4096)
def _list_forms(value: str) -> tuple[str, ...]:
    """Return the forms in which a value occurs in texts; none if it is no secret.

    A log contains a value of several lines line by line. JSON, `repr` and URLs escape characters.
    """
    if not _may_be_secret(value):
        return ()
    lines = [line.strip() for line in value.splitlines()]
    forms: list[str] = []
    for text in (value, *(line for line in lines if len(line) >= _MIN_LINE_LENGTH)):
        in_json = json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
        # `os.environ` decodes bytes that are not UTF-8 as surrogates.
        in_url = [escape(text, errors="surrogateescape") for escape in (quote, quote_plus)]
        in_url.append(quote(text, safe="", errors="surrogateescape"))
        forms += [text, *in_json, repr(text)[1:-1], *in_url]
    return tuple(dict.fromkeys(forms))


def _may_be_secret(value: str) -> bool:
    """Return whether a value is long enough for a secret, and is not the path of a file."""
    if len(value) < _MIN_SECRET_LENGTH:
        return False
    return not (value.startswith(("/", "~", "./")) and os.path.exists(os.path.expanduser(value)))  # noqa: PTH110, PTH111 - start-up path
