#!/bin/sh
# Installs the torch of constraints.txt into an environment: install_torch.sh PYTHON
#
# TORCH_INDEX names the index it comes from. Unset: PyTorch's own index of builds for the processor, since those of
# PyPI bring CUDA along (about 4 GB). Empty: whatever index pip uses for everything else. Only torch itself is taken
# from there. An index that does not answer is no error.
set -eu
python=$1
index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

[ -n "$index" ] || exit 0
"$python" -m pip install --no-deps --retries 1 --timeout 10 --index-url "$index" "$(grep ^torch== constraints.txt)" || {
    echo "TORCH_INDEX: no torch from $index; it will come from pip's usual index, maybe as a build for CUDA" >&2
}
