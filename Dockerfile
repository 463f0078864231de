# Trainyard with the pinned versions and PyTorch's CUDA libraries, 6.6 GB; the driver is the host's.
#
#     docker build -t trainyard .
#     docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" trainyard train digits
#
ARG BASE=python:3.11-slim
FROM ${BASE}

# tini: the first process, which passes signals on and reaps what is left behind; gcc: torch.compile's, for a model that is compiled.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Like the user of the volumes on Kubernetes (launch/kubernetes.py).
RUN useradd --create-home --uid 1000 trainyard && install --directory --owner trainyard /work

RUN python3 -m venv /opt/trainyard
ENV PATH=/opt/trainyard/bin:$PATH PYTHONUNBUFFERED=1

# What it depends on is a layer of its own, which a change of Trainyard's leaves as it is.
ARG EXTRAS="gcs hdf5 s3 schedulefree tensorboard wandb"
COPY pyproject.toml requirements.lock requirements-dev.lock /build/
RUN python -c 'import sys, tomllib; \
project = tomllib.load(open("/build/pyproject.toml", "rb"))["project"]; \
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]; \
print(*project["dependencies"], *sum(extras, []), sep="\n")' ${EXTRAS} >/build/wanted.txt \
    && pip install --no-cache-dir --constraint /build/requirements.lock \
        --constraint /build/requirements-dev.lock --requirement /build/wanted.txt

COPY README.md LICENSE /build/
COPY trainyard /build/trainyard
RUN pip install --no-cache-dir --no-deps /build

USER trainyard
WORKDIR /work
ENTRYPOINT ["tini", "--", "trainyard"]
CMD ["--help"]
