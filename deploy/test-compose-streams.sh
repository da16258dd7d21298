#!/usr/bin/env bash
# Brings deploy/compose-streams up with a key of its own, sends requests over HTTP, looks at the answers and the scale
# signal, stops a worker while requests run, and takes it away.   deploy/test-compose-streams.sh [IMAGE]
set -euo pipefail
cd "$(dirname "$0")/compose-streams"
export COMPOSE_PROJECT_NAME=inference-streams-test-$$ SIDECAR_IMAGE=${1:-inference-worker:test}
export GATEWAY_PUBLISH=127.0.0.1:0 SCALER_PUBLISH=127.0.0.1:0 MODEL_MOCK_LATENCY_S=0.2 IWL_CONCURRENCY=1
started=$SECONDS
most_s=150 # for all of it

fail() { # say what is wrong, and what the services said
  echo "FAILED: $*" >&2
  docker compose ps -a >&2 || true
  docker compose logs --no-color --tail 30 gateway scaler worker-1 worker-2 >&2 || true
  exit 1
}
cleanup() {
  timeout 60 docker compose down --volumes --timeout 2 >/dev/null 2>&1 || true
  rm -rf "$room"
}
trap cleanup EXIT
room=$(mktemp -d)
export API_KEYS_FILE=$room/api-keys.json

echo "a key"
said=$(docker run --rm --network none "$SIDECAR_IMAGE" gateway --new-key me --operator 2>&1) || fail "--new-key: $said"
KEY=$(grep -oE 'iwk_[A-Za-z0-9_-]+' <<<"$said" | head -1)
line=$(grep -oE '\{"tenant".*\}' <<<"$said" | head -1)
[ -n "$KEY" ] && [ -n "$line" ] || fail "--new-key printed no key: $said"
grep -q "$KEY" <<<"$line" && fail "the line for the file has the key in it"
export KEY
echo "{\"keys\": [$line]}" >"$API_KEYS_FILE"
chmod 755 "$room"
chmod 644 "$API_KEYS_FILE"

echo "the files are in order"
docker compose config --quiet
MODEL_MODE=vllm docker compose --profile gpu config --quiet

echo "up"
timeout "$most_s" docker compose up --detach --wait --quiet-pull >"$room/up" 2>&1 || fail "it did not come up: $(tail -3 "$room/up")"
echo "  after $((SECONDS - started)) s"
GATEWAY=http://$(docker compose port gateway 8080) SCALER=http://$(docker compose port scaler 8081)
export GATEWAY SCALER

cat >"$room/ask.py" <<'PY'
"""ask.py send N FIRST | answers N FIRST | scale | refused"""
import json, os, sys, urllib.error, urllib.request

def ask(url, body=None, key=os.environ["KEY"]):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)

gateway, scaler = os.environ["GATEWAY"], os.environ["SCALER"]
match sys.argv[1:]:
    case ["send", count, first]:
        for n in range(int(count)):
            payload = {"messages": [{"role": "user", "content": f"{first} {n}"}]}
            job = ask(f"{gateway}/v1/jobs", {"payload": payload, "idempotency_key": f"{first}-{n}"})
            print(job["job_id"])
    case ["answers", first]:
        for n, job_id in enumerate(sys.stdin.read().split()):
            job = ask(f"{gateway}/v1/jobs/{job_id}?wait=30")
            assert job["status"] == "succeeded", job
            assert job["result"]["choices"][0]["message"]["content"] == f"{first} {n}", job
    case ["scale"]:
        for url in (f"{gateway}/v1/scale/inference:jobs", f"{scaler}/v1/scale/inference:jobs"):
            seen = ask(url)
            assert type(seen["desired_replicas"]) is int and type(seen["backlog"]["ready"]) is int, seen
        print(seen["desired_replicas"])
    case ["refused"]:
        for url in (f"{gateway}/v1/jobs", f"{gateway}/v1/scale", f"{scaler}/v1/scale"):
            try:
                ask(url, key=None)
            except urllib.error.HTTPError as error:
                assert error.code == 401, (url, error.code)
            else:
                raise AssertionError(f"{url} asks for no key")
PY
ask() { python3 "$room/ask.py" "$@"; }

echo "requests"
ask send 5 first >"$room/first" || fail "not accepted"
ask answers first <"$room/first" || fail "not answered"
ask send 5 first | cmp - "$room/first" || fail "the same idempotency keys made other jobs"
ask refused || fail "somebody without a key is let in"

echo "the scale signal"
for _ in $(seq 20); do desired=$(ask scale 2>"$room/scale") && break; sleep 0.5; done
[ -n "${desired:-}" ] || fail "no scale signal: $(tail -1 "$room/scale")"
echo "  $desired wanted"

echo "check"
docker compose exec -T worker-1 inference-worker check >"$room/check" || fail "check: $(cat "$room/check")"

echo "a worker is stopped while requests run"
ask send 40 second >"$room/second" || fail "not accepted"
timeout 45 docker compose stop worker-1 >/dev/null 2>&1 || fail "worker-1 did not stop"
[ "$(docker inspect -f '{{.State.ExitCode}}' "$(docker compose ps -aq worker-1)")" = 0 ] || fail "worker-1 did not end well"
ask answers second <"$room/second" || fail "not all were answered without worker-1"
[ "$(docker compose exec -T redis redis-cli XLEN inference:jobs)" = 0 ] || fail "something is left in the stream"
[ "$(docker compose exec -T redis redis-cli EXISTS inference:dlq)" = 0 ] || fail "there are dead letters"

echo "down"
timeout 60 docker compose down --volumes >/dev/null 2>&1 || fail "down"
[ -z "$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || fail "containers are left"
[ -z "$(docker volume ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")" ] || fail "volumes are left"
took=$((SECONDS - started))
[ "$took" -le "$most_s" ] || fail "it took $took s"
echo "streams over HTTP work, $took s in all"
