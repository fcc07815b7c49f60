# Drafts and targets on NVIDIA GPUs. The host needs NVIDIA's driver and container toolkit. Build from the root:
#   docker build --file deploy/containers/cuda.Dockerfile --tag draftbridge:cuda .
# The version that all tests run on.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# PyPI's PyTorch for Linux brings CUDA's libraries. For an older driver, name PyTorch's index of an older CUDA.
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=otel
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/draftbridge \
    && /opt/draftbridge/bin/pip install --disable-pip-version-check --extra-index-url "${TORCH_INDEX}" \
        --constraint constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="DraftBridge" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --home-dir /models draftbridge \
    && install --directory --owner=draftbridge --group=draftbridge /models
COPY --from=build /opt/draftbridge /opt/draftbridge
ENV PATH=/opt/draftbridge/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DRAFTBRIDGE_CACHE=/models \
    HF_HOME=/models/hub \
    DRAFTBRIDGE_CLIENT_SERVER=127.0.0.1:50051 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m \
    CMD ["draftbridge", "health"]
ENTRYPOINT ["draftbridge"]
CMD ["--help"]
