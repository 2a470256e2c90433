"""What importing megatron-core takes."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_megatron_core_brings_neither_the_compiler_nor_wandb_which_others_may_still_import() -> (
    None
):
    program = (
        "import sys, torch; compiler = torch.compile\nimport aligner.megatron,"
        " megatron.core\nassert torch.compile is compiler\nprint([name for name in"
        " ('torch._inductor', 'torch._dynamo.eval_frame', 'wandb') if name in sys.modules])\nimport"
        " wandb; assert wandb.__version__\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
