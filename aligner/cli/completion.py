"""`aligner completion`: scripts by which bash and zsh complete commands, options, files and options
of groups."""

import argparse

from aligner.cli.command_table import OVERRIDES_COMPLETION, build_parser
from aligner.config.conf_files import group_directories, group_options
from aligner.schema.keys import schema_keys

# bash takes `=` for the end of a word, so that the word before the cursor is looked up in the line,
# and what is given back begins behind its `=`.
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
    """Print a shell's script."""
    import shtab

    words = " ".join(_words())
    function = {"bash": _BASH, "zsh": _ZSH}[parsed.shell].format(
        function=OVERRIDES_COMPLETION, words=words
    )
    print(shtab.complete(build_parser(), parsed.shell, preamble=function))


def _words() -> list[str]:
    """Overrides that can be told in advance: the built-in options of each group, and the choices of
    keys that have some."""
    options = group_options(group_directories(None))
    groups = [f"{group}={name}" for group, names in options.items() for name in names]
    return groups + [
        f"{key.name}={choice}"
        for key in schema_keys().values()
        for choice in key.choices
        if ":" not in choice
    ]
