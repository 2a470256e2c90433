"""`aligner completion`: scripts that complete the command line in bash, zsh and fish.

The scripts complete commands, options, files, options of configuration groups, keys, and the values
of keys with a fixed set of choices.
"""

import argparse

from aligner.cli.command_table import COMMANDS, OVERRIDES_COMPLETION, build_parser
from aligner.config.conf_files import find_group_directories, list_group_options
from aligner.schema.keys import get_schema_keys

# bash splits words at `=`, so the function reads the word before the cursor from the line itself,
# and returns only the part of each completion after the last `=` of that word. Before the `=`, the
# function completes names alone, because the list of all names with their values would be long.
_BASH = """\
{function}() {{
  local line="${{COMP_LINE:0:COMP_POINT}}"
  local word="${{line##* }}" behind="" words="{names}"
  [[ "$word" == *=* ]] && words="{values}"
  [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]] && behind="${{word%=*}}="
  compgen -W "$words" -- "$word" | while IFS= read -r found; do echo "${{found#"$behind"}}"; done
  [[ "$(type -t compopt)" == builtin && "$word" != *=* ]] && compopt -o nospace 2>/dev/null
  return 0
}}"""
_ZSH = """\
{function}() {{
  if [[ "$PREFIX" == *=* ]]; then
    compadd -- {values}
  else
    compadd -S '' -- {names}
  fi
}}"""


def print_completion(parsed: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    names, values = _list_words()
    if parsed.shell == "fish":
        print(_build_fish_script(names, values))
        return
    import shtab

    function = {"bash": _BASH, "zsh": _ZSH}[parsed.shell].format(
        function=OVERRIDES_COMPLETION, names=" ".join(names), values=" ".join(values)
    )
    print(shtab.complete(build_parser(), parsed.shell, preamble=function))


def _list_words() -> tuple[list[str], list[str]]:
    """Return the names of groups and keys as `NAME=`, and the known values as `NAME=VALUE`."""
    options = list_group_options(find_group_directories(None))
    keys = get_schema_keys().values()
    values = [f"{group}={name}" for group, names in options.items() for name in names]
    for key in keys:
        choices = ("true", "false") if key.type_name == "bool" else key.choices
        values += [f"{key.name}={choice}" for choice in choices if ":" not in choice]
    names = [f"{name}=" for name in (*options, *(key.name for key in keys))]
    return names, values


def _build_fish_script(names: list[str], values: list[str]) -> str:
    """Return the fish script, which shtab cannot generate.

    Args:
        names: Names of groups and keys as `NAME=`.
        values: Known values as `NAME=VALUE`.
    """
    overrides = "__fish_aligner_overrides"
    lines = [
        f"function {overrides}",
        "    if string match -q '*=*' -- (commandline -ct)",
        f"        printf '%s\\n' {' '.join(values)}",
        "    else",
        f"        printf '%s\\n' {' '.join(names)}",
        "    end",
        "end",
    ]
    for name, command in COMMANDS.items():
        lines.append(
            f"complete -c aligner -f -n __fish_use_subcommand -a {name} -d {_quote(command.help)}"
        )
        parser = argparse.ArgumentParser(add_help=False)
        for add in command.arguments:
            add(parser)
        seen = f"'__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            if action.dest == "overrides":
                lines.append(f"complete -c aligner -f -n {seen} -a '({overrides})'")
                continue
            arguments = f"-a {_quote(' '.join(map(str, action.choices)))}" if action.choices else ""
            flags = " ".join(f"-l {flag[2:]}" for flag in action.option_strings if flag[:2] == "--")
            if not flags and not arguments:
                continue  # fish completes files by default
            takes_value = "-r" if flags and action.nargs != 0 else ""
            parts = (flags, takes_value, arguments, f"-d {_quote(action.help or '')}")
            lines.append(
                f"complete -c aligner -n {seen} " + " ".join(part for part in parts if part)
            )
    return "\n".join(lines)


def _quote(text: str) -> str:
    """Return a text as a single-quoted word of fish."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
