#!/usr/bin/env bash
# Check licences, sources, duplicates and advisories with cargo-deny, where it is installed.
#   scripts/deny.sh            use it if it is there, else say that the check was skipped
#   scripts/deny.sh --install  compile it into target/tools first when it is missing
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/target/tools/bin:$PATH"

if ! command -v cargo-deny >/dev/null; then
    if [[ "${1:-}" != --install ]]; then
        echo "skipped: cargo-deny is not installed (make deny installs it): licences and advisories not checked"
        exit 0
    fi
    cargo install --locked --root target/tools cargo-deny
fi

cargo deny check bans licenses sources
# The advisories live in a repository of their own, which not every machine can reach.
if cargo deny fetch db >/dev/null 2>&1; then
    cargo deny check advisories
else
    echo "skipped: the advisory database cannot be fetched from here: advisories not checked"
fi
