#!/bin/sh
# Smoke test of a public base model's real weights, where there is a network (or the folder is named): three steps of
# both stages on the bundled sentences, evaluation, export, one generated line. About 5 GB of memory for the default.
#   experiments/smoke.sh [MODEL, default Qwen/Qwen2.5-0.5B] [FOLDER, default runs/smoke]
set -eu
model=${1:-Qwen/Qwen2.5-0.5B}
folder=${2:-runs/smoke}
case "$model" in
  */config.json) model=${model%/config.json} ;;
esac
if [ ! -d "$model" ]; then
  python3 -c "import sys; from huggingface_hub import snapshot_download as get; \
get(sys.argv[1], allow_patterns=['*.json', '*.safetensors', '*.txt'])" "$model" ||
    { echo "smoke: no network, or no model $model: name a folder that holds one" >&2; exit 2; }
fi
rm -rf "$folder"
cqwen train configs/qwen2.5-0.5b.yaml "model.name_or_path=$model" model.compile_layers=false "run.dir=$folder/run" \
  data.train=bundled:diabetes data.eval_fraction=0.05 data.pack=false data.sequence_length=128 data.limit=64 \
  stages.0.steps=3 stages.0.warmup_steps=0 stages.1.steps=3 stages.1.warmup_steps=0 \
  train.global_batch_size=4 train.micro_batch_size=2 "train.precision=${PRECISION:-bf16}"
cqwen eval "$folder/run"
cqwen export "$folder/run" "$folder/export" --merge
cqwen generate "$folder/export" --prompt "Tom has 3 bags of 12 apples. He has" --max-new-tokens 12
echo "smoke: good"
