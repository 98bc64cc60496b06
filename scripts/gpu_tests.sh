#!/usr/bin/env bash
# Run the tests that need an NVIDIA GPU. In a checkout they run in .venv. In a bundle (scripts/gpu_bundle.py) this file is
# run.sh: the tests and the bundled wheel get their own environment on top of a python3 that has torch. The bundle also
# runs the benchmark afterwards, unless tests are named.
#
#   run.sh [ARGUMENT OF PYTEST ...]      --look: only report whether there is a GPU
#
# PYTHON selects another python3, TMPDIR the disk to use, BENCH other arguments of `python -m gpubench`. Results go to
# the folder $OUT, or to the folder of this file.
set -euo pipefail
here="$(cd "${BASH_SOURCE[0]%/*}" && pwd)"

refuse() {
    echo "test-gpu: $1" >&2
    exit 1
}

look_for_gpu() {
    local said
    command -v nvidia-smi >/dev/null || refuse "no NVIDIA GPU here: nvidia-smi, which comes with the driver, is not found."
    said="$(nvidia-smi -L 2>&1)" || refuse "no NVIDIA GPU here: nvidia-smi says \"${said//$'\n'/ }\"."
    [[ $said == *"GPU 0"* ]] || refuse "no NVIDIA GPU here: nvidia-smi says \"${said//$'\n'/ }\"."
    echo "$said"
}

memory_used() {
    nvidia-smi --query-gpu=memory.used --format=csv,noheader | paste -s -d ,
}

# An environment with the wheel, and with all that the given python3 has.
make_environment() {
    local base="$1" wheel="$2" venv="$3" module packages
    command -v "$base" >/dev/null || refuse "there is no $base."
    for module in pip numpy pytest torch; do
        "$base" -c "import $module" 2>/dev/null || refuse "$base has no $module; PYTHON=... names another one."
    done
    "$base" -m venv --without-pip --system-site-packages "$venv" || refuse "$base cannot make an environment."
    # An environment that is made from within another one sees the system's packages, and not those of the other.
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    echo "import site; site.addsitedir('$("$base" -c "$packages")')" >"$("$venv/bin/python" -c "$packages")/base.pth"
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --ignore-installed "$wheel"
}

look_for_gpu
[[ ${1:-} == --look ]] && exit

wheels=("$here"/deepnvme-*.whl)
if [[ -e ${wheels[0]} ]]; then
    root="$here"
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    make_environment "${PYTHON:-python3}" "${wheels[0]}" "$scratch/venv"
    python="$scratch/venv/bin/python"
else
    root="${here%/*}"
    python="$root/.venv/bin/python"
    [[ -x $python ]] || refuse "there is no .venv here: make setup."
fi

# These would put the fake driver in the place of the GPU.
unset DEEPNVME_FAKE_DRIVER DEEPNVME_LIBCUDA DEEPNVME_LIBCUFILE
cd "$root"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || refuse "torch of $python reaches no GPU."
"$python" -c 'import deepnvme, torch; print("deepnvme", deepnvme.__version__, "torch", torch.__version__, deepnvme.__file__)'

log=/dev/null
results=()
if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    log="$OUT/gpu-tests.log"
    results=("--junitxml=$OUT/gpu-tests.xml")
fi

before="$(memory_used)"
status=0
"$python" -m pytest -m gpu -p no:cacheprovider --durations=5 "${results[@]}" "$@" python/tests/gpu 2>&1 | tee "$log" || status=$?
sleep 1 # the driver takes a moment to clear up after a process
echo "memory used of each GPU: before $before, after $(memory_used)" | tee -a "$log"

# The whole bundle measures, too. Who names tests wants those.
if [[ -n ${scratch:-} && $# -eq 0 ]]; then
    read -r -a wanted <<<"${BENCH:---mib 2048 --rounds 5 --seconds 60}"
    PYTHONPATH="$root/benchmarks" "$python" -m gpubench "${wanted[@]}" --scratch "$scratch/bench" \
        --results "${OUT:-$root/results}" 2>&1 | tee "${OUT:-$root}/gpu-bench.log" || status=1
fi
exit "$status"
