# vLLM with the adapter that takes candidates from a bridge. Build from the repository's root:
#   docker build --file deploy/containers/vllm.Dockerfile --tag draftbridge:vllm .
ARG VLLM=0.32.0

FROM vllm/vllm-openai:v${VLLM}
WORKDIR /source
COPY . .
# Without our dependencies, which are those of servers: the adapter needs gRPC only, and vLLM's torch must stay.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip install --disable-pip-version-check --no-deps . \
    && python3 -m pip install --disable-pip-version-check --upgrade-strategy only-if-needed \
        "grpcio>=1.85.1" "protobuf>=7.35.1" "googleapis-common-protos>=1.73.1" \
    && useradd --uid 10001 --no-create-home --home-dir /tmp draftbridge \
    && install --directory --owner=draftbridge --group=draftbridge /models
WORKDIR /models
ENV HF_HOME=/models/hub \
    VLLM_CACHE_ROOT=/models/vllm \
    TORCHINDUCTOR_CACHE_DIR=/models/inductor \
    HOME=/tmp
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
