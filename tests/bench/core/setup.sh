#!/usr/bin/env bash
# Bring .venv-bench (the peers, from their published packages) to what locks/bench.txt says. `setup.sh --lock` resolves anew.
set -euo pipefail
cd "$(dirname "$0")/../../.."
lock=locks/bench.txt
if [ "${1:-}" = --lock ]; then
  uv pip compile tests/bench/core/peers.in --python-version 3.11 --no-header --no-emit-index-url --generate-hashes -q -o "$lock"
fi
stamp=.venv-bench/.lock-$(sha256sum <"$lock" | cut -c1-16)
[ -e "$stamp" ] && exit 0
echo "environment bench: installing $(grep -c '==' "$lock") packages into .venv-bench" >&2
[ -x .venv-bench/bin/python ] || uv venv -q --python 3.11 .venv-bench
VIRTUAL_ENV=$PWD/.venv-bench uv pip sync -q --require-hashes "$lock"
rm -f .venv-bench/.lock-*
touch "$stamp"
