#!/usr/bin/env bash
# Serve a DSA model with SGLang and this plugin. Everything past the set-up is in sglang_dsa_plugin/tools/serve.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'USAGE'
usage: scripts/serve.sh [--model DIR] [--smoke] [SGLang server arguments]

Sets up .venv, starts `python -m sglang.launch_server`, where this plugin serves DSA models, waits until it answers and
prints its address with a curl command to paste. Ctrl-C stops the server.

  --model DIR   checkpoint to serve (as SGLang's --model-path); without it a small random model is made in .models/tiny
  --smoke       ask one completion and one streamed chat, print both, stop the server; exit status 0 when all went well
  -h, --help    this text

Every other argument goes to SGLang, --config FILE (see configs/) included. Without --port a free port is chosen,
30000 if possible. Without a CUDA device these are added unless you give your own value:
  --max-total-tokens 32768     or SGLang would take most of the memory for the KV cache
  --max-running-requests 16    or it would keep tables for 2048 requests
  --sleep-on-idle              or a waiting server would take most of a core
USAGE
}

for arg in "$@"; do
    if [[ $arg == -h || $arg == --help ]]; then
        usage
        exit 0
    fi
done
setup
exec "$PYTHON" -m sglang_dsa_plugin.tools.serve "$ROOT" "$@"
