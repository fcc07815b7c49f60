# Targets and drafts on Gaudi. The host needs Intel's driver and container runtime. Build from the root:
#   docker build --file deploy/containers/gaudi.Dockerfile --tag draftbridge:gaudi .
# FP8 needs Intel Neural Compressor, which the base image has. A model on several Gaudis needs Intel's DeepSpeed:
#   --build-arg EXTRA_PACKAGES=git+https://github.com/HabanaAI/DeepSpeed.git@1.23.0
# The base image has PyTorch for Gaudi, which pip must not replace. Its version is the one that optimum-habana 1.21.2
# was validated with.
ARG GAUDI=1.24.0
ARG GAUDI_PYTORCH=2.10.0

# Intel names a release in the path, and tags its builds.
# hadolint ignore=DL3007
FROM vault.habana.ai/gaudi-docker/${GAUDI}/ubuntu24.04/habanalabs/pytorch-installer-${GAUDI_PYTORCH}:latest AS build
ARG EXTRA_PACKAGES=""
WORKDIR /source
COPY . .
# The constraints file is for environments without Gaudi, whose transformers is newer. pip keeps the installed torch.
# The base image has no ensurepip; its own pip installs into the environment whose Python runs it. torch is not
# imported, because without a Gaudi that may fail or print text.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip --system-site-packages /opt/draftbridge \
    && python3 -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > /tmp/installed.txt \
    && /opt/draftbridge/bin/python -m pip install --disable-pip-version-check --constraint /tmp/installed.txt \
        '.[habana,otel]' ${EXTRA_PACKAGES}

# Intel names a release in the path, and tags its builds.
# hadolint ignore=DL3007
FROM vault.habana.ai/gaudi-docker/${GAUDI}/ubuntu24.04/habanalabs/pytorch-installer-${GAUDI_PYTORCH}:latest
LABEL org.opencontainers.image.title="DraftBridge" org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --home-dir /models draftbridge \
    && install --directory --owner=draftbridge --group=draftbridge /models
COPY --from=build /opt/draftbridge /opt/draftbridge
# Statistics for FP8 are written to a path relative to this one.
WORKDIR /models
ENV PATH=/opt/draftbridge/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DRAFTBRIDGE_CACHE=/models \
    HF_HOME=/models/hub \
    DRAFTBRIDGE_CLIENT_SERVER=127.0.0.1:50051 \
    HABANA_VISIBLE_DEVICES=all \
    PT_HPU_LAZY_MODE=1 \
    HABANA_LOGS=/tmp/habana_logs
USER 10001:10001
VOLUME /models
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m \
    CMD ["draftbridge", "health"]
ENTRYPOINT ["draftbridge"]
CMD ["--help"]
