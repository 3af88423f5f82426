# The controller, and `edgectl`: API, planning, signing, delivery; mosquitto for who wants it as a child.
#
#     docker build -f deploy/images/controller.Dockerfile -t edgesplit/controller .
#
# The base is pinned by its version. To pin what it is today, or to update: `docker pull python:3.13-slim-bookworm`, then
# build with --build-arg PYTHON=python@sha256:... as `docker images --digests` shows it.
ARG PYTHON=python:3.13-slim-bookworm
ARG NODE=node:24-bookworm-slim

# The dashboard's pages: made by Node.js, served by Python.
FROM ${NODE} AS dashboard
WORKDIR /src/dashboard
COPY cloud_controller/dashboard/package.json cloud_controller/dashboard/package-lock.json ./
RUN npm ci --no-audit --no-fund
COPY cloud_controller/dashboard ./
RUN npm run build

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
COPY --from=dashboard /src/edgesplit_controller/dashboard_assets cloud_controller/edgesplit_controller/dashboard_assets
RUN python -m venv /opt/edgesplit \
 && /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/controller.txt \
 && /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

FROM ${PYTHON}
# Not pinned: Debian's newest for this release is the one with the security fixes.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends mosquitto \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp edgesplit \
 && install -d -o edgesplit -g edgesplit -m 0700 /data
COPY --from=build /opt/edgesplit /opt/edgesplit
COPY deploy/images/healthy.py /opt/edgesplit/healthy.py
ENV PATH=/opt/edgesplit/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp MPLCONFIGDIR=/tmp EDGESPLIT_DATA=/data
# State is in /data alone: the root may be read-only, with a tmpfs at /tmp.
VOLUME /data
EXPOSE 8443 8883 8500 9100
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["python", "/opt/edgesplit/healthy.py", "https://127.0.0.1:8443/v1/health", "/data/ca.pem"]
ENTRYPOINT ["edgectl"]
CMD ["up", "--bind", "0.0.0.0", "--log-format", "json", "--metrics", "0.0.0.0:9100"]
