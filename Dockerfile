# silograph with all that a server and a silo need. `docker build -t silograph .`, then for example
# docker run --rm -v "$PWD/silo:/data" silograph silo --data /data --server federation.example:8443
FROM python:3.11-slim

WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[fast,federation]" \
    && useradd --create-home --uid 1000 silograph

# Compiled kernels are kept in a folder that the user may write to.
ENV NUMBA_CACHE_DIR=/home/silograph/kernels
USER 1000
WORKDIR /home/silograph
RUN silograph compile

ENTRYPOINT ["silograph"]
