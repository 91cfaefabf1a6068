#!/usr/bin/env bash
# A virtual environment for one engine, beside the one with kvtransfer in it:
#
#     tests/engines/prepare.sh sglang FOLDER
#     PATH=FOLDER/bin:$PATH python -m pytest -m engines tests/engines/sglang
#
# The engine comes without its dependencies (they would bring a CUDA build of torch and a dozen kernel libraries).
# torch, triton, pytest and kvtransfer are seen in the environment of `python` (or $PYTHON), by a .pth file. What an
# engine has: engine.txt, installed without dependencies; needs.txt, with theirs; stubs/, import-only stand-ins; and
# debian.txt, packages of the system that must be there already.
set -euo pipefail

engine=$1
folder=$2
python=${PYTHON:-python}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$engine

"$python" -m venv --without-pip "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$base')" >"$site/base.pth"
[ ! -d "$here/stubs" ] || echo "$here/stubs" >>"$site/base.pth"

install() { "$python" -m pip --python "$folder/bin/python" install -qq --no-compile "$@"; }
install --no-deps -r "$here/engine.txt"
install -r "$here/needs.txt"
