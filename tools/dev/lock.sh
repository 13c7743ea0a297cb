#!/usr/bin/env bash
# Resolve the environments anew. Hosts are left out of the lock files on purpose: whoever installs has an index of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."
common=(--python-version 3.11 --no-header --no-emit-index-url --generate-hashes -q)
uv pip compile pyproject.toml --extra operator --extra dev --extra dev-operator "${common[@]}" -o locks/operator.txt
uv pip compile pyproject.toml --extra trainer --extra sglang --extra dev --prerelease=if-necessary-or-explicit "${common[@]}" -o locks/trainer.txt

# What goes into the images: the same versions, without the tools of developers.
uv pip compile pyproject.toml --extra operator -c locks/operator.txt "${common[@]}" -o locks/operator-image.txt
uv pip compile pyproject.toml --extra trainer -c locks/trainer.txt --prerelease=if-necessary-or-explicit "${common[@]}" -o locks/trainer-image.txt
uv pip compile pyproject.toml --extra trainer --extra sglang -c locks/trainer.txt --prerelease=if-necessary-or-explicit "${common[@]}" -o locks/trainer-sglang-image.txt
