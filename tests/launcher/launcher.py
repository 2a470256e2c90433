"""Run the real launcher with stand-in processes as roles.

Usage: `launcher.py OVERRIDES_AS_JSON BEHAVIORS_AS_JSON [CONFIG_DIRECTORY]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.errors import AlignerError, Interrupted, Stopped, get_exit_code
from aligner.launcher.local import launch
from aligner.paths import get_run_paths
from aligner.schema import Config

ROLE = Path(__file__).with_name("fake_role.py")


def main() -> int:
    directory = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    behaviors = json.loads(sys.argv[2])

    def command(group: str, config: Config) -> tuple[str, ...]:
        behavior = behaviors.get(group) or behaviors[group.partition(".")[0]]
        return (sys.executable, str(ROLE), group, str(get_run_paths(config).config), behavior)

    try:
        launch(plan_run(compose_config(json.loads(sys.argv[1]), directory), directory), command)
    except (AlignerError, Interrupted, Stopped) as error:
        if isinstance(error, AlignerError):
            print(error, file=sys.stderr)
        return get_exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
