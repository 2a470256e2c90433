"""Write the file of a job as YAML for readers: without references, and with text in blocks."""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writer of YAML that repeats equal parts instead of referring to the first one."""

    def ignore_aliases(self, data: Any) -> bool:
        """See `yaml.SafeDumper`."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write text of several lines as a literal block."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


# Texts of environment variables are instances of a subclass.
_Dumper.add_multi_representer(str, _represent_text)
_Dumper.add_representer(str, _represent_text)


def format_job(job: Any) -> str:
    """Return nested values as YAML, in their order."""
    return yaml.dump(job, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
