"""Types of arguments, read from the source of a package that is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aligner.checks.source_types import ClassSource, SourcePackage, find_field_problems

_PACKAGE = {
    "__init__.py": "raise ImportError('the package must not be imported')",
    "types.py": """
from enum import Enum
from typing import Literal
Runner = Literal["generate", "pooling"]
Rank = Literal[1, 8]
class Backend(Enum):
    FLASH = "vllm.flash"
    TRITON = "vllm.triton"
""",
    "config.py": """
from pydantic import field_validator, model_validator
from .types import Rank
@config
class CacheConfig:
    blocks: int = 1
    rank: Rank = 1
    level: int = 0
    computed: int = field(init=False)
    _private: int = 0
    @field_validator("level", mode="before")
    @classmethod
    def convert(cls, value): ...
@config
class OldConfig:
    @model_validator(mode="before")
    @classmethod
    def convert(cls, values): ...
""",
    "args.py": """
from typing import TYPE_CHECKING, Any, ClassVar, Optional
from unknown import Elsewhere
from package.config import CacheConfig, OldConfig
from package.types import Backend, Runner
if TYPE_CHECKING:
    from package.types import Runner as Method
else:
    Method = str
@dataclass
class Base:
    runner: Runner | Literal["draft"] = "generate"
    constant: ClassVar[int] = 3
    removed: int = 1
@dataclass
class Arguments(Base):
    removed: int = field(init=False)
    size: int = 1
    share: float = 0.5
    flag: bool | None = None
    sizes: list[int] | None = None
    names: set[str] = frozenset()
    limits: dict[str, int | dict[str, int]] = {}
    cache: CacheConfig = CacheConfig()
    old: "OldConfig" = OldConfig()
    backend: Optional[Backend] = None
    method: Method = "generate"
    worker: type[Any] | None = None
    other: Elsewhere = None
""",
}


@pytest.fixture
def arguments(tmp_path: Path) -> ClassSource:
    directory = tmp_path / "package"
    directory.mkdir()
    for name, text in _PACKAGE.items():
        (directory / name).write_text(text)
    source = SourcePackage(directory).find_class("package.args.Arguments")
    assert source is not None
    return source


@pytest.mark.parametrize(
    "values",
    [
        {"runner": "draft", "size": 3, "share": 1, "flag": None, "sizes": [1, 2], "names": ["a"]},
        {"limits": {"image": 1, "video": {"count": 2}}, "cache": {"blocks": 2, "rank": 8}},
        # A validator of the class may convert other types, and accept other names.
        {"cache": {"level": "full"}, "old": {"anything": 1}},
        {"backend": "flash", "other": {"any": "value"}, "method": "pooling"},
        {"backend": "TRITON", "sizes": None, "worker": None},
    ],
)
def test_values_of_the_annotated_types_are_accepted(
    arguments: ClassSource, values: dict[str, Any]
) -> None:
    assert not [*find_field_problems(arguments, "args", values)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "3"}, "args.size=3: expected int, got str"),
        ({"size": True}, "args.size=true: expected int, got bool"),
        ({"size": None}, "args.size=null: expected int, got NoneType"),
        ({"flag": 1}, "args.flag=1: expected bool or null, got int"),
        ({"runner": "serve"}, "args.runner=serve: allowed: generate, pooling, draft"),
        ({"method": "serve"}, "args.method=serve: allowed: generate, pooling"),
        (
            {"backend": "cuda"},
            "args.backend=cuda: allowed: FLASH, TRITON, vllm.flash, vllm.triton, null",
        ),
        ({"sizes": [1, "b"]}, "args.sizes[1]=b: expected int, got str"),
        ({"sizes": 4}, "args.sizes=4: expected list or null, got int"),
        ({"limits": {"image": "a"}}, "args.limits.image=a: expected int or mapping, got str"),
        ({"cache": {"rank": 2}}, "args.cache.rank=2: allowed: 1, 8"),
        ({"cache": 3}, "args.cache=3: expected mapping, got int"),
        (
            {"cache": {"block": 2}},
            "args.cache.block: CacheConfig has no such argument; did you mean args.cache.blocks?",
        ),
        ({"worker": "a.B"}, "args.worker=a.B: allowed: null"),
        ({"sise": 3}, "args.sise: Arguments has no such argument; did you mean args.size?"),
    ],
)
def test_value_of_another_type_is_refused_with_its_key(
    arguments: ClassSource, values: dict[str, Any], message: str
) -> None:
    assert [*find_field_problems(arguments, "args", values)] == [message]


@pytest.mark.parametrize("name", ["constant", "removed", "_private"])
def test_fields_that_are_no_arguments_are_unknown(arguments: ClassSource, name: str) -> None:
    (problem,) = find_field_problems(arguments, "args", {name: 1})
    assert problem.startswith(f"args.{name}: Arguments has no such argument")
    cache = {"cache": {"computed": 1}}
    (problem,) = find_field_problems(arguments, "args", cache)
    assert problem.startswith("args.cache.computed: CacheConfig has no such argument")
