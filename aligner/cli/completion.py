"""`aligner completion`: scripts that complete the command line in bash, zsh and fish.

The scripts complete commands, options, files, options of configuration groups, keys, and the values
of keys that are booleans, paths or have a fixed set of choices. A script contains all of these
words, so that a completion starts no Python process.
"""

import argparse
from dataclasses import dataclass

from aligner.cli.command_table import COMMANDS, OVERRIDES_COMPLETION, build_parser
from aligner.config.conf_files import find_config_sources, list_group_options
from aligner.schema.keys import Key, get_schema_keys

# bash splits words at `=`, so the function reads the word before the cursor from the line itself,
# and returns only the part of each completion after the last `=` of that word. Before the `=`, the
# function completes names alone, because the list of all names with their values would be long.
_BASH = """\
{function}() {{
  local line="${{COMP_LINE:0:COMP_POINT}}"
  local word="${{line##* }}" behind=""
  [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]] && behind="${{word%=*}}="
  case "$word" in
    {bash_path_keys}) compgen -P "${{word%%=*}}=" -f -- "${{word#*=}}" ;;
    *=*) compgen -W "{values}" -- "$word" ;;
    *) compgen -W "{names}" -- "$word" ;;
  esac | while IFS= read -r found; do echo "${{found#"$behind"}}"; done
  return 0
}}"""
# shtab runs the function above in a subshell, where `compopt` has no effect.
_BASH_END = """
_aligner() {{
  _shtab_aligner "$@"
  local line="${{COMP_LINE:0:COMP_POINT}}"
  case "${{line##* }}" in
    {bash_path_keys}) compopt -o filenames 2>/dev/null ;;
  esac
  [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}}
complete -o bashdefault -F _aligner aligner"""
_ZSH = """\
{function}() {{
  case "$PREFIX" in
    ({zsh_path_keys}) compset -P '*='; _files ;;
    (*=*) compadd -- {values} ;;
    (*) compadd -S '' -- {names} ;;
  esac
}}"""
_FISH = """\
function {function}
    set -l word (commandline -ct)
    switch $word
        case {fish_path_keys}
            set -l parts (string split -m 1 = -- $word)
            for path in $parts[2]*
                test -d $path; and set path $path/
                printf '%s=%s\\n' $parts[1] $path
            end
        case '*=*'
            printf '%s\\n' {values}
        case '*'
            printf '%s\\n' {names}
    end
end"""
# Keys whose values are paths, in addition to those whose names end in `.path` or `.dir`.
_PATH_KEYS = (
    "data.normalization",
    "data.pass_rate_samples",
    "reward.judge_cache",
    "teacher.scores",
    "engine.vllm.python",
    "server.python",
    "server.tls.certificate",
    "server.tls.key",
    "server.tls.authorities",
    "cluster.slurm.image",
    "cluster.slurm.workdir",
    "cluster.kubernetes.workdir",
)


@dataclass(frozen=True)
class _Words:
    """The words that complete overrides."""

    names: list[str]
    """Names of groups and keys as `NAME=`."""
    values: list[str]
    """Known values as `NAME=VALUE`."""
    path_keys: list[str]
    """Keys whose values are paths."""


def print_completion(parsed: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    words = _list_words()
    texts = {
        "function": OVERRIDES_COMPLETION,
        "names": " ".join(words.names),
        "values": " ".join(words.values),
        "bash_path_keys": " | ".join(f"{key}=*" for key in words.path_keys),
        "zsh_path_keys": "|".join(f"{key}=*" for key in words.path_keys),
        "fish_path_keys": " ".join(f"'{key}=*'" for key in words.path_keys),
    }
    if parsed.shell == "fish":
        print("\n".join([_FISH.format_map(texts), *_build_fish_lines()]))
        return
    import shtab

    template = {"bash": _BASH, "zsh": _ZSH}[parsed.shell]
    print(shtab.complete(build_parser(), parsed.shell, preamble=template.format_map(texts)))
    if parsed.shell == "bash":
        print(_BASH_END.format_map(texts))


def _list_words() -> _Words:
    """Return the words of all groups and keys."""
    options = list_group_options(find_config_sources(None))
    keys = get_schema_keys().values()
    values = [f"{group}={name}" for group, names in options.items() for name in names]
    values += [f"{key.name}={value}" for key in keys for value in _list_values(key)]
    return _Words(
        names=[f"{name}=" for name in (*options, *(key.name for key in keys))],
        values=values,
        path_keys=[
            key.name
            for key in keys
            if key.name.endswith((".path", ".dir")) or key.name in _PATH_KEYS
        ],
    )


def _list_values(key: Key) -> list[str]:
    """Return the values of a key with a fixed set of values; empty for any other key."""
    choices = ("true", "false") if key.type_name.startswith("bool") else key.choices
    # `module:callable` stands for any function.
    values = [choice for choice in choices if ":" not in choice]
    return [*values, "null"] if values and key.allows_null else values


def _build_fish_lines() -> list[str]:
    """Return the lines that complete commands and options in fish, which shtab does not support."""
    lines = []
    for name, command in COMMANDS.items():
        lines.append(
            f"complete -c aligner -f -n __fish_use_subcommand -a {name} -d {_quote(command.help)}"
        )
        parser = argparse.ArgumentParser(add_help=False)
        for add in command.arguments:
            add(parser)
        lines += [line for action in parser._actions if (line := _build_fish_line(name, action))]
    return lines


def _build_fish_line(command: str, action: argparse.Action) -> str:
    """Return the line that completes an argument of a command in fish.

    The line is empty for an argument that is a file, because fish completes files by default.
    """
    condition = f"complete -c aligner -n '__fish_seen_subcommand_from {command}'"
    if action.dest == "overrides":
        return f"{condition} -f -a '({OVERRIDES_COMPLETION})'"
    parts = [f"-l {flag[2:]}" for flag in action.option_strings if flag.startswith("--")]
    parts += [f"-s {flag[1:]}" for flag in action.option_strings if not flag.startswith("--")]
    if parts and action.nargs is None:
        parts.append("-r")  # the option requires a value
    if action.choices:
        parts.append(f"-f -a {_quote(' '.join(map(str, action.choices)))}")
    if not parts:
        return ""
    return " ".join([condition, *parts, f"-d {_quote(action.help or '')}"])


def _quote(text: str) -> str:
    """Return a text as a single-quoted word of fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
