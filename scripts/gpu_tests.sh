#!/usr/bin/env bash
# Run the tests that need an NVIDIA GPU. In a checkout they run in .venv. In a bundle (scripts/gpu_bundle.py) this file is
# run.sh: the tests and the bundled wheel get their own environment on top of a python3 that has torch. The bundle also
# runs the benchmark afterwards, unless tests are named.
#
#   run.sh [--bench] [--rehearse] [ARGUMENT OF PYTEST ...]
#
#   --look      only report whether there is a GPU
#   --bench     run the benchmark in a checkout also
#   --rehearse  do the same without a GPU, with the fake driver, which DEEPNVME_FAKE_DRIVER names
#
# PYTHON selects another python3, TMPDIR the disk to use, BENCH other arguments of `python -m gpubench`. Results go to
# the folder $OUT, or to the folder of this file.
set -euo pipefail
here="${BASH_SOURCE[0]}"
[[ $here == */* ]] || here="./$here" # started as `bash run.sh`
here="$(cd "${here%/*}" && pwd)"

# Both parts of the tests, and the benchmark, end within 25 minutes.
PARALLEL_S=240
ALONE_S=180

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
    if [[ -n $rehearse ]]; then
        echo none
    else
        nvidia-smi --query-gpu=memory.used --format=csv,noheader | paste -s -d ,
    fi
}

# An environment with the wheel, and with all that the given python3 has.
make_environment() {
    local base="$1" wheel="$2" venv="$3" module packages baseline
    command -v "$base" >/dev/null || refuse "there is no $base."
    for module in pip numpy pytest torch; do
        "$base" -c "import $module" 2>/dev/null || refuse "$base has no $module; PYTHON=... names another one."
    done
    "$base" -m venv --without-pip --system-site-packages "$venv" || refuse "$base cannot make an environment."
    # An environment that is made from within another one sees the system's packages, and not those of the other.
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    echo "import site; site.addsitedir('$("$base" -c "$packages")')" >"$("$venv/bin/python" -c "$packages")/base.pth"
    install "$venv" --ignore-installed "$wheel"
    for baseline in "$here"/baselines/*.whl; do
        [[ ! -e $baseline ]] || install "$venv" "$baseline" || echo "test-gpu: not installed: ${baseline##*/}" >&2
    done
}

install() {
    local venv="$1"
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps "$@"
}

# Run the tests of one marker expression, and keep the last line of their output.
run_tests() {
    local title="$1" seconds="$2" marker="$3" code=0 last
    local report=()
    [[ -z $4 ]] || report=("$4")
    shift 4
    echo "== $title"
    # SIGINT makes pytest print where it was.
    timeout --signal=INT --kill-after=30 "$seconds" \
        "$python" -m pytest -m "$marker" -p no:cacheprovider --durations=5 "${report[@]}" "$@" python/tests/gpu 2>&1 |
        tee "$scratch/part.log" || code=$?
    cat "$scratch/part.log" >>"$log"
    last="$(tail -n 1 "$scratch/part.log")"
    summary+=("$title:${last//=/}")
    while read -r last; do
        summary+=("$title: $last")
    done < <(grep -E '^(FAILED|ERROR) ' "$scratch/part.log" || true)
    case $code in
        0) ran=1 ;;
        5) ;; # no test has this marker
        124 | 137) summary+=("$title: stopped after $seconds s") && status=1 ;;
        *) status=$code ;;
    esac
}

rehearse=""
bench=""
while [[ ${1:-} == --rehearse || ${1:-} == --bench ]]; do
    if [[ $1 == --rehearse ]]; then rehearse=1; else bench=1; fi
    shift
done
[[ -n $rehearse ]] || look_for_gpu
[[ ${1:-} == --look ]] && exit

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
wheels=("$here"/deepnvme-*.whl)
if [[ -e ${wheels[0]} ]]; then
    root="$here"
    bench=1
    make_environment "${PYTHON:-python3}" "${wheels[0]}" "$scratch/venv"
    python="$scratch/venv/bin/python"
else
    root="${here%/*}"
    python="$root/.venv/bin/python"
    [[ -x $python ]] || refuse "there is no .venv here: make setup."
fi

# These would put the fake driver in the place of the GPU.
unset DEEPNVME_LIBCUDA DEEPNVME_LIBCUFILE
cd "$root"
if [[ -n $rehearse ]]; then
    which=("not gpu and not alone" "not gpu and alone")
    options=(--rehearse)
    : "${BENCH:=--mib 3 --model-mib 16 --rounds 1 --seconds 10}"
else
    unset DEEPNVME_FAKE_DRIVER
    which=("gpu and not alone" "gpu and alone")
    options=()
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || refuse "torch of $python reaches no GPU."
fi
"$python" -c 'import deepnvme, torch; print("deepnvme", deepnvme.__version__, "torch", torch.__version__, deepnvme.__file__)'

log="$scratch/gpu-tests.log"
reports=()
if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    log="$OUT/gpu-tests.log"
    reports=("--junitxml=$OUT/gpu-tests.xml" "--junitxml=$OUT/gpu-tests-alone.xml")
fi
: >"$log"
parallel=()
if "$python" -c "import xdist" 2>/dev/null; then
    parallel=(-n auto --maxprocesses=12)
fi

before="$(memory_used)"
status=0
ran=""
summary=()
run_tests "tests" "$PARALLEL_S" "${which[0]}" "${reports[0]:-}" "${parallel[@]}" "$@"
# These compare the memory of the whole GPU, which the others use also.
run_tests "tests that run alone" "$ALONE_S" "${which[1]}" "${reports[1]:-}" "$@"
[[ $status -ne 0 || -n $ran ]] || status=5
sleep 1 # the driver takes a moment to clear up after a process
summary+=("memory used of each GPU: before $before, after $(memory_used)")

# Named tests run without the benchmark.
if [[ -n $bench && $# -eq 0 ]]; then
    results="${OUT:-$root/results}"
    [[ -e ${wheels[0]} ]] || results="${OUT:-$root/benchmarks/results}"
    read -r -a wanted <<<"${BENCH:---mib 2048 --rounds 5 --seconds 60}"
    code=0
    mkdir -p "$results"
    PYTHONPATH="$root/benchmarks" "$python" -m gpubench "${options[@]}" "${wanted[@]}" --scratch "$scratch/bench" \
        --results "$results" 2>&1 | tee "$results/gpu-bench.log" || code=$?
    summary+=("benchmark: $([[ $code -eq 0 ]] && echo "no row failed" || echo "failed, exit status $code")")
    [[ $code -eq 0 ]] || status=1
fi
echo
printf '%s\n' "${summary[@]}" | tee -a "$log"
exit "$status"
