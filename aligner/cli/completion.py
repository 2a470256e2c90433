"""`aligner completion`: shell scripts that complete the command line in bash and zsh.

The scripts complete commands, options, files, and options of configuration groups.
"""

import argparse

from aligner.cli.command_table import OVERRIDES_COMPLETION, build_parser
from aligner.config.conf_files import find_group_directories, list_group_options
from aligner.schema.keys import get_schema_keys

# bash splits words at `=`, so the function reads the word before the cursor from the line itself,
# and returns only the part of each completion after the last `=` of that word.
_BASH = """\
{function}() {{
  local line="${{COMP_LINE:0:COMP_POINT}}"
  local word="${{line##* }}" behind=""
  [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]] && behind="${{word%=*}}="
  compgen -W "{words}" -- "$word" | while IFS= read -r found; do echo "${{found#"$behind"}}"; done
}}"""
_ZSH = """\
{function}() {{
  compadd -- {words}
}}"""


def print_completion(parsed: argparse.Namespace) -> None:
    """Print the completion script of a shell."""
    import shtab

    words = " ".join(_words())
    function = {"bash": _BASH, "zsh": _ZSH}[parsed.shell].format(
        function=OVERRIDES_COMPLETION, words=words
    )
    print(shtab.complete(build_parser(), parsed.shell, preamble=function))


def _words() -> list[str]:
    """Return overrides to complete: options of the built-in groups, and choices of keys."""
    options = list_group_options(find_group_directories(None))
    groups = [f"{group}={name}" for group, names in options.items() for name in names]
    return groups + [
        f"{key.name}={choice}"
        for key in get_schema_keys().values()
        for choice in key.choices
        if ":" not in choice
    ]
