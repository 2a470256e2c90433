"""Models that are named as on the Hugging Face Hub: their directories in its cache, downloaded
where that is possible."""

import json
import re
from pathlib import Path

from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.references import map_paths

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL = ["*.json", "*.jinja", "merges.txt"]
_WEIGHTS = "*.safetensors"
_WAIT_S = 10.0


def with_found_models(config: Config, *, weights: bool) -> Config:
    """The configuration with directories of the cache instead of names such as `Qwen/Qwen3-0.6B`.

    Without `weights` a model whose weights are not there is found too: enough to check a run. A
    directory of that name, or a described model (`model.config`) that is still to come, stays as it
    is. Raises ConfigError as `find_model` does.
    """

    def found(key: str, path: str) -> str:
        section = key.partition(".")[0]
        is_model = key.endswith(".path") and section in ("model", "critic", "reward", "teacher")
        if not is_model or Path(path).exists() or not _NAME.fullmatch(path):
            return path
        is_reward = section == "reward" or (
            config.reward.kind == "model" and path == config.reward.path
        )
        described = (
            {}
            if section == "teacher"
            else config.model.config or (config.reward.config if is_reward else {})
        )
        return path if described else str(find_model(path, key, weights=weights))

    return map_paths(config, found)


def find_model(name: str, key: str, *, weights: bool = True) -> Path:
    """The directory in the Hugging Face cache of the model `name`; what is missing there is
    downloaded.

    `key` is the configuration key that names it. Raises ConfigError where there is no such model,
    or no way to it.
    """
    # A fifth of a second, for those who name a model.
    from huggingface_hub import constants, snapshot_download

    patterns = [*_SMALL, _WEIGHTS] if weights else _SMALL
    why = "the cached files lack config.json, tokenizer.json" + (
        " or .safetensors files" if weights else ""
    )
    for settings in (
        {"local_files_only": True},
        {"allow_patterns": patterns, "etag_timeout": _WAIT_S},
    ):
        try:
            # Without a network the second gives what the cache has of it.
            directory = Path(snapshot_download(name, **settings))
            if _is_whole(directory, weights):
                return directory
        # Whatever its HTTP client raises: no network, no such model, no right to it, a full disk.
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise ConfigError(
        f"{key}={name}: is not a directory, is not complete in the Hugging Face cache"
        f" ({constants.HF_HUB_CACHE}), and could not be downloaded: {why}; run `hf download"
        f" {name}` on a machine with network access. Then copy the printed directory to this"
        f" machine and set {key}=DIRECTORY, or copy the full cache and set HF_HUB_CACHE to the"
        " copy"
    )


def _is_whole(directory: Path, weights: bool) -> bool:
    """Whether a snapshot has a configuration and a tokenizer and, if they are wanted, all files of
    weights."""
    tokenizers = ({"tokenizer.json"}, {"vocab.json", "merges.txt"})
    has_tokenizer = any(all((directory / name).is_file() for name in set_) for set_ in tokenizers)
    if not (directory / "config.json").is_file() or not has_tokenizer:
        return False
    index = directory / "model.safetensors.index.json"
    if not weights or not index.is_file():
        return not weights or (directory / "model.safetensors").is_file()
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, LookupError, AttributeError):
        return False
    return all((directory / str(file)).is_file() for file in files)
