#!/usr/bin/env bash
# PyTorch with FX tracing state that belongs to the context that traces.
#
# Usage: ./build.sh [wheel] [--torch V] [PIP INDEX OPTIONS]
#            Make a patched wheel in dist/ from the official one; its path is the last line.
#            V: a release that has a folder in patches/. Without it, the release of the torch
#            installed for $PYTHON, else the newest one that pip can get here.
#        ./build.sh test [--torch V] [--stock] [--in-order] [--upstream DIR]
#                        [PIP INDEX OPTIONS] [-- PYTEST ARGUMENTS]
#            Install the patched wheel in an environment under .venvs/, run the tests of the
#            patches, then those of this project. --stock: run the tests of the patches on the
#            unpatched release and show that they fail there. --in-order: run the tests of each
#            patch with the patches up to it applied and no later one. --upstream DIR: run PyTorch's
#            own FX tests from DIR (the test/ folder of a checkout), one at a time and on four
#            threads at once; all of them, or the files that the pytest arguments name.
#        ./build.sh apply
#        ./build.sh revert
#            Patch the torch that $PYTHON imports where it is installed, or put it back.
#        ./build.sh doctor
#            Say what torch $PYTHON has, whether it is patched and which faults show. Needs no
#            GPU. Exit status: 0 healthy, 1 affected, 2 cannot tell.
#        ./build.sh source --src DIR [--minimal] [--apply-only]
#            Build the wheel from a PyTorch source tree (a git checkout or an unpacked archive) of
#            a release in patches/, with the patches to its C++ too. Needs cmake, ninja, a compiler
#            and hours; a second call goes on where the first stopped. MAX_JOBS, USE_CUDA and the
#            other settings of PyTorch's setup.py hold. --minimal: CPU only, baseline instruction
#            set, not optimised: the smallest build, to test with and not to train with.
#            --apply-only: commit the patches to DIR and stop.
#        ./build.sh dev DIR [--torch V] [PIP INDEX OPTIONS]
#            Make DIR a git tree of the release's Python files, the patches as commits;
#            'PYTHONPATH=DIR $PYTHON' imports it.
#        ./build.sh refresh DIR
#            Write the commits of such a tree back to patches/.
#
# Options for every verb:
#   --quiet    no progress
#   --help     this text
# PIP INDEX OPTIONS: --index-url URL, --extra-index-url URL, --find-links DIR, --no-index. pip's
# own settings (PIP_INDEX_URL, pip.conf) hold as well.
# Environment: PYTHON, the interpreter to work for (default: python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
export PYTHON

usage() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
}

fail() {
  printf 'build.sh: %s\n' "$1" >&2
  exit "${2:-1}"
}

tool() {
  local name=$1
  shift
  command -v git >/dev/null || fail "git is not installed; install it and run again"
  command -v "$PYTHON" >/dev/null || fail "no Python at '$PYTHON'; set PYTHON to an interpreter"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$PYTHON' is older than Python 3.10; set PYTHON to a newer interpreter"
  exec "$PYTHON" "$root/tools/$name.py" "$@"
}

verb_wheel() { tool make_wheel "$@"; }
verb_test() { tool run_tests "$@"; }
verb_apply() { tool in_place apply "$@"; }
verb_revert() { tool in_place revert "$@"; }
verb_doctor() { tool doctor "$@"; }
verb_source() { tool source_build "$@"; }
verb_dev() { tool dev_tree dev "$@"; }
verb_refresh() { tool dev_tree refresh "$@"; }

for argument in "$@"; do
  case $argument in
    --help | -h)
      usage
      exit 0
      ;;
    --) break ;;
  esac
done

case ${1:-} in
  '' | -*) verb_wheel "$@" ;;
  wheel | test | apply | revert | doctor | source | dev | refresh)
    verb=$1
    shift
    "verb_$verb" "$@"
    ;;
  *) fail "unknown verb '$1' (./build.sh --help lists them)" 2 ;;
esac
