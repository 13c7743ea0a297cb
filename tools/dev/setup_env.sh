#!/usr/bin/env bash
# setup_env.sh operator|trainer — bring one of the two environments to what its lock file says.
# The two cannot be one: SGLang pins its own Kubernetes client, torch and transformers.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=${1:?operator or trainer}
case $kind in
  operator) folder=.venv ;;
  trainer) folder=.venv-trainer ;;
  *) echo "setup_env.sh: write operator or trainer, not '$kind'" >&2; exit 64 ;;
esac
lock=locks/$kind.txt
stamp=$folder/.lock-$(cat "$lock" pyproject.toml | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

# One uv for every checkout of this user, in the project's own cache.
cache=${OPD_CACHE:-$HOME/.cache/opd}
if ! command -v uv >/dev/null; then
  [ -x "$cache/uv/bin/uv" ] || { python3 -m venv "$cache/uv" && "$cache/uv/bin/python" -m pip install -q uv; }
  PATH=$cache/uv/bin:$PATH
fi
started=$(date +%s)
echo "environment $kind: installing $(grep -c '==' "$lock") packages into $folder" >&2
[ -x "$folder/bin/python" ] || uv venv -q --python 3.11 "$folder"
VIRTUAL_ENV=$PWD/$folder uv pip sync -q --require-hashes "$lock"
VIRTUAL_ENV=$PWD/$folder uv pip install -q --no-deps -e .
rm -f "$folder"/.lock-*
touch "$stamp"
echo "environment $kind: ready after $(($(date +%s) - started)) s, $(du -shx "$folder" | cut -f1)" >&2
