# Two images from one file:
#   control  the services: detector's monitor, planner, transition, api (no torch)
#   worker   the node agent with torch and megatron-core
#
#   docker build --target control --tag unicron-control .
#   docker build --target worker --tag unicron-worker .

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/unicron
ENV PATH=/opt/unicron/bin:$PATH
WORKDIR /src
# Dependencies first: they change less often than the sources, so this layer is kept. pip refuses every file whose hash is
# not in deploy/requirements-*.txt (`make requirements`).
COPY deploy/requirements-build.txt deploy/requirements-control.txt ./
RUN pip install --require-hashes -r requirements-build.txt \
    && pip install --require-hashes --no-build-isolation -r requirements-control.txt

FROM build AS build-control
COPY . .
RUN pip install --no-index --no-deps --no-build-isolation . && pip check

# No CUDA base image: torch's own packages bring the CUDA libraries, the host brings the driver.
FROM build AS build-worker
# Where to look for wheels besides the default index, such as an index of CPU builds.
ARG PIP_EXTRA_INDEX_URL=
COPY constraints.txt ./
RUN pip install -c constraints.txt torch==2.13.0 megatron-core safetensors
COPY . .
RUN pip install -c constraints.txt --no-build-isolation '.[train,postgres]'

FROM python:${PYTHON_VERSION}-slim AS base
RUN groupadd --system --gid 10001 unicron \
    && useradd --system --uid 10001 --gid unicron --home-dir /var/lib/unicron --create-home unicron
ENV PATH=/opt/unicron/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    UNICRON_RUN_DIR=/var/lib/unicron
# -P everywhere: the working directory is never on the import path.
WORKDIR /var/lib/unicron
VOLUME /var/lib/unicron
USER unicron

FROM base AS control
COPY --from=build-control /opt/unicron /opt/unicron
COPY deploy/healthcheck.py /opt/unicron/healthcheck.py
EXPOSE 8642
ENV UNICRON_HOST=0.0.0.0
# One service a container; docker-compose.yml names the others. The probe is the API's, as is the default command.
HEALTHCHECK --interval=5s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-P", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8642/readyz', timeout=3)"]
CMD ["python", "-P", "-m", "services.api.main"]

FROM base AS worker
COPY --from=build-worker /opt/unicron /opt/unicron
COPY deploy/healthcheck.py /opt/unicron/healthcheck.py
# Several ranks share a machine's cores on CPU, and each computes with one thread.
ENV OMP_NUM_THREADS=1 \
    OPENBLAS_NUM_THREADS=1
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-P", "/opt/unicron/healthcheck.py", "agent"]
CMD ["python", "-P", "-m", "services.agent.main"]
