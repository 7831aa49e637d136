# attnd in a container.
#   docker build -t attnd --build-arg REVISION="$(git rev-parse HEAD)" .
#   docker build -t attnd .                            the CPU backend
#   docker build -t attnd:cuda --build-arg EXTRA=cuda .    CuPy for CUDA 13 (EXTRA=cuda12: CUDA 12)
# It listens on all addresses of the container, so it needs authentication: set ATTND_AUTH__KEYS_FILE,
# or ATTND_AUTH__OPEN=true on a trusted network.
# With the gateway of Triton's clients: EXTRA=cpu,oip, EXTRA=cuda,oip.
# deploy/locked/ has the version and hash of every package (`make lock` writes it).

ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG EXTRA=cpu
# torch without CUDA in all variants, because the CUDA backend uses CuPy. Empty: the default index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/attnd
WORKDIR /src
# the dependencies first: a layer that changes only with the locked versions
COPY deploy/locked deploy/locked
RUN set -- && for name in base $(echo "$EXTRA" | tr , ' '); do \
      [ "$name" = cpu ] || set -- "$@" -r "deploy/locked/$name.txt"; done \
 && /opt/attnd/bin/pip install --no-cache-dir --no-deps --require-hashes \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$@" \
 && /opt/attnd/bin/python -c "import torch"
COPY . .
RUN /opt/attnd/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && ln -s "$(/opt/attnd/bin/python -c 'from attnd_service.service.launch import HOME; print(HOME)')" \
      /opt/attnd/packages

FROM ${BASE}
ARG EXTRA=cpu
ARG CUDA_ARCHS=sm_80,sm_90a
ARG REVISION=
LABEL org.opencontainers.image.title="attnd" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.description="Attention and KV cache as a service" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN /usr/sbin/groupadd --gid 10001 attnd \
 && /usr/sbin/useradd --uid 10001 --gid attnd --create-home --shell /usr/sbin/nologin attnd
COPY --from=build /opt/attnd /opt/attnd
ENV HOME=/home/attnd \
    PATH=/opt/attnd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CUPY_CACHE_DIR=/home/attnd/.cache/cupy \
    ATTND_SERVER__HOST=0.0.0.0 \
    ATTND_LOG__FORMAT=json
# a number, because runAsNonRoot of Kubernetes cannot check a name
USER 10001:10001
WORKDIR /home/attnd
# compiled kernels are cached in ~/.cache; the CUDA image has the common ones from the start
RUN mkdir -p /home/attnd/.cache \
 && case "$EXTRA" in cuda*) attnd compile --arch "$CUDA_ARCHS" ;; esac
VOLUME /home/attnd/.cache
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 CMD ["python", "-c", \
  "from http.client import *; door = HTTPConnection('127.0.0.1', 8080, timeout=2); \
   door.request('GET', '/health/ready'); raise SystemExit(door.getresponse().status != 200)"]
ENTRYPOINT ["attnd", "serve"]
