"""The TRL side of benchmarks.data: SFT or GRPO of some steps on a file of records. It runs with the
interpreter of the separate TRL environment.

The first argument is a JSON object with the entries of `Work`; the last line of the output is a
JSON object with the number of records.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def run(work: Mapping[str, Any]) -> int:
    """Train some steps, and return the number of records."""
    from datasets import load_dataset
    from transformers import logging
    from trl import SFTConfig, SFTTrainer

    logging.disable_progress_bar()
    records = load_dataset("json", data_files=work["file"], split="train")
    settings = SFTConfig(
        output_dir=work["directory"],
        max_steps=work["steps"],
        per_device_train_batch_size=work["batch_size"],
        max_length=work["max_tokens"],
        dataset_num_proc=work["processes"],
        assistant_only_loss=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=work["model"], args=settings, train_dataset=records)
    trainer.train()
    return len(records)


if __name__ == "__main__":
    print(json.dumps({"records": run(json.loads(sys.argv[1]))}))
