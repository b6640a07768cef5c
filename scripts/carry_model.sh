#!/usr/bin/env bash
# Packs SmolLM2 for a box without network that takes 64 MiB at a time: float16 safetensors with config and
# tokenizer beside it, split in parts with checksums. There, `bash join.sh` in the folder puts it together.
#   bash scripts/carry_model.sh FOLDER
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
FOLDER="${1:?usage: bash scripts/carry_model.sh FOLDER}"
PYTHON="${HYBRIDGEN_PYTHON:-.venv/bin/python}"
PART_BYTES=$((48 * 1024 * 1024))
mkdir -p "$FOLDER"

"$PYTHON" - "$FOLDER" <<'PYTHON'
import json, shutil, sys
from pathlib import Path

from safetensors.torch import save_file

from hybridgen.models.checkpoint import locate, open_checkpoint

target, source = Path(sys.argv[1]), locate("smollm2-135m").prepare()
with open_checkpoint(source) as checkpoint:
    save_file({name: checkpoint.tensor(name).half() for name in checkpoint.names()}, target / "model.safetensors")
config = json.loads((source / "config.json").read_text())
config.pop("dtype", None)
config["torch_dtype"] = "float16"
(target / "config.json").write_text(json.dumps(config, indent=1))
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    if (source / name).is_file():
        shutil.copy(source / name, target / name)
PYTHON

cd "$FOLDER"
rm -f model.part.*
sha256sum model.safetensors >SHA256SUMS
split -b "$PART_BYTES" -d model.safetensors model.part.
rm model.safetensors
sha256sum model.part.* >>SHA256SUMS
cat >join.sh <<'JOIN'
#!/usr/bin/env bash
# Puts the parts together and checks them; the folder is then a model directory (--model FOLDER).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
grep 'model\.part\.' SHA256SUMS | sha256sum --check --quiet
cat model.part.* >model.safetensors
grep 'model\.safetensors' SHA256SUMS | sha256sum --check --quiet
echo "model.safetensors is complete"
JOIN
ls -l
