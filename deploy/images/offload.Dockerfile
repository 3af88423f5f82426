# The offload server: finishes inferences that devices began. Any number of them may stand behind one address.
#
#     docker build -f deploy/images/offload.Dockerfile -t edgesplit/offload .
#
# It is given releases (root.json, revoked.pem, releases/) and credentials (`edgectl offload credentials`) to read.
#
# The base is pinned by its version. To pin what it is today, or to update: `docker pull python:3.13-slim-bookworm`, then
# build with --build-arg PYTHON=python@sha256:... as `docker images --digests` shows it.
ARG PYTHON=python:3.13-slim-bookworm

FROM ${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE hatch_build.py ./
COPY requirements requirements
COPY sdk sdk
COPY partitioner partitioner
COPY agent agent
COPY offload offload
COPY cloud_controller cloud_controller
COPY provisioning provisioning
COPY simulation simulation
COPY cli cli
COPY device_profiles device_profiles
COPY examples examples
RUN python -m venv /opt/edgesplit \
 && /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/offload.txt \
 && EDGESPLIT_WITHOUT_DASHBOARD=1 /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

FROM ${PYTHON}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp edgesplit
COPY --from=build /opt/edgesplit /opt/edgesplit
COPY deploy/images/healthy.py /opt/edgesplit/healthy.py
# Each run has one thread; the cores go to runs side by side.
ENV PATH=/opt/edgesplit/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp OMP_NUM_THREADS=1
EXPOSE 8500 9101
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "/opt/edgesplit/healthy.py", "http://127.0.0.1:9101/metrics"]
ENTRYPOINT ["python", "-m", "edgesplit_offload.main"]
CMD ["--releases", "/offload/releases", "--root", "/offload/root.json", "--revoked", "/offload/revoked.pem", \
     "--cert", "/tls/offload.pem", "--key", "/tls/offload.key", "--ca", "/tls/ca.pem", \
     "--host", "0.0.0.0", "--port", "8500", "--not-ready-for", "10", "--metrics", "0.0.0.0:9101", "--log-format", "json"]
