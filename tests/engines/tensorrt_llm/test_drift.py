"""The script that compares sources of TensorRT-LLM with the contract, on packages written from the
contract."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import tensorrt_llm_drift
from tests.engines.tensorrt_llm import contract

RELEASES = {"1.2": "1.2.1", "1.3": "1.3.0rc27", "1.4": "1.5.0rc0"}


def default_of(parameter: contract.Parameter) -> str:
    if parameter.default == contract.REQUIRED:
        return ""
    return " = None" if parameter.default == contract.UNCOMPARED else f" = {parameter.default!r}"


def signature_of(symbol: contract.Symbol, release: str) -> str:
    parameters = symbol.keywords(release).values()
    texts = [f"{each.name}{default_of(each)}" for each in parameters]
    return ", ".join(["self", *texts])


def write_extension(updates: contract.WeightUpdates) -> str:
    refused = "{}"
    if updates.refused_imports:
        refused = repr({name: [*names] for name, names in updates.refused_imports.items()})
    abort = "    def abort_update_weights(self, reason=''): self._forget()" * updates.has_abort
    return f"""
LATCH = {contract.LATCH!r}

class WorkerExtension:
    def _forget(self):
        delattr(self.engine.model_engine.model, LATCH)

    @decorated
    def update_weights(self, ipc_handles=None):
        try:
            {"disallowed_imports = " + refused if updates.refused_imports else "pass"}
        except Exception:
            {"self.model_loader.abort_update_weights()" if updates.has_loader_state else "pass"}
            {"self._forget()" if updates.clears_latch_on_failure else "pass"}
            raise
{abort}
"""


def write_package(root: Path, release: str, state: str = "") -> Path:
    """Write a package that agrees with the table, and return its directory."""
    files: dict[str, str] = {
        "tensorrt_llm/version.py": f"__version__ = {RELEASES[release]!r}\n",
        "tensorrt_llm/__init__.py": "from .sources import AsyncLLM, SamplingParams\n",
        "tensorrt_llm/llmapi/__init__.py": "__all__ = ['RequestOutput', 'KvCacheConfig',"
        " 'CudaGraphConfig', 'DecodeCudaGraphConfig']\n",
    }
    bodies: dict[tuple[str, str], list[str]] = {}
    for symbol in contract.SYMBOLS:
        if release not in symbol.versions:
            continue
        _, name, attribute = tensorrt_llm_drift._split_path(symbol.path)
        own, *further = symbol.sources[release].files
        if name == "WorkerExtension":
            continue
        # Methods of AsyncLLM are in its base class, whose file is the second one.
        where = (further[0], "Base") if name == "AsyncLLM" and attribute else (own, name)
        body = bodies.setdefault(where, [])
        if symbol.members:
            body += [f"{member} = {value!r}" for member, value in symbol.members.items()]
        elif attribute:
            body.append(f"async def {attribute}({signature_of(symbol, release)}): ...")
        elif symbol.field_sources:
            (fields_file,) = symbol.field_sources[release].files
            body += ["def __init__(self, placement_groups=None, **kwargs):", "    ..."]
            fields = bodies.setdefault((fields_file, "TorchLlmArgs"), [])
            for parameter in symbol.keywords(release).values():
                value = default_of(parameter).removeprefix(" = ")
                call = f"Field(default={value}, description='')" if value else "Field()"
                fields.append(f"{parameter.name}: int = {call}")
        else:
            body += [
                f"{each.name}: int{default_of(each)}" for each in symbol.keywords(release).values()
            ]
    for (file, name), body in bodies.items():
        base = "(Base)" if name == "AsyncLLM" else ""
        text = "\n    ".join([f"class {name}{base}:", *body])
        files[file] = files.get(file, "") + text + "\n"
    (extension_file,) = contract.EXTENSION_SOURCES[release].files
    files[extension_file] = write_extension(contract.WEIGHT_UPDATES[state or release])
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root / "tensorrt_llm"


def run_script(monkeypatch, capsys, *arguments: object) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["tensorrt_llm_drift", *map(str, arguments)])
    code = tensorrt_llm_drift.main()
    return code, capsys.readouterr().out.splitlines()


def change(package: Path, replacements: Mapping[str, tuple[str, str]]) -> None:
    for file, (old, new) in replacements.items():
        text = (package / file).read_text()
        assert old in text, file
        (package / file).write_text(text.replace(old, new))


@pytest.mark.promise("tensorrt-llm-contract")
@pytest.mark.parametrize("release", contract.VERSIONS)
def test_script_finds_no_difference_in_package_of_table(tmp_path, monkeypatch, capsys, release):
    write_package(tmp_path, release)
    code, lines = run_script(monkeypatch, capsys, tmp_path)
    assert lines == [
        f"TensorRT-LLM {RELEASES[release]}, compared with release {release}:",
        f"  weight updates fail as in {release}",
        lines[-1],
    ]
    assert re.fullmatch(r"\d\d entries compared, 0 differences, 0 not compared", lines[-1])
    assert code == 0


@pytest.mark.promise("tensorrt-llm-contract")
def test_script_reports_changed_package(tmp_path, monkeypatch, capsys):
    package = write_package(tmp_path, "1.4")
    change(
        package,
        {
            "llmapi/llm_args.py": (
                "max_input_len: int = Field(default=1024",
                "max_in: int = Field(1",
            ),
            "sampling_params.py": ("PROCESSED = 'processed'", "PROCESSED = 'cooked'"),
            "llmapi/__init__.py": ("'KvCacheConfig',", ""),
            "llmapi/llm.py": ("unique_reply_rank = None", "unique_reply_rank = 0"),
            "executor/ray/gpu_worker.py": ("report_device_id", "report_device"),
            "llmapi/rlhf_utils.py": ("'torch': ['save']", "'torch': []"),
        },
    )
    code, lines = run_script(monkeypatch, capsys, package)
    assert code == 1
    found = [line.removeprefix("  different: ") for line in lines if "different: " in line]
    assert found[:-1] == [
        "tensorrt_llm.AsyncLLM has no max_input_len",
        "tensorrt_llm.AsyncLLM.collective_rpc: unique_reply_rank is 0 by default, not None",
        "tensorrt_llm.sampling_params.LogprobMode.PROCESSED is 'cooked', not 'processed'",
        "tensorrt_llm/llmapi/__init__.py does not export KvCacheConfig",
        "there is no tensorrt_llm.executor.ray.gpu_worker.RayWorkerWrapper.report_device_id",
    ]
    assert found[-1].startswith("weight updates differ from all known states: ")


def test_script_recognizes_abort_on_all_workers(tmp_path, monkeypatch, capsys):
    package = write_package(tmp_path, "1.4", "abort on all workers")
    code, lines = run_script(monkeypatch, capsys, package)
    assert (code, lines[1]) == (0, "  weight updates fail as in abort on all workers")


def test_script_names_entries_without_files(tmp_path, monkeypatch, capsys):
    package = write_package(tmp_path, "1.3")
    (package / "llmapi" / "rlhf_utils.py").unlink()
    (package / "version.py").unlink()
    code, lines = run_script(monkeypatch, capsys, package, "--release", "1.3")
    assert code == 0
    assert "  not compared: weight updates: there is no WorkerExtension" in lines
    assert lines[0] == "TensorRT-LLM of unknown version, compared with release 1.3:"
    with pytest.raises(SystemExit, match="does not exist; set --release"):
        run_script(monkeypatch, capsys, package)


def test_script_refuses_missing_or_old_package(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="contains no directory tensorrt_llm"):
        run_script(monkeypatch, capsys, tmp_path)
    with pytest.raises(SystemExit, match=r"TensorRT-LLM 1\.1\.0: aligner requires 1\.2"):
        tensorrt_llm_drift.select_release("1.1.0")


def test_every_entry_names_release_and_files():
    for symbol in contract.SYMBOLS:
        sources = [*symbol.sources.values(), *(symbol.field_sources or {}).values()]
        assert sources
        for source in sources:
            assert source.release in contract.READ_FROM, symbol.path
            assert source.files, symbol.path
            assert all(file.startswith("tensorrt_llm/") for file in source.files)
