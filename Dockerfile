# Images of aligner. The base of the GPU images is the release image of TensorRT-LLM, which contains CUDA, torch,
# transformer-engine and apex.
#   docker build --target trainer -t aligner-trainer .      launcher, preparation, trainer and conversion
#   docker build --target server  -t aligner-server  .      critic, reward and generator servers; also contains PyTriton
#   docker build --target cpu     -t aligner-cpu     .      all roles without a GPU, for laptops and CI; needs no image of NVIDIA
# The base must be a 1.2 release: nvidia-pytriton requires numpy below 2, and release 1.3 contains numpy 2. To pin the exact image:
#   --build-arg BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.0@sha256:…
ARG BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.0
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim

# This stage builds the wheel. The images contain the wheel, but neither the sources nor the build tools. The wheel is pure
# Python, so it can be built without the base of the GPU images.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /build
RUN pip install --no-cache-dir hatchling==1.33.0
COPY pyproject.toml README.md ./
COPY conf conf
COPY aligner aligner
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE_IMAGE} AS common
# User id 10001, because the release image may already use 1000. `docker run --user` may set any other id, so every user may write
# to this home directory.
RUN useradd --create-home --uid 10001 aligner \
    && chmod 1777 /home/aligner
WORKDIR /opt/aligner
# Copy only the files that define the dependencies, so that other edits of the repository do not invalidate these layers.
COPY pyproject.toml constraints.txt ./
COPY container/pins.py container/
# Install megatron-core without its dependencies: otherwise pip replaces the torch build of the base image with a release from PyPI.
RUN pip install --no-cache-dir --no-deps megatron-core==0.16.1 \
    && python3 container/pins.py held.txt requirements.txt sentiment verify tensorrt_llm wandb mlflow view \
    && pip install --no-cache-dir --constraint held.txt --requirement requirements.txt
ENTRYPOINT ["aligner"]
CMD ["--help"]

FROM common AS trainer
COPY --from=wheel /wheels /wheels
COPY container/check_image.py container/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 container/check_image.py trainer held.txt
# A user without an entry in /etc/passwd needs HOME for JIT caches and a user name for getpass. These variables are not set in
# `common`: the imports that root runs during the build would create directories there that only root can write to.
ENV HOME=/home/aligner USER=aligner LOGNAME=aligner
USER 10001
WORKDIR /home/aligner

FROM common AS server
RUN python3 container/pins.py held_server.txt requirements.txt server \
    && pip install --no-cache-dir --constraint held_server.txt --requirement requirements.txt
COPY --from=wheel /wheels /wheels
COPY container/check_image.py container/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 container/check_image.py server held.txt
ENV HOME=/home/aligner USER=aligner LOGNAME=aligner
USER 10001
WORKDIR /home/aligner

FROM ${PYTHON_IMAGE} AS cpu
RUN useradd --create-home --uid 10001 aligner \
    && chmod 1777 /home/aligner
WORKDIR /opt/aligner
COPY pyproject.toml constraints.txt ./
COPY container/pins.py container/
# The default Linux wheels of torch contain CUDA. With an index of CPU builds, the image is several GB smaller.
ARG PIP_EXTRA_INDEX_URL
# Unlike the GPU images, replace packages of the base: torch needs a newer setuptools.
RUN python3 container/pins.py /dev/null requirements.txt server demo sentiment verify wandb mlflow view \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt
COPY --from=wheel /wheels /wheels
COPY container/check_image.py container/
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 container/check_image.py server constraints.txt --no-gpu
ENV HOME=/home/aligner USER=aligner LOGNAME=aligner
USER 10001
WORKDIR /home/aligner
ENTRYPOINT ["aligner"]
CMD ["--help"]
