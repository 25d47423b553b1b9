#!/usr/bin/env bash
# The suite of ci:vllm on an AMD GPU, in a container: .github/rocm/run.sh [--dry-run] [--where mi350x|mi355x]
#
# Needs Docker and ROCm's kernel driver. --where also runs the catalog's cases for these GPUs, which need their checkpoints;
# --dry-run prints what would run. What came of it is written to build/rocm, and as a file into recipes/support, from which
# README's support matrix is made: commit both to contribute the result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

pinned=.github/rocm/image.digest
dry=
steps=()
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --where) steps+=(--where "${2:?--where needs a GPU, such as mi355x}"); shift ;;
    *) echo "run.sh: no option $1; there are --dry-run and --where GPU." >&2; exit 2 ;;
  esac
  shift
done

run() {
  if [[ $dry ]]; then printf '%q ' "$@"; echo; else "$@"; fi
}

image=$(<"$pinned")
if [[ ! $image =~ @sha256:[0-9a-f]{64}$ ]]; then
  if [[ ${GITHUB_ACTIONS:-} ]]; then
    echo "::error::$pinned names $image without a digest: run .github/rocm/run.sh on such a GPU, which writes it, and commit the file."
    exit 1
  fi
  run docker pull --quiet "$image"
  if [[ ! $dry ]]; then
    digest=$(docker inspect --format '{{index .RepoDigests 0}}' "$image")
    image=$image@${digest#*@}
    echo "$image" > "$pinned"
    echo "$pinned now holds the digest: commit it."
  fi
fi

commit=$(git rev-parse HEAD)
out=$PWD/build/rocm
cache=${HF_HOME:-$HOME/.cache/huggingface}
tag=atom-vllm-bridge-rocm:$commit
if [[ $dry ]]; then
  echo "git archive $commit | docker build --build-arg IMAGE=$image --tag $tag --file .github/rocm/Dockerfile -"
else
  mkdir -p "$out" "$cache"
  rm -f "$out"/gfx*.json
  # Tracked files alone: what else lies in the checkout stays out.
  git archive "$commit" | docker build --build-arg "IMAGE=$image" --tag "$tag" --file .github/rocm/Dockerfile -
fi
failed=0
run docker run --rm --device /dev/kfd --device /dev/dri --group-add video --ipc host --security-opt seccomp=unconfined \
  --volume "$out:/out" --volume "$cache:/root/.cache/huggingface" \
  --env "COMMIT=$commit" --env "IMAGE=$image" --env "OWNER=$(id -u):$(id -g)" \
  "$tag" --out /out "${steps[@]}" || failed=$?
if [[ $dry ]]; then
  exec python3 .github/rocm/steps.py --dry-run "${steps[@]}"
fi
if ! compgen -G "$out/gfx*.json" >/dev/null; then
  echo "run.sh: the container ended with $failed before a step had: its output above says why." >&2
  exit 1
fi
mkdir -p recipes/support
cp "$out"/gfx*.json recipes/support/
python3 .github/scripts/support.py README.md
echo "recipes/support and README.md hold the result: commit them to contribute it."
exit "$failed"
