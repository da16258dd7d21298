# One image for every command: `docker run IMAGE` is the worker, `docker run IMAGE check`, `… mock-model`, … the others.
#
#   docker build -t inference-worker .
#
# With what `process --transport gcp-pubsub` needs besides:
#
#   docker build --build-arg REQUIREMENTS=requirements-pubsub.txt -t inference-worker .
#
# Behind a proxy that opens TLS, hand in the authorities; they are used for pip and stay out of the image:
#
#   docker build --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt -t inference-worker .

ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
ARG REQUIREMENTS=requirements.txt
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# A venv without pip: what is copied has what the worker imports, and nothing that installs.
RUN python3 -m venv --without-pip /opt/inference-worker
COPY requirements.txt requirements-pubsub.txt ./
RUN --mount=type=secret,id=ca,target=/run/ca.pem,required=false \
    if [ -s /run/ca.pem ]; then export PIP_CERT=/run/ca.pem; fi && \
    python3 -m pip --python /opt/inference-worker install --quiet --only-binary :all: --require-hashes -r ${REQUIREMENTS}
COPY pyproject.toml README.md LICENSE ./
COPY inference_worker inference_worker
# The bytecode is made here: a read-only root file system could never keep it, and every start would compile again.
# Not with -O: the asserts are few, and what they say is worth more than their time.
RUN pip="python3 -m pip --python /opt/inference-worker --quiet" && \
    $pip install --no-deps --no-index --no-build-isolation --no-compile . && \
    $pip uninstall --yes setuptools && \
    find /opt/inference-worker -name __pycache__ -prune -exec rm -rf {} + && \
    /opt/inference-worker/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/inference-worker/lib

FROM ${PYTHON_IMAGE}
# The base's pip goes, and with the setuid bits every way for a process here to become somebody else.
RUN rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/lib/python3*/ensurepip /usr/local/bin/pip* \
        /usr/lib/python3/dist-packages/* /usr/lib/python3*/ensurepip /usr/bin/pip* /usr/share/python-wheels && \
    find / -xdev -type f -perm /6000 -exec chmod a-s {} + && \
    echo 'worker:x:10001:10001::/nonexistent:/usr/sbin/nologin' >>/etc/passwd && echo 'worker:x:10001:' >>/etc/group
COPY --from=build /opt/inference-worker /opt/inference-worker
# Large answers come in pieces: above 64 KiB they are mapped, so that their memory goes back when they do.
ENV PATH=/opt/inference-worker/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 MALLOC_MMAP_THRESHOLD_=65536
# The one place where `submit` may note how far it is; `run` writes nothing.
WORKDIR /tmp
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 9090
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="inference-worker" \
      org.opencontainers.image.description="A sidecar that serves a model from a queue: RabbitMQ to model to Redis" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Whether the process is alive, not whether it is ready: a neighbour's outage must not restart it. Past any proxy; with
# the port off there is nothing to ask.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15s --retries=3 \
    CMD ["python", "-IS", "-c", "import os, urllib.request as r; port = os.environ.get('WORKER_HTTP_PORT') or '9090'; port == '0' or r.build_opener(r.ProxyHandler({})).open(f'http://127.0.0.1:{port}/livez', timeout=4)"]
ENTRYPOINT ["inference-worker"]
CMD ["run"]
