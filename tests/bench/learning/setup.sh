#!/usr/bin/env bash
# TRL with its DistillationTrainer beside .venv-bench, whose trl is the old one that ms-swift asks for; the rest fits both.
# `setup.sh --lock` resolves anew.
set -euo pipefail
cd "$(dirname "$0")/../../.."
tests/bench/core/setup.sh
lock=locks/bench-trl.txt
target=.venv-bench/learning
if [ "${1:-}" = --lock ]; then
  echo trl | uv pip compile - --no-deps --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes -q -o "$lock"
fi
stamp=$target/.lock-$(sha256sum <"$lock" | cut -c1-16)
[ -e "$stamp" ] && exit 0
rm -rf "$target"
uv pip install -q --python .venv-bench/bin/python --no-deps --require-hashes --target "$target" -r "$lock"
touch "$stamp"
