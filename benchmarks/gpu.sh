#!/usr/bin/env bash
# Measures this machine's GPU in under 8 minutes, as one JSON file: benchmarks/gpu.sh [--out gpu.json] [--device cuda]
# Without a GPU the script itself is tried by: benchmarks/gpu.sh --device cpu --small
exec python "$(dirname "$0")/gpu.py" "$@"
