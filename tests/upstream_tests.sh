#!/usr/bin/env bash
# Fetch the newest of PyTorch's own test folders that Debian has, for ./build.sh test --upstream.
#
# Usage: tests/upstream_tests.sh DIR     makes DIR/test and prints its path
#
# It is the test/ folder of release 2.6.0, out of Debian's source package (27 MB). So that it runs
# with a current pytest and a newer torch, its conftest.py is set aside, and in test_fx.py the import
# of fx/test_matcher_utils, which needs torch.export.export_for_training, and the loading of
# libtorchbind_test.so, which is not in the wheels: the few torchbind tests fail on every wheel alike.
set -euo pipefail

fail() {
  printf 'upstream_tests.sh: %s\n' "$1" >&2
  exit 2
}

# The address of the Debian mirror that this machine uses.
mirror() {
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
    sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' | head -n 1
}

fetch() {
  local folder=$1 address
  address=$(mirror)
  [[ -n $address ]] || fail "no Debian mirror in /etc/apt; unpack a PyTorch checkout's test/ by hand"
  mkdir -p "$folder/lists/partial"
  printf 'deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie main\n' \
    "$address" > "$folder/trixie.list"
  local options=(-qq -o "Dir::Etc::sourcelist=$folder/trixie.list" -o Dir::Etc::sourceparts=-
                 -o "Dir::State::lists=$folder/lists" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update >&2 || fail "the Debian mirror does not answer"
  (cd "$folder" && apt-get "${options[@]}" source --download-only pytorch >&2) ||
    fail "the source package pytorch cannot be fetched"
}

adapt() {
  local tests=$1
  rm -f "$tests/conftest.py" "$tests/pytest.ini"
  sed -i -e '/^from fx.test_matcher_utils/d' \
    -e '/def setUp/,/def tearDown/s/if not (IS_FBCODE or IS_WINDOWS or IS_MACOS):/if False:/' \
    "$tests/test_fx.py"
}

[[ $# -eq 1 ]] || fail "usage: tests/upstream_tests.sh DIR"
dir=$1
if [[ ! -f $dir/test/test_fx.py ]]; then
  command -v apt-get > /dev/null || fail "needs apt-get; unpack a PyTorch checkout's test/ by hand"
  temporary=$(mktemp -d)
  trap 'rm -rf "$temporary"' EXIT
  fetch "$temporary"
  mkdir -p "$temporary/out" "$dir"
  tar -xJf "$temporary"/pytorch_*.orig.tar.xz -C "$temporary/out" --strip-components=1 \
    --wildcards '*/test/*'
  adapt "$temporary/out/test"
  mv "$temporary/out/test" "$dir/test"
fi
printf '%s\n' "$dir/test"
