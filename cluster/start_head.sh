#!/usr/bin/env bash
# Starts a Ray head on this machine with token authentication and a dashboard that only this machine reaches.
# Arguments go to `ray start --head`. The token lies in $RAY_AUTH_TOKEN_PATH and is made if it is not there.
set -euo pipefail

export RAY_AUTH_MODE=token
: "${RAY_AUTH_TOKEN_PATH:?set it to the file that holds the token or shall hold a new one}"
export RAY_AUTH_TOKEN_PATH

if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
  mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
  (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
fi
chmod 600 "$RAY_AUTH_TOKEN_PATH"

exec ray start --head --dashboard-host=127.0.0.1 --disable-usage-stats "$@"
