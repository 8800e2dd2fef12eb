# Two images from one file:
#   control  the services: detector's monitor, planner, transition, api (no torch)
#   worker   the node agent with torch and megatron-core
#
#   docker build --target control --tag unicron-control:0.1.0 .
#   docker build --target worker --tag unicron-worker:0.1.0 .
#
# Both run with a read-only root file system: they write to their volumes, /tmp and /dev/shm only.

# Python 3.11 on Debian. For a mirror: --build-arg BASE_IMAGE=registry.example.org/python:3.11-slim
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/unicron
ENV PATH=/opt/unicron/bin:$PATH
WORKDIR /src
# pip refuses every file whose hash is not in deploy/requirements-*.txt (`make requirements`).
COPY deploy/requirements-build.txt ./
RUN pip install --require-hashes -r requirements-build.txt

FROM build AS build-control
# Dependencies first: they change less often than the sources, so this layer is kept.
COPY deploy/requirements-control.txt ./
RUN pip install --no-compile --require-hashes --no-build-isolation -r requirements-control.txt
COPY . .
# Nothing is installed, compiled or checked in a running container: pip and setuptools stay behind, and the tests, type stubs
# and headers of other projects. So does what no service uses of a large one: numpy's builders and random numbers, other
# databases, libyaml (safe_load does without it).
RUN pip install --no-compile --no-index --no-deps --no-build-isolation . && pip check \
    && pip uninstall --yes setuptools pip \
    && find /opt/unicron \( -type d -name tests -o -type d -name testing -o -name '*.pyi' -o -name '*.[ah]' \) -prune \
        -exec rm -r {} + \
    && (cd /opt/unicron/lib/python3*/site-packages && rm -rf numpy/distutils numpy/f2py numpy/random yaml/_yaml*.so \
        sqlalchemy/dialects/mssql sqlalchemy/dialects/mysql sqlalchemy/dialects/oracle) \
    && python -P deploy/load_control.py

# No CUDA base image: torch's own packages bring the CUDA libraries, the host brings the driver.
FROM build AS build-worker
# Where to look for wheels besides the default index, such as an index of CPU builds.
ARG PIP_EXTRA_INDEX_URL=
# Extras of the library: train,s3 for checkpoints in S3.
ARG EXTRAS=train
COPY constraints.txt ./
RUN pip install -c constraints.txt torch==2.13.0 megatron-core safetensors
COPY . .
# setuptools stays: torch compiles extensions with it.
RUN pip install -c constraints.txt --no-build-isolation "./unicron[${EXTRAS}]" ".[agent]" && pip check && pip uninstall --yes pip

FROM ${BASE_IMAGE} AS base
# The second folder is the run directory of an agent that runs as root without any right to others' files (docker-compose.yml):
# tasks enter it as users of their own, and list nothing there.
RUN groupadd --system --gid 10001 unicron \
    && useradd --system --uid 10001 --gid unicron --home-dir /var/lib/unicron --no-create-home unicron \
    && install --directory --mode 0755 --owner unicron --group unicron /var/lib/unicron \
    && install --directory --mode 0711 /var/lib/unicron-node
ENV PATH=/opt/unicron/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    UNICRON_RUN_DIR=/var/lib/unicron
# -P everywhere: the working directory is never on the import path.
WORKDIR /var/lib/unicron
USER unicron

FROM base AS control
COPY --from=build-control /opt/unicron /opt/unicron
COPY deploy/healthcheck.py /opt/unicron/healthcheck.py
VOLUME /var/lib/unicron
EXPOSE 8642
ENV UNICRON_HOST=0.0.0.0
# One service a container; docker-compose.yml names the others. The probe is the API's, as is the default command.
HEALTHCHECK --interval=5s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-P", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8642/healthz', timeout=3)"]
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
