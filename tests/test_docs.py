"""The pages of docs/: their commands, keys, metrics and links exist, and the site builds."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aligner.cli.command_table import COMMANDS
from aligner.config.compose import compose_config
from aligner.config.conf_files import find_config_sources, list_group_options
from aligner.rewards.judge import COUNTS as JUDGE_COUNTS
from aligner.schema.keys import get_schema_keys
from aligner.version import __version__
from aligner.view.metric_descriptions import describe_metric

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))

PROGRAMS = (
    "aligner",
    "uvx",
    "uv",
    "pip",
    "python",
    "make",
    "docker",
    "eval",
    "wandb",
    "scancel",
    "kubectl",
    "curl",
    "grep",
    "tar",
    "sbatch",
)
# `aligner launch` and `validate` of an experiment are composed by tests/config/test_unread_keys.py.
COMPOSED = re.compile(r"aligner (launch|validate) .*experiment=")
ELSEWHERE = {
    r"make|\.ci/run": "the checks themselves",
    r"pip ": "tests/system/test_install.py installs a wheel; tests/test_extras.py knows the extras",
    r"python -m pytest ": "the tests themselves",
    r"python -m benchmarks\.": "minutes, and figures that depend on the machine",
    r"python -m aligner\.config\.reference_page": "tests/config/test_reference_page.py",
    r"uvx? ": (
        "uv is not in the test environment; tried by hand, and the wheel with pip by"
        " tests/system/test_install.py"
    ),
    r"docker |python container/": "no container engine: tests/test_dockerfile.py reads the recipe",
    r"python (openenv_environment|textarena_game)\.py ": (
        "tests/system/test_openenv.py, tests/system/test_textarena.py"
    ),
    r"wandb |curl |scancel |kubectl |grep |eval ": "another program's command, or one line of a shell",
    r"aligner \S+ .*(DIRECTORY|RUN|NAME|SOURCE|OUTPUT|FILE)": (
        "what a command's arguments are, to be filled in"
    ),
    r"aligner (launch|validate) ": (
        "models, data or files of the reader's own: tests/cli/test_first_run.py runs the like"
    ),
    r"aligner (generate|evaluate|serve-model|convert|report|status|plan|new|fetch|completion|cache|--version|--help|view)": (
        "its options are parsed here; tests/cli, tests/engines, tests/data, tests/observability and"
        " tests/planner run it"
    ),
    r"aligner prove ": "tests/proof runs it",
    r"aligner doctor": "tests/cli/test_doctor_command.py",
    r"aligner:? ": "what it prints",
}
"""Commands that no test runs unchanged: a pattern of their start, and the reason."""


def commands() -> list[tuple[str, str]]:
    """Return page and command for each command in an indented or fenced block, on one line."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for line in re.findall(r"^(?: {4}|\t)(\S.*)$", text, re.MULTILINE):
            if re.match(rf"(\w+=\S+ )*({'|'.join(PROGRAMS)}|\.ci/run) ", line):
                found.append((page.name, re.sub(r"\s+", " ", line.partition("  #")[0]).strip()))
    return found


@pytest.mark.promise("docs-commands-are-tested")
def test_commands_in_pages_are_composed_or_listed() -> None:
    all_commands = commands()
    assert len(all_commands) > 100
    assert not [
        (page, command)
        for page, command in all_commands
        if not COMPOSED.match(command)
        and not any(re.match(rf"(\w+=\S+ )*({begins})", command) for begins in ELSEWHERE)
    ]


def test_diffs_in_pages_equal_the_files() -> None:
    diffs = re.findall(
        r"^```diff\n(.*?)^```", (DOCS / "adding_a_family.md").read_text(), re.M | re.S
    )
    assert len(diffs) >= 4
    for diff in diffs:
        name = re.search(r"^\+\+\+ b/(\S+)", diff, re.M)
        assert name is not None
        added = re.findall(r"^\+(?!\+\+ )(.*)$", diff, re.M)
        assert "\n".join(added) in (REPOSITORY / name[1]).read_text(), name[1]


def test_commands_and_options_in_pages_exist() -> None:
    options = {name: options_of(name) for name in COMMANDS}
    wrong = []
    for page, command in commands():
        words = shlex.split(command, comments=True)
        if (
            "aligner" not in words
            or words[-1] == "aligner"
            or command.startswith(("aligner:", "uv", "docker", "pip", "eval"))
        ):
            continue
        name, *rest = words[words.index("aligner") + 1 :]
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        if not name.startswith("-") and (name not in COMMANDS or not given <= options[name]):
            wrong.append((page, command))
    assert not wrong


def options_of(name: str) -> set[str]:
    """Return the options of a command."""
    parser = argparse.ArgumentParser()
    for add in COMMANDS[name].arguments:
        add(parser)
    return set(parser._option_string_actions)


def test_keys_in_migration_page_exist() -> None:
    keys, groups = get_schema_keys(), list_group_options(find_config_sources(None))
    named = set()
    for line in (DOCS / "migrating.md").read_text().splitlines():
        cells = line.split(" | ")
        if len(cells) >= 3 and not line.startswith("| ---"):
            named |= set(
                re.findall(
                    r"`([a-z_]+(?:\.[a-z_]+)*(?:=[^`]+)?)`",
                    cells[1] + (cells[2] if "`" in cells[2] else ""),
                )
            )
    named = {name for name in named if "." in name or "=" in name}
    assert len(named) > 50
    for name in named - {"data.train_batch_size"}:  # a key of verl
        key, _, value = name.partition("=")
        if key in groups:
            assert value in groups[key], name
        else:
            assert key in keys or key == "reward.sources", name
            assert not value or not keys[key].choices or value in keys[key].choices, name


def test_field_mappings_in_migration_page_are_accepted() -> None:
    page = (DOCS / "migrating.md").read_text()
    mappings = re.findall(r"'\+data\.fields=\{[^}]*\}'", page)
    assert len(mappings) >= 4
    for mapping in mappings:
        compose_config(["experiment=tiny_ppo", "data.path=x.jsonl", mapping.strip("'")])


METRIC_MODULES = (
    "aligner/algorithms/evaluation_scores.py",
    "aligner/rewards/judge.py",
    "aligner/training",
)
"""Files and directories that write metrics under their complete names."""
STATISTIC_MODULES = (
    "aligner/algorithms/distillation.py",
    "aligner/algorithms/policy_losses.py",
    "aligner/algorithms/offline_losses.py",
    "aligner/algorithms/online_algorithm.py",
    "aligner/algorithms/policy_losses.py",
    "aligner/algorithms/preference_losses.py",
    "aligner/megatron/optimizer.py",
    "aligner/megatron/policy.py",
    "aligner/megatron/runner.py",
)
"""Files that return statistics of an optimizer step; the trainer adds a prefix such as `policy/`."""
NOT_METRICS = {
    *("cispo", "clip", "copg", "cross_entropy", "dpo", "reinforce"),  # names of losses
    *("constant", "sum"),  # aggregations of a loss
    *("token", "sequence"),  # levels of ratios
    *("denominator", "temperature", "weights"),  # arguments of functions
    *("eps", "chunk_tokens"),  # settings of optimizers and of log-probs
    *("entropies", "logprobs"),  # tensors
}
"""Keys of dictionaries in these files that are not metrics."""
BUILT_METRICS = {
    *("reward/p10", "reward/p50", "reward/p90"),
    *("throughput/samples_per_s", "throughput/tokens_per_s"),
    *(f"judge/{count}" for count in JUDGE_COUNTS),
}
"""Names that the code builds from parts, so that they do not occur as literals."""


def metric_names() -> set[str]:
    """Collect the metric names in the code: complete ones, and `/NAME` for statistics."""
    names = set()
    for file in python_files(METRIC_MODULES):
        for node in ast.walk(ast.parse(file.read_text())):
            for text in string_starts(node):
                if re.fullmatch(r"[a-z_]+/[a-z_]+@?", text):
                    names.add(text)
            is_phase = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "phase"
            if is_phase:
                names |= {f"time/{text}" for text in strings_below(node.args[0])}
    for file in python_files(STATISTIC_MODULES):
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {f"/{key}" for key in written_keys(node) if key not in NOT_METRICS}
    return names


def python_files(places: tuple[str, ...]) -> list[Path]:
    """List the Python files of some files and directories."""
    paths = [REPOSITORY / place for place in places]
    return [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]


def string_starts(node: ast.AST) -> list[str]:
    """Return a string literal, or the text before the first field of an f-string."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return string_starts(node.values[0])
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def strings_below(node: ast.AST) -> list[str]:
    """Return all string literals of an expression."""
    return [text for each in ast.walk(node) for text in string_starts(each)]


def written_keys(node: ast.AST) -> list[str]:
    """Return the string keys that a dictionary display or an assignment to a subscript writes."""
    if isinstance(node, ast.Dict):
        return [text for key in node.keys if key is not None for text in string_starts(key)]
    if isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        return [text for target in targets for text in string_starts(target.slice)]
    return []


def test_metrics_page_names_every_metric() -> None:
    page = (DOCS / "metrics.md").read_text()
    named = set(re.findall(r"`([^`\s]+)`", page))
    statistics = {f"/{name.partition('/')[2]}" for name in named if "/" in name}
    # Some names end with a number or a name: `staleness/share_N`, `eval/pass@1`.
    starts = {re.sub("(_to_N|N|[A-Z]{2,}|[0-9]+)$", "", name) for name in named}
    names = metric_names() | BUILT_METRICS
    assert len(names) > 100
    assert not names - named - statistics - starts


def test_viewer_describes_every_metric() -> None:
    # The names of lengths end with a number: `response/generated_to_8`.
    starts = {"response/generated", "response/trained"}
    names = (metric_names() | BUILT_METRICS) - starts
    complete = [f"policy{name}" if name.startswith("/") else name for name in names]
    assert [name for name in complete if not describe_metric(name)] == []


def test_changelog_starts_with_the_installed_version() -> None:
    versions = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def headings_of(page: Path) -> set[str]:
    """Return the anchors that GitHub makes for a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_outside_of_site_are_valid() -> None:
    # Sphinx checks the links of the pages in docs/.
    pages = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    broken = []
    for page in [*pages, REPOSITORY / "examples" / "README.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if link.startswith("https://"):
                continue
            if not target.exists() or (anchor and anchor not in headings_of(target)):
                broken.append((page.name, link))
    assert not broken


@pytest.mark.promise("docs-site-builds")
@pytest.mark.slow
def test_site_builds_without_external_resources(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        str(DOCS),
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "kl_coeffici" in (site / "searchindex.js").read_text()  # word stems
    for page in site.glob("*.html"):
        assert not re.search(
            r"""<(script|link|img|iframe)[^>]+(src|href)=["'](https?:)?//""", page.read_text()
        ), page.name
