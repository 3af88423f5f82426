# The agent, for devices that run containers. x86-64 and aarch64; what an accelerator needs is the device's to bring.
#
#     docker build -f deploy/images/agent.Dockerfile -t edgesplit/agent .
#     docker run -v edgesplit-agent:/data -v ./cam-1.claim.json:/claim.json:ro -p 127.0.0.1:8600:8600 edgesplit/agent \
#         run --data /data --claim /claim.json
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
 && /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/agent.txt \
 && EDGESPLIT_WITHOUT_DASHBOARD=1 /opt/edgesplit/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

FROM ${PYTHON}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp edgesplit \
 && install -d -o edgesplit -g edgesplit -m 0700 /data
COPY --from=build /opt/edgesplit /opt/edgesplit
COPY deploy/images/healthy.py /opt/edgesplit/healthy.py
ENV PATH=/opt/edgesplit/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
VOLUME /data
EXPOSE 8600
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["python", "/opt/edgesplit/healthy.py", "http://127.0.0.1:8600/v2/health/live"]
ENTRYPOINT ["edgesplit-agent"]
CMD ["run", "--data", "/data", "--log-format", "json"]
