#!/usr/bin/env bash
# Sets up what is missing, then runs the main job on the small real model; options are passed on.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup.sh"
exec "$ROOT/.venv/bin/python" -m hybridgen.run --model smollm2-135m "$@"
