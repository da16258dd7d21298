#!/usr/bin/env bash
# Builds the image and looks at what is in it:  deploy/test-image.sh [IMAGE]
# Needs a Docker Engine. The image is left for deploy/test-compose.sh; who calls removes it.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${1:-inference-worker:test}
base=${PYTHON_IMAGE:-python:3.13-slim}
most_mb=90 # of ours, above the base image

fail() { echo "FAILED: $*" >&2; exit 1; }
size_of() { docker image inspect -f '{{.Size}}' "$1"; }
inside() { # as the image runs in production: read-only, no rights, no network
  docker run --rm --read-only --cap-drop ALL --security-opt no-new-privileges --network none "$@"
}

authorities=/etc/ssl/certs/ca-certificates.crt secret=()
[ ! -s "$authorities" ] || secret=(--secret "id=ca,src=$authorities")
echo "build"
DOCKER_BUILDKIT=1 timeout 600 docker build -q "${secret[@]}" --build-arg PYTHON_IMAGE="$base" \
  --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" -t "$image" . >/dev/null

echo "size"
ours=$((($(size_of "$image") - $(size_of "$base")) / 1000000))
echo "  $((ours)) MB of ours on $(($(size_of "$base") / 1000000)) MB of $base"
[ "$ours" -le "$most_mb" ] || fail "our layers have $ours MB, and $most_mb is the most"

echo "configuration"
[ "$(docker image inspect -f '{{.Config.User}}' "$image")" = 10001:10001 ] || fail "it does not run as user 10001"
[ "$(docker image inspect -f '{{json .Config.Entrypoint}}{{json .Config.Cmd}}' "$image")" = '["inference-worker"]["run"]' ] ||
  fail "the entry point is not the worker"
[ "$(docker image inspect -f '{{len .Config.Healthcheck.Test}}' "$image")" -gt 1 ] || fail "it has no health check"
docker image inspect -f '{{json .Config.Labels}}' "$image" | grep -q '"org.opencontainers.image.version"' || fail "no labels"

echo "commands"
[ "$(inside "$image" --version)" = "inference-worker $(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" ] || fail "--version"
for command in $(inside "$image" --help | sed -n 's/^    \([a-z-]*\)\( .*\)\{0,1\}$/\1/p'); do
  inside "$image" "$command" --help >/dev/null || fail "$command --help"
done
code=0; said=$(inside "$image" 2>&1) || code=$?
[ "$code" = 2 ] && grep -q '^DEPLOYMENT_ID: ' <<<"$said" || fail "without a configuration it ended with $code: $said"

echo "contents"
inside --entrypoint sh "$image" -c '
  bad() { echo "  $*"; exit 1; }
  [ "$(id -u)" = 10001 ] || bad "runs as $(id -u)"
  for tool in gcc cc g++ make cmake ld git pip pip3 uv curl wget; do
    ! command -v $tool >/dev/null || bad "$tool is in it: $(command -v $tool)"
  done
  for module in pip setuptools wheel ensurepip pytest mypy tests; do
    ! python -c "import $module" 2>/dev/null || bad "Python finds $module"
  done
  found=$(find / -xdev -type d \( -name pip -o -name setuptools -o -name ensurepip \) 2>/dev/null)
  [ -z "$found" ] || bad "installs things: $found"
  found=$(find / -xdev \( -path /proc -o -path /sys \) -prune -o -type f -perm /6000 -print 2>/dev/null)
  [ -z "$found" ] || bad "setuid or setgid: $found"
  found=$(find /opt /home /root /src /tmp /app /run -xdev \( -name "*.pem" -o -name "*.key" -o -name "id_rsa*" -o -name "id_ed25519*" -o -name "id_ecdsa*" -o -name "id_dsa*" -o -name ".env*" \
    -o -name ".git" -o -name ".netrc" -o -name "pip.conf" -o -name ".cache" -o -name "*secret*" \) 2>/dev/null |
    grep -vE "/site-packages/(certifi/cacert.pem$|pydantic_settings/)" || true)
  [ -z "$found" ] || bad "does not belong here: $found"
  found=$(find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune -o -writable -not -type l -print 2>/dev/null |
    grep -vE "^(/tmp|/var/tmp|/run/lock|/dev/.*)$" || true)
  [ -z "$found" ] || bad "may be written to: $found"
  python -c "import inference_worker.__main__ as m; assert m.__cached__ and __import__(\"os\").path.exists(m.__cached__)" ||
    bad "the bytecode is not there"
' || fail "contents"

echo "secrets in the history"
! docker history --no-trunc --format '{{.CreatedBy}}' "$image" | grep -iE 'password|token=|BEGIN |PIP_INDEX_URL=|https?://[^ ]*@' ||
  fail "the history tells something"
if docker image inspect -f '{{range .Config.Env}}{{println .}}{{end}}' "$image" | grep -iE 'password|token|secret|api_key'; then
  fail "the environment has a secret"
fi
# The authorities that the build was handed must have left no trace of their path.
inside --entrypoint sh "$image" -c '[ ! -e /run/ca.pem ]' || fail "the build secret is in the image"

echo "signals and health"
name=inference-worker-test-$$
trap 'docker rm -f "$name" >/dev/null 2>&1 || true' EXIT
docker run -d --name "$name" --read-only --network none -e DEPLOYMENT_ID=d -e REPLICA_ID=r -e USER_ID=u -e HF_MODEL_ID=m \
  -e METRIC_SERVER_URL=off -e CROESUS_HOST=off -e http_proxy=http://127.0.0.1:1 "$image" >/dev/null
for _ in $(seq 40); do
  health=$(docker inspect -f '{{.State.Health.Status}}' "$name")
  [ "$health" = starting ] || break
  sleep 1
done
# With no neighbour in reach it is alive all the same.
[ "$health" = healthy ] || fail "it is $health: $(docker inspect -f '{{json .State.Health.Log}}' "$name")"
from=$SECONDS
docker stop -t 30 "$name" >/dev/null
[ $((SECONDS - from)) -le 12 ] || fail "it took $((SECONDS - from)) s to stop"
[ "$(docker inspect -f '{{.State.ExitCode}}' "$name")" = 0 ] || fail "SIGTERM ended it with $(docker inspect -f '{{.State.ExitCode}}' "$name")"
echo "the image is sound"
