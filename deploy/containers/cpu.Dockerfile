# Bridges, drafts and targets on CPUs. Build from the repository's root:
#   docker build --file deploy/containers/cpu.Dockerfile --tag draftbridge:cpu .
# The version that all tests run on.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# The index has PyTorch without CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=ik-llama,openvino,otel
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
# Everything that a process writes is in /models and /tmp, so the root file system can be read-only.
ENV PATH=/opt/draftbridge/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DRAFTBRIDGE_CACHE=/models \
    HF_HOME=/models/hub \
    DRAFTBRIDGE_CLIENT_SERVER=127.0.0.1:50050
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m \
    CMD ["draftbridge", "health"]
ENTRYPOINT ["draftbridge"]
CMD ["--help"]
