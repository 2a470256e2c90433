# The GPU image: TensorRT-LLM's release image, which brings CUDA, torch, transformer-engine and apex, with aligner on top.
# Of the 1.2 family: nvidia-pytriton needs numpy below 2, which 1.3 has left.
ARG TENSORRT_LLM_VERSION=1.2.0
FROM nvcr.io/nvidia/tensorrt-llm/release:${TENSORRT_LLM_VERSION}

WORKDIR /opt/aligner
COPY pyproject.toml README.md ./
COPY conf conf
COPY aligner aligner

# megatron-core and aligner go in without their dependencies, and the base image's torch and numpy are held where they are:
# pip would replace them with builds that TensorRT-LLM and transformer-engine do not fit.
RUN python3 -c "from importlib.metadata import version as v; print(*(f'{n}=={v(n)}' for n in ('torch', 'numpy')), sep='\n')" > held.txt \
    && pip install --no-cache-dir --no-deps megatron-core==0.16.1 . \
    && pip install --no-cache-dir --constraint held.txt \
        "hydra-core>=1.3.2,<1.4" "nvidia-pytriton==0.7.0" "psutil>=5.9" "ray>=2.40" "rich>=13" "tensorboard>=2.18" "vaderSentiment>=3.3.2"

# A base image that does not fit fails here and not on the cluster. TensorRT-LLM, transformer-engine and apex load the
# driver when they are imported, and a build has none: they are looked up.
RUN python3 - <<'CHECK'
import importlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

for line in Path("held.txt").read_text().split():
    name, held = line.split("==")
    assert version(name) == held, f"{name} {held} was replaced by {version(name)}"
assert int(version("numpy").split(".")[0]) < 2, f"numpy {version('numpy')}: nvidia-pytriton needs one below 2"
assert version("tensorrt_llm").startswith("1.2."), f"tensorrt_llm {version('tensorrt_llm')}: 1.2 is needed"
assert version("megatron-core") == "0.16.1", f"megatron-core {version('megatron-core')}: 0.16.1 is needed"
for name in ("ray", "transformer_engine", "apex", "transformers", "tokenizers", "safetensors"):
    assert importlib.util.find_spec(name), f"{name} is not in the base image"
for name in ("torch", "hydra", "pytriton.triton", "tritonclient.grpc", "aligner.cli", "aligner.config.compose"):
    importlib.import_module(name)
CHECK

# The release image may own user id 1000 already.
RUN useradd --create-home --uid 10001 aligner
USER aligner
WORKDIR /home/aligner
ENTRYPOINT ["aligner"]
CMD ["--help"]
