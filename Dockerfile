# The GPU images: TensorRT-LLM's release image, which brings CUDA, torch, transformer-engine and apex, with aligner on top.
#   docker build --target trainer -t aligner-trainer .      what launches, prepares, trains and converts
#   docker build --target server  -t aligner-server  .      critic, reward and generator: PyTriton besides
# Of the 1.2 family: nvidia-pytriton needs numpy below 2, which 1.3 has left. A digest pins it for good:
#   --build-arg BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.0@sha256:…
ARG BASE_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.2.0

# The sources, and what builds a wheel of them, stay behind in this stage.
FROM ${BASE_IMAGE} AS wheel
WORKDIR /build
RUN pip install --no-cache-dir hatchling==1.33.0
COPY pyproject.toml README.md ./
COPY conf conf
COPY aligner aligner
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE_IMAGE} AS common
# The release image may own user id 1000 already. `docker run --user` may give any other: all may write to this home.
RUN useradd --create-home --uid 10001 aligner \
    && chmod 1777 /home/aligner
WORKDIR /opt/aligner
# Dependencies come first, with no more of the repository than says what they are: edits elsewhere leave their layers alone.
COPY pyproject.toml constraints.txt ./
COPY container/pins.py container/
# megatron-core goes in without its dependencies: for torch pip would replace the base image's build by a release of its own.
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
# A user without an entry in /etc/passwd has no home for JIT caches otherwise, and getpass finds no name. Not in `common`: what
# root imports while the image is built would leave directories there that are root's.
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
